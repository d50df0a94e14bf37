"""LoRA of decode items and runs: the weights are on wgmma's long side, 64 rank rows by a window's tokens.

One warpgroup copies, another multiplies. A ring of stages holds the chunks on their way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from slora_jax.pallas_kernels.lora_work import SLOTS, WINDOW
from slora_jax.pallas_kernels.mosaic_lora_item import (
    OPERAND,
    RANKS,
    SWIZZLE,
    WARPS,
    Item,
    LoraConfig,
    Phase,
    Ref,
    accumulate,
    add_to_memory,
    clear_stages,
    copy_if,
    iota,
    lora_kernel,
    may_start_empty,
    steps_of_part,
    sum_parts,
)
from slora_jax.pallas_kernels.mosaic_lora_rows import add_row
from slora_jax.pallas_kernels.xla_lora import RANK_BLOCK

RING_ROWS = 2 * RANKS  # of the ring of stages: with it, two thread blocks fit an SM
FEW = SLOTS // 2  # blocks up to which an item counts as small
# The bytes of OPERAND, one row after another.
ROWS = (plgpu.TilingTransform((1, SWIZZLE)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]


def decode_kernel(config: LoraConfig, n_items: int, split: int, phase: Phase) -> Callable[..., Any]:
    """Of phase "both": (x, chunks, items, pages, layer, y ref); "shrink": the same without y -> h; "expand":
    h instead of x.

    h f32 [split, n_items * 64, window]: r by t of each item, a summand from each part. One warpgroup copies,
    another multiplies.
    """
    n_modules, width, window = len(config.out_dims), config.width, config.window
    tokens = window * n_modules
    pieces = width // SWIZZLE  # of a chunk's columns, as they are added to y
    at_once = max(1, pieces * WINDOW // window)  # as many as registers hold for two thread blocks an SM

    def decode(
        x: Ref, chunks: Ref, items: Ref, pages: Ref, layer: Ref, out: Ref, scratch: dict[str, Ref]
    ) -> None:
        index, part = lax.axis_index("item"), lax.axis_index("part")
        item = Item(config, items, pages, layer, index)
        w_s, full, free = scratch["w_s"], scratch["full_s"], scratch["free_s"]
        few = item.blocks <= FEW
        # wgmma reads 64 rows of a chunk: those past the item's blocks belong to the next, and meet zeros of
        # h.
        rows = RANK_BLOCK * item.blocks if config.pack else RANKS
        held = 1 + lax.div(RING_ROWS - RANKS, jnp.maximum(rows, RANK_BLOCK))  # chunks in the ring
        stages = jnp.minimum(config.stages, held)
        no_steps = part * 0
        shrinks = no_steps if phase == "expand" else steps_of_part(config.a_chunks, part, split)
        expands = no_steps if phase == "shrink" else steps_of_part(max(config.b_chunks), part, split)
        total = shrinks + expands

        def loop(first: jax.Array, end: jax.Array, body: Callable[[jax.Array, jax.Array], None]) -> None:
            """body(step, stage) for the steps from first to end."""

            def counted(i: jax.Array, stage: jax.Array) -> jax.Array:
                body(i, stage)
                return jnp.where(stage + 1 == stages, 0, stage + 1)

            lax.fori_loop(first, end, counted, lax.rem(first, stages))

        def chunk_rows(stage: jax.Array) -> Ref:
            return w_s.at[pl.ds(stage * rows, RANKS)]

        def by_slots(body: Callable[[Ref, int], None]) -> None:
            """body(barriers that stages are full, slots that a step copies)."""
            pl.when(few)(lambda: body(scratch["few_full_s"], FEW))
            pl.when(jnp.logical_not(few))(lambda: body(full, SLOTS))

        def wait_until_full(stage: jax.Array) -> None:
            by_slots(lambda barriers, _: plgpu.barrier_wait(barriers.at[stage]))

        def produce() -> None:
            if phase != "shrink":
                # What no copy fills must be finite: wgmma multiplies it with zeros.
                stale = (item.blocks < SLOTS) | may_start_empty(config, phase)
                pl.when(stale & (item.count >= config.whole_window))(lambda: clear_stages(w_s))
                plgpu.commit_smem()
            plgpu.warp_map(produce_steps)

        def produce_steps(warp: jax.Array) -> None:
            """One warp's copies of every step: every WARPS-th block; the last one's are of x, too."""

            def step(i: jax.Array, stage: jax.Array) -> None:
                is_a = i < shrinks
                k = part + split * jnp.where(is_a, i, i - shrinks)
                pl.when(i >= stages)(lambda: plgpu.barrier_wait(free.at[stage]))
                by_slots(functools.partial(copy, stage, is_a, k))

            def copy(stage: jax.Array, is_a: jax.Array, k: jax.Array, barriers: Ref, n_slots: int) -> None:
                slots = [warp + n for n in range(0, n_slots, WARPS)]
                item.copy(chunks, chunk_rows(stage), barriers.at[stage], k, is_a, slots=slots)
                if phase == "expand":
                    return

                @pl.when(warp == WARPS - 1)
                def _() -> None:
                    column = jnp.where(is_a, k, 0) * width
                    source = x.at[pl.ds(item.row, window), pl.ds(column, width)]
                    copy_if(source, scratch["x_s"].at[stage], barriers.at[stage], is_a, config)

            loop(jnp.int32(0), total, step)
            loop(jnp.maximum(total - stages, 0), total, lambda _, stage: plgpu.barrier_wait(free.at[stage]))

        def shrink() -> jax.Array:
            def steps(acc: Ref) -> None:
                def step(_: jax.Array, stage: jax.Array) -> None:
                    wait_until_full(stage)
                    plgpu.wgmma(acc, chunk_rows(stage), scratch["x_s"].at[stage].T)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[stage])

                loop(jnp.int32(0), shrinks, step)

            return accumulate((RANKS, window), steps)

        def expand(h: jax.Array, y: Ref) -> None:
            h_s, d_s = scratch["h_s"], scratch["d_s"]
            r = iota((RANKS, window), 0)
            own = item.has(lax.rem(iota((SWIZZLE, tokens), 1), window))
            for m in range(n_modules):
                mine = (r >= RANK_BLOCK * item.start(m)) & (r < RANK_BLOCK * item.ends[m])
                h_s.at[pl.ds(window * m, window)].T[...] = jnp.where(mine, h, 0.0).astype(jnp.bfloat16)
            plgpu.commit_smem()

            def step(i: jax.Array, stage: jax.Array) -> None:
                wait_until_full(stage)
                for turn, piece in enumerate(range(0, pieces, at_once)):
                    add_pieces(i, stage, piece, i * (pieces // at_once) + turn)

            def add_pieces(i: jax.Array, stage: jax.Array, first: int, turn: jax.Array) -> None:
                def multiply(*accs: Ref) -> list[jax.Array]:
                    for c, acc in enumerate(accs, first):
                        w = chunk_rows(stage).at[:, pl.ds(SWIZZLE * c, SWIZZLE)]  # r, w
                        plgpu.wgmma(acc, w.T, h_s.T)
                    return [acc[...] for acc in accs]

                acc = plgpu.ACC((SWIZZLE, tokens), jnp.float32)
                deltas = pl.run_scoped(multiply, *[acc] * at_once)
                if first + at_once == pieces:
                    plgpu.barrier_arrive(free.at[stage])
                # The last pieces of this buffer of d_s have left it.
                plgpu.wait_smem_to_gmem(config.deltas - 1, wait_read_only=True)
                buffer = at_once * tokens * lax.rem(turn, config.deltas)
                for c, delta in enumerate(deltas):
                    delta = jnp.where(own, delta, 0.0)  # an adapter's NaNs stay with its tokens
                    d_s.at[pl.ds(buffer + tokens * c, tokens)].T[...] = delta.astype(jnp.bfloat16)
                plgpu.commit_smem()
                column = (part + split * (i - shrinks)) * width + SWIZZLE * first
                if config.interpret is None:  # whose warps could not add as `add_to_memory` does
                    plgpu.warp_map(lambda warp: add_modules(column, buffer, [warp], warp < at_once))
                else:
                    add_modules(column, buffer, range(at_once), True)
                plgpu.commit_smem_to_gmem_group()

            def add_modules(
                first: jax.Array, buffer: jax.Array, parts: Sequence[jax.Array | int], some: jax.Array | bool
            ) -> None:
                """Add pieces to each module that has their columns, from column `first` of it on."""
                for m in range(n_modules):

                    @pl.when((item.ends[m] > item.start(m)) & (first < config.out_dims[m]) & some)
                    def _(m: int = m) -> None:
                        for c in parts:
                            column = config.columns[m] + first + SWIZZLE * c
                            source = d_s.at[pl.ds(buffer + tokens * c + window * m, window)]
                            target = y.at[pl.ds(item.row, window), pl.ds(column, SWIZZLE)]
                            add_to_memory(source, target, config)

            def few_tokens_step(i: jax.Array, stage: jax.Array) -> None:
                k = part + split * (i - shrinks)
                wait_until_full(stage)
                for m in range(n_modules):

                    @pl.when((item.ends[m] > item.start(m)) & (k < config.b_chunks[m]))
                    def _(m: int = m) -> None:
                        def add_token(n: jax.Array, _: None) -> None:
                            t = item.token(n)
                            add_row(
                                chunk_rows(stage),
                                h_s,
                                y,
                                first=jnp.asarray(item.start(m), jnp.int32),
                                end=item.ends[m],
                                h_row=window * m + t,
                                row=item.row + t,
                                column=config.columns[m] + k * width,
                                interpreted=config.interpret is not None,
                            )

                        lax.fori_loop(0, item.count, add_token, None)

                plgpu.barrier_arrive(free.at[stage])

            by_rows = item.count < config.whole_window
            pl.when(by_rows)(lambda: loop(shrinks, total, few_tokens_step))
            pl.when(jnp.logical_not(by_rows))(lambda: loop(shrinks, total, step))
            plgpu.wait_smem_to_gmem(0)

        def consume() -> None:
            if phase == "expand":
                expand(sum_parts(x, split, pl.ds(index * RANKS, RANKS)), out)
            elif phase == "shrink":
                out[part, pl.ds(index * RANKS, RANKS)] = shrink()
            else:
                expand(shrink(), out)

        worker = lax.axis_index("worker")
        pl.when((item.blocks > 0) & (worker == 0))(consume)
        pl.when((item.blocks > 0) & (worker == 1))(produce)

    bf16, reads_x = jnp.bfloat16, phase != "expand"
    scratch = {
        "w_s": plgpu.SMEM((RING_ROWS, width), bf16, transforms=OPERAND),  # r of all stages, w
        "full_s": plgpu.Barrier(num_arrivals=SLOTS + reads_x, num_barriers=config.stages),
        "few_full_s": plgpu.Barrier(num_arrivals=FEW + reads_x, num_barriers=config.stages),
        "free_s": plgpu.Barrier(num_barriers=config.stages),
    }
    if reads_x:
        scratch["x_s"] = plgpu.SMEM((config.stages, window, width), bf16, transforms=OPERAND)  # stage, t, w
    if phase != "shrink":
        scratch["h_s"] = plgpu.SMEM((tokens, RANKS), bf16, transforms=OPERAND)  # (m, t), r
        rows = config.deltas * at_once * tokens  # (w/64, m, t), w of 64
        scratch["d_s"] = plgpu.SMEM((rows, SWIZZLE), bf16, transforms=ROWS)
    out_type = (
        jax.ShapeDtypeStruct((split, n_items * RANKS, window), jnp.float32) if phase == "shrink" else ()
    )

    def body(
        x: Ref,  # bf16[t, in_dim]; in the expand h f32[split, n_items * 64, window]
        chunks: Ref,  # bf16[rows, W]
        items: Ref,  # i32[4, n_items, FIELDS]
        pages: Ref,  # i32[lp]
        layer: Ref,  # i32[1]
        out: Ref,  # y bf16[t, sum of out_dims]; in the shrink h
        **scratch: Ref,
    ) -> None:
        decode(x, chunks, items, pages, layer, out, scratch)

    body.__name__ = f"lora_decode_{phase}"
    return lora_kernel(body, config, 2, out_type=out_type, grid=(n_items, split), scratch_types=scratch)
