"""Decode's outputs: an item's sums become its rows, at once or added from the parts of several stretches.

An item inside one stretch is written to the output. One that a stretch's border cuts leaves its parts in
memory, each counted as it is stored; whoever stores the last one adds them in their order, so the bits of an
output do not depend on who that was, and nobody waits for another thread block.

Letters and names as in mosaic_decode_shape.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from slora_jax.pallas_kernels.mosaic_decode_shape import (
    COLUMN,
    NO_SCORE,
    DecodeMemory,
    DecodeShape,
    spread,
    transposed,
)
from slora_jax.pallas_kernels.mosaic_decode_walk import Cut

MERGE_ELEMS = 8192  # of parts of an item that are loaded at once, after its first two: 64 registers a thread

Part = tuple[Any, Any, Any]  # [e, rows] sum of weighted values, [rows] largest score, [rows] sum of weights


def write_item(z: DecodeShape, o_s: Any, out: Any, acc: Any, total: Any, item: Any) -> None:
    """Start the copy of an item's output, acc / total, through o_s [rows, e] to its rows of out [b*h, e]."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    o_s.transpose((1, 0))[...] = transposed((acc / spread(total, z.e)).astype(jnp.bfloat16))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_s.at[pl.ds(0, z.group)], out.at[pl.ds(item * z.group, z.group)])


def clear_row(z: DecodeShape, m: DecodeMemory, wg: Any, seq: Any) -> None:
    """Zeros for a row without context."""
    plgpu.wait_smem_to_gmem(0)
    zeros = plgpu.layout_cast(jnp.zeros((z.e, z.rows), jnp.bfloat16), plgpu.Layout.WGMMA)
    m.o_s.at[wg].transpose((1, 0))[...] = transposed(zeros)
    plgpu.commit_smem()
    heads = z.n_kv * z.group
    for at in range(0, heads, z.rows):
        size = min(z.rows, heads - at)
        plgpu.copy_smem_to_gmem(m.o_s.at[wg, pl.ds(0, size)], m.out.at[pl.ds(seq * heads + at, size)])


def store_part(
    z: DecodeShape, m: DecodeMemory, wg: Any, values: Part, stretch: Any, item: Any, begins: Any, cut: Cut
) -> None:
    """Store the part of a cut item that lies in a stretch; add all its parts if this is the last."""
    part = stretch * 2 + begins.astype(jnp.int32)
    m.parts[part], top, total = values
    m.sums[pl.ds(part * 2 * z.rows, z.rows)] = top
    m.sums[pl.ds((part * 2 + 1) * z.rows, z.rows)] = total
    if z.interpreted:  # `merge_kernel` adds them
        return
    owner = jnp.where(begins, stretch, cut.owner)
    others = jnp.where(begins, cut.last_others, cut.others)
    last = _arrive(m.counters.at[owner], others)

    @pl.when(last == 1)
    def _() -> None:
        write_item(z, m.o_s.at[wg], m.out, *_merged(z, m.parts, m.sums, owner, others), item)


def _arrive(counter: Any, others: Any) -> Any:
    """Count this warpgroup's stores as one of `others` + 1; i32: 1 for the last, which then sees all stores.

    counter: a reference to one i32 in global memory, 0 before the first.
    """
    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
    )

    def arrive(_: Any, counter: Any, others: Any) -> Any:
        i32, utils = ir.IntegerType.get_signless(32), mgpu.utils
        utils.warpgroup_barrier()  # orders the stores of all threads before the one that counts them
        is_last = utils.inline_ptx(
            """{
            .reg .pred one, last;
            .reg .b32 before;
            setp.ne.u32 one, $3, 0;
            mov.b32 before, 0xffffffff;
            @one atom.acq_rel.gpu.global.add.u32 before, [$1], 1;
            setp.eq.u32 last, before, $2;
            barrier.cta.red.or.pred last, $4, 128, last;
            selp.u32 $0, 1, 0, last;
            }""",
            utils.memref_ptr(counter),
            others.registers.flat[0],
            arith.extui(i32, utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)),
            utils.warpgroup_barrier_idx(sync=False),
            result_types=i32,
            has_side_effects=True,
            convergent=True,
        )
        return mgpu.FragmentedArray.splat(is_last, shape=(), is_signed=True)

    return inline(arrive)(counter, others)


def _merged(z: DecodeShape, parts: Any, sums: Any, stretch: Any, more: Any) -> tuple[Any, Any]:
    """An item's sum of weighted values [e, rows] and sum of weights [rows], of its parts in their order."""
    part = functools.partial(_load_part, z, parts, sums, stretch, more)
    ahead = MERGE_ELEMS // (z.rows * 128)  # as many of head_dim 64

    def further(n: Any, carry: Part) -> Part:
        return _add_parts(z, [carry, *(part(2 + n * ahead + at) for at in range(ahead))])

    first = _add_parts(z, [part(jnp.int32(n)) for n in (0, 1)])  # few items have more
    rounds = lax.div(more - 2 + ahead, ahead)
    acc, _, total = lax.fori_loop(0, rounds, further, first)
    return acc, total


def _load_part(z: DecodeShape, parts: Any, sums: Any, stretch: Any, more: Any, n: Any) -> Part:
    """Part n of the `more` + 1 of the item that begins in a stretch; beyond them one of no weight.

    parts and sums as in `DecodeMemory`.
    """
    part = jnp.where(n == 0, stretch * 2 + 1, (stretch + jnp.minimum(n, more)) * 2)
    acc = plgpu.load(parts.at[part], layout=plgpu.Layout.WGMMA, optimized=False)
    top, total = (
        plgpu.load(sums.at[pl.ds((part * 2 + at) * z.rows, z.rows)], layout=COLUMN, optimized=False)
        for at in (0, 1)
    )
    return acc, top + jnp.where(n <= more, 0.0, NO_SCORE), total


def _add_parts(z: DecodeShape, parts: list[Part]) -> Part:
    new = functools.reduce(jnp.maximum, [top for _, top, _ in parts])
    shrink = [jnp.exp2(top - new) for _, top, _ in parts]
    acc = sum(acc * spread(s, z.e) for (acc, _, _), s in zip(parts, shrink, strict=True))
    return acc, new, sum(total * s for (_, _, total), s in zip(parts, shrink, strict=True))


@functools.cache
def merge_kernel(shape: DecodeShape, interpret: Any) -> Any:
    """The kernel from (stretches, parts, sums) into `out`, of items that are cut: for the interpreter."""
    z = shape

    def merge_decode(
        stretches: Any,  # i32[n_stretches * columns]
        parts: Any,  # f32[n_stretches * 2, e, rows]
        sums: Any,  # f32[n_stretches * 2 * 2 * rows]
        out: Any,  # bf16[b * h, e]
        o_s: Any,  # bf16[rows, e]
    ) -> None:
        stretch = lax.axis_index("stretch")
        more = stretches[stretch * z.columns + 10]

        @pl.when(more > 0)
        def _() -> None:
            following = (stretch + 1) * z.columns  # it starts inside the item
            item = stretches[following + 4] * z.n_kv + stretches[following + 1]
            write_item(z, o_s, out, *_merged(z, parts, sums, stretch, more), item)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        merge_decode,
        out_type=(),
        grid=(z.n_stretches,),
        grid_names=("stretch",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        scratch_types=[plgpu.SMEM((z.rows, z.e), jnp.bfloat16)],
        interpret=interpret,
    )
