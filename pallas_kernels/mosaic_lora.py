"""Batched LoRA of mixed adapters and ranks for Hopper and newer, over rank blocks held in the page pool.

Written with Pallas' Mosaic GPU backend. `lora_work` says what an item is; each is a thread block here, of one
warpgroup. Weights reach shared memory as TMA copies of chunks `[8, W]`, 4 KiB at W=256, two or three steps
ahead of the tensor cores. A step of the shrink multiplies all rank rows with one chunk of columns; a
step of the expand multiplies all rank rows with one chunk of each module's output columns, and the TMA
adds the result to y in memory, so that y is never read and rows that no adapter touches cost nothing.

Decode items put the weights on wgmma's long side (64 rank rows by 8 tokens), tiles the tokens (64
tokens by 64 rank rows). With many decode items one launch does both halves, the expand's weights
already under way while the shrink ends; with few, and for tiles, the columns are split over more thread
blocks and the intermediate `h` passes through memory between two launches.

Letters: `t` token, `r` rank row of an item's 64, `w` column of a chunk, `m` module of the launch.
"""

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

from slora_jax.pallas_kernels.lora_work import (
    END,
    ENDS,
    FIRST,
    MODULE_GROUPS,
    PAGES,
    RANK_BLOCK,
    ROW,
    SLOTS,
    TILE,
    WINDOW,
    A,
    B,
    LoraWork,
)

