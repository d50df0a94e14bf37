"""Adapters that come and go, more requests than can be served, fairness."""

from __future__ import annotations

from benchmarks.published.table import Column, Row, Table, rows

_CONTENDED = {"model": "llama-2-7b", "setting": "S2", "lengths": [8, 512]}
_THRASH = {**_CONTENDED, "adapters_in_pool": 64, "batch": 64}
_POPULARITIES = {"zipf": "1/i", "uniform": "uniform"}


def _thrash_columns(head: str, show: str, field: str) -> tuple[Column, ...]:
    return tuple(
        Column(f"{head}: {label}", show, field, {"memory": memory})
        for memory, label in {"unified": "one pool", "64 slots": "64 slots"}.items()
    )


THRASH = Table(
    "thrash",
    "Working sets that do not fit",
    "Output tokens/s, and the 99th percentile of the time between tokens, each as a share of what the same "
    "requests have with all adapters resident.",
    ("popularity", "adapters asked for, of those that fit"),
    (
        *_thrash_columns("tokens/s", "**{:.0%}**", "share_of_all_resident"),
        *_thrash_columns("p99", "{:.2f}", "p99_of_all_resident"),
        *_thrash_columns("sequences running", "{:.0f}", "mean_running"),
    ),
    tuple(
        Row((label, f"{times}x"), "thrash", {**_THRASH, "popularity": popularity, "times": times})
        for popularity, label in _POPULARITIES.items()
        for times in (1, 2, 4)
    ),
)
THRASH_LINES = Table(
    "thrash_lines",
    "Working sets that do not fit",
    "A closed loop on the 7B shape, 64 sequences at a time, adapters of ranks 64, 32, 16 and 8. `times` is "
    "the adapters asked for over those that the pool was measured to hold beside the KV of a full batch. "
    "Slots are each as large as rank 64 takes, beside the same KV, hence their pages. p99 is of the time "
    "between two tokens.",
    ("popularity", "times", "memory"),
    (
        Column("adapters", "{}", "working_set"),
        Column("output tokens/s", "{:,.0f}"),
        Column("of all-resident", "**{:.1%}**", "share_of_all_resident"),
        Column("p99, ms", "{:.1f}", "token_ms_p99"),
        Column("of all-resident", "{:.2f}", "p99_of_all_resident"),
        Column("running", "{:.1f}", "mean_running"),
        Column("resident", "{:.1f}", "mean_resident"),
        Column("loads", "{}", "loads"),
        Column("seconds", "{:.0f}", "seconds"),
        Column("pages", "{}", "num_pages"),
    ),
    rows(
        "thrash",
        "popularity times memory",
        (
            (popularity, times, memory)
            for popularity in _POPULARITIES
            for times in (1, 2, 4)
            for memory in ("all-resident", "unified", "64 slots")
        ),
        _THRASH,
    ),
)

_LOADS = {"batch": 256, "context": 400}
LOAD_BANDWIDTH = Table(
    "load_bandwidth",
    "Adapters that stream in beside a full batch",
    "Copies from pinned host memory into the pool's pages beside 256 decodes of 400 tokens: their rate as "
    "a share of a plain copy's, and how much longer steps take meanwhile. The benchmark's own share of the "
    "host's time, asking for so many adapters, is within the steps.",
    ("model", "rank"),
    (
        Column("of the link's rate", "**{:.0%}**", "share_of_pinned_copy"),
        Column("a step alone, ms", "{:.1f}", "step_ms_alone.0"),
        Column("beside loads, ms", "{:.1f}", "step_ms_beside_loads.0"),
        Column("longer, median", "{:.1%}", "step_slower_by"),
        Column("longer, mean", "{:.1%}", "mean_step_slower_by"),
        Column("adapter, bytes", "{:,}", "adapter_bytes"),
        Column("the benchmark's share, ms", "{:.1f}", "harness_ms"),
    ),
    rows(
        "load_bandwidth",
        "model rank",
        ((model, rank) for model in ("llama-2-7b", "llama-3-8b") for rank in (64, 16, 8)),
        _LOADS,
    ),
)
COLD = Table(
    "cold_first_token",
    "First tokens of cold adapters",
    "How much later the first token of a request comes whose adapter is not in the pool, 7B shape, a "
    "prompt of 128 tokens. The copy alone is at the rate of a plain one.",
    ("rank", "the adapter lies in"),
    (
        Column("later by, ms", "**{:.1f}**"),
        Column("the copy alone, ms", "{:.1f}", "transfer_ms"),
        Column("first token, ms", "{:.1f}", "cold_ms"),
        Column("90th percentile, ms", "{:.1f}", "cold_p90_ms"),
        Column("adapter resident, ms", "{:.1f}", "resident_ms"),
    ),
    rows(
        "cold_first_token",
        "rank source",
        ((rank, source) for rank in (64, 16, 8) for source in ("host", "disk")),
        {"model": "llama-2-7b", "prompt_tokens": 128},
    ),
)


