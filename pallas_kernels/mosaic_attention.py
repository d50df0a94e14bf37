"""Paged decode attention with Pallas Mosaic GPU (Hopper), reading K and V where they lie in the page pool.

The context of every (sequence, KV head), an *item*, is cut into chunks of `CHUNK_ELEMS / head_dim` tokens.
All chunks of a batch, one item after another, are one line, and each of a fixed number of warpgroups takes a
stretch of it of equal cost, then further, shorter ones as long as there are any (`decode_plan`). So they
finish together whatever the lengths are and however fast each multiprocessor is, long contexts and small
batches split by themselves, and copies run ahead over the ends of items and stretches: memory is never idle.
An item inside one stretch is written to the output. One that a stretch's border cuts leaves its parts in
memory, each counted as it is stored; whoever stores the last one adds them in their order, so the bits of an
output do not depend on who took which stretch. A thread block has two warpgroups that multiply, and one whose
warps take stretches, follow the page table and copy for them.

Both products are the transposed ones: K Q^T of [c, e] by [e, rows] and V^T P^T of [e, c] by [c, rows]. So
the 64 rows that wgmma must have are tokens and head dims, and a group of 1 to 16 query heads fills its 8 or
16 columns instead of 1 to 16 of 64 rows: an eighth of the multiplications, exponentials and registers.

Letters as in xla_attention; `c` is a chunk's token; `rows` are a group's query heads, in whole 8-row tiles.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from slora_jax.pallas_kernels.decode_plan import DEALT, FIRST_PAGES, ITEM_COST, ROUNDS, plan_decode

BLOCKS = 264  # multiplying warpgroups: two on each of an H100's or H200's 132 multiprocessors
CONSUMERS = 2  # warpgroups of a thread block that multiply, each with a stretch of its own
CHUNK_ELEMS = 8192  # of K in a chunk: 64 tokens of head_dim 128
SMEM_BYTES = 227 * 1024 - 1024  # of a thread block, barriers aside
TAKEN = 8  # stretches that copying warps may be ahead of who multiplies; more than the most stages
MERGE_ELEMS = 8192  # of parts of an item that are loaded at once, after its first two: 64 registers a thread
MAX_GROUP = 16
NO_SCORE = -1e30
LOG2E = math.log2(math.e)
# What wgmma reads.
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # of a vector, one value a column of a product


class _Shape(NamedTuple):
    """Static facts of a decode kernel."""

    batch: int
    max_pages: int
    n_kv: int
    group: int
    stride: int  # rows of q from one item's to the next's: TMA fills swizzled memory from one 8-row tile
    e: int
    page_tokens: int
    n_pages: int
    blocks: int  # warpgroups that multiply
    stretch: int  # numbers of a stretch in the plan
    consumers: int
    stages: int
    chunk: int
    scale: float
    interpreted: bool

    @property
    def rows(self) -> int:
        """Query rows that are copied and multiplied: the group, in whole swizzled 8-row tiles."""
        return _query_rows(self.group)

    @property
    def stretches(self) -> int:
        return self.blocks * ROUNDS

    @property
    def pages(self) -> int:
        """Pages of a chunk."""
        return self.chunk // self.page_tokens

    @property
    def warps(self) -> int:
        """Warps that copy for one multiplying warpgroup."""
        return 4 // self.consumers

    @property
    def pages_each(self) -> int:
        """Pages of a chunk that one warp copies."""
        return pl.cdiv(self.pages, self.warps)


class _Memory(NamedTuple):
    """What a decode kernel reads and writes: its operands, its outputs, then shared memory and barriers."""

    layer: Any  # i32[1]
    stretch: Any  # i32[stretches * stretch]
    walk: Any  # i32[b * 2]
    kv_len: Any  # i32[b]
    table: Any  # i32[b * m]
    q: Any  # bf16[b * n_kv * stride, e]
    pool: Any  # bf16[layers * pages * 2 * n_kv * page_tokens, e]
    # i32[stretches + 1] parts stored of the item that begins in a stretch; at last the stretches taken beyond
    # the first `blocks`. 0 at first.
    counters: Any
    out: Any  # bf16[b * h, e]
    parts: Any  # f32[stretches * 2, e, rows] sums of weighted values; part 0 goes on from the stretch before
    sums: Any  # f32[stretches * 2 * 2 * rows] of a part the largest scores, then the sums of weights
    q_s: Any  # bf16[consumers, stages, rows, e]
    k_s: Any  # bf16[consumers, stages, chunk, e]
    v_s: Any  # bf16[consumers, stages, chunk, e]
    p_s: Any  # bf16[consumers, rows, chunk] weights
    o_s: Any  # bf16[consumers, rows, e]
    across: Any  # f32[consumers, 32 * rows] what warps tell each other
    taken: Any  # i32[consumers * TAKEN] the stretches that each warpgroup has after its first, in turns
    taken_bar: Any  # [consumers * TAKEN]
    q_bar: Any  # [consumers * stages], as the following
    k_bar: Any
    v_bar: Any
    k_free: Any
    v_free: Any


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
    consumers: int = CONSUMERS,
    stages: int | None = None,
    chunk: int | None = None,
    item_cost: int = ITEM_COST,
    dealt: float = DEALT,
    interpret: Any = None,
) -> jax.Array:
    """out[s] = softmax(scale * q[s] K[:kv_len[s]]^T) V[:kv_len[s]], one query token a sequence.

    q bf16 [s, h, e]; pool bf16 [n_layers, n_pages, page_elems]; page_table int32 [s, m]; kv_len int32 [s],
    the query's own token included (0: a padding row, whose output is 0). Query head h reads KV head
    h // (h / n_kv). Products of bf16, sums in float32; weights are rounded to bf16 before they meet V.
    Returns bf16 [s, h, e]. Raises ValueError where the shapes are beyond the kernel's limits.

    Tunings: blocks, the warpgroups that multiply; consumers, those of a thread block; stages, chunks in
    flight for each (None: as many as shared memory holds); chunk, its tokens; item_cost and dealt as in
    `plan_decode`. Pallas's interpreter (`interpret`) has no atomics: there a second kernel
    adds the parts of cut items, by the same code.
    """
    s, h, e = q.shape
    chunk = chunk or CHUNK_ELEMS // (128 if e == 128 else 64)
    check_attention(q, pool, page_table, n_kv=n_kv, page_tokens=page_tokens, chunk=chunk)
    if kv_len.shape != (s,) or page_table.shape[0] != s:
        raise ValueError(
            f"kv_len {kv_len.shape} and page_table {page_table.shape} must have a row for each of {s} queries"
        )
    if consumers not in (1, 2) or blocks < 1 or blocks % consumers:
        raise ValueError(f"blocks {blocks} must be a multiple of consumers {consumers} (1 or 2)")
    most = _stages(consumers, chunk, e, _query_rows(h // n_kv))
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
        blocks=blocks,
        item_cost=item_cost,
        dealt=dealt,
    )
    shape = _Shape(
        batch=s,
        max_pages=page_table.shape[1],
        n_kv=n_kv,
        group=h // n_kv,
        stride=pl.next_power_of_2(h // n_kv),
        e=e,
        page_tokens=page_tokens,
        n_pages=n_pages,
        blocks=blocks,
        stretch=plan.stretch.shape[1],
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
        plan.stretch.reshape(-1),
        plan.walk.reshape(-1),
        kv_len,
        page_table.reshape(-1),
        whole_tiles(q.reshape(-1, e)),
        rows,
        jax.new_ref(jnp.zeros(shape.stretches + 1, jnp.int32)),
    )
    if interpret is not None:
        ref = jax.new_ref(out)
        _merge_kernel(shape, interpret)(plan.stretch.reshape(-1), parts, sums, ref)
        out = jax.freeze(ref)
    attended: jax.Array = out.reshape(s, h, e)
    return attended


def _query_rows(group: int) -> int:
    return 8 if group <= 8 else 16


def _stages(consumers: int, chunk: int, e: int, rows: int) -> int:
    """Chunks in flight for a warpgroup: as many as fit the shared memory beside weights and outputs."""
    stage = 2 * (2 * chunk + rows) * e  # bytes of K, V and q
    rest = 2 * rows * (chunk + e) + 4 * 32 * rows  # of p_s, o_s, across
    return (SMEM_BYTES // consumers - rest) // stage


def whole_tiles(x: jax.Array) -> jax.Array:
    """x with rows (axis 0) added to a multiple of 8, which swizzled copies need; few shapes need any."""
    missing = -x.shape[0] % 8
    return jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) if missing else x


def unsupported(*, n_q: int, n_kv: int, head_dim: int, page_tokens: int, chunk: int = 64) -> str | None:
    """The limit of the attention kernels that a model's shard is beyond, or None where it has kernels."""
    if head_dim not in (64, 128):
        return f"head_dim must be 64 or 128, not {head_dim}"
    if n_kv < 1 or n_q % n_kv or n_q // n_kv > MAX_GROUP:
        return f"{n_q} query heads over {n_kv} KV heads: need a whole group of 1 to {MAX_GROUP}"
    if page_tokens < 8 or page_tokens % 8 or chunk % 64 or chunk > 256 or chunk % page_tokens:
        return f"page_tokens {page_tokens} must be a multiple of 8 that divides {chunk} (use 16, 32 or 64)"
    return None


