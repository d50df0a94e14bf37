"""Which backend a device gets, and the sizes of its LoRA work lists."""

from __future__ import annotations

import numpy as np
import pytest

from slora_jax.pallas_kernels.backend import XLA, LoraShape, select_backend
from slora_jax.pallas_kernels.mosaic_backend import MOSAIC

SHAPE = LoraShape(
    tokens=96,
    decode_rows=32,
    prefill_seqs=4,
    chunks_per_page=64,
    a_chunks=(16, 16, 16, 16, 16, 16, 56),
    b_chunks=(16, 4, 4, 16, 56, 56, 16),
)


@pytest.mark.parametrize(
    ("name", "platform", "capability", "dtype", "want"),
    [
        ("auto", "cpu", None, "bfloat16", "xla"),
        ("auto", "gpu", "9.0", "bfloat16", "xla"),
        ("mosaic", "gpu", "9.0", "bfloat16", "mosaic"),
        ("xla", "gpu", "9.0", "bfloat16", "xla"),
    ],
)
def test_auto_is_xla_and_a_name_is_obeyed(
    name: str, platform: str, capability: str | None, dtype: str, want: str
) -> None:
    assert select_backend(name, platform, capability, dtype).name == want


@pytest.mark.parametrize(
    ("platform", "capability", "dtype", "message"),
    [
        ("cpu", None, "bfloat16", r"needs a Hopper GPU \(compute capability 9.x\), found cpu"),
        ("gpu", "8.9", "bfloat16", "found compute capability 8.9"),
        ("gpu", "10.0", "bfloat16", "found compute capability 10.0"),
        ("gpu", "9.0", "float32", "computes in bfloat16, not float32"),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused(
    platform: str, capability: str | None, dtype: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        select_backend("mosaic", platform, capability, dtype)


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
    below = planner.sizes(rung - 1, SHAPE)
    assert all(small <= large for small, large in zip(below, sizes, strict=True))
