"""Against PEFT on a CPU, and bfloat16 against float32."""

from __future__ import annotations

from benchmarks.published.table import Column, Row, Table, rows

_CPU = {
    "requests": 32, "ranks": [4, 8, 12, 16, 24, 32, 48, 64], "max_tokens": 64, "model": "SmolLM2-135M",
    "modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "dtype": "float32",
}  # fmt: skip
CPU = Table(
    "cpu",
    "Two CPU cores, against PEFT",
    "SmolLM2-135M in float32, 32 chat prompts over 8 adapters of ranks 4 to 64 on q, k, v, o, 64 output "
    "tokens each, prefill included.",
    ("",),
    (Column("output tokens/s", "**{:.0f}**"), Column("peak memory, MB", "{:,}", "peak_rss_mb")),
    tuple(
        Row((label,), "cpu_throughput", {**_CPU, "system": system, "mode": mode})
        for label, system, mode in (
            ("slora-jax, one mixed batch", "slora-jax", "mixed"),
            ("transformers + PEFT, one mixed batch (`adapter_names`)", "peft", "mixed"),
            ("transformers + PEFT, one adapter at a time", "peft", "sequential"),
            ("slora-jax, no adapters", "slora-jax", "base"),
            ("transformers, no adapters", "peft", "base"),
        )
    ),
)
CPU_SPEEDUP = Table(
    "cpu_speedup",
    "The two mixed batches compared",
    "",
    ("",),
    (
        Column("slora-jax's rate over PEFT's", "**{:.2f}**"),
        Column("answers equal, token for token, of 32", "{}", "equal_answers"),
    ),
    (Row(("one mixed batch",), "cpu_speedup_over_peft", {"mode": "mixed"}),),
)

_AGREEMENT_COLUMNS = (
    Column("tokens before the first that differs", "**{:.1%}**"),
    Column("logits off by, mean", "{:.1%}", "mean_error"),
    Column("worst request", "{:.1%}", "worst_error"),
)
AGREEMENT = Table(
    "agreement",
    "bfloat16 against float32",
    "Random weights in two shapes (head dims 64 and 128), mixed adapters and lengths, greedy, on the H200: "
    "these kernels (mosaic) and plain JAX (xla), both in bfloat16, against plain JAX in float32. Logits "
    "up to the first token that differs.",
    ("shape", "backend"),
    _AGREEMENT_COLUMNS,
    rows(
        "greedy_agreement",
        "shape backend",
        ((shape, backend) for shape in ("e64", "e128") for backend in ("mosaic", "xla")),
        {"dtype": "bfloat16", "step_tokens": 256, "tokens": 24},
    ),
)
_PEFT = {
    "model": "SmolLM2-135M-Instruct",
    "against": "PEFT float32",
    "backend": "mosaic",
    "dtype": "bfloat16",
}
AGREEMENT_PEFT = Table(
    "agreement_peft",
    "bfloat16 against PEFT in float32",
    "SmolLM2-135M with the adapters of tests/parity, greedy, on the H200.",
    ("pool",),
    _AGREEMENT_COLUMNS,
    rows("greedy_agreement", "pool", (("ample",), ("150 shuffled pages, chunks of 7",)), _PEFT),
)
NEXT_TOKEN = Table(
    "next_token",
    "The next token after PEFT's own",
    "The same, where both have seen the same tokens.",
    ("",),
    (Column("next tokens that agree", "**{:.1%}**"),),
    (Row(("SmolLM2-135M",), "next_token_agreement", _PEFT),),
)
