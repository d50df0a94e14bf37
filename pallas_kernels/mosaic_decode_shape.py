"""What a decode kernel is compiled for and what it works on: the `z` and `m` of all `mosaic_decode_*`.

Letters as in xla_attention; `c` is a chunk's token; `rows` are a group's query heads, in whole 8-row tiles.
`stretch` is a stretch's number, `wg` a multiplying warpgroup's in its thread block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

NO_SCORE = -1e30  # of a token that is not there; exp2 of it is 0, and it is less than any score
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # of a vector, one value a column of a product


class DecodeShape(NamedTuple):
    """Static facts of a decode kernel."""

    batch: int
    max_pages: int
    n_kv: int
    group: int
    stride: int  # rows of q from one item's to the next's: TMA fills swizzled memory from one 8-row tile
    e: int
    page_tokens: int
    n_pages: int
    n_stretches: int
    columns: int  # numbers of a stretch in the plan
    consumers: int
    stages: int
    chunk: int
    scale: float
    interpreted: bool

    @property
    def rows(self) -> int:
        """Query rows that are copied and multiplied, of one item."""
        return query_rows(self.group)

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


class DecodeMemory(NamedTuple):
    """What a decode kernel reads and writes: its operands, its outputs, then shared memory and barriers."""

    layer: Any  # i32[1]
    stretches: Any  # i32[n_stretches * columns]
    walk: Any  # i32[b * 2]
    kv_len: Any  # i32[b]
    table: Any  # i32[b * m]
    q: Any  # bf16[b * n_kv * stride, e]
    pool: Any  # bf16[layers * pages * 2 * n_kv * page_tokens, e]
    counters: Any  # i32[n_stretches] parts stored of the item that begins in a stretch; 0 at first
    out: Any  # bf16[b * h, e]
    parts: (
        Any  # f32[n_stretches * 2, e, rows] sums of weighted values; part 0 goes on from the stretch before
    )
    sums: Any  # f32[n_stretches * 2 * 2 * rows] of a part the largest scores, then the sums of weights
    q_s: Any  # bf16[consumers, stages, rows, e]
    k_s: Any  # bf16[consumers, stages, chunk, e]
    v_s: Any  # bf16[consumers, stages, chunk, e]
    p_s: Any  # bf16[consumers, rows, chunk] weights
    o_s: Any  # bf16[consumers, rows, e]
    across: Any  # f32[consumers, 32 * rows] what warps tell each other
    q_bar: Any  # [consumers * stages], as the following
    k_bar: Any
    v_bar: Any
    k_free: Any
    v_free: Any


def query_rows(group: int) -> int:
    """Rows that a group of query heads takes, in whole swizzled 8-row tiles."""
    return 8 if group <= 8 else 16


def spread(x: jax.Array, n: int) -> jax.Array:
    """[n, x.size] of n equal rows x."""
    return lax.broadcast_in_dim(x, (n, x.shape[0]), [1])


def transposed(x: jax.Array) -> jax.Array:
    """x in the registers that store it to a transposed reference."""
    cast: jax.Array = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
    return cast
