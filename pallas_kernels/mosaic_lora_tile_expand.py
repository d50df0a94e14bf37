"""The expand of tiles: a step's columns of B, for 64 tokens, times their h, added to y.

Letters as in mosaic_lora_tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from slora_jax.pallas_kernels.mosaic_lora_tiles import Units, shrink_units
from slora_jax.pallas_kernels.xla_lora import RANK_BLOCK

STAGES, BUFFERS = 2, 3  # of B; of y or what is added to it
BLOCKS_OF_SM = 2
SUMMANDS = 4  # of h loaded at once, as registers hold them


class _Turn(NamedTuple):
    """A step's product with one module's rows of B."""

    number: jax.Array
    step: jax.Array  # of the unit's
    nth: jax.Array  # of the step's turns
    module: jax.Array
    column: jax.Array  # of y
    exists: jax.Array  # whether the module has columns at this step


class _Unit:
    """Scalars of the unit at hand, and its turns: of each step, one for every module that its item has."""

    def __init__(self, units: Units, item: Item, index: jax.Array, part: jax.Array, parts: jax.Array) -> None:
        self.item, self.index, self.part, self.parts = item, index, part, parts
        self._config, self._width = units.config, units.width
        self.steps = steps_of_part(units.steps, part, parts)
        self._has = [item.ends[m] > item.start(m) for m in range(len(units.config.out_dims))]
        counts = [has.astype(jnp.int32) for has in self._has]
        self._before = [sum(counts[:m], jnp.int32(0)) for m in range(len(counts))]
        self.turns_of_step = sum(counts, jnp.int32(0))
        self.turns = self.steps * self.turns_of_step

    def turn(self, number: jax.Array) -> _Turn:
        step, nth = lax.div(number, self.turns_of_step), lax.rem(number, self.turns_of_step)
        module = jnp.int32(0)
        for m in range(1, len(self._has)):
            module = jnp.where(self._has[m] & (self._before[m] == nth), m, module)
        column = (self.part + self.parts * step) * self._width
        first, columns = (_choose(n, module) for n in (self._config.columns, self._config.out_dims))
        exists = (number < self.turns) & (column < columns)
        return _Turn(number, step, nth, module, pl.multiple_of(first + column, self._width), exists)

    def is_read(self, turn: _Turn) -> jax.Array:
        """Whether nothing else adds to what this turn does, so that it may read and write it."""
        item = self.item
        is_full = (item.first == 0) & (item.end == TILE)
        alone: jax.Array = is_full & item.is_alone(turn.module)
        return alone


def _choose(values: Sequence[int], m: jax.Array) -> jax.Array:
    value: jax.Array = jnp.int32(values[0])
    for n in range(1, len(values)):
        value = jnp.where(m == n, values[n], value)
    return value


class _Expand:
    """What a thread block does with its references to memory and shared memory."""

    def __init__(self, units: Units, h: Ref, chunks: Ref, y: Ref, scratch: dict[str, Ref]) -> None:
        self.units, self.config, self.width = units, units.config, units.width
        self.h, self.chunks, self.y = h, chunks, y
        self.w_s, self.w_bars, self.h_s = scratch["w_s"], scratch["w_bars"], scratch["h_s"]
        self.d_s, self.y_bars = scratch["d_s"], scratch["y_bars"]

    def unit(self, unit: _Unit, choices: Sequence[int], summands: jax.Array) -> None:
        """y += h B of a tile's part."""
        config, item = self.config, unit.item
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the unit before
        for n in range(BUFFERS - 1 if config.reads_y else 0):
            self.fetch(unit, jnp.int32(n))

        def clear() -> None:
            for stage in range(STAGES):
                clear_stages(self.w_s.at[stage])

        pl.when((item.blocks < SLOTS) | may_start_empty(config, "expand"))(clear)
        plgpu.commit_smem()
        lax.fori_loop(0, jnp.minimum(STAGES, unit.steps), lambda i, _: self.issue(unit, i), None)
        for n in sorted({min(n, SUMMANDS) for n in choices}):
            pl.when(jnp.minimum(summands, SUMMANDS) == n)(functools.partial(self.write_h, unit, n, summands))
        plgpu.commit_smem()
        lax.fori_loop(0, unit.turns, lambda n, _: self.turn(unit, unit.turn(n)), None)

    def issue(self, unit: _Unit, i: jax.Array) -> None:
        """Start copying B of a step."""
        stage = lax.rem(i, STAGES)
        step, to, barrier = unit.part + unit.parts * i, self.w_s.at[stage], self.w_bars.at[stage]
        self.units.copy(unit.item, self.chunks, to, barrier, step, is_a=False)

    def write_h(self, unit: _Unit, at_once: int, summands: jax.Array) -> None:
        """Each module's own rank rows of the summands' sum, zero elsewhere."""

        def some(i: jax.Array | int) -> jax.Array:
            return sum_parts(self.h, at_once, pl.ds(0, TILE), unit.index * summands + at_once * i)

        values = lax.fori_loop(1, lax.div(summands, at_once), lambda i, total: total + some(i), some(0))
        r = iota((TILE, RANKS), 1)
        for m in range(len(self.config.out_dims)):
            mine = (r >= RANK_BLOCK * unit.item.start(m)) & (r < RANK_BLOCK * unit.item.ends[m])
            self.h_s[m] = jnp.where(mine, values, 0.0).astype(jnp.bfloat16)

    def window(self, unit: _Unit, turn: _Turn) -> Ref:
        return self.y.at[pl.ds(unit.item.row, TILE), pl.ds(turn.column, self.width)]

    def fetch(self, unit: _Unit, number: jax.Array) -> None:
        """Start copying a turn's window of y to shared memory."""
        turn = unit.turn(number)
        buffer = lax.rem(number, BUFFERS)
        window, target, barrier = self.window(unit, turn), self.d_s.at[buffer], self.y_bars.at[buffer]
        pl.when(turn.exists & unit.is_read(turn))(lambda: plgpu.copy_gmem_to_smem(window, target, barrier))

    def turn(self, unit: _Unit, turn: _Turn) -> None:
        stage = lax.rem(turn.step, STAGES)
        pl.when(turn.nth == 0)(lambda: plgpu.barrier_wait(self.w_bars.at[stage]))
        pl.when(turn.exists)(lambda: self.multiply(unit, turn, stage))
        pl.when(jnp.logical_not(turn.exists))(lambda: self.make_room(unit, turn))
        plgpu.commit_smem_to_gmem_group()  # of nothing, too: `make_room` counts them

        @pl.when(turn.nth == unit.turns_of_step - 1)
        def _() -> None:
            plgpu.commit_smem()  # every warp has read the stage that is filled anew
            pl.when(turn.step + STAGES < unit.steps)(lambda: self.issue(unit, turn.step + STAGES))

    def multiply(self, unit: _Unit, turn: _Turn, stage: jax.Array) -> None:
        product = functools.partial(plgpu.wgmma, a=self.h_s.at[turn.module], b=self.w_s.at[stage])
        delta = accumulate((TILE, self.width), product)
        self.make_room(unit, turn)
        if self.config.reads_y:
            read = unit.is_read(turn)
            pl.when(read)(lambda: self.store_sum(unit, turn, delta))
            pl.when(jnp.logical_not(read))(lambda: self.add(unit, turn, delta))
        else:
            self.add(unit, turn, delta)

    def make_room(self, unit: _Unit, turn: _Turn) -> None:
        """Wait until what is overwritten next has left shared memory."""
        if self.config.reads_y:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.fetch(unit, turn.number + BUFFERS - 1)
        else:
            plgpu.wait_smem_to_gmem(BUFFERS - 1, wait_read_only=True)

    def store_sum(self, unit: _Unit, turn: _Turn, delta: jax.Array) -> None:
        """The same bits as `add` gives."""
        buffer = lax.rem(turn.number, BUFFERS)
        sums = self.d_s.at[buffer]
        plgpu.barrier_wait(self.y_bars.at[buffer])
        before = plgpu.load(sums, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        sums[...] = (before + delta.astype(jnp.bfloat16).astype(jnp.float32)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums, self.window(unit, turn), commit_group=False)

    def add(self, unit: _Unit, turn: _Turn, delta: jax.Array) -> None:
        """By the TMA: the rounded product, to other tokens' rows zeros."""
        item, products = unit.item, self.d_s.at[lax.rem(turn.number, BUFFERS)]
        t = iota((TILE, self.width), 0)  # an adapter's NaNs stay with its tokens
        products[...] = jnp.where((t >= item.first) & (t < item.end), delta, 0.0).astype(jnp.bfloat16)
        plgpu.commit_smem()
        if self.config.interpret is None:
            add_to_memory(products, self.window(unit, turn), self.config)
            return

        def add_row(t: jax.Array, _: None) -> None:
            target = self.y.at[pl.ds(item.row + t, 1), pl.ds(turn.column, self.width)]
            add_to_memory(products.at[pl.ds(t, 1)], target, self.config)

        lax.fori_loop(item.first, item.end, add_row, None)


def expand_units(config: LoraConfig, nt: int) -> Units:
    """Those of the expand."""
    return Units(config, nt, max(config.out_dims), range(1, 9), BLOCKS_OF_SM)


def tile_expand_kernel(config: LoraConfig, nt: int) -> Callable[..., Any]:
    """(h of the shrink, chunks, items, pages, layer, y ref): adds h B to y.

    The TMA adds products to y in memory; or, `reads_y`, where a tile is full and no other item adds to the
    module's outputs, y is copied to shared memory ahead, and the sums are stored.
    """
    units, shrinks = expand_units(config, nt), shrink_units(config, nt)
    n_modules, width, bf16 = len(config.out_dims), units.width, jnp.bfloat16

    def lora_tile_expand(
        h: Ref,  # f32[units of the shrink, 64 t, 64 r]
        chunks: Ref,  # bf16[rows, W]
        items: Ref,  # i32[4, nt, FIELDS]
        pages: Ref,  # i32[lp]
        layer: Ref,  # i32[1]
        y: Ref,  # bf16[t, sum of out_dims]
        **scratch: Ref,
    ) -> None:
        block = _Expand(units, h, chunks, y, scratch)
        summands = shrinks.parts(items)

        def expand(index: jax.Array, part: jax.Array, parts: jax.Array) -> None:
            item = Item(config, items, pages, layer, index)
            block.unit(_Unit(units, item, index, part, parts), shrinks.choices, summands)

        units.each(items, expand)
        plgpu.wait_smem_to_gmem(0)

    return lora_kernel(
        lora_tile_expand,
        config,
        **units.launch,
        out_type=(),
        scratch_types={
            "w_s": plgpu.SMEM((STAGES, RANKS, width), bf16, transforms=OPERAND),  # stage, r, w
            "w_bars": plgpu.Barrier(num_arrivals=SLOTS, num_barriers=STAGES),
            "h_s": plgpu.SMEM((n_modules, TILE, RANKS), bf16, transforms=OPERAND),  # m, t, r
            "d_s": plgpu.SMEM((BUFFERS, TILE, width), bf16, transforms=OPERAND),  # buffer, t, w
            "y_bars": plgpu.Barrier(num_barriers=BUFFERS),
        },
    )
