"""Ragged chunked prefill attention with Pallas Mosaic GPU (Hopper), reading K and V from the page pool.

A thread block takes 128 query rows that read the same KV head (128 tokens of one head, or 64 tokens of two)
and walks its sequence's context in blocks of `BLOCK_KV` tokens. The warps of one warpgroup follow the page
table and copy; two warpgroups multiply, 64 rows each. Such a warpgroup has the product Q K^T of the next
block and P V of this one in flight together, and computes the softmax of the next while P V runs. All tiles
of a few heads come before those of the next heads, so that their K and V stay in L2; among them the tiles
with the longest context start first, so that the short ones fill the end.

Letters as in xla_attention.
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

from slora_jax.pallas_kernels.mosaic_attention_operands import TILED, check_attention, whole_tiles

BLOCK_KV = 128
STAGES = 2
ROWS = 64  # query rows of a warpgroup
HEADS_TOGETHER = 8  # at most: blocks of heads whose tiles all come before the next heads'
ROW_ALIGNMENT = 8  # of the first token of a tile's window
ROW = plgpu.Layout.WGMMA.reduce(1)  # of a vector, one value a row of a product
LOG2E = math.log2(math.e)


class _Shape(NamedTuple):
    """Static facts of a prefill kernel."""

    tokens: int
    tiles: int
    max_pages: int
    n_kv: int
    group: int
    e: int
    page_tokens: int
    n_pages: int
    tile: int
    block_kv: int
    stages: int
    scale: float
    heads_together: int
    overlap: bool
    pingpong: bool
    auto_barriers: bool
    p_in_smem: bool  # the interpreter has no wgmma with a register operand

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply: for one head's 128 rows, or for two heads' 64."""
        return 2 if self.tile == 2 * ROWS or self.group % 2 == 0 else 1

    @property
    def heads(self) -> int:
        """Query heads of a thread block."""
        return self.consumers * ROWS // self.tile

    @property
    def pages(self) -> int:
        """Pages of a block of context."""
        return self.block_kv // self.page_tokens


