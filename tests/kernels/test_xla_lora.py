"""Batched LoRA over rank blocks in pages against one dense x A^T B a token in float32 NumPy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slora_jax.pallas_kernels.xla_lora import (
    AdapterBlocks,
    LoraBlocks,
    apply_lora,
    build_lora_blocks,
    lora_blocks_needed,
)

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


def lora_blocks(token_adapter: np.ndarray, data: Adapters, spare: int = 0) -> LoraBlocks:
    """The blocks of a batch: exactly, or with `spare` or more blocks of padding, in few sizes."""
    nb, lp = lora_blocks_needed(data.blocks)
    if spare:
        nb, lp = nb + spare + -(nb + spare) % 64, lp + 1 + -(lp + 1) % 2048
    host = build_lora_blocks(token_adapter, data.blocks, nb, lp, a_chunks=A_CHUNKS, b_chunks=B_CHUNKS)
    return LoraBlocks(**{name: jnp.asarray(array) for name, array in host.items()})


@functools.partial(jax.jit, static_argnums=4)
def apply_group(
    x: jax.Array, y: jax.Array, pool: jax.Array, blocks: LoraBlocks, group: tuple[int, ...]
) -> jax.Array:
    outs = tuple(OUT[m] for m in group)
    return apply_lora(
        x, y, pool, jnp.int32(LAYER), blocks, modules=group, in_dim=IN[group[0]], out_dims=outs, chunk_width=W
    )


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


def check(
    rng: np.random.Generator,
    data: Adapters,
    token_adapter: np.ndarray,
    spare: int = 3,
    dtype: jnp.dtype = jnp.float32,
    tolerance: float = 2e-6,
) -> None:
    blocks = lora_blocks(token_adapter, data, spare)
    check_groups(
        rng, data, token_adapter, lambda x, y, g: apply_group(x, y, data.pool, blocks, g), dtype, tolerance
    )


def popularity(rng: np.random.Generator, kind: str, tokens: int) -> np.ndarray:
    """Which adapter each token uses, adapters numbered as they appear."""
    drawn = {
        "distinct": np.arange(tokens),
        "uniform": rng.integers(0, max(1, round(tokens**0.5)), tokens),
        "zipf": np.minimum(rng.zipf(1.5, tokens), 20),
        "identical": np.zeros(tokens, int),
    }[kind]
    return np.unique(drawn, return_inverse=True)[1].astype(np.int32)


@pytest.mark.parametrize("kind", ["distinct", "uniform", "zipf", "identical"])
@pytest.mark.parametrize("tokens", [1, 33, 130])
def test_popularity(kind: str, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    token_adapter = popularity(rng, kind, tokens)
    n = token_adapter.max() + 1
    ranks = [{m: int(rng.integers(1, 20)) for m in range(7) if rng.random() < 0.7} for _ in range(n)]
    check(rng, pack(rng, ranks), token_adapter)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-6), (jnp.bfloat16, 6e-3)])
def test_mixed_ranks_modules_and_base_tokens(dtype: jnp.dtype, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    ranks = [{0: 4, 1: 4, 2: 4, 3: 4}, {3: 33}, {m: 64 for m in range(7)}, {4: 1, 6: 9}, {2: 8}, NONE]
    token_adapter = np.array([2, -1, 0, 0, 1, 5, -1, 3, 4, 2, 2, 1, -1], np.int32)
    check(rng, pack(rng, ranks, dtype), token_adapter, dtype=dtype, tolerance=tolerance)


def test_chunks_of_a_block_cross_pages() -> None:
    rng = np.random.default_rng(1)
    data = pack(rng, [{0: 8, 4: 17, 6: 40}, {6: 64}])
    assert max(len(pages) for pages, *_ in data.blocks) > 10
    assert any(start[6] % CHUNKS_PER_PAGE + A_CHUNKS[6] > CHUNKS_PER_PAGE for _, _, start, _ in data.blocks)
    check(rng, data, np.array([1, 0, 0, 1], np.int32))


def test_exact_sizes_without_padding() -> None:
    rng = np.random.default_rng(2)
    check(rng, pack(rng, [{m: 8 for m in range(7)}]), np.zeros(3, np.int32), spare=0)


@pytest.mark.parametrize("spare", [0, 4])
def test_base_only_batch_returns_y(spare: int) -> None:
    rng = np.random.default_rng(3)
    data = Adapters(pack(rng, [{0: 8}]).pool, [], [], [])
    check(rng, data, np.full(5, -1, np.int32), spare=spare)


def test_builder_refuses_sizes_too_small() -> None:
    rng = np.random.default_rng(4)
    data = pack(rng, [{0: 24}, {0: 8}])
    assert lora_blocks_needed(data.blocks)[0] == 4
    with pytest.raises(ValueError, match="pass at least nb=4"):
        build_lora_blocks(np.zeros(1, np.int32), data.blocks, 3, 99, a_chunks=A_CHUNKS, b_chunks=B_CHUNKS)
    with pytest.raises(ValueError, match="too small"):
        build_lora_blocks(np.zeros(1, np.int32), data.blocks, 4, 1, a_chunks=A_CHUNKS, b_chunks=B_CHUNKS)


def test_prompts_of_several_adapters_after_decodes() -> None:
    """Tiles that hold one adapter, several, base tokens alone; adapters not in order of first use."""
    rng = np.random.default_rng(5)
    ranks = [{m: int(rng.integers(1, 50)) for m in range(7) if rng.random() < 0.8} for _ in range(9)]
    decodes = rng.integers(-1, 9, 20)
    prompts = np.repeat([7, -1, 2, 7, 0], [90, 70, 30, 11, 5])
    check(rng, pack(rng, ranks), np.concatenate([decodes, prompts]).astype(np.int32))


def test_base_tokens_are_untouched_beside_garbage() -> None:
    """A padding token's x may be anything; a base token's y comes back bit for bit."""
    rng = np.random.default_rng(6)
    data = pack(rng, [{0: 8, 1: 8, 2: 8}])
    blocks = lora_blocks(np.array([-1, 0, -1], np.int32), data, 2)
    x = jnp.asarray(rng.standard_normal((3, IN[0])), jnp.float32).at[2].set(jnp.nan)
    y = jnp.asarray(rng.standard_normal((3, 32)), jnp.float32)
    got = apply_group(x, y, data.pool, blocks, GROUPS[0])
    np.testing.assert_array_equal(np.asarray(got)[[0, 2]], np.asarray(y)[[0, 2]])
    assert np.abs(np.asarray(got - y))[1].min() > 0


def test_builder_orders_adapters_by_their_last_token() -> None:
    rng = np.random.default_rng(7)
    data = pack(rng, [{0: 8}, {0: 16}, {0: 8}, {1: 8}])
    host = build_lora_blocks(
        np.array([0, 1, -1, 2, 0, 1]), data.blocks, 6, 20, a_chunks=A_CHUNKS, b_chunks=B_CHUNKS
    )
    assert host["token_adapter"].tolist() == [2, 3, -1, 1, 2, 3]  # adapter 3 has no token and becomes 0
    assert host["adapter"][0].tolist() == [1, 2, 3, 3, -2, -2]
    assert host["adapter"][1].tolist() == [0, -2, -2, -2, -2, -2]
    assert all(array.dtype == np.int32 for array in host.values())
    with pytest.raises(ValueError, match="names adapter 4 of 4"):
        build_lora_blocks(np.array([4]), data.blocks, 6, 20, a_chunks=A_CHUNKS, b_chunks=B_CHUNKS)


def test_lora_makes_no_copy_of_the_pool() -> None:
    shape = (LAYERS, 4000, CHUNKS_PER_PAGE * 8 * W)
    data = pack(np.random.default_rng(8), [{0: 8, 1: 8, 2: 8}])
    blocks = lora_blocks(np.zeros(100, np.int32), data)
    f32 = jnp.float32
    compiled = apply_group.lower(
        jax.ShapeDtypeStruct((100, IN[0]), f32),
        jax.ShapeDtypeStruct((100, 32), f32),
        jax.ShapeDtypeStruct(shape, f32),
        blocks,
        GROUPS[0],
    ).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 4 * np.prod(shape) / 4


def test_no_blocks_needed_without_adapters() -> None:
    assert lora_blocks_needed([]) == (0, 0)
