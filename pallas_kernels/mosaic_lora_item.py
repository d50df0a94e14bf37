"""What `mosaic_lora`'s decode and tile kernels share: an item's scalars and copies, and the launch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from slora_jax.pallas_kernels.lora_work import ALONE, END, ENDS, FIRST, PAGES, ROW, SLOTS, WINDOW, A, B
from slora_jax.pallas_kernels.xla_lora import RANK_BLOCK

RANKS = RANK_BLOCK * SLOTS  # rank rows of an item
SWIZZLE = 64  # columns of a swizzled tile of bfloat16: 128 bytes
OPERAND = (plgpu.TilingTransform((8, SWIZZLE)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
WARPS = 4  # of a warpgroup
Phase = Literal["both", "shrink", "expand"]
Ref = Any  # of Pallas; untyped there


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """What one launch is compiled for."""

    group: int  # of modules, see lora_work.MODULE_GROUPS
    in_dim: int
    out_dims: tuple[int, ...]
    width: int  # W
    per_page: int  # chunks in a page
    n_pages: int
    pack: bool = True  # stages hold only the item's blocks, so that small items have more of them under way
    interpret: Any = None
    # Of decode items and runs:
    stages: int = 3  # at most
    window: int = WINDOW  # rows: WINDOW, or RUN
    deltas: int = 2  # buffers of products on their way to y
    whole_window: int = 3  # tokens from which an item expands its window with wgmma instead of row by row
    # Of tiles:
    tile_split: int | None = None  # parts of each tile: 1, 2, 4 or 8, instead of as many as fill the SMs
    shrink_blocks: int = 1  # thread blocks of an SM: 1 or 2
    reads_y: bool = True  # whether sums with y are formed in shared memory where no other item adds to it
    sms: int = 132  # of an H100 or H200

    @property
    def a_chunks(self) -> int:
        return self.in_dim // self.width

    @property
    def b_chunks(self) -> tuple[int, ...]:
        return tuple(n // self.width for n in self.out_dims)

    @property
    def columns(self) -> tuple[int, ...]:
        """First column of each module in y."""
        return tuple(sum(self.out_dims[:m]) for m in range(len(self.out_dims)))


class Item:
    """Scalars of the item at hand, read from memory once, and the copies of its rank blocks."""

    def __init__(self, config: LoraConfig, items: Ref, pages: Ref, layer: Ref, index: jax.Array) -> None:
        self.config, self._pages = config, pages
        self.row = pl.multiple_of(items[config.group, index, ROW], WINDOW)
        self.first, self.end = items[config.group, index, FIRST], items[config.group, index, END]
        self.is_run = config.window > WINDOW
        self.count = self.end - self.first if self.is_run else self.end  # of a decode item's or run's tokens
        self.ends = [items[config.group, index, ENDS + m] for m in range(3)]
        self.blocks = self.ends[2]
        self._alone = items[config.group, index, ALONE]
        self._page_base = items[config.group, index, PAGES]
        self._a = [items[config.group, index, A + m] for m in range(len(config.out_dims))]
        self._b = [items[config.group, index, B + m] for m in range(len(config.out_dims))]
        self._first_page = layer[0] * config.n_pages

    def token(self, n: jax.Array | int) -> jax.Array:
        """The nth token of a decode item or run, counted from the window's first."""
        if self.is_run:
            nth: jax.Array = self.first + n
            return nth
        return lax.rem(lax.shift_right_logical(self.first, jnp.int32(4 * n)), WINDOW)

    def has(self, t: jax.Array) -> jax.Array:
        """Whether token t of the window, an array of them, is one of a decode item's or run's."""
        if self.is_run:
            inside: jax.Array = (t >= self.first) & (t < self.end)
            return inside
        found = [t == jnp.where(n < self.count, self.token(n), -1) for n in range(WINDOW)]
        return functools.reduce(jnp.logical_or, found)

    def is_alone(self, m: jax.Array) -> jax.Array:
        """Whether no other item has blocks of module m for these tokens."""
        alone: jax.Array = lax.rem(lax.shift_right_logical(self._alone, m), 2) == 1
        return alone

    def start(self, m: int) -> jax.Array | int:
        """First block of module m."""
        return self.ends[m - 1] if m else 0

    def copy(
        self,
        chunks: Ref,
        dst: Ref,
        barrier: Ref,
        k: jax.Array,
        is_a: jax.Array | bool,
        *,
        slots: Sequence[jax.Array | int] = range(SLOTS),
        column: jax.Array | int = 0,
    ) -> None:
        """Start copying chunk k of every block of A, or of B where it has one, from a column on, to dst
        [64, w].

        The barrier sees an arrival from each of the `slots`, the blocks looked at, in any case.
        """
        config = self.config
        b_chunks = [jnp.int32(n) for n in config.b_chunks]
        found = []
        for block in slots:
            of_a = self._of_module(block, self._a) + block * config.a_chunks
            of_b = self._of_module(
                block, [b + block * n for b, n in zip(self._b, config.b_chunks, strict=True)]
            )
            exists = (block < self.blocks) & (is_a | (k < self._of_module(block, b_chunks)))
            chunk = jnp.where(exists, k + jnp.where(is_a, of_a, of_b), 0)
            page = self._pages[self._page_base + lax.div(chunk, config.per_page)]
            found.append((exists, page, lax.rem(chunk, config.per_page), RANK_BLOCK * block))
        for exists, page, chunk, row in found:  # after all loads of pages, which so overlap
            at = ((self._first_page + page) * config.per_page + chunk) * RANK_BLOCK
            source = chunks.at[pl.ds(at, RANK_BLOCK), pl.ds(column, dst.shape[1])]
            copy_if(source, dst.at[pl.ds(row, RANK_BLOCK)], barrier, exists, config)

    def _of_module(self, block: jax.Array | int, values: list[jax.Array]) -> jax.Array:
        """The value of the module that `block` belongs to."""
        value = values[0]
        for m in range(1, len(values)):
            value = jnp.where(block >= self.ends[m - 1], values[m], value)
        return value