def check_attention(
    q: jax.Array, pool: jax.Array, page_table: jax.Array, *, n_kv: int, page_tokens: int, chunk: int
) -> None:
    """Raise ValueError, naming the limit, for what the attention kernels cannot do."""
    if q.ndim != 3 or pool.ndim != 3 or page_table.ndim != 2:
        raise ValueError(
            "need q [t, h, e], pool [layers, pages, elems], page_table [s, m]; "
            f"got {q.shape}, {pool.shape}, {page_table.shape}"
        )
    h, e = q.shape[1:]
    if q.dtype != jnp.bfloat16 or pool.dtype != jnp.bfloat16:
        raise ValueError(
            f"q and pool must be bfloat16, not {q.dtype} and {pool.dtype}; use kernel_backend='xla'"
        )
    limit = unsupported(n_q=h, n_kv=n_kv, head_dim=e, page_tokens=page_tokens, chunk=chunk)
    if limit:
        raise ValueError(f"{limit}; kernel_backend='xla' has no such limit")
    if pool.shape[2] != 2 * n_kv * page_tokens * e:
        raise ValueError(
            f"pool pages have {pool.shape[2]} elements, not 2 * {n_kv} * {page_tokens} * {e} "
            "(n_kv, page_tokens, head_dim)"
        )
    if pool.size // e >= 2**31:
        raise ValueError(f"pool of {pool.size // e} rows of head_dim: row numbers must fit int32")


