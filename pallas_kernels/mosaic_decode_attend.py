"""Decode's multiplying warpgroups: a running softmax over the chunks of a stretch, item by item.

Both products are the transposed ones: K Q^T of [c, e] by [e, rows] and V^T P^T of [e, c] by [c, rows]. So
the 64 rows that wgmma must have are tokens and head dims, and a group of 1 to 16 query heads fills its 8 or
16 columns instead of 1 to 16 of 64 rows: an eighth of the multiplications, exponentials and registers.

Letters and names as in mosaic_decode_shape.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from slora_jax.pallas_kernels.mosaic_decode_output import clear_row, store_part, write_item
from slora_jax.pallas_kernels.mosaic_decode_shape import (
    COLUMN,
    NO_SCORE,
    DecodeMemory,
    DecodeShape,
    spread,
    transposed,
)
from slora_jax.pallas_kernels.mosaic_decode_walk import Cut, Place, numbers, place_after

LOG2E = math.log2(math.e)


def attend_stretch(z: DecodeShape, m: DecodeMemory, stretch: Any, wg: Any) -> None:
    """The chunks of a stretch, item by item, and rows without context."""
    *start, count = numbers(z, m, stretch, 0, 4)
    padding = [stretch + n * z.n_stretches for n in range(pl.cdiv(z.batch, z.n_stretches))]
    # Loaded at the end, these would be waited for.
    lengths = [m.kv_len[jnp.minimum(seq, z.batch - 1)] for seq in padding]
    cut = Cut(*numbers(z, m, stretch, 8, 11))

    def segment_step(carry: Any) -> Any:
        """The chunks of one item that lie in this stretch."""
        c, at, segment = carry
        steps = lax.div(at.length + z.chunk - 1, z.chunk)
        here = jnp.minimum(steps - at.i, count - c)
        begins, ends = at.i == 0, at.i + here == steps
        plgpu.barrier_wait(m.q_bar.at[wg * z.stages + lax.rem(segment, z.stages)])
        acc = plgpu.layout_cast(jnp.zeros((z.e, z.rows), jnp.float32), plgpu.Layout.WGMMA)
        top = plgpu.layout_cast(jnp.full((z.rows,), NO_SCORE, jnp.float32), COLUMN)
        total = plgpu.layout_cast(jnp.zeros((z.chunk, z.rows), jnp.float32), plgpu.Layout.WGMMA)
        step = functools.partial(_attend_chunk, z, m, wg, c0=c, i0=at.i, n=at.length, segment=segment)
        acc, top, total = lax.fori_loop(0, here, step, (acc, top, total))
        item = at.seq * z.n_kv + at.head
        total = _reduce(z, m, wg, "add", total)
        whole = begins & ends
        pl.when(whole)(lambda: write_item(z, m.o_s.at[wg], m.out, acc, total, item))
        part = (acc, top, total)
        pl.when(jnp.logical_not(whole))(lambda: store_part(z, m, wg, part, stretch, item, begins, cut))
        following = place_after(z, m, at, at.i + here - 1)
        return c + here, following, segment + 1

    carry = (jnp.int32(0), Place(*start, *numbers(z, m, stretch, 4, 8)), jnp.int32(0))
    lax.while_loop(lambda carry: carry[0] < count, segment_step, carry)
    for seq, length in zip(padding, lengths, strict=True):
        pl.when((seq < z.batch) & (length == 0))(functools.partial(clear_row, z, m, wg, seq))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _attend_chunk(
    z: DecodeShape, m: DecodeMemory, wg: Any, t: Any, carry: Any, *, c0: Any, i0: Any, n: Any, segment: Any
) -> Any:
    """Add chunk i0 + t of an item of length n, chunk c0 + t of its stretch, to a running softmax.

    carry: f32 [e, rows] sum of weighted values; [rows] largest score; [chunk, rows] sums of weights.
    """
    bf16, f32 = jnp.bfloat16, jnp.float32
    acc, top, total = carry
    i, slot = i0 + t, lax.rem(c0 + t, z.stages)
    at = wg * z.stages + slot
    plgpu.barrier_wait(m.k_bar.at[at])

    def scores(ref: Any) -> Any:
        q_s = m.q_s.at[wg, lax.rem(segment, z.stages)]
        plgpu.wgmma(ref, m.k_s.at[wg, slot], q_s.transpose((1, 0)))
        return ref[...]

    score = pl.run_scoped(scores, plgpu.ACC((z.chunk, z.rows), f32)) * (z.scale * LOG2E)
    plgpu.barrier_arrive(m.k_free.at[at])
    token = plgpu.broadcasted_iota(jnp.int32, score.shape, 0, layout=plgpu.Layout.WGMMA)
    score = jnp.where(token < n - i * z.chunk, score, NO_SCORE)
    new_top = jnp.maximum(top, _reduce(z, m, wg, "max", score))
    shrink = jnp.exp2(top - new_top)
    weight = jnp.exp2(score - spread(new_top, z.chunk))
    total = total * spread(shrink, z.chunk) + weight
    acc = acc * spread(shrink, z.e)
    # The barrier of `_reduce` says that the product before has read p_s.
    m.p_s.at[wg].transpose((1, 0))[...] = transposed(weight.astype(bf16))
    plgpu.commit_smem()
    plgpu.barrier_wait(m.v_bar.at[at])

    @pl.when((i + 1) * z.chunk > n)
    def _() -> None:  # another's leftovers may be NaN, which a weight of 0 does not hide
        row = plgpu.broadcasted_iota(jnp.int32, (z.chunk, z.e), 0, layout=plgpu.Layout.WGMMA)
        v = plgpu.load(m.v_s.at[wg, slot], layout=plgpu.Layout.WGMMA, optimized=False)
        m.v_s[wg, slot] = jnp.where(row < n - i * z.chunk, v.astype(f32), 0.0).astype(bf16)
        plgpu.commit_smem()

    def values(ref: Any) -> Any:
        if not z.interpreted:
            ref[...] = acc
        plgpu.wgmma(ref, m.v_s.at[wg, slot].transpose((1, 0)), m.p_s.at[wg].transpose((1, 0)))
        return ref[...]

    summed = pl.run_scoped(values, plgpu.ACC((z.e, z.rows), f32))
    plgpu.barrier_arrive(m.v_free.at[at])
    return acc + summed if z.interpreted else summed, new_top, total


def _reduce(z: DecodeShape, m: DecodeMemory, wg: Any, op: str, x: Any) -> Any:
    """[rows]: max or sum over the tokens (axis 0) of x, which the four warps share among them."""
    if z.interpreted:
        return x.max(axis=0) if op == "max" else x.sum(axis=0)
    # Mosaic's own scratch for this would be one for both multiplying warpgroups.
    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((z.rows,), jnp.float32, layout=COLUMN),
    )
    return inline(lambda _, x, scratch: x.reduce(op, 0, scratch))(x, m.across.at[wg])
