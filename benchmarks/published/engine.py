"""Decode steps and offline throughput of the engine."""

from __future__ import annotations

from typing import Any

from benchmarks.published.table import MIXED, Column, Row, Table, rows

MODELS = {
    "llama-2-7b": "Llama-2-7B shape",
    "llama-3-8b": "Llama-3-8B shape",
    "llama-2-13b": "Llama-2-13B shape",
}

_DECODES = (
    *((256, 0, ""), *((256, n, ranks) for ranks in ("16", MIXED) for n in (1, 32, 256))),
    *((64, 0, ""), *((64, n, ranks) for ranks in ("16", MIXED) for n in (1, 32))),
    *((n, *adapters) for n in (16, 1) for adapters in ((0, ""), (1, "16"), (1, MIXED))),
)


def _decodes(model: str) -> Table:
    return Table(
        f"decode_{model}",
        f"Decode steps, {MODELS[model]}",
        "A step of a full batch at 400 tokens of context, LoRA on q, k, v, o. The floor is the bytes of "
        "weights, KV and adapters that it must read, at 4.3 TB/s. Adapters' ranks take turns.",
        ("batch", "adapters in it", "ranks"),
        (
            Column("ms", "**{:.2f}**"),
            Column("floor, ms", "{:.2f}", "floor_ms"),
            Column("of it adapters, ms", "{:.2f}", "adapter_floor_ms"),
        ),
        rows("decode_step", "batch distinct ranks", _DECODES, {"model": model, "context": 400}),
    )


DECODES = tuple(map(_decodes, MODELS))


def _decode_column(head: str, batch: int, distinct: int = 0, ranks: str = "") -> Column:
    case = {"batch": batch, "distinct": distinct, "ranks": ranks}
    return Column(head, "**{:.1f}** ({:.1f})", "value floor_ms", case)


DECODE = Table(
    "decode",
    "Decode steps",
    "Milliseconds of a step (in brackets what memory needs for its bytes).",
    ("batch:",),
    (
        _decode_column("1", 1),
        _decode_column("16", 16),
        _decode_column("64", 64),
        _decode_column("256", 256),
        _decode_column("256 on one adapter, rank 16", 256, 1, "16"),
        _decode_column("256, each its adapter, rank 16", 256, 256, "16"),
        _decode_column("the same, ranks 64 to 8 mixed", 256, 256, MIXED),
    ),
    tuple(Row((label,), "decode_step", {"model": model, "context": 400}) for model, label in MODELS.items()),
)

ADAPTERS = (5, 100, 1000, 2000)
_S1, _S2, _S4 = ("S1", "8"), ("S2", MIXED), ("S4", "64/32/16")
_OFFLINE_TEXT = (
    "1000 requests submitted at once, 256 at a time, inputs and outputs of 8 to 512 tokens, for n "
    "adapters. None is in the pool at the start, all are in host memory; `loads` are copies into the pool. "
    "No prefix caching."
)
_OURS = (
    Column("output tokens/s", "{:,.0f}", "output_tokens_per_s"),
    Column("loads", "{}", "adapter_loads"),
    Column("preemptions", "{}", "preemptions"),
)


def _offline_row(labels: tuple[str, ...], model: str, setting: str, **case: Any) -> Row:
    return Row(
        labels, "offline_throughput", {"model": model, "setting": setting, "popularity": "zipf", **case}
    )


def _offline_rows(model: str, setting: tuple[str, str], **case: Any) -> tuple[Row, ...]:
    return tuple(
        _offline_row((MODELS[model], setting[1], str(n)), model, setting[0], n=n, **case) for n in ADAPTERS
    )


OFFLINE_ZIPF = Table(
    "offline_zipf",
    "Adapter i asked for with probability proportional to 1/i",
    _OFFLINE_TEXT,
    ("model", "ranks", "n"),
    (
        Column("slora-jax, requests/s", "**{:.1f}**"),
        Column("vLLM, requests/s", "{:.1f}", "vllm.value"),
        *_OURS,
    ),
    (
        *(_offline_row((label, "", "0"), model, "none", n=0) for model, label in MODELS.items()),
        *_offline_rows("llama-2-7b", _S1),
        *_offline_rows("llama-2-7b", _S2),
        *_offline_rows("llama-3-8b", _S2),
        *_offline_rows("llama-2-13b", _S4),
    ),
)
OFFLINE_UNIFORM = Table(
    "offline_uniform",
    "All adapters equally popular",
    "The same requests otherwise.",
    ("model", "ranks", "n"),
    (Column("requests/s", "**{:.1f}**"), *_OURS),
    (
        *_offline_rows("llama-2-7b", _S1, popularity="uniform"),
        *_offline_rows("llama-2-7b", _S2, popularity="uniform"),
        *_offline_rows("llama-3-8b", _S2, popularity="uniform"),
    ),
)


def _offline_columns(show: str, fields: str) -> tuple[Column, ...]:
    return (
        Column("no adapters", show, fields, {"setting": "none", "n": 0, "popularity": "zipf"}),
        *(Column(f"n = {n}", show, fields, {"n": n}) for n in ADAPTERS),
    )


OFFLINE = Table(
    "offline",
    "Offline throughput",
    "Requests a second, slora-jax (vLLM).",
    ("n adapters, asked for by 1/i:",),
    _offline_columns("**{:.1f}** ({:.1f})", "value vllm.value"),
    (
        _offline_row(("Llama-2-7B shape, rank 8",), "llama-2-7b", "S1"),
        _offline_row(("the same, ranks 64, 32, 16 and 8",), "llama-2-7b", "S2"),
        _offline_row(("Llama-3-8B shape, ranks 64, 32, 16 and 8",), "llama-3-8b", "S2"),
    ),
)
OFFLINE_MORE = Table(
    "offline_more",
    "Offline throughput where vLLM was not measured",
    "Requests a second.",
    ("n adapters:",),
    _offline_columns("{:.1f}", "value"),
    (
        _offline_row(("13B, ranks 64, 32 and 16, asked for by 1/i",), "llama-2-13b", "S4"),
        _offline_row(("7B, rank 8, all equally popular",), "llama-2-7b", "S1", popularity="uniform"),
        _offline_row(
            ("7B, ranks 64, 32, 16 and 8, equally popular",), "llama-2-7b", "S2", popularity="uniform"
        ),
        _offline_row(
            ("8B, ranks 64, 32, 16 and 8, equally popular",), "llama-3-8b", "S2", popularity="uniform"
        ),
    ),
)
