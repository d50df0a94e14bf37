"""Paged attention in plain JAX: the backend for CPUs, and what kernels of other backends are compared with.

A page of one layer is read as `[2, n_kv, page_tokens, head_dim]` (K first). Letters: `t` query token, `b`
row (a sequence, or a tile of a prompt), `u` unit (a row and one block of its context), `h` query head, `k`
KV head, `g` query heads of one KV head, `e` head dim, `m` pages of a sequence, `c` context token of a block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

BLOCK_TOKENS = 256  # context tokens that one unit of work reads
LOOP_QUERIES = 256  # query tokens that one pass of the loop over units takes
FLOOR = -1e30  # the maximum of no scores


def rope_write_kv(
    pool: jax.Array,
    layer: int | jax.Array,
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    page: jax.Array,
    offset: jax.Array,
    *,
    n_kv: int,
    page_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """pool[layer, page[t]].kv[:, :, offset[t]] = (rope(k[t]), v[t]), in place where the pool is donated.

    pool [n_layers, n_pages, page_elems]; qkv [t, h + 2 n_kv, head_dim]: the heads of q, of k, of v; cos, sin
    f32[t, head_dim / 2] of the tokens' positions; page, offset int32 [t] (page -1: dropped). Returns (pool,
    rope(q) [t, h, head_dim]).
    """
    h = qkv.shape[1] - 2 * n_kv
    q, k, v = jnp.split(qkv, (h, h + n_kv), axis=1)
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    return write_kv(pool, layer, k, v, page, offset, page_tokens=page_tokens), q


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the halves of each head: x [t, h, e], cos and sin f32[t, e/2] -> [t, h, e] in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def write_kv(
    pool: jax.Array,
    layer: int | jax.Array,
    k: jax.Array,
    v: jax.Array,
    page: jax.Array,
    offset: jax.Array,
    *,
    page_tokens: int,
) -> jax.Array:
    """pool[layer, page[t]].kv[:, :, offset[t]] = (k[t], v[t]), in place where the pool is donated.

    pool [n_layers, n_pages, page_elems]; k, v [t, n_kv, head_dim]; page, offset int32 [t] (page -1: dropped).
    """
    n_layers, n_pages, _ = pool.shape
    _, n_kv, e = k.shape
    row = jnp.where(page < 0, n_layers * n_pages, layer * n_pages + page)
    view = pool.reshape(n_layers * n_pages, 2, n_kv, page_tokens, e)
    kv = jnp.stack((k, v), axis=1).astype(pool.dtype)  # [t, 2, k, e]
    return view.at[row, :, :, offset].set(kv, mode="drop").reshape(pool.shape)


def decode_attention(
    q: jax.Array,
    pool: jax.Array,
    layer: int | jax.Array,
    page_table: jax.Array,
    kv_len: jax.Array,
    *,
    n_kv: int,
    page_tokens: int,
    scale: float,
) -> jax.Array:
    """out[s] = softmax(scale * q[s] K[:kv_len[s]]^T) V[:kv_len[s]], one query token a sequence, in float32.

    q [s, h, e]; page_table int32 [s, m]; kv_len int32 [s], the query's own token included (0: a padding row,
    whose output is 0). Query head h reads KV head h // (h / n_kv). Returns [s, h, e] in q's dtype.
    """
    last = kv_len[:, None] - 1
    out = _attend(q[:, None], pool, layer, page_table, last, n_kv=n_kv, page_tokens=page_tokens, scale=scale)
    return out.reshape(q.shape)


def prefill_attention(
    q: jax.Array,
    pool: jax.Array,
    layer: int | jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    tile_seq: jax.Array,
    tile_start: jax.Array,
    tile_len: jax.Array,
    tile_row: jax.Array,
    *,
    n_kv: int,
    page_tokens: int,
    tile: int,
    scale: float,
) -> jax.Array:
    """Causal attention of ragged prompt chunks over all that their sequences' pages hold, in float32.

    q [t, h, e]; page_table int32 [b, m]; positions int32 [t]. Tile j holds the tile_len[j] (at most `tile`)
    tokens from tile_start[j] on, of sequence row tile_seq[j] (-1: padding). Token t's output is row
    tile_row[t] = j * tile + o of the tiles' outputs (0 for padding tokens, whose output is finite and means
    nothing). Returns [t, h, e] in q's dtype.
    """
    t, h, e = q.shape
    offset = jnp.arange(tile, dtype=jnp.int32)
    token = jnp.clip(tile_start[:, None] + offset, 0, t - 1)  # [n, tile]
    live = (offset < tile_len[:, None]) & (tile_seq[:, None] >= 0)
    last = jnp.where(live, positions[token], -1)
    table = page_table[jnp.maximum(tile_seq, 0)]
    out = _attend(q[token], pool, layer, table, last, n_kv=n_kv, page_tokens=page_tokens, scale=scale)
    return out.reshape(-1, h, e)[tile_row]


def _attend(
    q: jax.Array,
    pool: jax.Array,
    layer: int | jax.Array,
    page_table: jax.Array,
    last: jax.Array,
    *,
    n_kv: int,
    page_tokens: int,
    scale: float,
) -> jax.Array:
    """Attention of q [b, t, h, e] where token t of row b sees context 0 .. last[b, t] (-1: none, gives 0).

    Rows are cut into units, one for each block of context that a row really has; a loop takes some units at a
    time and stops after the last, so that time follows the true lengths, not the table's width. Partial
    softmaxes of a row's units are then merged (as flash decoding does). A table of one block needs neither.
    """
    b, t, h, e = q.shape
    pages = max(1, min(page_table.shape[1], BLOCK_TOKENS // page_tokens))  # of a block
    n_blocks = -(-page_table.shape[1] // pages)
    table = jnp.pad(page_table, ((0, 0), (0, n_blocks * pages - page_table.shape[1])))
    table = table.reshape(b * n_blocks, pages)
    grouped = (q.astype(jnp.float32) * scale).reshape(b, t, n_kv, h // n_kv, e).transpose(0, 2, 3, 1, 4)

    def units(row: jax.Array, block: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        visible = last[row] - block[:, None] * (pages * page_tokens)  # [u, t]
        return _block(q, pool, layer, table[row * n_blocks + block], visible, page_tokens=page_tokens)

    step = min(b, max(1, LOOP_QUERIES // t))
    if n_blocks == 1 and step == b:
        everything = jnp.arange(b, dtype=jnp.int32)
        out, total, _ = units(everything, jnp.zeros_like(everything), grouped)
        out = out / jnp.maximum(total, 1e-30)[..., None]
    else:
        count = jnp.max(last, axis=1) // (pages * page_tokens) + 1  # [b] blocks that a row has
        end = jnp.cumsum(count)
        size = -(-b * n_blocks // step) * step
        number = jnp.arange(size, dtype=jnp.int32)
        row_of = jnp.minimum(jnp.searchsorted(end, number, side="right").astype(jnp.int32), b - 1)
        block_of = jnp.minimum(number - (end - count)[row_of], n_blocks - 1)

        def some(
            i: jax.Array, parts: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            row = lax.dynamic_slice(row_of, (i * step,), (step,))
            block = lax.dynamic_slice(block_of, (i * step,), (step,))
            new = units(row, block, grouped[row])
            return tuple(  # type: ignore[return-value]
                lax.dynamic_update_slice_in_dim(part, x, i * step, 0)
                for part, x in zip(parts, new, strict=True)
            )

        shape = (size, *grouped.shape[1:4])
        parts = (jnp.zeros((*shape, e)), jnp.zeros(shape), jnp.full(shape, FLOOR))
        parts = lax.fori_loop(0, -(-end[-1] // step), some, parts)
        out = _merge(*parts, first=end - count, count=count, n_blocks=n_blocks)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def _block(
    q: jax.Array,
    pool: jax.Array,
    layer: int | jax.Array,
    pages: jax.Array,
    visible: jax.Array,
    *,
    page_tokens: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """exp(q K^T - top) V, its row sums, and top, over one block of context a unit.

    q [u, k, g, t, e] (scaled); pages int32 [u, m]; visible int32 [u, t]: last visible token of the block
    (negative: none; the block's end or more: all). Returns [u, k, g, t, e], [u, k, g, t], [u, k, g, t].
    """
    n_layers, n_pages, _ = pool.shape
    u, n_kv, g, t, e = q.shape
    m = pages.shape[1]
    far = jnp.max(visible, axis=1)[:, None]  # [u, 1]
    unread = jnp.arange(m) * page_tokens > far
    pages = jnp.where(unread, 0, pages)  # the null page stays in the cache
    rows = pool.reshape(n_layers * n_pages * 2 * n_kv, page_tokens * e)
    first = ((layer * n_pages + pages) * 2 * n_kv)[:, None, :] + jnp.arange(n_kv)[:, None]  # [u, k, m]
    context = jnp.arange(m * page_tokens)

    def read(rows_of: jax.Array) -> jax.Array:
        # The barrier keeps XLA from fusing the reshape into the gather, which would then copy head_dim
        # elements at a time with index arithmetic between them: twice as slow on a CPU.
        got: jax.Array = lax.optimization_barrier(rows.at[rows_of].get(mode="promise_in_bounds"))
        return got.reshape(u, n_kv, m * page_tokens, e).astype(jnp.float32)

    score = jnp.einsum("ukxe,ukce->ukxc", q.reshape(u, n_kv, g * t, e), read(first))
    score = score.reshape(u, n_kv, g, t, m * page_tokens)
    score = jnp.where(context <= visible[:, None, None, :, None], score, -jnp.inf)
    top = jnp.maximum(jnp.max(score, axis=-1), FLOOR)
    weight = jnp.exp(score - top[..., None])
    v = jnp.where((context <= far)[:, None, :, None], read(first + n_kv), 0)  # others' leftovers may be NaN
    out = jnp.einsum("ukxc,ukce->ukxe", weight.reshape(u, n_kv, g * t, m * page_tokens), v)
    return out.reshape(q.shape), jnp.sum(weight, axis=-1), top


def _merge(
    out: jax.Array, total: jax.Array, top: jax.Array, *, first: jax.Array, count: jax.Array, n_blocks: int
) -> jax.Array:
    """The softmax-weighted sums of rows whose units are first[b] .. + count[b] of out [u, k, g, t, e]."""
    block = jnp.arange(n_blocks)
    unit = jnp.minimum(first[:, None] + block, out.shape[0] - 1)  # [b, n_blocks]
    mine = (block < count[:, None])[:, :, None, None, None]
    tops = jnp.where(mine, top[unit], FLOOR)
    factor = jnp.where(mine, jnp.exp(tops - jnp.max(tops, axis=1, keepdims=True)), 0)
    summed = jnp.sum(factor * total[unit], axis=1)
    return jnp.sum(factor[..., None] * out[unit], axis=1) / jnp.maximum(summed, 1e-30)[..., None]