def spread(x: jax.Array, n: int) -> jax.Array:
    """[n, x.size] of n equal rows x."""
    return lax.broadcast_in_dim(x, (n, x.shape[0]), [1])


def transposed(x: jax.Array) -> jax.Array:
    """x in the registers that store it to a transposed reference."""
    cast: jax.Array = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
    return cast


def _numbers(z: _Shape, m: _Memory, block: Any, first: int, end: int) -> list[Any]:
    """Columns first .. end of a stretch in the plan."""
    return [m.stretch[block * z.stretch + at] for at in range(first, end)]


def _first_sequence(z: _Shape, m: _Memory, block: Any) -> Any:
    """(number, length) of the sequence that a stretch starts in, and of the next one in the walk."""
    seq, n, *following = _numbers(z, m, block, 4, 8)
    return (seq, n), tuple(following)


def _move(z: _Shape, m: _Memory, to: Any, j: Any, sequences: Any) -> Any:
    """From sequence j of the walk and the one after it, as `_first_sequence` has them, to j or j + 1."""
    here, following = sequences
    seq, n = (jnp.where(to == j, x, y) for x, y in zip(here, following, strict=True))
    at = jnp.minimum(to + 1, z.batch - 1) * 2
    return (seq, n), (m.walk[at], m.walk[at + 1])


