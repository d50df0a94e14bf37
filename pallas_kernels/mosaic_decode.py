"""Paged decode attention with Pallas Mosaic GPU (Hopper), reading K and V where they lie in the page pool.

The context of every (sequence, KV head), an *item*, is cut into chunks of `CHUNK_ELEMS / head_dim` tokens.
All chunks of a batch, one item after another, are one line, and each of a fixed number of warpgroups takes a
stretch of it of equal cost (`decode_plan`). So they finish together whatever the lengths are, long contexts
and small batches split by themselves, and copies run ahead over the ends of items: memory is never idle.

A thread block has two warpgroups that multiply (`mosaic_decode_attend`), and one whose warps follow the page
table and copy for them (`mosaic_decode_copy`); both walk their stretch alike (`mosaic_decode_walk`). How an
item's output is written, and merged where a stretch's border cuts the item, says `mosaic_decode_output`.

Letters as in xla_attention.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from slora_jax.pallas_kernels.decode_plan import ITEM_COST, plan_decode
from slora_jax.pallas_kernels.mosaic_attention_operands import TILED, check_attention, whole_tiles
from slora_jax.pallas_kernels.mosaic_decode_attend import attend_stretch
from slora_jax.pallas_kernels.mosaic_decode_copy import copy_stretch
from slora_jax.pallas_kernels.mosaic_decode_output import merge_kernel
from slora_jax.pallas_kernels.mosaic_decode_shape import DecodeMemory, DecodeShape, query_rows

STRETCHES = 264  # two on each of an H100's or H200's 132 multiprocessors
CONSUMERS = 2  # warpgroups of a thread block that multiply, each with a stretch of its own
CHUNK_ELEMS = 8192  # of K in a chunk: 64 tokens of head_dim 128
SMEM_BYTES = 227 * 1024 - 1024  # of a thread block, barriers aside


def decode_attention(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    page_table: jax.Array,
    kv_len: jax.Array,
    *,
    n_kv: int,
    page_tokens: int,
    scale: float,
    n_stretches: int = STRETCHES,
    consumers: int = CONSUMERS,
    stages: int | None = None,
    chunk: int | None = None,
    item_cost: int = ITEM_COST,
    interpret: Any = None,
) -> jax.Array:
    """out[s] = softmax(scale * q[s] K[:kv_len[s]]^T) V[:kv_len[s]], one query token a sequence.

    q bf16 [s, h, e]; pool bf16 [n_layers, n_pages, page_elems]; page_table int32 [s, m]; kv_len int32 [s],
    the query's own token included (0: a padding row, whose output is 0). Query head h reads KV head
    h // (h / n_kv). Products of bf16, sums in float32; weights are rounded to bf16 before they meet V.
    Returns bf16 [s, h, e]. Raises ValueError where the shapes are beyond the kernel's limits.

    Tunings: n_stretches, to which chunks are dealt; consumers, multiplying warpgroups of a thread block;
    stages, chunks in flight for each (None: as many as shared memory holds); chunk, its tokens; item_cost as
    in `plan_decode`. Pallas's interpreter (`interpret`) has no atomics: there a second kernel
    adds the parts of cut items, by the same code.
    """
    chunk = chunk or CHUNK_ELEMS // (128 if q.shape[-1:] == (128,) else 64)
    check_attention(q, pool, page_table, n_kv=n_kv, page_tokens=page_tokens, chunk=chunk)
    s, h, e = q.shape
    if kv_len.shape != (s,) or page_table.shape[0] != s:
        raise ValueError(
            f"kv_len {kv_len.shape} and page_table {page_table.shape} must have a row for each of {s} queries"
        )
    if consumers not in (1, 2) or n_stretches < 1 or n_stretches % consumers:
        raise ValueError(f"n_stretches {n_stretches} must be a multiple of consumers {consumers} (1 or 2)")
    most = _stages(consumers, chunk, e, query_rows(h // n_kv))
    if not most:
        raise ValueError(
            f"chunk {chunk} of head_dim {e} does not fit the shared memory of {consumers} consumers: use a "
            "smaller chunk or fewer consumers"
        )
    stages = stages or most
    if not 1 <= stages <= most:
        raise ValueError(f"stages {stages} must be 1 to {most}, what the shared memory holds")
    n_layers, n_pages, _ = pool.shape
    plan = plan_decode(
        kv_len,
        page_table,
        n_kv=n_kv,
        page_tokens=page_tokens,
        chunk=chunk,
        n_stretches=n_stretches,
        item_cost=item_cost,
    )
    shape = DecodeShape(
        batch=s,
        max_pages=page_table.shape[1],
        n_kv=n_kv,
        group=h // n_kv,
        stride=pl.next_power_of_2(h // n_kv),
        e=e,
        page_tokens=page_tokens,
        n_pages=n_pages,
        n_stretches=n_stretches,
        columns=plan.stretches.shape[1],
        consumers=consumers,
        stages=stages,
        chunk=chunk,
        scale=scale,
        interpreted=interpret is not None,
    )
    rows = pool.reshape(n_layers * n_pages * 2 * n_kv * page_tokens, e)
    if shape.stride > shape.group:  # as 3 heads: none may lie on both sides of a tile's border
        q = jnp.pad(q.reshape(s, n_kv, -1, e), ((0, 0), (0, 0), (0, shape.stride - shape.group), (0, 0)))
    out, parts, sums = _attend_kernel(shape, interpret)(
        jnp.asarray(layer, jnp.int32).reshape(1),
        plan.stretches.reshape(-1),
        plan.walk.reshape(-1),
        kv_len,
        page_table.reshape(-1),
        whole_tiles(q.reshape(-1, e)),
        rows,
        jax.new_ref(jnp.zeros(n_stretches, jnp.int32)),
    )
    if interpret is not None:
        ref = jax.new_ref(out)
        merge_kernel(shape, interpret)(plan.stretches.reshape(-1), parts, sums, ref)
        out = jax.freeze(ref)
    attended: jax.Array = out.reshape(s, h, e)
    return attended


def _stages(consumers: int, chunk: int, e: int, rows: int) -> int:
    """Chunks in flight for a warpgroup: as many as fit the shared memory beside weights and outputs."""
    stage = 2 * (2 * chunk + rows) * e  # bytes of K, V and q
    rest = 2 * rows * (chunk + e) + 4 * 32 * rows  # of p_s, o_s, across
    return (SMEM_BYTES // consumers - rest) // stage


@functools.cache
def _attend_kernel(shape: DecodeShape, interpret: Any) -> Any:
    """The kernel from the operands of `DecodeMemory` to (out, parts, sums)."""
    z, bf16, f32 = shape, jnp.bfloat16, jnp.float32

    def decode(*refs: Any, **scratch: Any) -> None:
        m = DecodeMemory(*refs, **scratch)
        wg = lax.axis_index("wg")
        first_stretch = lax.axis_index("block") * z.consumers

        @pl.when(wg < z.consumers)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            attend_stretch(z, m, first_stretch + wg, wg)

        @pl.when(wg == z.consumers)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            plgpu.warp_map(functools.partial(copy_stretch, z, m, first_stretch))

    each = z.consumers * z.stages
    scratch: Any = {
        "q_s": plgpu.SMEM((z.consumers, z.stages, z.rows, z.e), bf16, transforms=TILED),
        "k_s": plgpu.SMEM((z.consumers, z.stages, z.chunk, z.e), bf16, transforms=TILED),
        "v_s": plgpu.SMEM((z.consumers, z.stages, z.chunk, z.e), bf16, transforms=TILED),
        "p_s": plgpu.SMEM((z.consumers, z.rows, z.chunk), bf16, transforms=TILED),
        "o_s": plgpu.SMEM((z.consumers, z.rows, z.e), bf16),
        "across": plgpu.SMEM((z.consumers, 32 * z.rows), f32),
        "q_bar": plgpu.Barrier(num_barriers=each),
        "k_bar": plgpu.Barrier(num_arrivals=z.pages, num_barriers=each),
        "v_bar": plgpu.Barrier(num_arrivals=z.pages, num_barriers=each),
        "k_free": plgpu.Barrier(num_barriers=each),
        "v_free": plgpu.Barrier(num_barriers=each),
    }
    out = jax.ShapeDtypeStruct((z.batch * z.n_kv * z.group, z.e), bf16)
    parts = jax.ShapeDtypeStruct((z.n_stretches * 2, z.e, z.rows), f32)
    sums = jax.ShapeDtypeStruct((z.n_stretches * 2 * 2 * z.rows,), f32)
    return plgpu.kernel(
        decode,
        out_type=(out, parts, sums),
        grid=(z.n_stretches // z.consumers,),
        grid_names=("block",),
        num_threads=z.consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
        ),
        scratch_types=scratch,
        interpret=interpret,
    )
