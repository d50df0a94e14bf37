"""Batched LoRA of mixed adapters and ranks in plain JAX, over rank blocks held in the page pool.

A rank block is 8 rank rows of one adapter's A (or B) for one module: `width / W` chunks `[8, W]`, one after another
over the adapter's pages (which lie anywhere). Letters: `t` token, `n` rank block, `c` chunk of a block, `r` rank row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

N_MODULES = 7  # q, k, v, o, gate, up, down
RANK_BLOCK = 8
BASE, PADDING = -1, -2  # adapter of a token without one; owner of a block that is none


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraBlocks:
    """The rank blocks of a batch, built by `build_lora_blocks`; all int32."""

    token_adapter: jax.Array  # [t] adapter in this batch; -1: base model
    adapter: jax.Array  # [7, nb] owner of each block; -2: padding
    page_base: jax.Array  # [7, nb] where in `pages` the owner's pages begin
    a_start: jax.Array  # [7, nb] first chunk of the block of A, counted from the owner's first
    b_start: jax.Array  # [7, nb] the same of B
    pages: jax.Array  # [lp] page lists of the batch's adapters, one after another


AdapterBlocks = tuple[np.ndarray, Sequence[int], Sequence[int], Sequence[int]]


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
    """The fields of LoraBlocks as NumPy arrays, padded to nb blocks a module and lp pages.

    `adapters[i]` is (pages, rank_blocks [7], a_start [7], b_start [7]) of the adapter that token_adapter calls i;
    `a_chunks`, `b_chunks` [7]: chunks in one block of A and B by module. Raises ValueError where nb or lp is too small.
    """
    need = lora_blocks_needed(adapters)
    if need[0] > nb or need[1] > lp:
        raise ValueError(f"nb={nb}, lp={lp} are too small for this batch: pass at least nb={need[0]}, lp={need[1]}")
    out = {name: np.zeros((N_MODULES, nb), np.int32) for name in ("page_base", "a_start", "b_start")}
    out["adapter"] = np.full((N_MODULES, nb), PADDING, np.int32)
    out["token_adapter"] = np.asarray(token_adapter, np.int32)
    out["pages"] = np.zeros(lp, np.int32)
    if not adapters:
        return out
    lists, *tables = zip(*adapters, strict=True)
    counts, a_first, b_first = (np.asarray(table, np.int32) for table in tables)  # [adapters, 7] each
    out["pages"][: need[1]] = np.concatenate(lists)
    base = np.cumsum([0, *map(len, lists[:-1])], dtype=np.int32)
    flat = counts.T.ravel()  # module by module, [7 * adapters]
    owner = np.repeat(np.tile(np.arange(len(adapters), dtype=np.int32), N_MODULES), flat)
    module = np.repeat(np.arange(N_MODULES), counts.sum(0))
    place = np.arange(len(owner)) - np.repeat(np.cumsum(flat) - flat, flat)  # block number within (module, adapter)
    column = np.arange(len(owner)) - np.repeat(np.cumsum(counts.sum(0)) - counts.sum(0), counts.sum(0))
    out["adapter"][module, column] = owner
    out["page_base"][module, column] = base[owner]
    out["a_start"][module, column] = a_first[owner, module] + place * np.asarray(a_chunks)[module]
    out["b_start"][module, column] = b_first[owner, module] + place * np.asarray(b_chunks)[module]
    return out


def apply_lora(
    x: jax.Array,
    y: jax.Array,
    pool: jax.Array,
    layer: int,
    blocks: LoraBlocks,
    *,
    modules: tuple[int, ...],
    in_dim: int,
    out_dims: tuple[int, ...],
    chunk_width: int,
) -> jax.Array:
    """y[t] += (x[t] A_m^T) B_m of token t's own adapter, for modules that read the same x and lie side by side in y.

    x [t, in_dim]; y [t, sum(out_dims)]; pool [n_layers, n_pages, page_elems]; `modules` are numbers in the order
    q, k, v, o, gate, up, down. The scaling is part of B. Accumulates in float32; returns y's dtype. Skipped at run
    time where no adapter of the batch has these modules.
    """
    if blocks.adapter.shape[1] == 0:
        return y
    nb = blocks.adapter.shape[1]
    rows = jnp.asarray(modules)
    owner = blocks.adapter[rows]  # [modules, nb]

    def add(y: jax.Array) -> jax.Array:
        hit = owner.reshape(-1)[None] == blocks.token_adapter[:, None]  # [t, modules * nb]
        a = _gather(pool, layer, blocks, rows, blocks.a_start[rows], in_dim, chunk_width)
        h = jnp.einsum("td,nd->tn", x.astype(jnp.float32), a)
        h = jnp.where(jnp.repeat(hit, RANK_BLOCK, axis=1), h, 0)
        parts = []
        for i, (module, width) in enumerate(zip(modules, out_dims, strict=True)):
            one = jnp.asarray([module])
            b = _gather(pool, layer, blocks, one, blocks.b_start[one], width, chunk_width)
            part = h[:, i * nb * RANK_BLOCK : (i + 1) * nb * RANK_BLOCK]
            parts.append(part @ b)
        return (y.astype(jnp.float32) + jnp.concatenate(parts, axis=1)).astype(y.dtype)

    return lax.cond(jnp.any(owner >= 0), add, lambda y: y, y)


def _gather(
    pool: jax.Array,
    layer: int,
    blocks: LoraBlocks,
    rows: jax.Array,
    start: jax.Array,
    width: int,
    chunk_width: int,
) -> jax.Array:
    """The blocks that begin at chunks `start` [modules, nb] as one matrix [modules * nb * 8, width]; padding is zero."""
    n_layers, n_pages, page_elems = pool.shape
    per_page = page_elems // (RANK_BLOCK * chunk_width)
    chunk = start[..., None] + jnp.arange(width // chunk_width)  # [modules, nb, c]
    page = blocks.pages[blocks.page_base[rows][..., None] + chunk // per_page]
    page = jnp.where(blocks.adapter[rows][..., None] >= 0, page, 0)
    first = ((layer * n_pages + page) * per_page + chunk % per_page) * RANK_BLOCK
    row = first[:, :, None, :] + jnp.arange(RANK_BLOCK)[:, None]  # [modules, nb, 8, c]
    view = pool.reshape(n_layers * n_pages * per_page * RANK_BLOCK, chunk_width)
    return view[row].reshape(-1, width).astype(jnp.float32)
