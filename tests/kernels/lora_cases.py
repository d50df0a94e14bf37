"""Adapters in pages, batches that use them, and what LoRA must give: a dense x A^T B a token in NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from slora_jax.pallas_kernels.xla_lora import AdapterBlocks

W, CHUNKS_PER_PAGE, LAYERS, LAYER = 8, 5, 2, 1
IN = (24, 24, 24, 16, 24, 24, 40)  # q, k, v, o, gate, up, down
OUT = (16, 8, 8, 24, 40, 40, 24)
GROUPS = ((0, 1, 2), (3,), (4, 5), (6,))
A_CHUNKS, B_CHUNKS = [n // W for n in IN], [n // W for n in OUT]
NONE: dict[int, int] = {}


@dataclasses.dataclass
class Adapters:
    """Adapters of the given ranks by module, in shuffled pages of a pool whose unused pages are NaN."""

    pool: jax.Array
    blocks: list[AdapterBlocks]
    a: list[dict[int, np.ndarray]]  # an adapter: module -> [rank, in]
    b: list[dict[int, np.ndarray]]  # an adapter: module -> [rank, out]


def pack(rng: np.random.Generator, ranks: list[dict[int, int]], dtype: jnp.dtype = jnp.float32) -> Adapters:
    n_pages = 2 + sum(-(-rank // 8) * (A_CHUNKS[m] + B_CHUNKS[m]) for r in ranks for m, rank in r.items())
    n_pages += -n_pages % 1024  # few shapes, few compilations
    free = list(rng.permutation(np.arange(1, n_pages)))
    pool = np.full((LAYERS, n_pages, CHUNKS_PER_PAGE, 8, W), np.nan, np.float32)
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
            sides = (("a", a, IN[module]), ("b", b, OUT[module]))
            for side, dense, width in sides:
                drawn = rng.standard_normal((rank, width)) / np.sqrt(rank)
                dense[module] = np.asarray(jnp.asarray(drawn, dtype), np.float32)
                starts[side][module] = len(chunks)
                padded = np.zeros((count[module] * 8, width), np.float32)
                padded[:rank] = dense[module]
                for block in range(count[module]):
                    for c in range(width // W):
                        chunks.append(padded[block * 8 : block * 8 + 8, c * W : c * W + W])
        pages = [int(free.pop()) for _ in range(-(-len(chunks) // CHUNKS_PER_PAGE))]
        for c, chunk in enumerate(chunks):
            pool[LAYER, pages[c // CHUNKS_PER_PAGE], c % CHUNKS_PER_PAGE] = chunk
        blocks.append((np.array(pages, np.int32), count, starts["a"], starts["b"]))
        a_all.append(a)
        b_all.append(b)
    return Adapters(jnp.asarray(pool.reshape(LAYERS, n_pages, -1), dtype), blocks, a_all, b_all)


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
        x = jnp.asarray(rng.standard_normal((len(token_adapter), IN[group[0]])), dtype)
        y = jnp.asarray(rng.standard_normal((len(token_adapter), sum(OUT[m] for m in group))), dtype)
        want = np.asarray(y, np.float64).copy()
        for t, adapter in enumerate(token_adapter):
            column = 0
            for m in group:
                if adapter >= 0 and m in data.a[adapter]:
                    h = np.asarray(x[t], np.float64) @ data.a[adapter][m].T
                    want[t, column : column + OUT[m]] += h @ data.b[adapter][m]
                column += OUT[m]
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
