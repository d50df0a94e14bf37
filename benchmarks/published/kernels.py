"""The kernels alone."""

from __future__ import annotations

from benchmarks.published.table import MIXED, Column, Row, Table, rows

QKV = "q,k,v"

_LORA_CASE = {"d_model": 4096, "modules": QKV}
_LORA_COLUMNS = (
    Column("slora-jax, µs", "**{:.1f}**"),
    Column("the same in XLA, µs", "{:.0f}", "earlier.xla_us"),
    Column("vLLM, µs", "{:.0f}", "vllm.value"),
)


def _lora_row(label: str, bench: str, tokens: int, distinct: int, ranks: str) -> Row:
    return Row((label,), bench, {**_LORA_CASE, "tokens": tokens, "distinct": distinct, "ranks": ranks})


LORA = Table(
    "lora",
    "LoRA of one layer",
    "Shrink and expand on q, k and v of a 4096 wide layer with 32 KV heads. XLA is the backend `xla`, "
    "compiled with the engine's options.",
    ("",),
    _LORA_COLUMNS,
    (
        _lora_row("256 tokens, each its own adapter, rank 16", "lora_decode", 256, 256, "16"),
        _lora_row("the same, ranks 64, 32, 16 and 8 mixed", "lora_decode", 256, 256, MIXED),
        _lora_row("the same, rank 8", "lora_decode", 256, 256, "8"),
        _lora_row("256 tokens on 32 adapters, rank 16", "lora_decode", 256, 32, "16"),
        _lora_row("256 tokens on one adapter, rank 16", "lora_decode", 256, 1, "16"),
        _lora_row("prefill, 2048 tokens on 8 adapters, rank 16", "lora_prefill", 2048, 8, "16"),
        _lora_row("256 tokens, each its own adapter, rank 64", "lora_decode", 256, 256, "64"),
        _lora_row("64 tokens, each its own adapter, rank 16", "lora_decode", 64, 64, "16"),
        _lora_row("16 tokens, each its own adapter, rank 16", "lora_decode", 16, 16, "16"),
    ),
)
_RATE = (
    Column("µs", "**{:.1f}**"),
    Column("TB/s", "{:.2f}", "tb_s"),
    Column("of the copy rate", "{:.0%}", "of_copy"),
)
_LORA_KEYS = "tokens distinct ranks modules d_model kv"
LORA_SHAPES = Table(
    "lora_shapes",
    "LoRA of other shapes",
    "`kv` is the width of k and v where it is not that of q. The rate is of the adapters' bytes, and of "
    "y's in a prefill.",
    ("tokens", "adapters", "ranks", "modules", "width", "kv"),
    (*_RATE, Column("the same in XLA, µs", "{:.0f}", "earlier.xla_us")),
    (
        *rows(
            "lora_decode",
            _LORA_KEYS,
            (
                (256, 256, "16", QKV, 4096, 1024),
                (256, 256, MIXED, QKV, 4096, 1024),
                (256, 256, "16", QKV, 5120, None),
                (256, 5, MIXED, QKV, 4096, None),
                (256, 1, "64", QKV, 4096, None),
                (1, 1, "64", QKV, 4096, None),
                (256, 256, "16", "o", 4096, None),
                (256, 256, "8", "o", 4096, None),
                (256, 5, MIXED, "o", 4096, None),
                (256, 1, "64", "o", 4096, None),
                (256, 1, "16", "o", 4096, None),
            ),
            {},
        ),
        *rows("lora_prefill", _LORA_KEYS, ((2048, 8, MIXED, QKV, 4096, 1024),), {}),
    ),
)

DECODE_ATTENTION = Table(
    "decode_attention",
    "Paged decode attention",
    "One layer; `context` tokens of each sequence lie in the pool. The share is of what a large copy moves "
    "in the same run, read plus written; reading alone can be faster.",
    ("sequences", "context", "KV heads", "query heads", "head dim", "lengths"),
    (
        Column("µs", "{:.1f}", "us"),
        Column("TB/s", "**{:.2f}**", "tb_s"),
        Column("of the copy rate", "{:.0%}"),
    ),
    rows(
        "paged_decode_attention",
        "batch context n_kv n_q head_dim lengths",
        (
            (256, 400, 32, 32, 128, None),
            (256, 400, 8, 32, 128, None),
            (256, 400, 32, 32, 128, "8..792"),
            (256, 400, 8, 32, 128, "8..792"),
            (256, 2048, 8, 32, 128, None),
            (128, 1024, 32, 32, 128, None),
            (128, 1024, 8, 32, 128, None),
            (128, 1024, 8, 32, 64, None),
            (128, 4096, 8, 32, 128, None),
            (64, 512, 8, 32, 128, None),
            (16, 4096, 32, 32, 128, None),
            (16, 4096, 8, 32, 128, None),
            (1, 4096, 8, 32, 128, None),
        ),
        {},
    ),
)
PREFILL_ATTENTION = Table(
    "prefill_attention",
    "Causal prefill attention",
    "One layer, one prompt unless `prompts` says more; `before` tokens of it lie in the pool already. The "
    "share is of what a large bfloat16 matmul reaches in the same run.",
    ("tokens", "KV heads", "query heads", "head dim", "prompts", "before"),
    (
        Column("µs", "{:.1f}", "us"),
        Column("TFLOP/s", "**{:.0f}**"),
        Column("of the matmul rate", "{:.0%}", "share_of_matmul"),
    ),
    rows(
        "prefill_attention",
        "tokens n_kv n_q head_dim prompts before",
        (
            (4096, 32, 32, 128, None, None),
            (4096, 8, 32, 128, None, None),
            (4096, 8, 32, 64, None, None),
            (2048, 8, 32, 128, 8, None),
            (512, 8, 32, 128, None, 3584),
        ),
        {},
    ),
)
ROPE_KV_WRITE = Table(
    "rope_kv_write",
    "RoPE and KV write",
    "q and k turned, k and v written into their pages, one layer. The share is of the copy rate in the "
    "same run.",
    ("tokens", "KV heads", "query heads", "head dim"),
    (
        Column("µs", "**{:.1f}**"),
        Column("of the copy rate", "{:.0%}", "of_copy"),
        Column("the same in XLA, µs", "{:.0f}", "xla_us"),
    ),
    rows(
        "rope_kv_write",
        "tokens n_kv n_q head_dim",
        ((tokens, n_kv, 32, 128) for tokens in (256, 4096) for n_kv in (32, 8)),
        {},
    ),
)
SAMPLING = Table(
    "sampling",
    "Sampling",
    "A token for each of 256 rows of float32 logits over 128,256 tokens. The share is that of the copy rate "
    "at which the time would have read the logits once. Logits are normal ones times 4: at temperature 0.6 "
    "nuclei have up to 85 tokens, at 0.8 up to 536, at 5 most of the vocabulary.",
    ("temperature", "top_k", "top_p"),
    (Column("µs", "**{:.0f}**"), Column("of the copy rate", "{:.0%}", "of_copy")),
    rows(
        "sampling",
        "temperature top_k top_p",
        (
            (0, None, None),
            (0.8, None, None),
            (0.8, 50, 0.95),
            (0.6, None, 0.95),
            (0.8, None, 0.95),
            (5, None, 0.95),
        ),
        {"rows": 256, "vocab": 128256},
    ),
)
