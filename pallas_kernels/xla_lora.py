"""Batched LoRA of mixed adapters and ranks in plain JAX, over rank blocks held in the page pool.

A rank block is 8 rank rows of one adapter's A (or B) for one module: `width / W` chunks `[8, W]`, one
after another over the adapter's pages (which lie anywhere). Tokens are taken in tiles of up to 64. The
host numbers a batch's adapters by the last token that uses them and lists the blocks in that order, so
that the adapters of a tile of prompt tokens are neighbours; a tile then multiplies with the blocks from
its lowest to its highest adapter only, a few at a time, in a loop that ends with the last. Letters: `t`
token, `m` module, `n` rank block, `r` rank row of the blocks at hand, `c` chunk of a block, `w` column of
a chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

N_MODULES = 7  # q, k, v, o, gate, up, down
RANK_BLOCK = 8  # rank rows of a block
BASE, PADDING = -1, -2  # adapter of a token without one; owner of a block that is none
TILE = 64  # most tokens of a tile
BLOCKS_OF_ONE_TILE, BLOCKS_OF_MANY = (
    16,
    4,
)  # a module's blocks in one pass, for a batch of one tile or of many


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraBlocks:
    """The rank blocks of a batch, built by `build_lora_blocks`; all int32."""

    token_adapter: jax.Array  # [t] adapter, numbered by its last token in the batch; -1: base model
    adapter: jax.Array  # [7, nb] owner of each block, ascending in a module; then -2: padding
    page_base: jax.Array  # [7, nb] where in `pages` the owner's pages begin
    a_start: jax.Array  # [7, nb] first chunk of the block of A, counted from the owner's first
    b_start: jax.Array  # [7, nb] the same of B
    pages: jax.Array  # [lp] page lists of the batch's adapters, one after another


# Of an adapter: its pages; then by module (0 where not targeted): rank blocks, first chunk of A, of B.
AdapterBlocks = tuple[np.ndarray | Sequence[int], Sequence[int], Sequence[int], Sequence[int]]


def lora_blocks_needed(adapters: Sequence[AdapterBlocks]) -> tuple[int, int]:
    """The smallest (nb, lp) that hold these adapters: most blocks of any one module, and pages in all."""
    if not adapters:
        return 0, 0
    return int(np.sum([a[1] for a in adapters], axis=0).max()), sum(len(a[0]) for a in adapters)


def build_lora_blocks(
    token_adapter: np.ndarray,
    adapters: Sequence[AdapterBlocks],
    nb: int,
    lp: int,
    *,
    a_chunks: Sequence[int],
    b_chunks: Sequence[int],
) -> dict[str, np.ndarray]:
    """The fields of LoraBlocks as int32 arrays, padded to nb blocks a module and lp pages.

    `token_adapter` [t]: index into `adapters` of each token's, or -1. `a_chunks`, `b_chunks` [7]: chunks in
    one block of A and of B by module. Raises ValueError where nb or lp is too small, or an index has no
    adapter.
    """
    need = lora_blocks_needed(adapters)
    if need[0] > nb or need[1] > lp:
        raise ValueError(f"nb={nb}, lp={lp} are too small: pass at least nb={need[0]}, lp={need[1]}")
    token_adapter = np.asarray(token_adapter, np.int32)
    if len(token_adapter) and token_adapter.max() >= len(adapters):
        raise ValueError(f"token_adapter names adapter {token_adapter.max()} of {len(adapters)}")
    out: dict[str, np.ndarray] = {
        name: np.zeros((N_MODULES, nb), np.int32) for name in ("page_base", "a_start", "b_start")
    }
    out["adapter"] = np.full((N_MODULES, nb), PADDING, np.int32)
    out["pages"] = np.zeros(lp, np.int32)
    if not adapters:
        return out | {"token_adapter": token_adapter}

    used = np.flatnonzero(token_adapter >= 0)
    last_token = np.full(len(adapters), -1)
    last_token[token_adapter[used]] = used  # of repeated indices the last one stays
    order = np.argsort(last_token, kind="stable")
    new_number = np.empty(len(adapters) + 1, np.int32)
    new_number[order] = np.arange(len(adapters))
    new_number[-1] = BASE
    out["token_adapter"] = new_number[np.maximum(token_adapter, -1)]

    lists, *tables = zip(*(adapters[i] for i in order), strict=True)
    counts, a_first, b_first = (np.array(table, np.int32).T for table in tables)  # [7, adapters]
    lengths = np.array([len(pages) for pages in lists], np.int32)
    out["pages"][: need[1]] = np.concatenate(lists)
    module, owner = (np.repeat(index.ravel(), counts.ravel()) for index in np.indices(counts.shape))
    totals = counts.sum(1)
    column = np.arange(len(owner)) - np.repeat(np.cumsum(totals) - totals, totals)
    before = np.cumsum(counts) - counts.ravel()
    place = np.arange(len(owner)) - np.repeat(before, counts.ravel())  # number within the adapter's module
    out["adapter"][module, column] = owner
    out["page_base"][module, column] = (np.cumsum(lengths) - lengths)[owner]
    out["a_start"][module, column] = a_first[module, owner] + place * np.asarray(a_chunks)[module]
    out["b_start"][module, column] = b_first[module, owner] + place * np.asarray(b_chunks)[module]
    return out


def apply_lora(
    x: jax.Array,
    y: jax.Array,
    pool: jax.Array,
    layer: int | jax.Array,
    blocks: LoraBlocks,
    *,
    modules: tuple[int, ...],
    in_dim: int,
    out_dims: tuple[int, ...],
    chunk_width: int,
) -> jax.Array:
    """y[t] += (x[t] A_m^T) B_m of token t's own adapter, for modules m that read one x, side by side in y.

    x [t, in_dim]; y [t, sum(out_dims)]; pool [n_layers, n_pages, page_elems]; `modules` are numbers in the
    order q, k, v, o, gate, up, down. The scaling is part of B. Computes in float32; returns y's dtype. Time
    follows the rank blocks that each tile of tokens uses; nothing is computed where no adapter of the batch
    has the modules.
    """
    t, nb = x.shape[0], blocks.adapter.shape[1]
    if t == 0 or nb == 0:
        return y
    n_tiles = -(-t // TILE)
    size = -(-t // n_tiles)
    step = min(nb, BLOCKS_OF_ONE_TILE if n_tiles == 1 else BLOCKS_OF_MANY)
    chunk_elems = RANK_BLOCK * chunk_width
    per_page = pool.shape[2] // chunk_elems
    rows = pool.reshape(-1, chunk_elems)

    # What follows is the same in every layer: keep `layer` out of it, so that unrolled layers share it.
    owner, begin, end = _tile_ranges(blocks, modules, n_tiles, size, step)
    tiles = _tile_starts(t, n_tiles, size)
    a_rows = [_chunk_rows(blocks, m, blocks.a_start, in_dim // chunk_width, per_page, step) for m in modules]
    b_rows = [
        _chunk_rows(blocks, m, blocks.b_start, width // chunk_width, per_page, step)
        for m, width in zip(modules, out_dims, strict=True)
    ]

    def gather(row: jax.Array) -> jax.Array:
        """Chunks row [c, n] of this layer as [c, r, w]."""
        # The barrier keeps XLA from fusing the reshape into the gather, which would then copy a chunk's rows
        # one by one with index arithmetic between them: twice as slow on a CPU.
        got: jax.Array = lax.optimization_barrier(
            rows.at[row + layer * pool.shape[1] * per_page].get(mode="promise_in_bounds")
        )
        return got.reshape(row.shape[0], -1, chunk_width).astype(jnp.float32)

    def tile(j: jax.Array | int, y: jax.Array) -> jax.Array:
        first = tiles[j]
        adapter = lax.dynamic_slice_in_dim(blocks.token_adapter, first, size)
        adapter = jnp.where(
            first + jnp.arange(size) >= j * size, adapter, BASE
        )  # not the tile before's tokens
        x_tile = lax.dynamic_slice_in_dim(x, first, size).astype(jnp.float32)
        x_tile = x_tile.reshape(size, in_dim // chunk_width, chunk_width).transpose(1, 2, 0)  # [c, w, t]

        def some(i: jax.Array, delta: jax.Array) -> jax.Array:
            def now(table: jax.Array, k: int) -> jax.Array:
                return lax.dynamic_slice_in_dim(table, begin[j, k] + i * step, step, axis=-1)

            h = jnp.einsum("crw,cwt->crt", gather(_join([now(r, k) for k, r in enumerate(a_rows)])), x_tile)
            mine = jnp.repeat(_join([now(o, k) for k, o in enumerate(owner)]), RANK_BLOCK)[:, None] == adapter
            h = jnp.where(mine, jnp.sum(h, axis=0), 0).T  # [t, r of all modules]
            parts = []
            for k, r in enumerate(b_rows):
                h_k = h[:, k * step * RANK_BLOCK : (k + 1) * step * RANK_BLOCK]
                parts.append(jnp.einsum("tr,crw->tcw", h_k, gather(now(r, k))).reshape(size, -1))
            return delta + _join(parts)

        delta = jnp.zeros((size, y.shape[1]), jnp.float32)
        delta = lax.fori_loop(0, -(-jnp.max(end[j] - begin[j]) // step), some, delta)
        new = lax.dynamic_slice_in_dim(y, first, size).astype(jnp.float32) + delta
        return lax.dynamic_update_slice_in_dim(y, new.astype(y.dtype), first, 0)

    if n_tiles == 1:
        out: jax.Array = lax.cond(jnp.max(end) > 0, lambda y: tile(0, y), lambda y: y, y)
    else:
        out = lax.fori_loop(0, jnp.where(jnp.max(end) > 0, n_tiles, 0), tile, y)
    return out


def merge_lora(
    w: jax.Array,
    pool: jax.Array,
    layer: int | jax.Array,
    blocks: LoraBlocks,
    *,
    modules: tuple[int, ...],
    in_dim: int,
    out_dims: tuple[int, ...],
    chunk_width: int,
) -> jax.Array:
    """w[i, o] + sum_r A_m[r, i] B_m[r, o] of the one adapter in `blocks`, for modules m side by side in w.

    w [in_dim, sum(out_dims)]; the other arguments are `apply_lora`'s. The product and the sum are float32,
    rounded once to w's dtype.
    """
    chunk_elems = RANK_BLOCK * chunk_width
    per_page = pool.shape[2] // chunk_elems
    rows = pool.reshape(-1, chunk_elems)

    def matrix(module: int, start: jax.Array, width: int) -> jax.Array:
        """A (or B) [r, width], zero beyond the adapter's rank."""
        row = _chunk_rows(blocks, module, start, width // chunk_width, per_page, 0)  # [c, n]
        got = rows.at[row + layer * pool.shape[1] * per_page].get(mode="promise_in_bounds")
        return got.reshape(*row.shape, RANK_BLOCK, chunk_width).transpose(1, 2, 0, 3).reshape(-1, width)

    deltas = [
        jnp.einsum(
            "ri,ro->io",
            matrix(m, blocks.a_start, in_dim),
            matrix(m, blocks.b_start, width),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        for m, width in zip(modules, out_dims, strict=True)
    ]
    return (w.astype(jnp.float32) + _join(deltas)).astype(w.dtype)


def _tile_starts(t: int, n_tiles: int, size: int) -> jax.Array:
    """First token of each tile; the last tile may overlap the one before."""
    return jnp.minimum(jnp.arange(n_tiles, dtype=jnp.int32) * size, t - size)


def _tile_ranges(
    blocks: LoraBlocks, modules: tuple[int, ...], n_tiles: int, size: int, step: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Owners [m, nb + step] (padded), and which of the blocks each tile may need: begin, end [n_tiles, m]."""
    owner = blocks.adapter[jnp.asarray(modules, jnp.int32)]
    adapter = jnp.pad(
        blocks.token_adapter, (0, n_tiles * size - len(blocks.token_adapter)), constant_values=BASE
    ).reshape(n_tiles, size)
    lowest = jnp.min(jnp.where(adapter >= 0, adapter, np.iinfo(np.int32).max), axis=1)[:, None, None]
    highest = jnp.max(adapter, axis=1)[:, None, None]
    real = owner >= 0
    end = jnp.sum(real & (owner <= highest), axis=2, dtype=jnp.int32)
    begin = jnp.minimum(jnp.sum(real & (owner < lowest), axis=2, dtype=jnp.int32), end)
    return jnp.pad(owner, ((0, 0), (0, step)), constant_values=PADDING), begin, end


def _chunk_rows(
    blocks: LoraBlocks, module: int, start: jax.Array, n_chunks: int, per_page: int, step: int
) -> jax.Array:
    """Where in a layer the chunks of the module's blocks lie, counted in chunks: int32 [c, nb + step].

    Padding blocks are chunk 0, in page 0, which is all zero.
    """
    chunk = start[module] + jnp.arange(n_chunks, dtype=jnp.int32)[:, None]
    page = blocks.pages.at[blocks.page_base[module] + chunk // per_page].get(mode="clip")
    row = jnp.where(blocks.adapter[module] >= 0, page * per_page + chunk % per_page, 0)
    return jnp.pad(row, ((0, 0), (0, step)))


def _join(parts: list[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