def _cold_column(head: str, source: str) -> Column:
    return Column(head, "{:.1f} ms", "value", {"source": source, "prompt_tokens": 128}, "cold_first_token")


LOADS = Table(
    "loads",
    "What a load costs",
    "",
    ("rank",),
    (
        _cold_column("first token later, adapter in host memory", "host"),
        _cold_column("adapter on disk", "disk"),
        Column("loads beside 256 decodes, of the link's rate", "{:.0%}", "share_of_pinned_copy", _LOADS),
        Column("steps longer meanwhile", "{:.1%}", "step_slower_by", _LOADS),
    ),
    rows("load_bandwidth", "rank", ((64,), (16,), (8,)), {"model": "llama-2-7b"}),
)

_CLUSTERED = ((1.0, "fcfs", 0), (1.0, "cluster", 16), (1.0, "cluster", 64),
              (0.3, "fcfs", 0), (0.3, "cluster", 16), (0.3, "cluster", 64))  # fmt: skip
CLUSTER = Table(
    "cluster",
    "Clustering",
    "The pool, adapters and queue of S-LoRA's ablation on the 7B shape: 14,500 tokens, 32 adapters of ranks "
    "64, 32, 16 and 8, always 40 requests that wait. Served as they came, or with at most `passes` later "
    "ones before one. alpha is S-LoRA's: 1 is uniform, less is skewed. What was predicted, and why an "
    "H200's whole pool gains next to nothing: [experiments.md](experiments.md#clustering).",
    ("alpha", "policy", "passes"),
    (
        Column("output tokens/s", "**{:,.0f}**"),
        Column("requests/s", "{:.1f}", "requests_per_s"),
        Column("adapters running", "{:.1f}", "mean_adapters_running"),
        Column("sequences running", "{:.1f}", "mean_running"),
        Column("first token, median, s", "{:.2f}", "ttft_s.0"),
        Column("p99, s", "{:.2f}", "ttft_s.1"),
        Column("loads", "{}", "loads"),
    ),
    rows(
        "cluster",
        "alpha policy passes",
        _CLUSTERED,
        {
            "model": "llama-2-7b",
            "setting": "S2",
            "n": 32,
            "pool_tokens": 14500,
            "waiting": 40,
            "lengths": [8, 512],
        },
    ),
)

_ONLINE = {
    **_CONTENDED, "rate": 60.0, "cv": 2.0, "n": 200, "alpha": 1.0, "target_s": 6.0, "batch": 256,
    "adapters_in_pool": 64, "seconds": 18.0,
}  # fmt: skip
_ONLINE_COLUMNS = (
    Column("first tokens in time", "**{:.0%}**"),
    Column("satisfaction", "{:.2f}", "satisfaction"),
    Column("of the small tenant in time", "{:.0%}", "attainment_small"),
    Column("requests/s", "{:.1f}", "throughput"),
)
ONLINE = Table(
    "online",
    "More than can be served",
    "7B shape, 200 equally popular adapters of ranks 64, 32, 16 and 8 in a pool for 64: for 18 s 60 requests "
    "a second come in bursts (gamma arrivals, cv 2), about twice what is served, a quarter of them a small "
    "tenant's. A first token is wanted within 6 s; satisfaction is S-LoRA's.",
    ("policy",),
    (
        *_ONLINE_COLUMNS,
        Column("first token, median, s", "{:.2f}", "ttft_s.0"),
        Column("p99, s", "{:.2f}", "ttft_s.1"),
        Column("given up", "{}", "aborted"),
        Column("of requests", "{}", "requests"),
        Column("loads", "{}", "loads"),
    ),
    tuple(
        Row((f"`{policy}`",), "online", {**_ONLINE, "policy": policy})
        for policy in ("fcfs", "cluster", "early-abort", "vtc+cluster+early-abort")
    ),
)
_FAIR_POLICIES = ("fcfs", "vtc", "vtc+cluster")
_FAIR_COLUMNS = (
    Column("largest gap, priced tokens", "**{:,.0f}**"),
    Column("VTC's bound", "{:,.0f}", "bound"),
)
VTC_GAP = Table(
    "vtc_gap",
    "Fairness",
    "Two tenants that always wait, one with three times as many requests, 16 sequences of prompts and "
    "outputs of up to 64 tokens, 7B shape: the largest gap of their services, until together they have got "
    "six times VTC's bound and 8 s have passed. (The gap of `fcfs` grows for as long as it runs.)",
    ("policy",),
    (
        *_FAIR_COLUMNS,
        Column("of the bound", "{:.1%}", "gap_of_bound"),
        Column("share of the small tenant", "{:.0%}", "share_of_small"),
        Column("seconds", "{:.1f}", "seconds"),
    ),
    tuple(
        Row((f"`{policy}`",), "vtc_gap",
            {"policy": policy, "tenants": 2, "batch": 16, "longest": 64, "model": "llama-2-7b"})
        for policy in _FAIR_POLICIES
    ),
)  # fmt: skip