def _after(z: _Shape, j: Any, head: Any, i: Any, n: Any) -> tuple[Any, Any, Any]:
    """What follows chunk i of KV head `head` of sequence j, of length n."""
    ends = (i + 1) * z.chunk >= n
    last = ends & (head + 1 == z.n_kv)
    head = jnp.where(last, 0, jnp.where(ends, head + 1, head))
    return jnp.where(last, j + 1, j), head, jnp.where(ends, 0, i + 1)


def _copy(z: _Shape, m: _Memory, first_block: Any, warp: Any) -> None:
    """One warp's pages of every chunk of one warpgroup's stretches; the first of its warps takes these, and
    copies q.
    """
    to, part = lax.div(warp, z.warps), lax.rem(warp, z.warps)
    first_page = m.layer[0] * z.n_pages

    def copy(half: int, ids: list[Any], head: Any, i: Any, n: Any, slot: Any) -> None:
        """Start the copies of K (0) or V (1); pages beyond the length arrive without bytes."""
        dst, bar = ((m.k_s, m.k_bar), (m.v_s, m.v_bar))[half]
        bar = bar.at[to * z.stages + slot]
        for p, page in enumerate(ids):
            at = (part * z.pages_each + p) * z.page_tokens
            row = (((first_page + page) * 2 + half) * z.n_kv + head) * z.page_tokens
            source = m.pool.at[pl.ds(row, z.page_tokens)]
            target = dst.at[to, slot, pl.ds(at, z.page_tokens)]
            has = i * z.chunk + at < n
            if not z.interpreted:
                plgpu.copy_gmem_to_smem(source, target, bar, predicate=has)
            else:  # it knows no predicates
                pl.when(has)(functools.partial(plgpu.copy_gmem_to_smem, source, target, bar))
                pl.when(jnp.logical_not(has))(functools.partial(plgpu.barrier_arrive, bar))

    def copy_q(seq: Any, head: Any, segment: Any) -> None:
        slot = lax.rem(segment, z.stages)
        source = m.q.at[pl.ds((seq * z.n_kv + head) * z.stride, z.rows)]
        plgpu.copy_gmem_to_smem(source, m.q_s.at[to, slot], m.q_bar.at[to * z.stages + slot])

    def page_ids(seq: Any, i: Any) -> list[Any]:
        first, last = i * z.pages + part * z.pages_each, z.max_pages - 1
        return [m.table[seq * z.max_pages + jnp.minimum(first + p, last)] for p in range(z.pages_each)]

    def step(first: Any, n: Any, carry: Any) -> Any:
        """Chunk n of a stretch whose first is the warpgroup's chunk `first`."""
        (j, head, i), sequences, ids, segment = carry
        seq, length = sequences[0]
        c = first + n
        slot = lax.rem(c, z.stages)
        opens = (n == 0) | (i == 0)
        used = c >= z.stages
        mine = part * z.pages_each < z.pages
        pl.when(used)(lambda: plgpu.barrier_wait(m.k_free.at[to * z.stages + slot]))
        # q's slot is free: every chunk before c - stages + 1 has been multiplied with its own.
        pl.when(opens & (part == 0))(lambda: copy_q(seq, head, segment))
        pl.when(mine)(lambda: copy(0, ids, head, i, length, slot))
        # Loads of the next chunk's place travel while V's stage is awaited.
        there = _after(z, j, head, i, length)
        next_sequences = _move(z, m, there[0], j, sequences)
        next_ids = page_ids(next_sequences[0][0], there[2])
        pl.when(used)(lambda: plgpu.barrier_wait(m.v_free.at[to * z.stages + slot]))
        pl.when(mine)(lambda: copy(1, ids, head, i, length, slot))
        return there, next_sequences, next_ids, segment + opens.astype(jnp.int32)

    def copy_stretch(carry: Any) -> Any:
        block, _, c, segment, turn = carry
        *start, count = _numbers(z, m, block, 0, 4)
        [end] = _numbers(z, m, block, 11, 12)
        sequences = _first_sequence(z, m, block)
        at = block * z.stretch + FIRST_PAGES + part * z.pages_each
        ids = [m.stretch[at + p] for p in range(z.pages_each)]
        # Never true. It has what the first copies need loaded before the first branch, at once.
        loaded = [*start, end, *sequences[0], *sequences[1], first_page, *ids]
        count = jnp.where(functools.reduce(jnp.minimum, loaded) == -(2**31), 0, count)
        first = (tuple(start), sequences, ids, segment)
        *_, segment = lax.fori_loop(0, count, functools.partial(step, c), first)
        pl.when(part == 0)(lambda: _take(z, m, block, to * TAKEN + lax.rem(turn, TAKEN)))
        return _taken(z, m, to, turn), end, c + count, segment, turn + 1

    _, _, count, *_ = _stretch_by_stretch(z, copy_stretch, first_block + to)

    def drain(c: Any, _: Any) -> None:  # the interpreter wants every phase seen
        for free in (m.k_free, m.v_free):
            wait = functools.partial(plgpu.barrier_wait, free.at[to * z.stages + lax.rem(c, z.stages)])
            pl.when(c >= z.stages)(wait)

    lax.fori_loop(count, count + z.stages, drain, None)


