"""Which backend a device gets, and the sizes of its LoRA work lists."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from slora_jax.pallas_kernels.backend import XLA, KernelShape, LoraShape, select_backend
from slora_jax.pallas_kernels.mosaic_backend import MOSAIC
from slora_jax.pallas_kernels.xla_lora import AdapterBlocks

SHAPE = LoraShape(
    tokens=96,
    decode_rows=32,
    prefill_seqs=4,
    chunks_per_page=64,
    a_chunks=(16, 16, 16, 16, 16, 16, 56),
    b_chunks=(16, 4, 4, 16, 56, 56, 16),
)


LLAMA = KernelShape("bfloat16", n_q=32, n_kv=8, head_dim=128, page_tokens=16, chunk_width=256)
UNSUITABLE = [
    ({"dtype": "float32"}, "compute in bfloat16, not float32"),
    ({"head_dim": 80}, "head_dim must be 64 or 128, not 80"),
    ({"n_q": 40, "n_kv": 2}, "40 query heads over 2 KV heads"),
    ({"page_tokens": 12}, "page_tokens 12 must be a multiple of 8"),
    ({"chunk_width": 32}, "must be a multiple of 64; the widest columns that divide all are 32"),
]


@pytest.mark.parametrize(
    ("name", "platform", "capability", "want"),
    [
        ("auto", "cpu", None, "xla"),
        ("auto", "gpu", "8.9", "xla"),
        ("auto", "gpu", "9.0", "mosaic"),
        ("mosaic", "gpu", "9.0", "mosaic"),
        ("xla", "gpu", "9.0", "xla"),
    ],
)
def test_auto_is_mosaic_on_hopper_and_a_name_is_obeyed(
    name: str, platform: str, capability: str | None, want: str
) -> None:
    assert select_backend(name, platform, capability, LLAMA).name == want


@pytest.mark.parametrize(
    ("capability", "told"), [("8.9", True), ("10.0", True), ("9.0", False), (None, False)]
)
def test_a_gpu_that_cannot_have_the_kernels_is_told_in_the_log(
    capability: str | None, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    select_backend("auto", "cpu" if capability is None else "gpu", capability, LLAMA)
    assert (f"this one has {capability}: plain JAX serves, far slower" in caplog.text) == told


@pytest.mark.parametrize(
    ("platform", "capability", "message"),
    [
        ("cpu", None, r"needs a Hopper GPU \(compute capability 9.x\), found cpu"),
        ("gpu", "8.9", "found compute capability 8.9"),
        ("gpu", "10.0", "found compute capability 10.0"),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused(
    platform: str, capability: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        select_backend("mosaic", platform, capability, LLAMA)


@pytest.mark.parametrize(("change", "message"), UNSUITABLE)
def test_a_model_that_the_kernels_cannot_serve_is_told(
    change: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By name it is an error; auto takes plain JAX and says why in the log."""
    shape = dataclasses.replace(LLAMA, **change)
    with pytest.raises(ValueError, match=message):
        select_backend("mosaic", "gpu", "9.0", shape)
    assert select_backend("auto", "gpu", "9.0", shape) is XLA
    assert re.search(message, caplog.text)


