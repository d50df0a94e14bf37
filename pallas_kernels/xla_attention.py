"""Paged attention in plain JAX: the backend for CPUs, and what every kernel of another backend is compared with.

A page of one layer is read as `[2, n_kv, page_tokens, head_dim]` (K first). Letters: `t` token, `s`/`b` sequence,
`h` query head, `k` KV head, `g` query heads of one KV head, `e` head dim, `m` pages of a sequence, `c` context token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def write_kv(
    pool: jax.Array,
    layer: int,
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
    t, n_kv, e = k.shape
    row = jnp.where(page < 0, n_layers * n_pages, layer * n_pages + page)
    view = pool.reshape(n_layers * n_pages, 2, n_kv, page_tokens, e)
    kv = jnp.stack((k, v), axis=1).astype(pool.dtype)  # [t, 2, k, e]
    return view.at[row, :, :, offset].set(kv, mode="drop").reshape(pool.shape)


def decode_attention(
    q: jax.Array,
    pool: jax.Array,
    layer: int,
    page_table: jax.Array,
    kv_len: jax.Array,
    *,
    n_kv: int,
    page_tokens: int,
    scale: float,
) -> jax.Array:
    """out[s] = softmax(scale * q[s] K[:kv_len[s]]^T) V[:kv_len[s]], one query token a sequence, softmax in float32.

    q [s, h, e]; page_table int32 [s, m]; kv_len int32 [s], the query's own token included (0: a padding row, whose
    output is finite and means nothing). Query head h reads KV head h // (h / n_kv). Returns [s, h, e] in q's dtype.
    """
    s = q.shape[0]
    return _attend(
        q[:, None], pool, layer, page_table, kv_len[:, None] - 1, n_kv=n_kv, page_tokens=page_tokens, scale=scale
    ).reshape(s, *q.shape[1:])


def prefill_attention(
    q: jax.Array,
    pool: jax.Array,
    layer: int,
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
    """Causal attention of ragged prompt chunks over everything in their sequences' pages, softmax in float32.

    q [t, h, e]; page_table int32 [b, m]; positions int32 [t]. Tile j holds tokens tile_start[j] .. + tile_len[j]
    (at most `tile`) of sequence row tile_seq[j] (-1: padding). Token t's output is row tile_row[t] = j * tile + o of
    the tiles' outputs (0 for padding tokens, whose output is finite and means nothing). Returns [t, h, e].
    """
    t, h, e = q.shape
    offset = jnp.arange(tile)
    token = jnp.clip(tile_start[:, None] + offset, 0, t - 1)  # [n, tile]
    live = (offset < tile_len[:, None]) & (tile_seq[:, None] >= 0)
    last = jnp.where(live, positions[token], -1)
    table = page_table[jnp.maximum(tile_seq, 0)]
    out = _attend(q[token], pool, layer, table, last, n_kv=n_kv, page_tokens=page_tokens, scale=scale)
    return out.reshape(-1, h, e)[tile_row]


def _attend(
    q: jax.Array,
    pool: jax.Array,
    layer: int,
    page_table: jax.Array,
    last: jax.Array,
    *,
    n_kv: int,
    page_tokens: int,
    scale: float,
) -> jax.Array:
    """Attention of q [b, t, h, e], row t of which sees context 0..last[b, t] (-1: nothing), one sequence at a time."""
    n_layers, n_pages, _ = pool.shape
    _, t, h, e = q.shape
    m = page_table.shape[1]
    view = pool.reshape(n_layers * n_pages, 2, n_kv, page_tokens, e)
    context = jnp.arange(m * page_tokens)

    def one(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, table, last = args
        kv = view[layer * n_pages + table].transpose(1, 2, 0, 3, 4).reshape(2, n_kv, m * page_tokens, e)
        kv = jnp.where((context <= last.max())[:, None], kv, 0).astype(jnp.float32)
        grouped = q.reshape(t, n_kv, h // n_kv, e).astype(jnp.float32)
        score = jnp.einsum("tkge,kce->kgtc", grouped, kv[0]) * scale
        score = jnp.where(context <= last[:, None], score, -jnp.inf)
        top = jnp.maximum(score.max(-1, keepdims=True), -1e30)
        weight = jnp.exp(score - top)
        total = jnp.maximum(weight.sum(-1, keepdims=True), 1e-30)
        weight = weight / total
        out = jnp.einsum("kgtc,kce->tkge", weight, kv[1])
        return out.reshape(t, h, e).astype(q.dtype)

    return lax.map(one, (q, page_table, last))
