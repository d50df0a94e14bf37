"""The padded baseline gives what one dense x A^T B a token gives, within bounded memory."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slora_jax.pallas_kernels.padded_bmm as padded_bmm
from slora_jax.pallas_kernels.backend import XLA, LoraShape
from slora_jax.pallas_kernels.padded_bmm import (
    GATHER_BYTES,
    PaddedAdapters,
    PaddedPlanner,
    apply_padded_bmm,
    with_padded_bmm,
)
from tests.kernels.lora_cases import LAYER, NONE, SMALL, Adapters, check_groups, pack_adapters, popularity

PLANNER = PaddedPlanner()


def lora_shape(tokens: int) -> LoraShape:
    return LoraShape(tokens, tokens, 0, SMALL.chunks_per_page, tuple(SMALL.a_chunks), tuple(SMALL.b_chunks))


def padded(token_adapter: np.ndarray, data: Adapters) -> PaddedAdapters:
    """The batch's tables, of the lowest rung that holds them."""
    shape = lora_shape(len(token_adapter))
    needs = PLANNER.needs(token_adapter, data.blocks, shape)
    sizes = PLANNER.sizes(needs[0], shape)
    assert all(size >= need for size, need in zip(sizes, needs, strict=True))
    host = PLANNER.build(token_adapter, data.blocks, sizes, shape)
    assert {name: array.shape for name, array in host.items()} == dict(PLANNER.fields(sizes, shape))
    return PaddedAdapters(**{name: jnp.asarray(array) for name, array in host.items()})


def apply_group(
    x: jax.Array, y: jax.Array, pool: jax.Array, work: PaddedAdapters, group: tuple[int, ...]
) -> jax.Array:
    sizes: dict[str, Any] = {"in_dim": SMALL.ins[group[0]], "out_dims": tuple(SMALL.outs[m] for m in group)}
    apply = functools.partial(apply_padded_bmm, modules=group, chunk_width=SMALL.chunk_width, **sizes)
    got: jax.Array = jax.jit(apply)(x, y, pool, jnp.int32(LAYER), work)
    return got


def check(
    rng: np.random.Generator,
    data: Adapters,
    token_adapter: np.ndarray,
    dtype: jnp.dtype = jnp.float32,
    tolerance: float = 2e-6,
) -> None:
    work = padded(token_adapter, data)
    check_groups(
        rng, data, token_adapter, lambda x, y, g: apply_group(x, y, data.pool, work, g), dtype, tolerance
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-6), (jnp.bfloat16, 2e-2)])
def test_mixed_ranks_modules_and_base_tokens(dtype: jnp.dtype, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    ranks = [{0: 4, 1: 4, 2: 4, 3: 4}, {3: 33}, {m: 64 for m in range(7)}, {4: 1, 6: 9}, {2: 8}, NONE]
    token_adapter = np.array([2, -1, 0, 0, 1, 5, -1, 3, 4, 2, 2, 1, -1], np.int32)
    check(rng, pack_adapters(rng, ranks, dtype=dtype), token_adapter, dtype, tolerance)


@pytest.mark.parametrize("kind", ["distinct", "zipf", "identical"])
@pytest.mark.parametrize("together", [1, 7, 1000])
def test_tokens_in_turns_that_overlap(kind: str, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few tokens' copies fit, each is added once."""
    rng = np.random.default_rng(together)
    token_adapter = popularity(rng, kind, 33)
    n = token_adapter.max() + 1
    ranks = [{m: int(rng.integers(1, 20)) for m in range(7) if rng.random() < 0.7} for _ in range(n)]
    most_rows = 8 * max(-(-r // 8) for modules in ranks for r in modules.values())
    monkeypatch.setattr(padded_bmm, "GATHER_BYTES", together * most_rows * 128 * 4)  # of gate and up
    check(rng, pack_adapters(rng, ranks), token_adapter)


@pytest.mark.parametrize("tokens", [256, 2048])
def test_memory_is_bounded_whatever_the_batch_and_rank(tokens: int) -> None:
    """Llama-2-7B, rank 64, every row another adapter: gigabytes of copies, were they made at once."""
    per_page, width = 64, 256
    chunks = tuple(n // width for n in (4096,) * 6 + (11008,)), (16, 16, 16, 16, 43, 43, 16)
    shape = LoraShape(tokens, min(tokens, 256), 0, per_page, *chunks)
    fields = PLANNER.fields(PLANNER.sizes(8, shape), shape)
    arrays: dict[str, Any] = {name: jax.ShapeDtypeStruct(dims, jnp.int32) for name, dims in fields.items()}
    work = PaddedAdapters(**arrays)
    pool = jax.ShapeDtypeStruct((32, 1000, per_page * 8 * width), jnp.float32)
    for modules, in_dim, outs in (((6,), 11008, (4096,)), ((0, 1, 2), 4096, (4096,) * 3)):
        compiled = (
            jax.jit(
                functools.partial(
                    apply_padded_bmm, modules=modules, in_dim=in_dim, out_dims=outs, chunk_width=width
                )
            )
            .lower(
                jax.ShapeDtypeStruct((tokens, in_dim), jnp.float32),
                jax.ShapeDtypeStruct((tokens, sum(outs)), jnp.float32),
                pool,
                jax.ShapeDtypeStruct((), jnp.int32),
                work,
            )
            .compile()
        )
        memory = compiled.memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < 3 * GATHER_BYTES


def test_only_the_lora_half_of_a_backend_changes() -> None:
    padded_xla = with_padded_bmm(XLA)
    assert padded_xla.apply_lora is apply_padded_bmm
    assert (padded_xla.decode_attention, padded_xla.rope_write_kv) == (
        XLA.decode_attention,
        XLA.rope_write_kv,
    )
