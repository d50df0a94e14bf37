"""LoRA of tiles, 64 tokens on wgmma's long side by 64 rank rows: the shrink; the expand follows with
`mosaic_lora_tile_expand`.

Both are persistent kernels: a fixed number of thread blocks share out the *units* of the batch, which are
parts of each tile's columns (split K in the shrink, split N in the expand), as many as there is room for at
once. Padding of the list is never looked at. A unit goes through its columns in steps, narrow enough that as
many thread blocks fit an SM as are meant to. Letters as in mosaic_lora; `w` is a column of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from slora_jax.pallas_kernels.lora_work import REAL, SLOTS, TILE
from slora_jax.pallas_kernels.mosaic_lora_item import (
    OPERAND,
    RANKS,
    WARPS,
    Item,
    LoraConfig,
    Ref,
    accumulate,
    lora_kernel,
    steps_of_part,
)

STEP = 256  # columns of the steps of an SM's thread blocks, at most
STAGES = 3  # of the shrink
START = 2  # steps that the begin of a unit takes
MOST_TURNS = 3  # units of a thread block, of divided tiles
UnitBody = Callable[[jax.Array, jax.Array, jax.Array], None]  # of (tile, part, parts)


class Units:
    """How a launch divides `columns` of each tile of a list of nt: one of `choices` parts a tile."""

    def __init__(
        self, config: LoraConfig, nt: int, columns: int, choices: Iterable[int], blocks_of_sm: int
    ) -> None:
        self.config, self.width = config, min(config.width, STEP // blocks_of_sm)
        self.steps = columns // self.width
        self.choices = [p for p in choices if p <= self.steps]
        if config.tile_split is not None:
            self.choices = [config.tile_split]
        self.blocks = min(blocks_of_sm * config.sms, nt * self.choices[-1])
        self.most = max(nt * self.choices[0], MOST_TURNS * self.blocks)  # of a batch

    def parts(self, items: Ref) -> jax.Array:
        """Of each tile, so that all are done soonest, if a unit takes START steps more than it has."""
        real = items[self.config.group, 0, REAL]
        parts: jax.Array = jnp.int32(self.choices[0])
        least = jnp.int32(2**30)
        for choice in self.choices:
            turns = lax.div(real * choice + self.blocks - 1, self.blocks)
            time = turns * (-(-self.steps // choice) + START)
            better = (time < least) & ((turns <= MOST_TURNS) | (choice == self.choices[0]))
            parts, least = jnp.where(better, choice, parts), jnp.where(better, time, least)
        return parts

    def each(self, items: Ref, body: UnitBody) -> None:
        """body(tile, part, parts) for this thread block's units; a tile's parts are next to one another."""
        block, parts = lax.axis_index("block"), self.parts(items)
        units = items[self.config.group, 0, REAL] * parts

        def unit(n: jax.Array, _: None) -> None:
            at = block + self.blocks * n
            body(lax.div(at, parts), lax.rem(at, parts), parts)

        lax.fori_loop(0, lax.div(units - block + self.blocks - 1, self.blocks), unit, None)

    def copy(
        self,
        item: Item,
        chunks: Ref,
        to: Ref,
        barrier: Ref,
        step: jax.Array,
        *,
        is_a: bool,
        beside: Callable[[], None] | None = None,
    ) -> None:
        """Start copying a step's columns of every block of A or B to [64, width], each warp some blocks.

        One warp does `beside`, too.
        """
        pieces = self.config.width // self.width  # of a chunk
        column = pl.multiple_of(lax.rem(step, pieces) * self.width, self.width)

        def some(warp: jax.Array) -> None:
            slots = [warp + n for n in range(0, SLOTS, WARPS)]
            item.copy(chunks, to, barrier, lax.div(step, pieces), is_a, slots=slots, column=column)
            if beside is not None:
                pl.when(warp == WARPS - 1)(beside)

        plgpu.warp_map(some)

    @property
    def launch(self) -> dict[str, Any]:
        """The grid, for `lora_kernel`."""
        return {"grid": (self.blocks,), "grid_names": ("block",)}


def shrink_units(config: LoraConfig, nt: int) -> Units:
    """Those of the shrink, whose parts are the summands of h."""
    return Units(config, nt, config.in_dim, (1, 2, 4, 8), config.shrink_blocks)


def tile_shrink_kernel(config: LoraConfig, nt: int) -> Callable[..., Any]:
    """(x, chunks, items, pages, layer) -> h f32 [units, 64, 64]: t by r of each unit, summands of its tile's.

    A tile's units follow one another. Where a batch has fewer than fit, the rest of h is not written.
    """
    units = shrink_units(config, nt)
    width, stages = units.width, STAGES

    def lora_tile_shrink(
        x: Ref,  # bf16[t, in_dim]
        chunks: Ref,  # bf16[rows, W]
        items: Ref,  # i32[4, nt, FIELDS]
        pages: Ref,  # i32[lp]
        layer: Ref,  # i32[1]
        h: Ref,  # f32[units, 64 t, 64 r]
        x_s: Ref,  # bf16[stages, 64 t, w]
        w_s: Ref,  # bf16[stages, 64 r, w]
        bars: Ref,
    ) -> None:
        def shrink(index: jax.Array, part: jax.Array, parts: jax.Array) -> None:
            item = Item(config, items, pages, layer, index)
            total = steps_of_part(units.steps, part, parts)

            def issue(i: jax.Array) -> None:
                stage, step = lax.rem(i, stages), part + parts * i
                source = x.at[pl.ds(item.row, TILE), pl.ds(pl.multiple_of(step * width, width), width)]
                copy = functools.partial(plgpu.copy_gmem_to_smem, source, x_s.at[stage], bars.at[stage])
                units.copy(item, chunks, w_s.at[stage], bars.at[stage], step, is_a=True, beside=copy)

            def steps(acc: Ref) -> None:
                def step(i: jax.Array, _: None) -> None:
                    stage = lax.rem(i, stages)
                    plgpu.barrier_wait(bars.at[stage])
                    plgpu.wgmma(acc, x_s.at[stage], w_s.at[stage].T)
                    plgpu.wgmma_wait(0)
                    plgpu.commit_smem()  # every warp has read the stage that is filled anew
                    pl.when(i + stages < total)(lambda: issue(i + stages))

                lax.fori_loop(0, total, step, None)

            lax.fori_loop(0, jnp.minimum(stages, total), lambda i, _: issue(i), None)
            h[index * parts + part] = accumulate((TILE, RANKS), steps)

        units.each(items, shrink)

    return lora_kernel(
        lora_tile_shrink,
        config,
        **units.launch,
        out_type=jax.ShapeDtypeStruct((units.most, TILE, RANKS), jnp.float32),
        scratch_types=[
            plgpu.SMEM((stages, TILE, width), jnp.bfloat16, transforms=OPERAND),
            plgpu.SMEM((stages, RANKS, width), jnp.bfloat16, transforms=OPERAND),
            plgpu.Barrier(num_arrivals=SLOTS + 1, num_barriers=stages),
        ],
    )
