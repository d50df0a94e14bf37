"""Simulated: the real scheduler, store and pool on a virtual clock."""

from __future__ import annotations

from benchmarks.published.table import Column, Table, rows

SCHEDULE_STEP = Table(
    "schedule_step",
    "What scheduling costs",
    "CPU time of `Scheduler.schedule` for a full batch of 256, with 10,000 sequences queued and 100,000 "
    "adapters registered. The one simulation whose times are measured, not virtual.",
    ("policy",),
    (
        Column("median, ms", "**{:.2f}**"),
        Column("p99, ms", "**{:.2f}**", "p99"),
        Column("longest, ms", "{:.1f}", "max"),
        Column("steps", "{:,}", "steps"),
    ),
    rows(
        "schedule_step",
        "policy",
        ((policy,) for policy in ("fcfs", "cluster", "vtc", "early-abort", "vtc+cluster+early-abort")),
        {"batch": 256, "queued": 10_000, "registered": 100_000},
    ),
)
_SWEEP = (*((2.4, cv) for cv in (1, 2, 4, 6, 8)), *((rate, 1) for rate in (1.8, 3.6, 4.8, 7.2)))
EARLY_ABORT = Table(
    "early_abort",
    "Giving up what would be late",
    "S-LoRA's experiment, with an A10G's costs: requests a second (which it can serve some two of), how "
    "bursty (cv), 200 adapters; a first token is wanted within 6 s.",
    ("requests/s", "cv", "policy"),
    (
        Column("in time", "**{:.0%}**"),
        Column("satisfaction", "{:.2f}", "satisfaction"),
        Column("requests/s served", "{:.2f}", "throughput"),
        Column("given up", "{}", "aborted"),
        Column("of requests", "{}", "requests"),
    ),
    rows(
        "early_abort",
        "rate cv policy",
        ((*at, policy) for at in _SWEEP for policy in ("fcfs", "early-abort", "cluster+early-abort")),
        {"n": 200, "target_s": 6, "cost": "A10G"},
    ),
)
_PASSES = (("fcfs", 0), ("cluster", 16), ("cluster", 64), ("cluster", 256))
CLUSTER = Table(
    "cluster_simulated",
    "Clustering, simulated",
    "S2 at the 7B shape, with an H200's costs: so many requests always wait for n adapters in a pool of "
    "so many tokens. The first is the pool of S-LoRA's own ablation, the last an H200's whole. Means of "
    "several runs.",
    ("pool tokens", "n", "waiting", "alpha", "policy", "passes"),
    (
        Column("output tokens/s", "**{:.0f}**"),
        Column("of fcfs", "{:.1%}", "of_fcfs"),
        Column("sequences running", "{:.0f}", "mean_running"),
        Column("adapters running", "{:.0f}", "mean_adapters_running"),
        Column("first token, median, s", "{:.1f}", "ttft_s.0"),
        Column("p99, s", "{:.1f}", "ttft_s.1"),
        Column("most overtaken", "{:.0f}", "most_overtaken"),
    ),
    rows(
        "cluster",
        "pool_tokens n waiting alpha policy passes",
        (
            (*pool, alpha, *order)
            for pool in ((14_500, 32, 40), (198_000, 2000, 256))
            for alpha in (1.0, 0.3)
            for order in _PASSES
        ),
        {"model": "llama-2-7b", "setting": "S2", "cost": "H200"},
    ),
)
VTC_GAP = Table(
    "vtc_gap_simulated",
    "Fairness, simulated",
    "As above, with an H200's costs, for longer: also 32 sequences of prompts and outputs of up to 512 "
    "tokens.",
    ("sequences", "longest", "policy"),
    (
        Column("largest gap, priced tokens", "**{:,.0f}**"),
        Column("VTC's bound", "{:,.0f}", "bound"),
        Column("seconds", "{:.0f}", "seconds"),
    ),
    rows(
        "vtc_gap",
        "batch longest policy",
        ((*shape, policy) for shape in ((16, 64), (32, 512)) for policy in ("fcfs", "vtc", "vtc+cluster")),
        {"tenants": 2, "cost": "H200"},
    ),
)
GUESSES = Table(
    "guesses",
    "Guessed adapters",
    "Requests for 200 adapters by 1/i, with an H200's costs and loads; host memory holds all of them or a "
    "third. `watermark` is `prefetch_watermark`: 1 guesses nothing. Cold ones are those that found their "
    "adapter not resident where nothing is guessed.",
    ("cv", "requests/s", "host memory for", "watermark"),
    (
        Column("first token, mean, s", "**{:.4f}**"),
        Column("p99, s", "{:.3f}", "p99"),
        Column("cold: mean, s", "{:.4f}", "cold_mean"),
        Column("p99, s", "{:.3f}", "cold_p99"),
        Column("resident on arrival", "{:.1%}", "resident_at_arrival"),
        Column("guesses", "{}", "guesses"),
        Column("useful", "{}", "guesses_useful"),
    ),
    rows(
        "guesses",
        "cv rate host watermark",
        (
            (cv, rate, host, watermark)
            for cv in (1, 4)
            for rate in (8, 12)
            for host in ("all", "a third")
            for watermark in (1.0, 0.2, 0.0)
        ),
        {"n": 200, "cost": "H200"},
    ),
)