def prefill_attention(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    page_table: jax.Array,
    positions: jax.Array,
    tile_seq: jax.Array,
    tile_start: jax.Array,
    tile_len: jax.Array,
    tile_row: jax.Array,
    *,
    n_kv: int,
    page_tokens: int,
    tile: int,
    scale: float,
    block_kv: int = BLOCK_KV,
    stages: int = STAGES,
    heads_together: int = HEADS_TOGETHER,
    overlap: bool = True,
    pingpong: bool = False,
    auto_barriers: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """Causal attention of ragged prompt chunks over all that their sequences' pages hold.

    q bf16 [t, h, e]; pool bf16 [n_layers, n_pages, page_elems]; page_table int32 [b, m]; positions int32 [t].
    Tile j holds the tile_len[j] tokens from tile_start[j] on, of sequence row tile_seq[j] (-1: padding), at
    consecutive positions; tiles follow one another from token 0 on. A tile lies within `tile` (64 or 128)
    tokens from a multiple of `ROW_ALIGNMENT` on: tile_start % 8 + tile_len <= tile, because TMA fills
    swizzled memory from whole 8-row tiles only. `tile_row` is not read: outputs are written where their
    tokens are, and tokens after the last tile give 0. Products of bf16, sums in float32; weights are rounded
    to bf16 before they meet V. Returns bf16 [t, h, e]. Raises ValueError where the shapes are beyond the
    kernel's limits.
    """
    del tile_row
    t, h, e = q.shape
    check_attention(q, pool, page_table, n_kv=n_kv, page_tokens=page_tokens, chunk=block_kv)
    if tile not in (ROWS, 2 * ROWS):
        raise ValueError(f"tile must be 64 or 128 tokens, not {tile}")
    if positions.shape != (t,) or not tile_seq.shape == tile_start.shape == tile_len.shape:
        raise ValueError(
            f"need positions [{t}] and tile arrays of one length; got {positions.shape}, {tile_seq.shape}, "
            f"{tile_start.shape}, {tile_len.shape}"
        )
    n_layers, n_pages, _ = pool.shape
    shape = _Shape(
        tokens=t,
        tiles=tile_seq.shape[0],
        max_pages=page_table.shape[1],
        n_kv=n_kv,
        group=h // n_kv,
        e=e,
        page_tokens=page_tokens,
        n_pages=n_pages,
        tile=tile,
        block_kv=block_kv,
        stages=stages,
        scale=scale,
        heads_together=heads_together,
        overlap=overlap,
        pingpong=pingpong,
        auto_barriers=auto_barriers,
        p_in_smem=interpret is not None,
    )
    rows = pool.reshape(n_layers * n_pages * 2 * n_kv * page_tokens, e)
    out: jax.Array = _prefill_kernel(shape, interpret)(
        jnp.asarray(layer, jnp.int32).reshape(1),
        plan_prefill(positions, tile_seq, tile_start, tile_len),
        page_table.reshape(-1),
        whole_tiles(q),
        rows,
    )
    return out


def plan_prefill(
    positions: jax.Array, tile_seq: jax.Array, tile_start: jax.Array, tile_len: jax.Array
) -> jax.Array:
    """int32 [(n + 1) * 4]: sequence, first token, its position and length (0: padding) of the tiles, the one
    with the longest context first; last, in place of a tile, where the tokens of no tile begin.
    """
    length = jnp.where(tile_seq >= 0, tile_len, 0)
    position = positions[jnp.clip(tile_start, 0, positions.shape[0] - 1)]
    tiles = jnp.stack([tile_seq, tile_start, position, length], axis=1)
    context = jnp.where(length > 0, position + length, 0)
    # Each tile's place: how many are longer, or as long and before it. A sort would be several kernels.
    order = jnp.arange(context.shape[0])
    before = (context[:, None] < context) | ((context[:, None] == context) & (order < order[:, None]))
    place = jnp.sum(before, axis=1, dtype=jnp.int32)
    sorted_tiles = jnp.zeros_like(tiles).at[place].set(tiles, unique_indices=True)
    covered = jnp.max(jnp.where(length > 0, tile_start + length, 0))
    last = jnp.stack([jnp.int32(0), covered, jnp.int32(0), jnp.int32(0)])
    return jnp.concatenate([sorted_tiles.reshape(-1), last]).astype(jnp.int32)


@functools.cache
def _prefill_kernel(shape: _Shape, interpret: Any) -> Any:
    """The kernel from (layer, tiles, table, q, pool rows) to out."""
    z, e, block_kv, stages, consumers = shape, shape.e, shape.block_kv, shape.stages, shape.consumers
    bf16, f32 = jnp.bfloat16, jnp.float32
    n_heads = z.n_kv * z.group
    blocks_of_heads = n_heads // z.heads
    together = next(n for n in range(z.heads_together, 0, -1) if blocks_of_heads % n == 0)
    scale = z.scale * LOG2E
    pages_each = -(-z.pages // 4)  # of a warp

    def prefill(
        layer: Any,  # i32[1]
        tiles: Any,  # i32[(n + 1) * 4]
        table: Any,  # i32[b * m]
        q: Any,  # bf16[t, h, e]
        pool: Any,  # bf16[layers * pages * 2 * n_kv * page_tokens, e]
        out: Any,  # bf16[t, h, e]
        q_s: Any,  # bf16[consumers, 64, e]
        k_s: Any,  # bf16[stages, block_kv, e]
        v_s: Any,
        o_s: Any,  # bf16[consumers, 64, e]
        p_s: Any,  # bf16[consumers, 64, block_kv], or nothing much
        q_bar: Any,
        k_bar: Any,
        v_bar: Any,
        k_free: Any,
        v_free: Any,
        clean: Any,
        turn: Any,
    ) -> None:
        rank, wg = lax.axis_index("rank"), lax.axis_index("wg")
        head_block = lax.axis_index("heads") * together + lax.axis_index("head")
        seq, start, position, length = (tiles[rank * 4 + n] for n in range(4))
        context = position + length

        def window(start: Any) -> tuple[Any, Any]:
            """The first token of the tile's window, and how many rows there are not the tile's."""
            before = lax.rem(start, ROW_ALIGNMENT)
            return pl.multiple_of(start - before, ROW_ALIGNMENT), before

        steps = lax.div(context + block_kv - 1, block_kv)

        def load(warp: Any) -> None:
            """One warp's pages of every block of the sequence's K and V, as stages become free."""
            kv_head = lax.div(head_block * z.heads, z.group)
            first_page, first = layer[0] * z.n_pages, warp * pages_each

            def copy(half: int, ids: list[Any], j: Any, slot: Any) -> None:
                """Pages beyond the context arrive without bytes. (The interpreter knows no predicates.)"""
                to, bar = ((k_s, k_bar.at[slot]), (v_s, v_bar.at[slot]))[half]
                for p, page in enumerate(ids):
                    at = (first + p) * z.page_tokens
                    row = (((first_page + page) * 2 + half) * z.n_kv + kv_head) * z.page_tokens
                    source, target = pool.at[pl.ds(row, z.page_tokens)], to.at[slot, pl.ds(at, z.page_tokens)]
                    has = j * block_kv + at < context
                    if interpret is None:
                        plgpu.copy_gmem_to_smem(source, target, bar, predicate=has)
                    else:
                        pl.when(has)(functools.partial(plgpu.copy_gmem_to_smem, source, target, bar))
                        pl.when(jnp.logical_not(has))(functools.partial(plgpu.barrier_arrive, bar))

            def wait(free: Any, j: Any) -> None:
                pl.when(j >= stages)(lambda: plgpu.barrier_wait(free.at[lax.rem(j, stages)]))

            def block(j: Any, _: Any) -> None:
                slot, at = lax.rem(j, stages), j * z.pages + first
                ids = [
                    table[seq * z.max_pages + jnp.minimum(at + p, z.max_pages - 1)] for p in range(pages_each)
                ]
                for half, free in enumerate((k_free, v_free)):
                    wait(free, j)
                    pl.when(first < z.pages)(functools.partial(copy, half, ids, j, slot))

            def drain(j: Any, _: Any) -> None:  # the interpreter wants every phase seen
                wait(k_free, j)
                wait(v_free, j)

            lax.fori_loop(0, steps, block, None)
            lax.fori_loop(steps, steps + stages, drain, None)

        def multiply(head: Any, row: Any) -> None:
            """64 rows' attention over the context."""
            my_q = q_s.at[wg]
            window_start, before = window(start)
            plgpu.copy_gmem_to_smem(q.at[pl.ds(window_start + row, ROWS), head], my_q, q_bar.at[wg])
            if z.pingpong:
                pl.when(wg == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
            plgpu.barrier_wait(q_bar.at[wg])
            first_position = position - before + row  # of this warpgroup's first row

            def mask(score: Any, j: Any) -> Any:
                column = plgpu.broadcasted_iota(jnp.int32, score.shape, 1, layout=plgpu.Layout.WGMMA)
                line = plgpu.broadcasted_iota(jnp.int32, score.shape, 0, layout=plgpu.Layout.WGMMA)
                return jnp.where(column - line <= first_position - j * block_kv, score, -jnp.inf)

            def softmax(score: Any, top: Any, total: Any) -> tuple[Any, Any, Any, Any]:
                """Weights in float32, the new (scaled) maximum and sum, the factor of the old sum."""
                new_top = jnp.maximum(top, score.max(axis=1) * scale)
                shrink = jnp.exp2(top - new_top)
                weight = jnp.exp2(score * scale - lax.broadcast_in_dim(new_top, score.shape, [0]))
                return weight, new_top, total * shrink + weight.sum(axis=1), shrink

            def take_turn() -> None:
                if z.pingpong:
                    plgpu.barrier_wait(turn.at[wg])

            def give_turn(last: Any) -> None:
                """Let the other warpgroup multiply; after the last step the first waits no more."""
                if z.pingpong:
                    pl.when((wg == 0) | jnp.logical_not(last))(lambda: plgpu.barrier_arrive(turn.at[1 - wg]))

            def stage(weight: Any) -> Any:
                if not z.p_in_smem:
                    return weight
                p_s[wg] = weight
                plgpu.commit_smem()
                return p_s.at[wg]

            def first_scores(ref: Any) -> Any:
                plgpu.wgmma(ref, my_q, k_s.at[0].transpose((1, 0)))
                return ref[...]

            plgpu.barrier_wait(k_bar.at[0])
            score = pl.run_scoped(first_scores, plgpu.ACC((ROWS, block_kv), f32))
            plgpu.barrier_arrive(k_free.at[0])
            top = plgpu.layout_cast(jnp.full((ROWS,), -1e30, f32), ROW)
            total = plgpu.layout_cast(jnp.zeros((ROWS,), f32), ROW)
            weight, top, total, _ = softmax(mask(score, 0), top, total)
            weight = weight.astype(bf16)
            acc = plgpu.layout_cast(jnp.zeros((ROWS, e), f32), plgpu.Layout.WGMMA)

            def step(j: Any, carry: Any, masked: bool) -> Any:
                """Scores and softmax of block j, weights times V of block j - 1."""
                acc, weight, top, total = carry
                slot, before = lax.rem(j, stages), lax.rem(j - 1, stages)
                plgpu.barrier_wait(k_bar.at[slot])
                operand = stage(weight)
                if not z.p_in_smem:
                    acc, operand = lax.optimization_barrier((acc, operand))

                def scores(ref: Any) -> None:
                    plgpu.wgmma(ref, my_q, k_s.at[slot].transpose((1, 0)))

                def values(ref: Any) -> None:
                    plgpu.wgmma(ref, operand, v_s.at[before])

                def new_weights(score: Any) -> tuple[Any, Any, Any, Any]:
                    plgpu.barrier_arrive(k_free.at[slot])
                    return softmax(mask(score, j) if masked else score, top, total)

                def together(score_ref: Any, acc_ref: Any) -> Any:
                    acc_ref[...] = acc
                    take_turn()
                    scores(score_ref)
                    plgpu.barrier_wait(v_bar.at[before])
                    values(acc_ref)
                    give_turn(j + 1 == steps)
                    score = plgpu.wgmma_accumulator_load(score_ref, wait_n=1 if z.overlap else 0)
                    new = new_weights(lax.optimization_barrier(score))
                    new = lax.optimization_barrier(new)
                    # Rounded only after the wait: the old weights' registers are an operand still being read.
                    summed, weight = lax.optimization_barrier((acc_ref[...], new[0]))
                    return summed, weight, *new[1:]

                if z.p_in_smem:  # nor can it begin with an accumulator's value

                    def alone(ref: Any, fill: Any) -> Any:
                        fill(ref)
                        return ref[...]

                    take_turn()
                    plgpu.barrier_wait(v_bar.at[before])
                    score = pl.run_scoped(
                        functools.partial(alone, fill=scores), plgpu.ACC((ROWS, block_kv), f32)
                    )
                    acc = acc + pl.run_scoped(
                        functools.partial(alone, fill=values), plgpu.ACC((ROWS, e), f32)
                    )
                    give_turn(j + 1 == steps)
                    weight, top, total, shrink = new_weights(score)
                else:
                    acc, weight, top, total, shrink = pl.run_scoped(
                        together, plgpu.ACC((ROWS, block_kv), f32), plgpu.ACC((ROWS, e), f32)
                    )
                plgpu.barrier_arrive(v_free.at[before])
                acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
                return acc, weight.astype(bf16), top, total

            # Blocks that every row sees whole need no mask; the first was masked above.
            whole = jnp.clip(lax.div(jnp.maximum(first_position + 1, 0), block_kv), 1, steps)
            carry = (acc, weight, top, total)
            carry = lax.fori_loop(1, whole, functools.partial(step, masked=False), carry)
            carry = lax.fori_loop(whole, steps, functools.partial(step, masked=True), carry)
            acc, weight, top, total = carry
            final = lax.rem(steps - 1, stages)
            plgpu.barrier_wait(v_bar.at[final])
            pl.when(lax.rem(context, block_kv) != 0)(
                lambda: clear_tail(final, context - (steps - 1) * block_kv)
            )
            operand = stage(weight)

            def last_values(ref: Any) -> Any:
                plgpu.wgmma(ref, operand, v_s.at[final])
                return ref[...]

            acc = acc + pl.run_scoped(last_values, plgpu.ACC((ROWS, e), f32))
            plgpu.barrier_arrive(v_free.at[final])
            o_s[wg] = (acc / lax.broadcast_in_dim(total, acc.shape, [0])).astype(bf16)
            plgpu.commit_smem()
            # Read again: the loop needs the registers.
            window_start, before = window(tiles[rank * 4 + 1])
            first, end = (jnp.clip(at - row, 0, ROWS) for at in (before, before + tiles[rank * 4 + 3]))
            write(head, window_start + row, first, end)

        def clear_tail(slot: Any, first: Any) -> None:
            """Zero V from row `first` on: leftovers there may be NaN, which a weight of 0 does not hide."""
            part = max(block_kv // consumers, ROWS)  # of each warpgroup; the first does all of a small block
            at = wg * part

            @pl.when(at < block_kv)
            def _() -> None:
                row = plgpu.broadcasted_iota(jnp.int32, (part, 64), 0, layout=plgpu.Layout.WGMMA)
                for column in range(0, e, 64):  # all at once would not fit the registers
                    mine = v_s.at[slot, pl.ds(at, part), pl.ds(column, 64)]
                    v = plgpu.load(mine, layout=plgpu.Layout.WGMMA, optimized=False)
                    mine[...] = jnp.where(row < first - at, v.astype(f32), 0.0).astype(bf16)
                plgpu.commit_smem()

            if consumers > 1:
                plgpu.barrier_arrive(clean)
                plgpu.barrier_wait(clean)

        def write(head: Any, token: Any, first: Any, end: Any) -> None:
            """Rows first .. end of o_s to tokens token + first .. of out, in powers of two: none goes too
            far.
            """
            size, rows = ROWS, jnp.maximum(end - first, 0)
            while size:
                at = first + rows - lax.rem(rows, 2 * size)

                @pl.when(lax.rem(lax.div(rows, size), 2) == 1)
                def _(size: int = size, at: Any = at) -> None:
                    plgpu.copy_smem_to_gmem(
                        o_s.at[wg, pl.ds(at, size)], out.at[pl.ds(token + at, size), head]
                    )

                size //= 2
            plgpu.wait_smem_to_gmem(0)

        def clear(head: Any, row: Any) -> None:
            """Zeros for the tokens of no tile."""
            o_s[wg] = plgpu.layout_cast(jnp.zeros((ROWS, e), bf16), plgpu.Layout.WGMMA)
            plgpu.commit_smem()

            def some(n: Any, _: Any) -> None:
                at = start + n * z.tile + row
                write(head, at, jnp.int32(0), jnp.clip(z.tokens - at, 0, ROWS))

            lax.fori_loop(0, lax.div(z.tokens - start + z.tile - 1, z.tile), some, None)

        @pl.when(wg < consumers)
        def _() -> None:
            plgpu.set_max_registers(240 if consumers == 2 else 248, action="increase")
            head = head_block * z.heads + (wg if z.heads == 2 else 0)
            row = wg * ROWS if z.tile == 2 * ROWS else 0
            pl.when(length > 0)(lambda: multiply(head, row))
            pl.when((rank == z.tiles) & (start < z.tokens))(lambda: clear(head, row))

        @pl.when(wg == consumers)
        def _() -> None:
            plgpu.set_max_registers(24, action="decrease")
            pl.when(length > 0)(lambda: plgpu.warp_map(load))

    return plgpu.kernel(
        prefill,
        out_type=jax.ShapeDtypeStruct((z.tokens, n_heads, e), bf16),
        grid=(blocks_of_heads // together, z.tiles + 1, together),
        grid_names=("heads", "rank", "head"),
        num_threads=consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=not z.auto_barriers,
        ),
        scratch_types=[
            plgpu.SMEM((consumers, ROWS, e), bf16, transforms=TILED),
            plgpu.SMEM((stages, block_kv, e), bf16, transforms=TILED),
            plgpu.SMEM((stages, block_kv, e), bf16, transforms=TILED),
            plgpu.SMEM((consumers, ROWS, e), bf16),
            plgpu.SMEM((consumers, ROWS, block_kv), bf16, transforms=TILED)
            if z.p_in_smem
            else plgpu.SMEM((8,), f32),
            plgpu.Barrier(num_barriers=consumers),
            plgpu.Barrier(num_arrivals=z.pages, num_barriers=stages),
            plgpu.Barrier(num_arrivals=z.pages, num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers),
            plgpu.Barrier(num_barriers=2),
        ],
        interpret=interpret,
    )
