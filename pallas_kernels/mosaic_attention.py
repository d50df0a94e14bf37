"""Paged decode attention with Pallas Mosaic GPU (Hopper), reading K and V where they lie in the page pool.

The context of every (sequence, KV head), an *item*, is cut into chunks of `CHUNK_ELEMS / head_dim` tokens; all chunks of
a batch, one item after another, are one line, and each of a fixed number of thread blocks takes an equal
stretch of it. So blocks finish together whatever the lengths are, long contexts and small batches split by
themselves, and copies run ahead over the ends of items: memory is never idle. An item inside one stretch is
written to the output; one that a stretch's border cuts leaves partial softmaxes, which a second small kernel
merges. Letters as in xla_attention; `c` is a chunk's token, `r` a row of a 64-row tensor-core tile.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

BLOCKS = 264  # two on each of an H100's or H200's 132 multiprocessors
CHUNK_ELEMS = 8192  # of K in a chunk: 64 tokens of head_dim 128
STAGES = 2  # chunks in flight in a block; with more, two blocks do not fit a multiprocessor
MIN_CHUNKS = 2  # of a stretch: a shorter one costs more to merge than it saves
TILE_ROWS = 64  # of wgmma
MAX_GROUP = 16
NO_SCORE = -1e30
LOG2E = math.log2(math.e)
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # what wgmma reads
ROW = plgpu.Layout.WGMMA.reduce(1)


class DecodePlan(NamedTuple):
    """How the chunks of a batch are dealt to blocks; the same for every layer of a step."""

    seqs: jax.Array  # i32[b] sequences that have context, in order
    stretch: jax.Array  # i32[blocks * 4] index into seqs, KV head and chunk where it starts; chunks it has
    merge: jax.Array  # i32[blocks * 2] the item cut by its end, if cut first there, and the blocks after it that go on


def plan_decode(kv_len: jax.Array, *, n_kv: int, chunk: int, blocks: int, min_chunks: int) -> DecodePlan:
    """Deal ceil(kv_len / chunk) * n_kv chunks of all sequences (int32 [b]) to `blocks` equal stretches."""
    steps = (kv_len + chunk - 1) // chunk
    b = kv_len.shape[0]
    live = steps > 0
    rank = jnp.where(live, jnp.cumsum(live) - 1, b)
    seqs = jnp.zeros(b, jnp.int32).at[rank].set(jnp.arange(b, dtype=jnp.int32), mode="drop")
    end = jnp.cumsum(jnp.zeros(b, jnp.int32).at[rank].set(steps, mode="drop")) * n_kv
    total = end[-1]
    quota = jnp.maximum(min_chunks, (total + blocks - 1) // blocks)
    first = jnp.arange(blocks, dtype=jnp.int32) * quota
    count = jnp.clip(total - first, 0, quota)
    j = jnp.minimum(jnp.sum(end <= first[:, None], axis=1, dtype=jnp.int32), b - 1)
    n = jnp.maximum(steps[seqs[j]], 1)
    offset = jnp.where(count > 0, first - (end[j] - n * n_kv), 0)
    head, i = offset // n, offset % n
    stretch = jnp.stack([j, head, i, count], axis=1)
    # Block c owns the merge of the item at its end when block c + 1 starts inside an item that starts in c.
    item, cut, size, more = (jnp.append(x[1:], 0) for x in (seqs[j] * n_kv + head, i, n, count))
    owns = (more > 0) & (cut > 0) & (cut <= quota)
    after = jnp.where(owns, (size - cut + quota - 1) // quota, 0)
    merge = jnp.stack([item, after], axis=1)
    return DecodePlan(seqs, stretch.reshape(-1).astype(jnp.int32), merge.reshape(-1).astype(jnp.int32))


class _Shape(NamedTuple):
    """Static facts of a decode kernel."""

    batch: int
    max_pages: int
    n_kv: int
    group: int
    e: int
    page_tokens: int
    n_pages: int
    blocks: int
    stages: int
    chunk: int
    scale: float
    auto_barriers: bool
    p_in_smem: bool  # the interpreter has no wgmma with a register operand

    @property
    def rows(self) -> int:
        """Rows of the tile that are copied and kept: the group, rounded up to what one swizzled copy takes."""
        return 8 if self.group <= 8 else 16

    @property
    def pages(self) -> int:
        """Pages of a chunk."""
        return self.chunk // self.page_tokens


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
    blocks: int = BLOCKS,
    stages: int = STAGES,
    chunk: int | None = None,
    auto_barriers: bool = True,
    interpret: Any = None,
) -> jax.Array:
    """out[s] = softmax(scale * q[s] K[:kv_len[s]]^T) V[:kv_len[s]], one query token a sequence.

    q bf16 [s, h, e]; pool bf16 [n_layers, n_pages, page_elems]; page_table int32 [s, m]; kv_len int32 [s], the
    query's own token included (0: a padding row, whose output is 0). Query head h reads KV head
    h // (h / n_kv). Products of bf16, sums in float32; weights are rounded to bf16 before they meet V.
    Returns bf16 [s, h, e]. Raises ValueError where the shapes are beyond the kernel's limits.
    """
    s, h, e = q.shape
    chunk = chunk or CHUNK_ELEMS // max(e, 1)
    check_attention(q, pool, page_table, n_kv=n_kv, page_tokens=page_tokens, chunk=chunk)
    if kv_len.shape != (s,) or page_table.shape[0] != s:
        raise ValueError(f"kv_len {kv_len.shape} and page_table {page_table.shape} must have a row for each of {s} queries")
    if stages < 1 or blocks < 1:
        raise ValueError(f"stages {stages} and blocks {blocks} must be at least 1")
    n_layers, n_pages, _ = pool.shape
    shape = _Shape(
        batch=s,
        max_pages=page_table.shape[1],
        n_kv=n_kv,
        group=h // n_kv,
        e=e,
        page_tokens=page_tokens,
        n_pages=n_pages,
        blocks=blocks,
        stages=stages,
        chunk=chunk,
        scale=scale,
        auto_barriers=auto_barriers,
        p_in_smem=interpret is not None,
    )
    plan = plan_decode(kv_len, n_kv=n_kv, chunk=chunk, blocks=blocks, min_chunks=MIN_CHUNKS)
    rows = pool.reshape(n_layers * n_pages * 2 * n_kv * page_tokens, e)
    out, parts, lse = _attend_kernel(shape, interpret)(
        jnp.asarray(layer, jnp.int32).reshape(1),
        plan.stretch,
        plan.seqs,
        kv_len,
        page_table.reshape(-1),
        q.reshape(s * h, e),
        rows,
    )
    ref = jax.new_ref(out)
    _merge_kernel(shape, interpret)(plan.merge, parts.reshape(-1), lse, ref)
    return jax.freeze(ref).reshape(s, h, e)


def check_attention(
    q: jax.Array, pool: jax.Array, page_table: jax.Array, *, n_kv: int, page_tokens: int, chunk: int
) -> None:
    """Raise ValueError, naming the limit, for what the attention kernels cannot do."""
    if q.ndim != 3 or pool.ndim != 3 or page_table.ndim != 2:
        raise ValueError(
            f"need q [t, h, e], pool [layers, pages, elems], page_table [s, m]; got {q.shape}, {pool.shape}, {page_table.shape}"
        )
    h, e = q.shape[1:]
    if q.dtype != jnp.bfloat16 or pool.dtype != jnp.bfloat16:
        raise ValueError(f"q and pool must be bfloat16, not {q.dtype} and {pool.dtype}; use kernel_backend='xla'")
    if e not in (64, 128):
        raise ValueError(f"head_dim must be 64 or 128, not {e}; use kernel_backend='xla'")
    if n_kv < 1 or h % n_kv or h // n_kv > MAX_GROUP:
        raise ValueError(f"{h} query heads over {n_kv} KV heads: need a whole group of 1 to {MAX_GROUP}")
    if page_tokens % 8 or chunk % 64 or chunk > 256 or chunk % page_tokens:
        raise ValueError(f"page_tokens {page_tokens} must be a multiple of 8 that divides {chunk} (use 16, 32 or 64)")
    if pool.shape[2] != 2 * n_kv * page_tokens * e:
        raise ValueError(
            f"pool pages have {pool.shape[2]} elements, not 2 * {n_kv} * {page_tokens} * {e} (n_kv, page_tokens, head_dim)"
        )
    if pool.size // e >= 2**31:
        raise ValueError(f"pool of {pool.size // e} rows of head_dim: row numbers must fit int32")


@functools.cache
def _attend_kernel(shape: _Shape, interpret: Any) -> Any:
    """The kernel from (layer, stretch, seqs, kv_len, table, q, pool rows) to (out, partial outputs, their lse)."""
    z, e, chunk, stages, group = shape, shape.e, shape.chunk, shape.stages, shape.group
    bf16, f32 = jnp.bfloat16, jnp.float32

    def decode(
        layer: Any,  # i32[1]
        stretch: Any,  # i32[blocks * 4]
        seqs: Any,  # i32[b]
        kv_len: Any,  # i32[b]
        table: Any,  # i32[b * m]
        q: Any,  # bf16[b * h, e]
        pool: Any,  # bf16[layers * pages * 2 * n_kv * page_tokens, e]
        out: Any,  # bf16[b * h, e]
        parts: Any,  # bf16[blocks * 2 * 2 * rows, e] what rounding leaves of it comes in a second part
        lse: Any,  # f32[blocks * 2 * rows] log2 of the sum of exp2 of scores
        q_s: Any,  # bf16[stages, 64, e]
        k_s: Any,  # bf16[stages, chunk, e]
        v_s: Any,
        o_s: Any,  # bf16[64, e]
        lse_s: Any,  # f32[64]
        p_s: Any,  # bf16[64, chunk], or nothing much
        q_bar: Any,
        k_bar: Any,
        v_bar: Any,
    ) -> None:
        block = lax.axis_index("block")
        first_page = layer[0] * z.n_pages
        count = stretch[block * 4 + 3]
        start = tuple(stretch[block * 4 + n] for n in range(3))

        def copy_or_arrive(has: Any, src: Any, dst: Any, bar: Any) -> None:
            """A copy without bytes still arrives at its barrier. (The interpreter knows no predicates.)"""
            if interpret is None:
                plgpu.copy_gmem_to_smem(src, dst, bar, predicate=has)
            else:
                pl.when(has)(lambda: plgpu.copy_gmem_to_smem(src, dst, bar))
                pl.when(jnp.logical_not(has))(lambda: plgpu.barrier_arrive(bar))

        def read(j: Any) -> tuple[Any, Any]:
            seq = seqs[jnp.minimum(j, z.batch - 1)]
            return seq, kv_len[seq]

        def after(j: Any, head: Any, i: Any, n: Any) -> tuple[Any, Any, Any]:
            ends = (i + 1) * chunk >= n
            last = ends & (head + 1 == z.n_kv)
            head = jnp.where(last, 0, jnp.where(ends, head + 1, head))
            return jnp.where(last, j + 1, j), head, jnp.where(ends, 0, i + 1)

        def page_ids(seq: Any, i: Any) -> list[Any]:
            at = seq * z.max_pages
            return [table[at + jnp.minimum(i * z.pages + p, z.max_pages - 1)] for p in range(z.pages)]

        def issue(half: int, ids: list[Any], head: Any, i: Any, n: Any, slot: Any) -> None:
            """Start the copies of a chunk's K (0) or V (1); pages beyond the length arrive without a copy."""
            to, bar = ((k_s, k_bar), (v_s, v_bar))[half]
            for p, page in enumerate(ids):
                row = (((first_page + page) * 2 + half) * z.n_kv + head) * z.page_tokens
                src = pool.at[pl.ds(row, z.page_tokens)]
                dst = to.at[slot, pl.ds(p * z.page_tokens, z.page_tokens)]
                if p:
                    copy_or_arrive(i * chunk + p * z.page_tokens < n, src, dst, bar.at[slot])
                else:
                    plgpu.copy_gmem_to_smem(src, dst, bar.at[slot])

        def issue_q(seq: Any, head: Any, segment: Any) -> None:
            slot = lax.rem(segment, stages)
            src = q.at[pl.ds((seq * z.n_kv + head) * group, z.rows)]
            plgpu.copy_gmem_to_smem(src, q_s.at[slot, pl.ds(0, z.rows)], q_bar.at[slot])

        ahead, segments = start, jnp.int32(0)
        for s in range(stages):
            seq, n = read(ahead[0])
            live = s < count
            ids = page_ids(seq, ahead[2])
            opens = live if s == 0 else live & (ahead[2] == 0)
            pl.when(opens)(functools.partial(issue_q, seq, ahead[1], segments))
            for half in range(2):
                pl.when(live)(functools.partial(issue, half, ids, ahead[1], ahead[2], n, s))
            segments = segments + opens.astype(jnp.int32)
            ahead = after(*ahead, n)

        def chunk_step(t: Any, carry: Any, c0: Any, n: Any, i0: Any, segment: Any) -> Any:
            acc, top, total, ahead, segments = carry
            c, i = c0 + t, i0 + t
            slot = lax.rem(c, stages)
            next_seq, next_n = read(ahead[0])
            next_ids = page_ids(next_seq, ahead[2])
            next_live = c + stages < count
            plgpu.barrier_wait(k_bar.at[slot])

            def scores(ref: Any) -> jax.Array:
                plgpu.wgmma(ref, q_s.at[lax.rem(segment, stages)], k_s.at[slot].transpose((1, 0)))
                return ref[...]

            score = pl.run_scoped(scores, plgpu.ACC((TILE_ROWS, chunk), f32)) * (z.scale * LOG2E)
            plgpu.commit_smem()  # every warp has read K
            opens = next_live & (ahead[2] == 0)
            pl.when(opens)(lambda: issue_q(next_seq, ahead[1], segments))
            pl.when(next_live)(lambda: issue(0, next_ids, ahead[1], ahead[2], next_n, slot))

            column = plgpu.broadcasted_iota(jnp.int32, score.shape, 1, layout=plgpu.Layout.WGMMA)
            score = jnp.where(column < n - i * chunk, score, NO_SCORE)
            new_top = jnp.maximum(top, score.max(axis=1))
            shrink = jnp.exp2(top - new_top)
            weight = jnp.exp2(score - lax.broadcast_in_dim(new_top, score.shape, [0]))
            total = total * shrink + weight.sum(axis=1)
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
            operand = weight.astype(bf16)
            if z.p_in_smem:
                p_s[...] = operand
                plgpu.commit_smem()
                operand = p_s
            plgpu.barrier_wait(v_bar.at[slot])

            @pl.when((i + 1) * chunk > n)
            def _() -> None:  # another's leftovers may be NaN, which a weight of 0 does not hide
                row = plgpu.broadcasted_iota(jnp.int32, (chunk, e), 0, layout=plgpu.Layout.WGMMA)
                v = plgpu.load(v_s.at[slot], layout=plgpu.Layout.WGMMA, optimized=False)
                v_s[slot] = jnp.where(row < n - i * chunk, v.astype(f32), 0.0).astype(bf16)
                plgpu.commit_smem()

            def values(ref: Any) -> jax.Array:
                plgpu.wgmma(ref, operand, v_s.at[slot])
                return ref[...]

            acc = acc + pl.run_scoped(values, plgpu.ACC((TILE_ROWS, e), f32))
            plgpu.commit_smem()  # every warp has read V
            pl.when(next_live)(lambda: issue(1, next_ids, ahead[1], ahead[2], next_n, slot))
            return acc, new_top, total, after(*ahead, next_n), segments + opens.astype(jnp.int32)

        def segment_step(carry: Any) -> Any:
            """The chunks of one item that lie in this block's stretch."""
            c, here, segment, ahead, segments = carry
            j, head, i = here
            seq, n = read(j)
            steps = lax.div(n + chunk - 1, chunk)
            length = jnp.minimum(steps - i, count - c)
            plgpu.barrier_wait(q_bar.at[lax.rem(segment, stages)])
            acc = plgpu.layout_cast(jnp.zeros((TILE_ROWS, e), f32), plgpu.Layout.WGMMA)
            top = plgpu.layout_cast(jnp.full((TILE_ROWS,), NO_SCORE, f32), ROW)
            total = plgpu.layout_cast(jnp.zeros((TILE_ROWS,), f32), ROW)
            step = functools.partial(chunk_step, c0=c, n=n, i0=i, segment=segment)
            acc, top, total, ahead, segments = lax.fori_loop(
                0, length, step, (acc, top, total, ahead, segments)
            )
            finish(acc, top, total, seq * z.n_kv + head, i + length == steps, i == 0)
            there = after(j, head, i + length - 1, n)
            return c + length, there, segment + 1, ahead, segments

        def finish(acc: Any, top: Any, total: Any, item: Any, item_ends: Any, begun: Any) -> None:
            """Write a segment's output, or its part of it to slot 0 (goes on from the block before) or 1."""
            acc = acc / lax.broadcast_in_dim(total, acc.shape, [0])
            high = acc.astype(bf16)
            plgpu.wait_smem_to_gmem(0)
            o_s[...] = high
            is_whole = item_ends & begun
            pl.when(jnp.logical_not(is_whole))(lambda: store_lse(top, total))
            plgpu.commit_smem()
            pl.when(is_whole)(
                lambda: plgpu.copy_smem_to_gmem(o_s.at[pl.ds(0, group)], out.at[pl.ds(item * group, group)])
            )

            @pl.when(jnp.logical_not(is_whole))
            def _() -> None:
                part = block * 2 + begun.astype(jnp.int32)
                plgpu.copy_smem_to_gmem(o_s.at[pl.ds(0, z.rows)], parts.at[pl.ds(part * 2 * z.rows, z.rows)])
                plgpu.copy_smem_to_gmem(lse_s.at[pl.ds(0, z.rows)], lse.at[pl.ds(part * z.rows, z.rows)])
                plgpu.wait_smem_to_gmem(0)
                o_s[...] = (acc - high.astype(f32)).astype(bf16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_s.at[pl.ds(0, z.rows)], parts.at[pl.ds((part * 2 + 1) * z.rows, z.rows)])

        def store_lse(top: Any, total: Any) -> None:
            lse_s[...] = top + jnp.log(total) * LOG2E

        zero = jnp.int32(0)
        lax.while_loop(lambda carry: carry[0] < count, segment_step, (zero, start, zero, ahead, segments))

        for n in range(-(-z.batch // z.blocks)):
            seq = block + n * z.blocks

            @pl.when((seq < z.batch) & (kv_len[jnp.minimum(seq, z.batch - 1)] == 0))
            def _(seq: Any = seq) -> None:
                plgpu.wait_smem_to_gmem(0)
                o_s[...] = plgpu.layout_cast(jnp.zeros((TILE_ROWS, e), bf16), plgpu.Layout.WGMMA)
                plgpu.commit_smem()
                heads = z.n_kv * group
                for at in range(0, heads, TILE_ROWS):
                    size = min(TILE_ROWS, heads - at)
                    plgpu.copy_smem_to_gmem(o_s.at[pl.ds(0, size)], out.at[pl.ds(seq * heads + at, size)])

        plgpu.wait_smem_to_gmem(0)

    parts = z.blocks * 2 * z.rows
    return plgpu.kernel(
        decode,
        out_type=(
            jax.ShapeDtypeStruct((z.batch * z.n_kv * group, e), bf16),
            jax.ShapeDtypeStruct((parts * 2, e), bf16),
            jax.ShapeDtypeStruct((parts,), f32),
        ),
        grid=(z.blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=not z.auto_barriers,
        ),
        scratch_types=[
            plgpu.SMEM((stages, TILE_ROWS, e), bf16, transforms=TILED),
            plgpu.SMEM((stages, chunk, e), bf16, transforms=TILED),
            plgpu.SMEM((stages, chunk, e), bf16, transforms=TILED),
            plgpu.SMEM((TILE_ROWS, e), bf16),
            plgpu.SMEM((TILE_ROWS,), f32),
            plgpu.SMEM((TILE_ROWS, chunk), bf16, transforms=TILED) if z.p_in_smem else plgpu.SMEM((8,), f32),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=z.pages, num_barriers=stages),
            plgpu.Barrier(num_arrivals=z.pages, num_barriers=stages),
        ],
        interpret=interpret,
    )


@functools.cache
def _merge_kernel(shape: _Shape, interpret: Any) -> Any:
    """The kernel that merges the parts of items cut by a stretch's border, into their rows of `out`."""
    z, e = shape, shape.e
    width = 128 // e  # rows that one warpgroup merges at a time

    def merge_decode(
        merge: Any,  # i32[blocks * 2]
        parts: Any,  # bf16[blocks * 2 * 2 * rows * e]
        lse: Any,  # f32[blocks * 2 * rows]
        out: Any,  # bf16[b * h, e]
        o_s: Any,  # bf16[128]
    ) -> None:
        block, rows = lax.axis_index("block"), lax.axis_index("rows")
        item, more = merge[block * 2], merge[block * 2 + 1]

        def spread(scalars: list[Any]) -> Any:
            """The value of each lane's row."""
            if width == 1:
                return scalars[0]
            lane = plgpu.broadcasted_iota(jnp.int32, (128,), 0, layout=plgpu.Layout.WG_STRIDED((128,), 1))
            return jnp.where(lane < e, scalars[0], scalars[1])

        @pl.when(more > 0)
        def _() -> None:
            def take(n: Any, carry: Any) -> Any:
                acc, tops, totals = carry
                part = jnp.where(n == 0, block * 2 + 1, (block + n) * 2)
                at = (part * 2 * z.rows + rows * width) * e
                x = parts[pl.ds(at, 128)].astype(jnp.float32)
                x = x + parts[pl.ds(at + z.rows * e, 128)].astype(jnp.float32)
                mine = [lse[part * z.rows + rows * width + w] for w in range(width)]
                new = [jnp.maximum(t, s) for t, s in zip(tops, mine, strict=True)]
                old_factor = [jnp.exp2(t - s) for t, s in zip(tops, new, strict=True)]
                factor = [jnp.exp2(t - s) for t, s in zip(mine, new, strict=True)]
                totals = [t * a + f for t, a, f in zip(totals, old_factor, factor, strict=True)]
                return acc * spread(old_factor) + x * spread(factor), new, totals

            acc = plgpu.layout_cast(jnp.zeros((128,), jnp.float32), plgpu.Layout.WG_STRIDED((128,), 1))
            tops, totals = [jnp.float32(NO_SCORE)] * width, [jnp.float32(0)] * width
            acc, _, totals = lax.fori_loop(0, more + 1, take, (acc, tops, totals))
            o_s[...] = (acc / spread(totals)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            for w in range(width):

                @pl.when(rows * width + w < z.group)
                def _(w: int = w) -> None:
                    to = out.at[item * z.group + rows * width + w]
                    plgpu.copy_smem_to_gmem(o_s.at[pl.ds(w * e, e)], to)

            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        merge_decode,
        out_type=(),
        grid=(z.blocks, -(-z.group // width)),
        grid_names=("block", "rows"),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        scratch_types=[plgpu.SMEM((128,), jnp.bfloat16)],
        interpret=interpret,
    )
