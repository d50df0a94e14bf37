"""LoRA of tiles: 64 tokens on wgmma's long side by 64 rank rows; shrink and expand are two launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from slora_jax.pallas_kernels.lora_work import SLOTS, TILE
from slora_jax.pallas_kernels.mosaic_lora_item import (
    OPERAND,
    RANKS,
    Item,
    LoraConfig,
    Ref,
    accumulate,
    add_to_memory,
    clear_stages,
    iota,
    lora_kernel,
    may_start_empty,
    steps_of_part,
    sum_parts,
)
from slora_jax.pallas_kernels.xla_lora import RANK_BLOCK


def tile_shrink_kernel(config: LoraConfig, nt: int, split: int) -> Callable[..., Any]:
    """(x, chunks, items, pages, layer) -> h f32 [split, nt * 64, 64]: t by r of each tile, a summand a
    part.
    """
    width, stages = config.width, config.stages

    def lora_tile_shrink(
        x: Ref, chunks: Ref, items: Ref, pages: Ref, layer: Ref, h: Ref, x_s: Ref, w_s: Ref, bars: Ref
    ) -> None:
        index, part = lax.axis_index("item"), lax.axis_index("part")
        item = Item(config, items, pages, layer, index)
        total = steps_of_part(config.a_chunks, part, split)

        def issue(step: jax.Array) -> None:
            stage, k = lax.rem(step, stages), part + split * step
            source = x.at[pl.ds(item.row, TILE), pl.ds(pl.multiple_of(k * width, width), width)]
            plgpu.copy_gmem_to_smem(source, x_s.at[stage], bars.at[stage])
            item.copy(chunks, w_s.at[stage], bars.at[stage], k, True)

        def steps(acc: Ref) -> None:
            def step(i: jax.Array, _: None) -> None:
                stage = lax.rem(i, stages)
                plgpu.barrier_wait(bars.at[stage])
                plgpu.wgmma(acc, x_s.at[stage], w_s.at[stage].T)
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()  # every warp has read the stage that is filled anew
                pl.when(i + stages < total)(lambda: issue(i + stages))

            lax.fori_loop(0, total, step, None)

        @pl.when(item.blocks > 0)
        def _() -> None:
            for step in range(stages):
                pl.when(step < total)(functools.partial(issue, jnp.int32(step)))
            h[part, pl.ds(index * TILE, TILE)] = accumulate((TILE, RANKS), steps)

    return lora_kernel(
        lora_tile_shrink,
        config,
        out_type=jax.ShapeDtypeStruct((split, nt * TILE, RANKS), jnp.float32),
        grid=(nt, split),
        scratch_types=[
            plgpu.SMEM((stages, TILE, width), jnp.bfloat16, transforms=OPERAND),
            plgpu.SMEM((stages, RANKS, width), jnp.bfloat16, transforms=OPERAND),
            plgpu.Barrier(num_arrivals=SLOTS + 1, num_barriers=stages),
        ],
    )


def tile_expand_kernel(config: LoraConfig, nt: int, split: int) -> Callable[..., Any]:
    """(h of the shrink, chunks, items, pages, layer, y ref): adds h B to y."""
    n_modules, width, stages = len(config.out_dims), config.width, config.stages

    def lora_tile_expand(
        h: Ref,
        chunks: Ref,
        items: Ref,
        pages: Ref,
        layer: Ref,
        y: Ref,
        w_s: Ref,
        h_s: Ref,
        d_s: Ref,
        bars: Ref,
    ) -> None:
        index, part = lax.axis_index("item"), lax.axis_index("part")
        item = Item(config, items, pages, layer, index)
        total = steps_of_part(max(config.b_chunks), part, split)

        def issue(step: jax.Array) -> None:
            stage = lax.rem(step, stages)
            item.copy(chunks, w_s.at[stage], bars.at[stage], part + split * step, False)

        def write_h() -> None:
            """Each module's own rank rows, zero elsewhere."""
            values = sum_parts(h, split, pl.ds(index * TILE, TILE))
            r = iota((TILE, RANKS), 1)
            for m in range(n_modules):
                mine = (r >= RANK_BLOCK * item.start(m)) & (r < RANK_BLOCK * item.ends[m])
                h_s[m] = jnp.where(mine, values, 0.0).astype(jnp.bfloat16)
            plgpu.commit_smem()

        def step(i: jax.Array, _: None) -> None:
            stage, k = lax.rem(i, stages), part + split * i
            plgpu.barrier_wait(bars.at[stage])
            for m in range(n_modules):
                has_column = (item.ends[m] > item.start(m)) & (k < config.b_chunks[m])
                pl.when(has_column)(functools.partial(multiply, m, stage, k))
            plgpu.commit_smem()  # every warp has read the stage that is filled anew
            pl.when(i + stages < total)(lambda: issue(i + stages))

        def multiply(m: int, stage: jax.Array, k: jax.Array) -> None:
            delta = accumulate((TILE, width), functools.partial(plgpu.wgmma, a=h_s.at[m], b=w_s.at[stage]))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            t = iota((TILE, width), 0)  # an adapter's NaNs stay with its tokens
            delta = jnp.where((t >= item.first) & (t < item.end), delta, 0.0)
            d_s[...] = delta.astype(jnp.bfloat16)
            plgpu.commit_smem()
            add(pl.multiple_of(config.columns[m] + k * width, width))

        def add(column: jax.Array) -> None:
            if config.interpret is None:  # zeros to other tokens' rows; rows past the end are dropped
                add_to_memory(d_s, y.at[pl.ds(item.row, TILE), pl.ds(column, width)], config)
                plgpu.commit_smem_to_gmem_group()
                return

            def add_row(t: jax.Array, _: None) -> None:
                add_to_memory(d_s.at[pl.ds(t, 1)], y.at[pl.ds(item.row + t, 1), pl.ds(column, width)], config)

            lax.fori_loop(item.first, item.end, add_row, None)

        @pl.when(item.blocks > 0)
        def _() -> None:
            def zero() -> None:
                for stage in range(stages):
                    clear_stages(w_s.at[stage])

            pl.when((item.blocks < SLOTS) | may_start_empty(config, "expand"))(zero)
            plgpu.commit_smem()
            for first in range(stages):
                pl.when(first < total)(functools.partial(issue, jnp.int32(first)))
            write_h()
            lax.fori_loop(0, total, step, None)
            plgpu.wait_smem_to_gmem(0)

    return lora_kernel(
        lora_tile_expand,
        config,
        out_type=(),
        grid=(nt, split),
        scratch_types=[
            plgpu.SMEM((stages, RANKS, width), jnp.bfloat16, transforms=OPERAND),
            plgpu.SMEM((n_modules, TILE, RANKS), jnp.bfloat16, transforms=OPERAND),
            plgpu.SMEM((TILE, width), jnp.bfloat16, transforms=OPERAND),
            plgpu.Barrier(num_arrivals=SLOTS, num_barriers=stages),
        ],
    )