@pytest.mark.parametrize("backend", [XLA, MOSAIC], ids=lambda b: b.name)
@pytest.mark.parametrize("popularity", ["distinct", "identical", "uniform"])
def test_some_rung_holds_every_batch(backend: object, popularity: str) -> None:
    planner = backend.planner  # type: ignore[attr-defined]
    rng = np.random.default_rng(0)
    choose = {
        "distinct": np.arange(96) % 36,
        "identical": np.zeros(96, int),
        "uniform": rng.integers(0, 9, 96),
    }
    token_adapter = choose[popularity].astype(np.int32)
    adapters = []
    for i in range(int(token_adapter.max()) + 1):
        blocks = [int(b) for b in rng.integers(0, 33, 7)]
        sizes = [n * (a + b) for n, a, b in zip(blocks, SHAPE.a_chunks, SHAPE.b_chunks, strict=True)]
        a_start = [sum(sizes[:m]) for m in range(7)]
        b_start = [start + n * a for start, n, a in zip(a_start, blocks, SHAPE.a_chunks, strict=True)]
        pages = np.arange(-(-sum(sizes) // 64), dtype=np.int32) + 1000 * i
        adapters.append((pages, blocks, a_start, b_start))
    needs = planner.needs(token_adapter, adapters, SHAPE)
    rung = next(
        r for r in range(1, 12) if all(s >= n for s, n in zip(planner.sizes(r, SHAPE), needs, strict=True))
    )
    sizes = planner.sizes(rung, SHAPE)
    built = planner.build(token_adapter, adapters, sizes, SHAPE)
    assert {name: array.shape for name, array in built.items()} == dict(planner.fields(sizes, SHAPE))


def attention_adapter(rank: int, shape: LoraShape) -> AdapterBlocks:
    """On q, k, v and o; where its blocks lie plays no part here."""
    blocks = [-(-rank // 8)] * 4 + [0] * 3
    chunks = sum(n * (a + b) for n, a, b in zip(blocks, shape.a_chunks, shape.b_chunks, strict=True))
    return np.arange(-(-chunks // shape.chunks_per_page), dtype=np.int32), blocks, [0] * 7, [0] * 7


@pytest.mark.parametrize("rows", [2, 8, 32, 128, 256])
def test_mosaic_s_usual_rung_holds_an_adapter_of_rank_64_for_every_row(rows: int) -> None:
    shape = dataclasses.replace(SHAPE, tokens=rows, decode_rows=rows, prefill_seqs=0)
    planner = MOSAIC.planner
    needs = planner.needs(np.arange(rows), [attention_adapter(64, shape)] * rows, shape)
    usual = planner.sizes(planner.usual_rung(shape), shape)
    assert all(size >= need for size, need in zip(usual, needs, strict=True)), (usual, needs)


@pytest.mark.parametrize(
    ("rows", "distinct", "rank", "runs"),
    [
        (256, 1, 64, 48),  # 16 windows of 3 items: 96 items else
        (256, 1, 16, 0),  # 32 items: one for 8 rows
        (256, 5, 32, 40),
        (256, 20, 64, 0),  # more than there is room for
        (256, 256, 16, 0),
        (128, 1, 64, 0),  # 48 items
        (128, 2, 128, 48),
        (64, 1, 256, 0),  # too few rows
    ],
)
def test_mosaic_takes_many_decodes_of_few_adapters_as_runs(
    rows: int, distinct: int, rank: int, runs: int
) -> None:
    shape = dataclasses.replace(SHAPE, tokens=rows, decode_rows=rows, prefill_seqs=0)
    token_adapter = np.sort(np.arange(rows) % distinct).astype(np.int32)
    token_adapter[-3:] = -1  # fewer than the shape has room for
    adapters = [attention_adapter(rank, shape) for _ in range(distinct)]
    needs = MOSAIC.planner.needs(token_adapter, adapters, shape)
    rungs = (MOSAIC.planner.sizes(rung, shape) for rung in range(1, 12))
    sizes = next(r for r in rungs if all(size >= need for size, need in zip(r, needs, strict=True)))
    assert bool(sizes[1]) == bool(runs)
    work = MOSAIC.planner.build(token_adapter, adapters, sizes, shape)
    assert sum(work["runs"][0, :, 3:6].max(axis=1) > 0) == needs[1]
    assert needs[1] == runs


@pytest.mark.parametrize("seed", range(20))
def test_a_step_of_usual_ranks_needs_mosaic_s_first_rung_however_its_prompts_are_cut(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = dataclasses.replace(SHAPE, tokens=256 + 1792, decode_rows=256, prefill_seqs=112)
    adapters = [attention_adapter(int(rank), shape) for rank in rng.choice([8, 16, 32, 64], 150)]
    lengths = rng.integers(16, 16 + 2 ** rng.integers(2, 10), 112)
    prompts = np.repeat(rng.integers(0, 150, 112), lengths)[:1792]
    token_adapter = np.full(shape.tokens, -1, np.int32)
    token_adapter[:256] = np.sort(rng.integers(0, 150, 256))
    token_adapter[256 : 256 + len(prompts)] = prompts
    planner = MOSAIC.planner
    needs, sizes = planner.needs(token_adapter, adapters, shape), planner.sizes(1, shape)
    assert all(size >= need for size, need in zip(sizes, needs, strict=True)), (sizes, needs)
    assert planner.build(token_adapter, adapters, sizes, shape)["tiles"].shape[1] == sizes[2]