def _stretch_by_stretch(z: _Shape, body: Callable[[Any], Any], first_block: Any) -> Any:
    """A warpgroup's stretches from `first_block` on.

    carry, which `body` returns for the next one: the stretch, the end of those that have chunks (as each
    one's line in the plan says), and the warpgroup's chunks, parts of items and stretches so far.
    """
    zero = jnp.int32(0)
    carry = (first_block, jnp.int32(z.stretches), zero, zero, zero)
    return lax.while_loop(lambda carry: carry[0] < carry[1], body, carry)


def _take(z: _Shape, m: _Memory, block: Any, slot: Any) -> None:
    """taken[slot] = the next stretch that nobody has, by one warp, whose last one is `block`."""
    bar, counter = m.taken_bar.at[slot], m.counters.at[z.stretches]
    if z.interpreted:  # it knows no atomics: they are dealt in turns
        m.taken[slot] = block + z.blocks
        plgpu.barrier_arrive(bar)
        return
    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
    )

    def take(_: Any, counter: Any, taken: Any, slot: Any) -> None:
        i32, utils = ir.IntegerType.get_signless(32), mgpu.utils
        utils.inline_ptx(
            """{
            .reg .pred one;
            .reg .b32 nth;
            setp.ne.u32 one, $2, 0;
            @one atom.relaxed.gpu.global.add.u32 nth, [$0], 1;
            @one add.u32 nth, nth, $3;
            @one st.shared.u32 [$1], nth;
            }""",
            utils.memref_ptr(counter),
            utils.getelementptr(utils.memref_ptr(taken), [slot.registers.flat[0]], i32),
            arith.extui(i32, utils.single_thread_predicate(utils.ThreadSubset.WARP)),
            utils.c(z.blocks, i32),
        )

    inline(take)(counter, m.taken, slot)
    plgpu.barrier_arrive(bar)


def _taken(z: _Shape, m: _Memory, to: Any, turn: Any) -> Any:
    """The stretch that warpgroup `to` has after `turn` others, once it is known.

    A slot is written again TAKEN turns later. By then a chunk that comes `stages` or more after the first of
    this stretch has found its stage free: that first one was multiplied, so all had read the slot.
    """
    slot = to * TAKEN + lax.rem(turn, TAKEN)
    plgpu.barrier_wait(m.taken_bar.at[slot])
    return m.taken[slot]


