"""Writing new tokens' K and V into the page pool with Pallas Mosaic GPU (Hopper), in place.

A token's K (or V) of all KV heads is one strided TMA store; a thread block stores a few tokens. Letters as in
xla_attention.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from slora_jax.pallas_kernels.mosaic_attention_operands import check_pages

BLOCKS = 264  # wanted at least: two on each of an H100's or H200's multiprocessors
MAX_TOKENS = 8  # of a block
SMEM_BYTES = 96 * 1024


def write_kv(
    pool: jax.Array,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    page: jax.Array,
    offset: jax.Array,
    *,
    page_tokens: int,
    interpret: Any = None,
) -> jax.Array:
    """pool[layer, page[t]].kv[:, :, offset[t]] = (k[t], v[t]), in place where the pool is donated.

    pool bf16 [n_layers, n_pages, page_elems]; k, v [t, n_kv, e], cast to bf16; page, offset int32 [t] (page
    -1: dropped; no slot may be given twice). Raises ValueError beyond the kernel's limits.
    """
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} must be alike")
    check_write(pool, k, page, offset, page_tokens)
    n_layers, n_pages, _ = pool.shape
    t, n_kv, e = k.shape
    fit = SMEM_BYTES // (2 * n_kv * e * 2)
    tokens = max(1, min(MAX_TOKENS, fit, -(-t // BLOCKS)))
    ref = jax.new_ref(pool.reshape(n_layers * n_pages * 2, n_kv, page_tokens, e))
    _write_kernel(t, n_pages, n_kv, e, tokens, interpret)(
        jnp.asarray(layer, jnp.int32).reshape(1),
        page,
        offset,
        k.astype(pool.dtype),
        v.astype(pool.dtype),
        ref,
    )
    return jax.freeze(ref).reshape(pool.shape)


def check_write(pool: jax.Array, k: jax.Array, page: jax.Array, offset: jax.Array, page_tokens: int) -> None:
    """Raises ValueError beyond what the kernels that write K and V can do."""
    if pool.ndim != 3 or k.ndim != 3:
        raise ValueError(
            f"need pool [layers, pages, elems], k and v [t, n_kv, e]; got {pool.shape}, {k.shape}"
        )
    t, n_kv, e = k.shape
    if pool.dtype != jnp.bfloat16:
        raise ValueError(f"pool must be bfloat16, not {pool.dtype}; use kernel_backend='xla'")
    check_pages(pool, n_kv=n_kv, page_tokens=page_tokens, e=e)
    if e % 64 or e > 256 or n_kv > 256 or page_tokens > 256:
        raise ValueError(
            f"head_dim {e} must be a multiple of 64 up to 256; n_kv {n_kv} and page_tokens {page_tokens} "
            "at most 256"
        )
    if page.shape != (t,) or offset.shape != (t,):
        raise ValueError(
            f"page {page.shape} and offset {offset.shape} must have one entry for each of {t} tokens"
        )


@functools.cache
def _write_kernel(t: int, n_pages: int, n_kv: int, e: int, tokens: int, interpret: Any) -> Any:
    """The kernel (layer, page, offset, k, v, pool ref) that stores `tokens` tokens a block."""

    def write_kv(
        layer: Any,  # i32[1]
        page: Any,  # i32[t]
        offset: Any,  # i32[t]
        k: Any,  # bf16[t, n_kv, e]
        v: Any,
        pool: Any,  # bf16[layers * pages * 2, n_kv, page_tokens, e]
        k_s: Any,  # bf16[tokens, n_kv, e]
        v_s: Any,
        bar: Any,
    ) -> None:
        first = lax.axis_index("block") * tokens
        parts = ((k, k_s), (v, v_s))
        for src, to in parts:
            plgpu.copy_gmem_to_smem(src.at[pl.ds(first, tokens)], to, bar)
        where = []
        for n in range(tokens):
            token = jnp.minimum(first + n, t - 1)
            where.append((page[token], offset[token]))
        plgpu.barrier_wait(bar)
        for n, (at, slot) in enumerate(where):

            @pl.when((first + n < t) & (at >= 0))
            def _(n: int = n, at: Any = at, slot: Any = slot) -> None:
                for half, (_, to) in enumerate(parts):
                    row = (layer[0] * n_pages + at) * 2 + half
                    plgpu.copy_smem_to_gmem(to.at[n], pool.at[row, :, slot])

        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        write_kv,
        out_type=(),
        grid=(-(-t // tokens),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        scratch_types=[
            plgpu.SMEM((tokens, n_kv, e), jnp.bfloat16),
            plgpu.SMEM((tokens, n_kv, e), jnp.bfloat16),
            plgpu.Barrier(num_arrivals=2),
        ],
        interpret=interpret,
    )
