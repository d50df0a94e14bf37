"""Batched LoRA of mixed adapters and ranks for Hopper, over rank blocks held in the page pool.

Written with Pallas' Mosaic GPU backend. `lora_work` says what an item is. Weights reach shared memory as
TMA copies of chunks `[8, W]`, 4 KiB at W=256, two or three steps ahead of the tensor cores. A step of the
shrink multiplies all rank rows with one chunk of columns; a step of the expand multiplies all rank rows with
one chunk of each module's output columns, and the TMA adds the result to y in memory, so that rows that no
adapter touches cost nothing; full tiles read y and store the sum.

Decode items and runs (`mosaic_lora_decode`), each a thread block, put the weights on wgmma's long side (64
rank rows by 8 or 16 tokens), tiles (`mosaic_lora_tiles`, `mosaic_lora_tile_expand`) the tokens (64 by 64 rank
rows). With many decode items one launch does both halves, the expand's weights already under way while the
shrink ends; with few, and for tiles, the columns are split over more thread blocks and the intermediate `h`
passes through memory between two launches.

Letters: `t` token, `r` rank row of an item's 64, `w` column of a chunk, `m` module of the launch.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from slora_jax.pallas_kernels.lora_work import MODULE_GROUPS, RUN, TILE, WINDOW, LoraWork, has_runs
from slora_jax.pallas_kernels.mosaic_lora_decode import decode_kernel
from slora_jax.pallas_kernels.mosaic_lora_item import LoraConfig
from slora_jax.pallas_kernels.mosaic_lora_tile_expand import tile_expand_kernel
from slora_jax.pallas_kernels.mosaic_lora_tiles import tile_shrink_kernel
from slora_jax.pallas_kernels.xla_lora import RANK_BLOCK

CHUNK_WIDTHS = (64, 128, 256)


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
    rounded to bf16 once. `split` forces over how many thread blocks a decode item's or run's columns are
    divided; `tuning` are LoraConfig's. Where t is no multiple of 8, or below 16 with runs or 64 with tiles,
    x and y are padded, which copies them. Raises ValueError for shapes that the kernels cannot do.
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
    t, (nd, nr, nt) = x.shape[0], (items.shape[1] for items in (work.decode, work.runs, work.tiles))
    if t == 0 or nd + nr + nt == 0:
        return y
    if pad := max(-t % WINDOW, RUN - t if nr else 0, TILE - t if nt else 0):
        x, y = (jnp.pad(a, ((0, pad), (0, 0))) for a in (x, y))
    chunks = pool.reshape(-1, config.width)
    rest = work.pages, layer.reshape(1)
    y_ref = jax.new_ref(y)
    items = work.decode
    if nr and has_runs(config.group):
        config, items = dataclasses.replace(config, window=RUN), work.runs
    if n := items.shape[1]:
        parts = split or _split(n, config)
        if parts == 1:
            decode_kernel(config, n, 1, "both")(x, chunks, items, *rest, y_ref)
        else:
            h = decode_kernel(config, n, parts, "shrink")(x, chunks, items, *rest)
            decode_kernel(config, n, parts, "expand")(h, chunks, items, *rest, y_ref)
    if nt:
        h = tile_shrink_kernel(config, nt)(x, chunks, work.tiles, *rest)
        tile_expand_kernel(config, nt)(h, chunks, work.tiles, *rest, y_ref)
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
    return max(s for s in (1, 2, 4, 8) if s == 1 or (s <= most and items * s <= 2 * config.sms))