def copy_if(source: Ref, target: Ref, barrier: Ref, condition: jax.Array, config: LoraConfig) -> None:
    """Start a TMA copy where the condition holds; the barrier sees an arrival in any case."""
    if config.interpret is None:
        plgpu.copy_gmem_to_smem(source, target, barrier, predicate=condition)
        return

    @pl.when(condition)  # the interpreter has no predicates
    def _() -> None:
        plgpu.copy_gmem_to_smem(source, target, barrier)

    @pl.when(jnp.logical_not(condition))
    def _() -> None:
        plgpu.barrier_arrive(barrier)


def clear_stages(w_s: Ref) -> None:
    """Clear the stages, so that rank rows that no copy fills are finite: wgmma multiplies them with zeros."""
    last = w_s.shape[0] - RANKS
    for row in sorted({*range(0, last, RANKS), last}):
        part = w_s.at[pl.ds(row, RANKS)]
        part[...] = plgpu.layout_cast(jnp.zeros(part.shape, part.dtype), plgpu.Layout.WGMMA)


def iota(shape: tuple[int, int], axis: int) -> jax.Array:
    """Indices along an axis, in wgmma's layout."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def accumulate(shape: tuple[int, int], body: Callable[[Ref], None]) -> jax.Array:
    """The f32 accumulator of a wgmma after body."""

    def scope(acc: Ref) -> jax.Array:
        body(acc)
        return acc[...]  # type: ignore[no-any-return]

    return pl.run_scoped(scope, plgpu.ACC(shape, jnp.float32))  # type: ignore[no-any-return]


def steps_of_part(chunks: int, part: jax.Array, split: jax.Array | int) -> jax.Array:
    """How many of `chunks` fall to a part that takes every split-th."""
    return lax.div(chunks - part + split - 1, split)


def lora_kernel(
    body: Callable[..., None], config: LoraConfig, warpgroups: int = 1, **kwargs: Any
) -> Callable[..., Any]:
    """plgpu.kernel, by default over (item, part), of one or two `worker`s; bodies order their
    shared-memory accesses with commit_smem themselves.
    """
    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
    )
    if config.interpret is not None:
        kwargs["interpret"] = config.interpret
    if warpgroups > 1:
        kwargs |= {"num_threads": warpgroups, "thread_name": "worker"}
    kwargs.setdefault("grid_names", ("item", "part"))
    kernel: Callable[..., Any] = plgpu.kernel(body, compiler_params=params, **kwargs)
    return kernel


def may_start_empty(config: LoraConfig, phase: Phase) -> bool:
    """Whether a stage may be multiplied before a copy has filled every block of the item once."""
    uneven = min(config.b_chunks) != max(config.b_chunks)
    return uneven and (phase == "expand" or config.a_chunks < config.stages)


def sum_parts(h: Ref, split: int, rows: Any, first: jax.Array | int = 0) -> jax.Array:
    """The sum over `split` parts of h[part, rows], from the first on, in wgmma's layout."""
    parts = [
        plgpu.load(h.at[first + part, rows], layout=plgpu.Layout.WGMMA, optimized=False)
        for part in range(split)
    ]
    return functools.reduce(jnp.add, parts)


def add_to_memory(source: Ref, target: Ref, config: LoraConfig) -> None:
    """target (memory) += source (shared memory), by the TMA; the group is committed by the caller."""
    if config.interpret is None:
        plgpu.copy_smem_to_gmem(source, target, commit_group=False, reduction_op="add")
    else:  # the interpreter has no reducing copies
        target[...] = target[...] + source[...]
        plgpu.commit_smem()  # it takes a copy over what was read so for a race without
