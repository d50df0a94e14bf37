"""Batched LoRA over rank blocks in pages against one dense x A^T B a token in float32 NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slora_jax.pallas_kernels.xla_lora import LoraBlocks, apply_lora, build_lora_blocks, lora_blocks_needed
from tests.kernels.lora_cases import (
    GROUPS,
    LAYER,
    LAYERS,
    NONE,
    SMALL,
    Adapters,
    check_groups,
    pack_adapters,
    popularity,
)


def lora_blocks(token_adapter: np.ndarray, data: Adapters, spare: int = 0) -> LoraBlocks:
    """The blocks of a batch: exactly, or with `spare` or more blocks of padding, in few sizes."""
    nb, lp = lora_blocks_needed(data.blocks)
    if spare:
        nb, lp = nb + spare + -(nb + spare) % 64, lp + 1 + -(lp + 1) % 2048
    host = build_lora_blocks(
        token_adapter, data.blocks, nb, lp, a_chunks=SMALL.a_chunks, b_chunks=SMALL.b_chunks
    )
    return LoraBlocks(**{name: jnp.asarray(array) for name, array in host.items()})


@functools.partial(jax.jit, static_argnums=4)
def apply_group(
    x: jax.Array, y: jax.Array, pool: jax.Array, blocks: LoraBlocks, group: tuple[int, ...]
) -> jax.Array:
    outs = tuple(SMALL.outs[m] for m in group)
    return apply_lora(
        x,
        y,
        pool,
        jnp.int32(LAYER),
        blocks,
        modules=group,
        in_dim=SMALL.ins[group[0]],
        out_dims=outs,
        chunk_width=SMALL.chunk_width,
    )


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


@pytest.mark.parametrize("kind", ["distinct", "uniform", "zipf", "identical"])
@pytest.mark.parametrize("tokens", [1, 33, 130])
def test_popularity(kind: str, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    token_adapter = popularity(rng, kind, tokens)
    n = token_adapter.max() + 1
    ranks = [{m: int(rng.integers(1, 20)) for m in range(7) if rng.random() < 0.7} for _ in range(n)]
    check(rng, pack_adapters(rng, ranks), token_adapter)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-6), (jnp.bfloat16, 6e-3)])
def test_mixed_ranks_modules_and_base_tokens(dtype: jnp.dtype, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    ranks = [{0: 4, 1: 4, 2: 4, 3: 4}, {3: 33}, {m: 64 for m in range(7)}, {4: 1, 6: 9}, {2: 8}, NONE]
    token_adapter = np.array([2, -1, 0, 0, 1, 5, -1, 3, 4, 2, 2, 1, -1], np.int32)
    check(rng, pack_adapters(rng, ranks, dtype=dtype), token_adapter, dtype=dtype, tolerance=tolerance)


def test_chunks_of_a_block_cross_pages() -> None:
    rng = np.random.default_rng(1)
    data = pack_adapters(rng, [{0: 8, 4: 17, 6: 40}, {6: 64}])
    assert max(len(pages) for pages, *_ in data.blocks) > 10
    assert any(
        start[6] % SMALL.chunks_per_page + SMALL.a_chunks[6] > SMALL.chunks_per_page
        for _, _, start, _ in data.blocks
    )
    check(rng, data, np.array([1, 0, 0, 1], np.int32))


def test_exact_sizes_without_padding() -> None:
    rng = np.random.default_rng(2)
    check(rng, pack_adapters(rng, [{m: 8 for m in range(7)}]), np.zeros(3, np.int32), spare=0)


@pytest.mark.parametrize("spare", [0, 4])
def test_base_only_batch_returns_y(spare: int) -> None:
    rng = np.random.default_rng(3)
    data = Adapters(SMALL, pack_adapters(rng, [{0: 8}]).pool, [], [], [])
    check(rng, data, np.full(5, -1, np.int32), spare=spare)


def test_builder_refuses_sizes_too_small() -> None:
    rng = np.random.default_rng(4)
    data = pack_adapters(rng, [{0: 24}, {0: 8}])
    assert lora_blocks_needed(data.blocks)[0] == 4
    with pytest.raises(ValueError, match="pass at least nb=4"):
        build_lora_blocks(
            np.zeros(1, np.int32), data.blocks, 3, 99, a_chunks=SMALL.a_chunks, b_chunks=SMALL.b_chunks
        )
    with pytest.raises(ValueError, match="too small"):
        build_lora_blocks(
            np.zeros(1, np.int32), data.blocks, 4, 1, a_chunks=SMALL.a_chunks, b_chunks=SMALL.b_chunks
        )


def test_prompts_of_several_adapters_after_decodes() -> None:
    """Tiles that hold one adapter, several, base tokens alone; adapters not in order of first use."""
    rng = np.random.default_rng(5)
    ranks = [{m: int(rng.integers(1, 50)) for m in range(7) if rng.random() < 0.8} for _ in range(9)]
    decodes = rng.integers(-1, 9, 20)
    prompts = np.repeat([7, -1, 2, 7, 0], [90, 70, 30, 11, 5])
    check(rng, pack_adapters(rng, ranks), np.concatenate([decodes, prompts]).astype(np.int32))


def test_base_tokens_are_untouched_beside_garbage() -> None:
    """A padding token's x may be anything; a base token's y comes back bit for bit."""
    rng = np.random.default_rng(6)
    data = pack_adapters(rng, [{0: 8, 1: 8, 2: 8}])
    blocks = lora_blocks(np.array([-1, 0, -1], np.int32), data, 2)
    x = jnp.asarray(rng.standard_normal((3, SMALL.ins[0])), jnp.float32).at[2].set(jnp.nan)
    y = jnp.asarray(rng.standard_normal((3, 32)), jnp.float32)
    got = apply_group(x, y, data.pool, blocks, GROUPS[0])
    np.testing.assert_array_equal(np.asarray(got)[[0, 2]], np.asarray(y)[[0, 2]])
    assert np.abs(np.asarray(got - y))[1].min() > 0


def test_builder_orders_adapters_by_their_last_token() -> None:
    rng = np.random.default_rng(7)
    data = pack_adapters(rng, [{0: 8}, {0: 16}, {0: 8}, {1: 8}])
    host = build_lora_blocks(
        np.array([0, 1, -1, 2, 0, 1]), data.blocks, 6, 20, a_chunks=SMALL.a_chunks, b_chunks=SMALL.b_chunks
    )
    assert host["token_adapter"].tolist() == [2, 3, -1, 1, 2, 3]  # adapter 3 has no token and becomes 0
    assert host["adapter"][0].tolist() == [1, 2, 3, 3, -2, -2]
    assert host["adapter"][1].tolist() == [0, -2, -2, -2, -2, -2]
    assert all(array.dtype == np.int32 for array in host.values())
    with pytest.raises(ValueError, match="names adapter 4 of 4"):
        build_lora_blocks(np.array([4]), data.blocks, 6, 20, a_chunks=SMALL.a_chunks, b_chunks=SMALL.b_chunks)


def test_lora_makes_no_copy_of_the_pool() -> None:
    shape = (LAYERS, 4000, SMALL.chunks_per_page * 8 * SMALL.chunk_width)
    data = pack_adapters(np.random.default_rng(8), [{0: 8, 1: 8, 2: 8}])
    blocks = lora_blocks(np.zeros(100, np.int32), data)
    f32 = jnp.float32
    compiled = apply_group.lower(
        jax.ShapeDtypeStruct((100, SMALL.ins[0]), f32),
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