def _reduce(z: _Shape, m: _Memory, wg: Any, op: str, x: Any) -> Any:
    """[rows]: max or sum over the tokens (axis 0) of x, which the four warps share among them."""
    if z.interpreted:
        return x.max(axis=0) if op == "max" else x.sum(axis=0)
    # Mosaic's own scratch for this would be one for both multiplying warpgroups.
    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((z.rows,), jnp.float32, layout=COLUMN),
    )
    return inline(lambda _, x, scratch: x.reduce(op, 0, scratch))(x, m.across.at[wg])


def _attend_chunk(
    z: _Shape, m: _Memory, wg: Any, t: Any, carry: Any, *, c0: Any, i0: Any, n: Any, segment: Any
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


def _attend(z: _Shape, m: _Memory, first_block: Any, wg: Any) -> None:
    """The stretches of a warpgroup, the first of which is `first_block`, and rows without context."""
    padding = [first_block + n * z.blocks for n in range(pl.cdiv(z.batch, z.blocks))]
    # Loaded at the end, these would be waited for.
    lengths = [m.kv_len[jnp.minimum(seq, z.batch - 1)] for seq in padding]

    def stretch(carry: Any) -> Any:
        block, _, c, segment, turn = carry
        [end] = _numbers(z, m, block, 11, 12)
        c, segment = _attend_stretch(z, m, block, wg, c, segment)
        return _taken(z, m, wg, turn), end, c, segment, turn + 1

    _stretch_by_stretch(z, stretch, first_block)
    for seq, length in zip(padding, lengths, strict=True):
        pl.when((seq < z.batch) & (length == 0))(functools.partial(_clear_row, z, m, wg, seq))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _attend_stretch(z: _Shape, m: _Memory, block: Any, wg: Any, first: Any, segment: Any) -> Any:
    """The chunks of stretch `block`, item by item; they are the warpgroup's from `first` on.

    Returns the warpgroup's chunks and items (in stretches) so far.
    """
    *start, count = _numbers(z, m, block, 0, 4)
    cut = _numbers(z, m, block, 8, 11)

    def segment_step(carry: Any) -> Any:
        """The chunks of one item that lie in this stretch."""
        c, (j, head, i), sequences, segment = carry
        seq, n = sequences[0]
        steps = lax.div(n + z.chunk - 1, z.chunk)
        length = jnp.minimum(steps - i, count - c)
        begins, ends = i == 0, i + length == steps
        plgpu.barrier_wait(m.q_bar.at[wg * z.stages + lax.rem(segment, z.stages)])
        acc = plgpu.layout_cast(jnp.zeros((z.e, z.rows), jnp.float32), plgpu.Layout.WGMMA)
        top = plgpu.layout_cast(jnp.full((z.rows,), NO_SCORE, jnp.float32), COLUMN)
        total = plgpu.layout_cast(jnp.zeros((z.chunk, z.rows), jnp.float32), plgpu.Layout.WGMMA)
        step = functools.partial(_attend_chunk, z, m, wg, c0=first + c, i0=i, n=n, segment=segment)
        acc, top, total = lax.fori_loop(0, length, step, (acc, top, total))
        item = seq * z.n_kv + head
        total = _reduce(z, m, wg, "add", total)
        whole = begins & ends
        pl.when(whole)(lambda: _write_item(z, m.o_s.at[wg], m.out, acc, total, item))
        part = (acc, top, total)
        pl.when(jnp.logical_not(whole))(lambda: _store_part(z, m, wg, part, block, item, begins, cut))
        there = _after(z, j, head, i + length - 1, n)
        sequences = _move(z, m, there[0], j, sequences)
        return c + length, there, sequences, segment + 1

    carry = (jnp.int32(0), tuple(start), _first_sequence(z, m, block), segment)
    count, _, _, segment = lax.while_loop(lambda carry: carry[0] < count, segment_step, carry)
    return first + count, segment


def _clear_row(z: _Shape, m: _Memory, wg: Any, seq: Any) -> None:
    """Zeros for a row without context."""
    plgpu.wait_smem_to_gmem(0)
    zeros = plgpu.layout_cast(jnp.zeros((z.e, z.rows), jnp.bfloat16), plgpu.Layout.WGMMA)
    m.o_s.at[wg].transpose((1, 0))[...] = transposed(zeros)
    plgpu.commit_smem()
    heads = z.n_kv * z.group
    for at in range(0, heads, z.rows):
        size = min(z.rows, heads - at)
        plgpu.copy_smem_to_gmem(m.o_s.at[wg, pl.ds(0, size)], m.out.at[pl.ds(seq * heads + at, size)])


_Part = tuple[Any, Any, Any]  # [e, rows] sum of weighted values, [rows] largest score, [rows] sum of weights


def _load_part(z: _Shape, parts: Any, sums: Any, block: Any, more: Any, n: Any) -> _Part:
    """Part n of the `more` + 1 of the item that begins in stretch `block`; beyond them one of no weight.

    parts and sums as in `_Memory`.
    """
    part = jnp.where(n == 0, block * 2 + 1, (block + jnp.minimum(n, more)) * 2)
    acc = plgpu.load(parts.at[part], layout=plgpu.Layout.WGMMA, optimized=False)
    top, total = (
        plgpu.load(sums.at[pl.ds((part * 2 + at) * z.rows, z.rows)], layout=COLUMN, optimized=False)
        for at in (0, 1)
    )
    return acc, top + jnp.where(n <= more, 0.0, NO_SCORE), total


def _add_parts(z: _Shape, parts: list[_Part]) -> _Part:
    new = functools.reduce(jnp.maximum, [top for _, top, _ in parts])
    shrink = [jnp.exp2(top - new) for _, top, _ in parts]
    acc = sum(acc * spread(s, z.e) for (acc, _, _), s in zip(parts, shrink, strict=True))
    return acc, new, sum(total * s for (_, _, total), s in zip(parts, shrink, strict=True))


def _merged(z: _Shape, parts: Any, sums: Any, block: Any, more: Any) -> tuple[Any, Any]:
    """An item's sum of weighted values [e, rows] and sum of weights [rows], of its parts in their order."""
    part = functools.partial(_load_part, z, parts, sums, block, more)
    ahead = MERGE_ELEMS // (z.rows * 128)  # as many of head_dim 64

    def further(n: Any, carry: _Part) -> _Part:
        return _add_parts(z, [carry, *(part(2 + n * ahead + at) for at in range(ahead))])

    first = _add_parts(z, [part(jnp.int32(n)) for n in (0, 1)])  # few items have more
    rounds = lax.div(more - 2 + ahead, ahead)
    acc, _, total = lax.fori_loop(0, rounds, further, first)
    return acc, total


def _write_item(z: _Shape, o_s: Any, out: Any, acc: Any, total: Any, item: Any) -> None:
    """Start the copy of an item's output, acc / total, through o_s [rows, e] to its rows of out [b*h, e]."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    o_s.transpose((1, 0))[...] = transposed((acc / spread(total, z.e)).astype(jnp.bfloat16))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_s.at[pl.ds(0, z.group)], out.at[pl.ds(item * z.group, z.group)])


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


def _store_part(
    z: _Shape, m: _Memory, wg: Any, values: _Part, block: Any, item: Any, begins: Any, cut: list[Any]
) -> None:
    """Store the part of a cut item that lies in stretch `block`; add all its parts if this is the last.

    cut: columns 8 to 10 of the stretch, of the items that its start and its end cut.
    """
    part = block * 2 + begins.astype(jnp.int32)
    m.parts[part], top, total = values
    m.sums[pl.ds(part * 2 * z.rows, z.rows)] = top
    m.sums[pl.ds((part * 2 + 1) * z.rows, z.rows)] = total
    if z.interpreted:  # `_merge_kernel` adds them
        return
    owner = jnp.where(begins, block, cut[0])
    others = jnp.where(begins, cut[2], cut[1])
    last = _arrive(m.counters.at[owner], others)

    @pl.when(last == 1)
    def _() -> None:
        _write_item(z, m.o_s.at[wg], m.out, *_merged(z, m.parts, m.sums, owner, others), item)


@functools.cache
def _attend_kernel(shape: _Shape, interpret: Any) -> Any:
    """The kernel from (layer, stretch, walk, kv_len, table, q, pool rows, counters) to (out, parts, sums)."""
    z, bf16, f32 = shape, jnp.bfloat16, jnp.float32

    def decode(*refs: Any, **scratch: Any) -> None:
        m = _Memory(*refs, **scratch)
        wg = lax.axis_index("wg")
        first_block = lax.axis_index("block") * z.consumers

        @pl.when(wg < z.consumers)
        def _() -> None:
            plgpu.set_max_registers(216, action="increase")
            _attend(z, m, first_block + wg, wg)

        @pl.when(wg == z.consumers)
        def _() -> None:
            plgpu.set_max_registers(72, action="decrease")
            plgpu.warp_map(functools.partial(_copy, z, m, first_block))

    each = z.consumers * z.stages
    scratch: Any = {
        "q_s": plgpu.SMEM((z.consumers, z.stages, z.rows, z.e), bf16, transforms=TILED),
        "k_s": plgpu.SMEM((z.consumers, z.stages, z.chunk, z.e), bf16, transforms=TILED),
        "v_s": plgpu.SMEM((z.consumers, z.stages, z.chunk, z.e), bf16, transforms=TILED),
        "p_s": plgpu.SMEM((z.consumers, z.rows, z.chunk), bf16, transforms=TILED),
        "o_s": plgpu.SMEM((z.consumers, z.rows, z.e), bf16),
        "across": plgpu.SMEM((z.consumers, 32 * z.rows), f32),
        "taken": plgpu.SMEM((z.consumers * TAKEN,), jnp.int32),
        "taken_bar": plgpu.Barrier(num_barriers=z.consumers * TAKEN),
        "q_bar": plgpu.Barrier(num_barriers=each),
        "k_bar": plgpu.Barrier(num_arrivals=z.pages, num_barriers=each),
        "v_bar": plgpu.Barrier(num_arrivals=z.pages, num_barriers=each),
        "k_free": plgpu.Barrier(num_barriers=each),
        "v_free": plgpu.Barrier(num_barriers=each),
    }
    out = jax.ShapeDtypeStruct((z.batch * z.n_kv * z.group, z.e), bf16)
    parts = jax.ShapeDtypeStruct((z.stretches * 2, z.e, z.rows), f32)
    sums = jax.ShapeDtypeStruct((z.stretches * 2 * 2 * z.rows,), f32)
    return plgpu.kernel(
        decode,
        out_type=(out, parts, sums),
        grid=(z.blocks // z.consumers,),
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


@functools.cache
def _merge_kernel(shape: _Shape, interpret: Any) -> Any:
    """The kernel from (stretch, parts, sums) into `out`, of items that are cut: for the interpreter."""
    z = shape

    def merge_decode(
        stretch: Any,  # i32[stretches * z.stretch]
        parts: Any,  # f32[stretches * 2, e, rows]
        sums: Any,  # f32[stretches * 2 * 2 * rows]
        out: Any,  # bf16[b * h, e]
        o_s: Any,  # bf16[rows, e]
    ) -> None:
        block = lax.axis_index("block")
        more = stretch[block * z.stretch + 10]

        @pl.when(more > 0)
        def _() -> None:
            following = (block + 1) * z.stretch  # it starts inside the item
            item = stretch[following + 4] * z.n_kv + stretch[following + 1]
            _write_item(z, o_s, out, *_merged(z, parts, sums, block, more), item)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        merge_decode,
        out_type=(),
        grid=(z.stretches,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        scratch_types=[plgpu.SMEM((z.rows, z.e), jnp.bfloat16)],
        interpret=interpret,
    )
