"""RoPE of q and k and the write of K and V into the page pool in one Pallas Mosaic GPU kernel (Hopper).

A thread block takes a few tokens: their q and k come to shared memory as swizzled 8-row tiles, are rotated
there through registers (64 heads of a token at once, cosines and sines by column), and leave as TMA stores: q
to its array, K and V of all heads of a token as one strided store each. Heads that do not fill tiles are
rotated by XLA and written by `mosaic_kv`. Letters as in xla_attention.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from slora_jax.pallas_kernels.mosaic_kv import BLOCKS, SMEM_BYTES, check_write, write_kv
from slora_jax.pallas_kernels.xla_attention import apply_rope

ROWS = 64  # heads that a warpgroup rotates at once
TILE_ROWS = 8  # of swizzled tiles: heads of q and of k must fill them
MAX_TOKENS = 4  # of a block
SWIZZLES = (64, 128)  # bytes of half a head
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # of a vector, one value a column


def rope_write_kv(
    pool: jax.Array,
    layer: jax.Array | int,
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    page: jax.Array,
    offset: jax.Array,
    *,
    n_kv: int,
    page_tokens: int,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """pool[layer, page[t]].kv[:, :, offset[t]] = (rope(k[t]), v[t]), in place where the pool is donated.

    pool bf16 [n_layers, n_pages, page_elems]; qkv bf16 [t, h + 2 n_kv, e]: the heads of q, of k, of v; cos,
    sin f32[t, e / 2]; page, offset int32 [t] (page -1: dropped; no slot may be given twice). Rotated in
    float32, rounded to bf16 once. Returns (pool, rope(q) [t, h, e]). Raises ValueError beyond the kernel's
    limits.
    """
    h = qkv.shape[1] - 2 * n_kv if qkv.ndim == 3 else 0
    if h < 1 or any(x.shape != (len(qkv), qkv.shape[2] // 2) or x.dtype != jnp.float32 for x in (cos, sin)):
        raise ValueError(
            f"need qkv [t, h + {2 * n_kv}, e], cos and sin float32 [t, e/2]; got {qkv.shape}, {cos.dtype} "
            f"{cos.shape}, {sin.dtype} {sin.shape}"
        )
    if qkv.dtype != pool.dtype:
        raise ValueError(f"qkv must be {pool.dtype}, as the pool is, not {qkv.dtype}")
    if h % TILE_ROWS or n_kv % TILE_ROWS or qkv.shape[2] not in SWIZZLES:
        q, k, v = jnp.split(qkv, (h, h + n_kv), axis=1)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        return write_kv(pool, layer, k, v, page, offset, page_tokens=page_tokens, interpret=interpret), q
    check_write(pool, qkv[:, h : h + n_kv], page, offset, page_tokens)
    n_layers, n_pages, _ = pool.shape
    t, _, e = qkv.shape
    if t == 0:
        return pool, qkv[:, :h]
    bytes_a_token = 2 * e * (pl.cdiv(h + n_kv, ROWS) * ROWS + n_kv) + 4 * e
    tokens = max(1, min(MAX_TOKENS, SMEM_BYTES // bytes_a_token, pl.cdiv(t, BLOCKS)))
    ref = jax.new_ref(pool.reshape(n_layers * n_pages * 2 * n_kv, page_tokens, e))
    q = _kernel(t, h, n_kv, e, n_pages, tokens, interpret)(
        jnp.asarray(layer, jnp.int32).reshape(1), page, offset, qkv, cos, sin, ref
    )
    return jax.freeze(ref).reshape(pool.shape), q


@functools.cache
def _kernel(t: int, h: int, n_kv: int, e: int, n_pages: int, tokens: int, interpret: Any) -> Any:
    """The kernel (layer, page, offset, qkv, cos, sin, pool ref) -> q, of `tokens` tokens a block."""
    rotated, half = h + n_kv, e // 2

    def rope_write_kv(
        layer: Any,  # i32[1]
        page: Any,  # i32[t]
        offset: Any,  # i32[t]
        qkv: Any,  # bf16[t, h + 2 n_kv, e]
        cos: Any,  # f32[t, e/2]
        sin: Any,
        pool: Any,  # bf16[layers * pages * 2 * n_kv, page_tokens, e]
        q: Any,  # bf16[t, h, e]
        qk_s: Any,  # bf16[tokens, h + n_kv to whole ROWS, e]
        v_s: Any,  # bf16[tokens, n_kv, e]
        cos_s: Any,  # f32[tokens, e/2]
        sin_s: Any,
        bar: Any,
    ) -> None:
        start = lax.axis_index("block") * tokens
        first = jnp.minimum(start, t - tokens)  # the last block's window lies within the batch
        window = pl.ds(first, tokens)
        for n in range(tokens):
            plgpu.copy_gmem_to_smem(qkv.at[first + n, pl.ds(0, rotated)], qk_s.at[n, pl.ds(0, rotated)], bar)
        plgpu.copy_gmem_to_smem(qkv.at[window, pl.ds(rotated, n_kv)], v_s, bar)
        plgpu.copy_gmem_to_smem(cos.at[window], cos_s, bar)
        plgpu.copy_gmem_to_smem(sin.at[window], sin_s, bar)
        where = [(page[first + n], offset[first + n]) for n in range(tokens)]
        plgpu.barrier_wait(bar)
        for n in range(tokens):
            _rotate(qk_s.at[n], cos_s.at[n], sin_s.at[n])
        plgpu.commit_smem()
        for n, (at, slot) in enumerate(where):

            @pl.when(first + n >= start)  # its own tokens, not another block's
            def _(n: int = n) -> None:
                plgpu.copy_smem_to_gmem(qk_s.at[n, pl.ds(0, h)], q.at[first + n])

            @pl.when((first + n >= start) & (at >= 0))
            def _(n: int = n, at: Any = at, slot: Any = slot) -> None:
                row = pl.multiple_of((layer[0] * n_pages + at) * 2 * n_kv, TILE_ROWS)
                plgpu.copy_smem_to_gmem(qk_s.at[n, pl.ds(h, n_kv)], pool.at[pl.ds(row, n_kv), slot])
                plgpu.copy_smem_to_gmem(v_s.at[n], pool.at[pl.ds(row + n_kv, n_kv), slot])

        plgpu.wait_smem_to_gmem(0)

    def _rotate(x: Any, cos: Any, sin: Any) -> None:
        """The halves of each head of one token, in place; rows beyond its heads hold anything."""
        shape = ROWS, half
        c, s = (
            lax.broadcast_in_dim(plgpu.load(angles, layout=COLUMN, optimized=False), shape, [1])
            for angles in (cos, sin)
        )
        for row in range(0, x.shape[0], ROWS):
            parts = [x.at[pl.ds(row, ROWS), pl.ds(column, half)] for column in (0, half)]
            a, b = (plgpu.load(part, layout=plgpu.Layout.WGMMA).astype(jnp.float32) for part in parts)
            parts[0][...] = (a * c - b * s).astype(jnp.bfloat16)
            parts[1][...] = (b * c + a * s).astype(jnp.bfloat16)

    tiled = (plgpu.TilingTransform((TILE_ROWS, half)), plgpu.SwizzleTransform(e))  # type: ignore[abstract]
    return plgpu.kernel(
        rope_write_kv,
        out_type=jax.ShapeDtypeStruct((t, h, e), jnp.bfloat16),
        grid=(pl.cdiv(t, tokens),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        scratch_types=[
            plgpu.SMEM((tokens, pl.cdiv(rotated, ROWS) * ROWS, e), jnp.bfloat16, transforms=tiled),
            plgpu.SMEM((tokens, n_kv, e), jnp.bfloat16),
            plgpu.SMEM((tokens, half), jnp.float32),
            plgpu.SMEM((tokens, half), jnp.float32),
            plgpu.Barrier(num_arrivals=tokens + 3),
        ],
        interpret=interpret,
    )