RANKS = RANK_BLOCK * SLOTS  # rank rows of an item
SWIZZLE = 64  # columns of a swizzled tile of bfloat16: 128 bytes
RING_ROWS = 2 * RANKS  # of the ring of stages: with it, two thread blocks fit an SM
FEW = SLOTS // 2  # blocks up to which an item counts as small
WARPS = 4  # of a warpgroup
CHUNK_WIDTHS = (64, 128, 256)
SMS = 132  # of an H100 or H200
OPERAND = (plgpu.TilingTransform((8, SWIZZLE)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
# The same bytes, but rows can be copied one by one.
ROWS = (plgpu.TilingTransform((1, SWIZZLE)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
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
    stages: int = 3  # at most, of decode items; tiles have 2
    pack: bool = True  # stages hold only the item's blocks, so that small items have more of them under way
    interpret: Any = None
    # Of decode items:
    deltas: int = 2  # buffers of products on their way to y
    whole_window: int = 3  # tokens from which an item adds its window at once instead of row by row

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


def apply_lora(
    x: jax.Array,
    y: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    work: LoraWork,
    *,
    modules: tuple[int, ...],
    in_dim: int,
    out_dims: tuple[int, ...],
    chunk_width: int,
    split: int | None = None,
    interpret: Any = None,
    **tuning: Any,
) -> jax.Array:
    """y[t] += (x[t] A_m^T) B_m of token t's own adapter, for modules m that read one x and are side by
    side in y.

    x bf16 [t, in_dim]; y bf16 [t, sum(out_dims)], updated in place where XLA may; pool bf16 [n_layers,
    n_pages, page_elems]; `modules` are numbers in the order q, k, v, o, gate, up, down and one of
    MODULE_GROUPS. The scaling is part of B. Sums in float32; x A^T and the product with B are each
    rounded to bf16 once. `split` forces over how many thread blocks a decode item's columns are
    divided, `stages` how many steps the copies run ahead; the rest of `tuning` are LoraConfig's. Where t is
    no multiple of 8, or below 64 with tiles, x and y are padded, which copies them. Raises ValueError for
    shapes that the kernels cannot do.
    """
    group = _check(x, y, pool, modules, in_dim, out_dims, chunk_width)
    config = LoraConfig(
        group=group,
        in_dim=in_dim,
        out_dims=out_dims,
        width=chunk_width,
        per_page=pool.shape[2] // (RANK_BLOCK * chunk_width),
        n_pages=pool.shape[1],
        interpret=interpret,
        **tuning,
    )
    out: jax.Array = _apply(config, split, x, y, pool, jnp.asarray(layer, jnp.int32), work)
    return out


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced once, not once a layer
def _apply(
    config: LoraConfig,
    split: int | None,
    x: jax.Array,
    y: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    work: LoraWork,
) -> jax.Array:
    t, nd, nt = x.shape[0], work.decode.shape[1], work.tiles.shape[1]
    if t == 0 or nd + nt == 0:
        return y
    if pad := max(-t % WINDOW, TILE - t if nt else 0):
        x, y = (jnp.pad(a, ((0, pad), (0, 0))) for a in (x, y))
    chunks = pool.reshape(-1, config.width)
    rest = work.pages, layer.reshape(1)
    y_ref = jax.new_ref(y)
    if nd:
        split = split or _split(nd, config)
        if split == 1:
            _decode_kernel(config, nd, 1, "both")(x, chunks, work.decode, *rest, y_ref)
        else:
            split = abs(split)
            h = _decode_kernel(config, nd, split, "shrink")(x, chunks, work.decode, *rest)
            _decode_kernel(config, nd, split, "expand")(h, chunks, work.decode, *rest, y_ref)
    if nt:
        config = dataclasses.replace(config, stages=2)
        split = _split(nt, config)
        h = _tile_shrink_kernel(config, nt, split)(x, chunks, work.tiles, *rest)
        _tile_expand_kernel(config, nt, split)(h, chunks, work.tiles, *rest, y_ref)
    return jax.freeze(y_ref)[:t]


def _check(
    x: jax.Array,
    y: jax.Array,
    pool: jax.Array,
    modules: tuple[int, ...],
    in_dim: int,
    out_dims: tuple[int, ...],
    width: int,
) -> int:
    """The number of the group of modules; raises ValueError for what the kernels cannot do."""
    if modules not in MODULE_GROUPS:
        raise ValueError(f"modules {modules} must be one of the groups that share an input: {MODULE_GROUPS}")
    if x.shape[1:] != (in_dim,) or y.shape != (x.shape[0], sum(out_dims)) or len(out_dims) != len(modules):
        raise ValueError(f"x {x.shape} and y {y.shape} do not fit in_dim {in_dim} and out_dims {out_dims}")
    if any(a.dtype != jnp.bfloat16 for a in (x, y, pool)):
        raise ValueError(f"the Mosaic LoRA kernels take bfloat16, got {x.dtype}, {y.dtype}, {pool.dtype}")
    if width not in CHUNK_WIDTHS:
        raise ValueError(f"chunk_width {width} must be one of {CHUNK_WIDTHS} for the Mosaic LoRA kernels")
    if any(n % width for n in (in_dim, *out_dims)) or pool.shape[2] % (RANK_BLOCK * width):
        raise ValueError(f"chunk_width {width} must divide in_dim {in_dim}, out_dims {out_dims} and the page")
    return MODULE_GROUPS.index(modules)


def _split(items: int, config: LoraConfig) -> int:
    """Over how many thread blocks each item's columns are divided, so that up to two run on every SM."""
    most = min(config.a_chunks, max(config.b_chunks))
    return max(s for s in (1, 2, 4, 8) if s == 1 or (s <= most and items * s <= 2 * SMS))


class _Item:
    """Scalars of the item at hand, read from memory once, and the copies of its rank blocks."""

    def __init__(self, config: LoraConfig, items: Ref, pages: Ref, layer: Ref, index: jax.Array) -> None:
        self.config, self._pages = config, pages
        self.row = pl.multiple_of(items[config.group, index, ROW], WINDOW)
        self.first, self.end = items[config.group, index, FIRST], items[config.group, index, END]
        self.count = self.end  # of a decode item's tokens
        self.ends = [items[config.group, index, ENDS + m] for m in range(3)]
        self.blocks = self.ends[2]
        self._page_base = items[config.group, index, PAGES]
        self._a = [items[config.group, index, A + m] for m in range(len(config.out_dims))]
        self._b = [items[config.group, index, B + m] for m in range(len(config.out_dims))]
        self._first_page = layer[0] * config.n_pages

    def token(self, n: jax.Array | int) -> jax.Array:
        """The nth token of a decode item, counted from the window's first."""
        return lax.rem(lax.shift_right_logical(self.first, jnp.int32(4 * n)), WINDOW)

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
    ) -> None:
        """Start copying chunk k of every block of A, or of B where it has one, to dst [64, W].

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
            source, target = chunks.at[pl.ds(at, RANK_BLOCK)], dst.at[pl.ds(row, RANK_BLOCK)]
            _copy(source, target, barrier, exists, config)

    def _of_module(self, block: jax.Array | int, values: list[jax.Array]) -> jax.Array:
        """The value of the module that `block` belongs to."""
        value = values[0]
        for m in range(1, len(values)):
            value = jnp.where(block >= self.ends[m - 1], values[m], value)
        return value


def _copy(source: Ref, target: Ref, barrier: Ref, condition: jax.Array, config: LoraConfig) -> None:
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


def _zero(w_s: Ref) -> None:
    """Clear the stages, so that rank rows that no copy fills are finite: wgmma multiplies them with zeros."""
    last = w_s.shape[0] - RANKS
    for row in sorted({*range(0, last, RANKS), last}):
        part = w_s.at[pl.ds(row, RANKS)]
        part[...] = plgpu.layout_cast(jnp.zeros(part.shape, part.dtype), plgpu.Layout.WGMMA)


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def _accumulate(shape: tuple[int, int], body: Callable[[Ref], None]) -> jax.Array:
    """The f32 accumulator of a wgmma after body."""

    def scope(acc: Ref) -> jax.Array:
        body(acc)
        return acc[...]  # type: ignore[no-any-return]

    return pl.run_scoped(scope, plgpu.ACC(shape, jnp.float32))  # type: ignore[no-any-return]


def _steps(chunks: int, part: jax.Array, split: int) -> jax.Array:
    """How many of `chunks` fall to a part that takes every split-th."""
    return lax.div(chunks - part + split - 1, split)


def _kernel(
    body: Callable[..., None], config: LoraConfig, warpgroups: int = 1, **kwargs: Any
) -> Callable[..., Any]:
    """plgpu.kernel over (item, part) of one or two `worker`s; bodies order their shared-memory accesses
    with commit_smem themselves.
    """
    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
    )
    if config.interpret is not None:
        kwargs["interpret"] = config.interpret
    if warpgroups > 1:
        kwargs |= {"num_threads": warpgroups, "thread_name": "worker"}
    kernel: Callable[..., Any] = plgpu.kernel(
        body, compiler_params=params, grid_names=("item", "part"), **kwargs
    )
    return kernel


def _decode_kernel(config: LoraConfig, nd: int, split: int, phase: Phase) -> Callable[..., Any]:
    """Of phase "both": (x, chunks, items, pages, layer, y ref); "shrink": the same without y -> h; "expand":
    h instead of x.

    h f32 [split, nd * 64, 8]: r by t of each item, a summand from each part. One warpgroup copies, another
    multiplies.
    """
    n_modules, width = len(config.out_dims), config.width
    tokens = WINDOW * n_modules
    pieces = width // SWIZZLE  # of a chunk's columns, as they are added to y

    def decode(
        x: Ref, chunks: Ref, items: Ref, pages: Ref, layer: Ref, out: Ref, scratch: dict[str, Ref]
    ) -> None:
        index, part = lax.axis_index("item"), lax.axis_index("part")
        item = _Item(config, items, pages, layer, index)
        w_s, full, free = scratch["w_s"], scratch["full_s"], scratch["free_s"]
        few = item.blocks <= FEW
        # wgmma reads 64 rows of a chunk: those past the item's blocks belong to the next, and meet zeros of
        # h.
        rows = RANK_BLOCK * item.blocks if config.pack else RANKS
        held = 1 + lax.div(RING_ROWS - RANKS, jnp.maximum(rows, RANK_BLOCK))  # chunks in the ring
        stages = jnp.minimum(config.stages, held)
        no_steps = part * 0
        shrinks = no_steps if phase == "expand" else _steps(config.a_chunks, part, split)
        expands = no_steps if phase == "shrink" else _steps(max(config.b_chunks), part, split)
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
                pl.when((item.blocks < SLOTS) | _may_start_empty(config, phase))(lambda: _zero(w_s))
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
                    source = x.at[pl.ds(item.row, WINDOW), pl.ds(column, width)]
                    _copy(source, scratch["x_s"].at[stage], barriers.at[stage], is_a, config)

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

            return _accumulate((RANKS, WINDOW), steps)

        def expand(h: jax.Array, y: Ref) -> None:
            h_s, d_s = scratch["h_s"], scratch["d_s"]
            r = _iota((RANKS, WINDOW), 0)
            t = lax.rem(_iota((SWIZZLE, tokens), 1), WINDOW)
            found = [t == jnp.where(n < item.count, item.token(n), -1) for n in range(WINDOW)]
            own = functools.reduce(jnp.logical_or, found)
            for m in range(n_modules):
                mine = (r >= RANK_BLOCK * item.start(m)) & (r < RANK_BLOCK * item.ends[m])
                h_s.at[pl.ds(WINDOW * m, WINDOW)].T[...] = jnp.where(mine, h, 0.0).astype(jnp.bfloat16)
            plgpu.commit_smem()

            def step(i: jax.Array, stage: jax.Array) -> None:
                k = part + split * (i - shrinks)
                wait_until_full(stage)

                def multiply(*accs: Ref) -> list[jax.Array]:
                    for c, acc in enumerate(accs):
                        w = chunk_rows(stage).at[:, pl.ds(SWIZZLE * c, SWIZZLE)]  # r, w
                        plgpu.wgmma(acc, w.T, h_s.T)
                    return [acc[...] for acc in accs]

                acc = plgpu.ACC((SWIZZLE, tokens), jnp.float32)
                deltas = pl.run_scoped(multiply, *[acc] * pieces)
                plgpu.barrier_arrive(free.at[stage])
                # The last chunk of this buffer of d_s has left it.
                plgpu.wait_smem_to_gmem(config.deltas - 1, wait_read_only=True)
                buffer = pieces * tokens * lax.rem(i, config.deltas)
                at_once = item.count >= config.whole_window
                pl.when(at_once)(lambda: store(deltas, buffer, masked=True))
                pl.when(jnp.logical_not(at_once))(lambda: store(deltas, buffer, masked=False))
                plgpu.commit_smem()
                if config.interpret is None:  # whose warps could not add as `_add` does
                    plgpu.warp_map(lambda warp: add_modules(k, buffer, [warp], warp < pieces))
                else:
                    add_modules(k, buffer, range(pieces), True)
                plgpu.commit_smem_to_gmem_group()

            def store(deltas: list[jax.Array], buffer: jax.Array, *, masked: bool) -> None:
                for c, delta in enumerate(deltas):
                    if masked:  # an adapter's NaNs stay with its tokens
                        delta = jnp.where(own, delta, 0.0)
                    d_s.at[pl.ds(buffer + tokens * c, tokens)].T[...] = delta.astype(jnp.bfloat16)

            def add_modules(
                k: jax.Array, buffer: jax.Array, parts: Sequence[jax.Array | int], some: jax.Array | bool
            ) -> None:
                for m in range(n_modules):

                    @pl.when((item.ends[m] > item.start(m)) & (k < config.b_chunks[m]) & some)
                    def _(m: int = m) -> None:
                        add(m, k, buffer, parts)

            def add(m: int, k: jax.Array, buffer: jax.Array, parts: Sequence[jax.Array | int]) -> None:
                @pl.when(item.count < config.whole_window)
                def _() -> None:
                    def add_token(n: jax.Array, _: None) -> None:
                        add_rows(m, k, buffer, parts, item.token(n), 1)

                    lax.fori_loop(0, item.count, add_token, None)

                @pl.when(item.count >= config.whole_window)
                def _() -> None:
                    add_rows(m, k, buffer, parts, 0, WINDOW)  # zeros where the tokens are another item's

            def add_rows(
                m: int,
                k: jax.Array,
                buffer: jax.Array,
                parts: Sequence[jax.Array | int],
                t: jax.Array | int,
                count: int,
            ) -> None:
                for c in parts:
                    column = config.columns[m] + k * width + SWIZZLE * c
                    source = d_s.at[pl.ds(buffer + tokens * c + WINDOW * m + t, count)]
                    _add(source, y.at[pl.ds(item.row + t, count), pl.ds(column, SWIZZLE)], config)

            loop(shrinks, total, step)
            plgpu.wait_smem_to_gmem(0)

        def consume() -> None:
            if phase == "expand":
                expand(_sum_parts(x, split, pl.ds(index * RANKS, RANKS)), out)
            elif phase == "shrink":
                out[part, pl.ds(index * RANKS, RANKS)] = shrink()
            else:
                expand(shrink(), out)

        worker = lax.axis_index("worker")
        pl.when((item.blocks > 0) & (worker == 0))(consume)
        pl.when((item.blocks > 0) & (worker == 1))(produce)

    bf16, reads_x = jnp.bfloat16, phase != "expand"
    scratch = {
        "w_s": plgpu.SMEM((RING_ROWS, width), bf16, transforms=OPERAND),
        "full_s": plgpu.Barrier(num_arrivals=SLOTS + reads_x, num_barriers=config.stages),
        "few_full_s": plgpu.Barrier(num_arrivals=FEW + reads_x, num_barriers=config.stages),
        "free_s": plgpu.Barrier(num_barriers=config.stages),
    }
    if reads_x:
        scratch["x_s"] = plgpu.SMEM((config.stages, WINDOW, width), bf16, transforms=OPERAND)
    if phase != "shrink":
        scratch["h_s"] = plgpu.SMEM((tokens, RANKS), bf16, transforms=OPERAND)  # (m, t), r
        rows = config.deltas * pieces * tokens  # (w/64, m, t), w of 64
        scratch["d_s"] = plgpu.SMEM((rows, SWIZZLE), bf16, transforms=ROWS)
    out_type = jax.ShapeDtypeStruct((split, nd * RANKS, WINDOW), jnp.float32) if phase == "shrink" else ()

    def body(x: Ref, chunks: Ref, items: Ref, pages: Ref, layer: Ref, out: Ref, **scratch: Ref) -> None:
        decode(x, chunks, items, pages, layer, out, scratch)

    body.__name__ = f"lora_decode_{phase}"
    return _kernel(body, config, 2, out_type=out_type, grid=(nd, split), scratch_types=scratch)


def _may_start_empty(config: LoraConfig, phase: Phase) -> bool:
    """Whether a stage may be multiplied before a copy has filled every block of the item once."""
    uneven = min(config.b_chunks) != max(config.b_chunks)
    return uneven and (phase == "expand" or config.a_chunks < config.stages)


def _sum_parts(h: Ref, split: int, rows: Any) -> jax.Array:
    """The sum over parts of h[part, rows], in wgmma's layout."""
    parts = [
        plgpu.load(h.at[part, rows], layout=plgpu.Layout.WGMMA, optimized=False) for part in range(split)
    ]
    return functools.reduce(jnp.add, parts)


def _add(source: Ref, target: Ref, config: LoraConfig) -> None:
    """target (memory) += source (shared memory), by the TMA; the group is committed by the caller."""
    if config.interpret is None:
        plgpu.copy_smem_to_gmem(source, target, commit_group=False, reduction_op="add")
    else:  # the interpreter has no reducing copies
        target[...] = target[...] + source[...]


def _tile_shrink_kernel(config: LoraConfig, nt: int, split: int) -> Callable[..., Any]:
    """(x, chunks, items, pages, layer) -> h f32 [split, nt * 64, 64]: t by r of each tile, a summand a
    part.
    """
    width, stages = config.width, config.stages

    def lora_tile_shrink(
        x: Ref, chunks: Ref, items: Ref, pages: Ref, layer: Ref, h: Ref, x_s: Ref, w_s: Ref, bars: Ref
    ) -> None:
        index, part = lax.axis_index("item"), lax.axis_index("part")
        item = _Item(config, items, pages, layer, index)
        total = _steps(config.a_chunks, part, split)

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
            h[part, pl.ds(index * TILE, TILE)] = _accumulate((TILE, RANKS), steps)

    return _kernel(
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


def _tile_expand_kernel(config: LoraConfig, nt: int, split: int) -> Callable[..., Any]:
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
        item = _Item(config, items, pages, layer, index)
        total = _steps(max(config.b_chunks), part, split)

        def issue(step: jax.Array) -> None:
            stage = lax.rem(step, stages)
            item.copy(chunks, w_s.at[stage], bars.at[stage], part + split * step, False)

        def write_h() -> None:
            """Each module's own rank rows, zero elsewhere."""
            values = _sum_parts(h, split, pl.ds(index * TILE, TILE))
            r = _iota((TILE, RANKS), 1)
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
            delta = _accumulate((TILE, width), functools.partial(plgpu.wgmma, a=h_s.at[m], b=w_s.at[stage]))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            t = _iota((TILE, width), 0)  # an adapter's NaNs stay with its tokens
            delta = jnp.where((t >= item.first) & (t < item.end), delta, 0.0)
            d_s[...] = delta.astype(jnp.bfloat16)
            plgpu.commit_smem()
            add(pl.multiple_of(config.columns[m] + k * width, width))

        def add(column: jax.Array) -> None:
            if config.interpret is None:  # zeros to other tokens' rows; rows past the end are dropped
                _add(d_s, y.at[pl.ds(item.row, TILE), pl.ds(column, width)], config)
                plgpu.commit_smem_to_gmem_group()
                return

            def add_row(t: jax.Array, _: None) -> None:
                _add(d_s.at[pl.ds(t, 1)], y.at[pl.ds(item.row + t, 1), pl.ds(column, width)], config)

            lax.fori_loop(item.first, item.end, add_row, None)

        @pl.when(item.blocks > 0)
        def _() -> None:
            def zero() -> None:
                for stage in range(stages):
                    _zero(w_s.at[stage])

            pl.when((item.blocks < SLOTS) | _may_start_empty(config, "expand"))(zero)
            plgpu.commit_smem()
            for first in range(stages):
                pl.when(first < total)(functools.partial(issue, jnp.int32(first)))
            write_h()
            lax.fori_loop(0, total, step, None)
            plgpu.wait_smem_to_gmem(0)

    return _kernel(
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
