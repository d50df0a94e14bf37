"""Adapters in pages, batches that use them, and what LoRA must give: a dense x A^T B a token in NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from slora_jax.pallas_kernels.xla_lora import AdapterBlocks

LAYERS, LAYER = 2, 1
GROUPS = ((0, 1, 2), (3,), (4, 5), (6,))
NONE: dict[int, int] = {}


@dataclasses.dataclass(frozen=True)
class Dims:
    """A model's modules q, k, v, o, gate, up, down, and how adapters are cut into chunks and pages."""

    chunk_width: int
    chunks_per_page: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]

    @property
    def a_chunks(self) -> list[int]:
        return [n // self.chunk_width for n in self.ins]

    @property
    def b_chunks(self) -> list[int]:
        return [n // self.chunk_width for n in self.outs]


SMALL = Dims(
    chunk_width=8, chunks_per_page=5, ins=(24, 24, 24, 16, 24, 24, 40), outs=(16, 8, 8, 24, 40, 40, 24)
)


@dataclasses.dataclass
class Adapters:
    """Adapters of the given ranks by module, in shuffled pages of a pool whose unused pages are NaN."""

    dims: Dims
    pool: jax.Array
    blocks: list[AdapterBlocks]
    a: list[dict[int, np.ndarray]]  # an adapter: module -> [rank, in]
    b: list[dict[int, np.ndarray]]  # an adapter: module -> [rank, out]


def pack_adapters(
    rng: np.random.Generator,
    ranks: list[dict[int, int]],
    dims: Dims = SMALL,
    *,
    dtype: jnp.dtype = jnp.float32,
    n_pages: int | None = None,
) -> Adapters:
    """Adapters in a pool of `n_pages`, by default of as many as they need, in few sizes."""
    width, per_page = dims.chunk_width, dims.chunks_per_page
    if n_pages is None:
        chunks_of = [a + b for a, b in zip(dims.a_chunks, dims.b_chunks, strict=True)]
        n_pages = 2 + sum(-(-rank // 8) * chunks_of[m] for r in ranks for m, rank in r.items())
        n_pages += -n_pages % 1024  # few shapes, few compilations
    free = list(rng.permutation(np.arange(1, n_pages)))
    pool = np.full((LAYERS, n_pages, per_page, 8, width), np.nan, np.float32)
    pool[:, 0] = 0
    blocks: list[AdapterBlocks] = []
    a_all, b_all = [], []
    for modules in ranks:
        a: dict[int, np.ndarray] = {}
        b: dict[int, np.ndarray] = {}
        chunks: list[np.ndarray] = []
        starts = {"a": [0] * 7, "b": [0] * 7}
        count = [0] * 7
        for module, rank in modules.items():
            count[module] = -(-rank // 8)
            for side, dense, n in (("a", a, dims.ins[module]), ("b", b, dims.outs[module])):
                drawn = rng.standard_normal((rank, n)) / np.sqrt(n if side == "a" else rank)
                dense[module] = np.asarray(jnp.asarray(drawn, dtype), np.float32)
                starts[side][module] = len(chunks)
                padded = np.zeros((count[module] * 8, n), np.float32)
                padded[:rank] = dense[module]
                chunks += [
                    padded[8 * block : 8 * block + 8, c * width : c * width + width]
                    for block in range(count[module])
                    for c in range(n // width)
                ]
        pages = [int(free.pop()) for _ in range(-(-len(chunks) // per_page))]
        for c, chunk in enumerate(chunks):
            pool[LAYER, pages[c // per_page], c % per_page] = chunk
        blocks.append((np.array(pages, np.int32), count, starts["a"], starts["b"]))
        a_all.append(a)
        b_all.append(b)
    return Adapters(dims, jnp.asarray(pool.reshape(LAYERS, n_pages, -1), dtype), blocks, a_all, b_all)


def dense_lora(
    x: np.ndarray, y: np.ndarray, data: Adapters, token_adapter: np.ndarray, group: tuple[int, ...]
) -> np.ndarray:
    """y + x A^T B of each token's adapter, one token at a time, f64[t, out of the group's modules]."""
    want = np.asarray(y, np.float64).copy()
    for t, adapter in enumerate(token_adapter):
        column = 0
        for m in group:
            width = data.dims.outs[m]
            if adapter >= 0 and m in data.a[adapter]:
                h = np.asarray(x[t], np.float64) @ data.a[adapter][m].T
                want[t, column : column + width] += h @ data.b[adapter][m]
            column += width
    return want


def check_groups(
    rng: np.random.Generator,
    data: Adapters,
    token_adapter: np.ndarray,
    apply: Callable[[jax.Array, jax.Array, tuple[int, ...]], jax.Array],
    dtype: jnp.dtype,
    tolerance: float,
) -> None:
    """Of every group of modules, apply(x, y, group) is y + x A^T B of each token's adapter, one token at a
    time, and y itself where a token has none.
    """
    for group in GROUPS:
        width = sum(data.dims.outs[m] for m in group)
        x = jnp.asarray(rng.standard_normal((len(token_adapter), data.dims.ins[group[0]])), dtype)
        y = jnp.asarray(rng.standard_normal((len(token_adapter), width)), dtype)
        want = dense_lora(np.asarray(x), np.asarray(y), data, token_adapter, group)
        got = apply(x, y, group)
        assert got.dtype == dtype
        scale = np.abs(want).max()
        np.testing.assert_allclose(np.asarray(got, np.float64) / scale, want / scale, rtol=0, atol=tolerance)
        base = token_adapter < 0
        np.testing.assert_array_equal(np.asarray(got)[base], np.asarray(y)[base])


def popularity(rng: np.random.Generator, kind: str, tokens: int) -> np.ndarray:
    """Which adapter each token uses, adapters numbered as they appear."""
    drawn = {
        "distinct": np.arange(tokens),
        "uniform": rng.integers(0, max(1, round(tokens**0.5)), tokens),
        "zipf": np.minimum(rng.zipf(1.5, tokens), 20),
        "identical": np.zeros(tokens, int),
    }[kind]
    return np.unique(drawn, return_inverse=True)[1].astype(np.int32)
