"""The plan of paged decode attention: how the chunks of a batch are dealt to stretches of equal cost.

It depends on lengths and page table alone, so all layers of a step share one. It is plain JAX, a few fusions
of small integers: sums over b x b comparisons are one fusion each, where sorts, scans and scatters would be
several.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK_COST = 2  # of a chunk, and
ITEM_COST = 2  # of an item beside its chunks (q, the first scores, the output), in one unit
MIN_CHUNKS = 2  # of a stretch: a shorter one costs more to merge than it saves
FIRST_PAGES = 11  # the column of a stretch's first page id


class DecodePlan(NamedTuple):
    """Where each of n stretches of chunks starts and ends, and what its first copies need.

    An *item* is a (sequence, KV head); a *part* of one is its chunks in a stretch whose border cuts it.
    """

    walk: jax.Array  # i32[b, 2] sequences that have context, in order, each with its length; then zeros
    # i32[n, columns], a multiple of 16 columns, so that a stretch lies in whole lines of 64 bytes. Columns:
    #  0-2  where it starts: row of `walk`, KV head, chunk;  3  how many chunks it has
    #  4-7  the sequence that it starts in and its length, and those of the next, as in `walk`
    #  8-9  the stretch in which its first item begins, and how many after that one go on with the item
    #   10  how many after this one go on with the item that its end cuts, if that begins in it; else 0
    #  11-  page ids of its first chunk, then zeros
    stretches: jax.Array


def plan_decode(
    kv_len: jax.Array,
    page_table: jax.Array,
    *,
    n_kv: int,
    page_tokens: int,
    chunk: int,
    n_stretches: int,
    item_cost: int = ITEM_COST,
) -> DecodePlan:
    """Deal ceil(kv_len / chunk) * n_kv chunks of all sequences to `n_stretches` stretches of equal cost.

    kv_len int32 [b]; page_table int32 [b, m]; chunk in tokens, whole pages. A chunk costs CHUNK_COST, an
    item `item_cost` beside its chunks: a stretch of many short items has fewer chunks.
    """
    steps = (kv_len + chunk - 1) // chunk
    b = kv_len.shape[0]
    order = jnp.arange(b, dtype=jnp.int32)
    rank = jnp.sum((steps > 0) & (order < order[:, None]), axis=1, dtype=jnp.int32)
    place = jnp.where(steps > 0, rank, b)  # among the sequences that have context
    here = place == order[:, None]
    seqs, lens = (jnp.sum(jnp.where(here, x, 0), axis=1, dtype=jnp.int32) for x in (order, kv_len))
    chunks = jnp.sum(jnp.where(place <= order[:, None], steps, 0), axis=1, dtype=jnp.int32) * n_kv
    ends = jnp.minimum(order + 1, jnp.sum(steps > 0)) * n_kv * item_cost + chunks * CHUNK_COST
    total = ends[-1]
    least = MIN_CHUNKS * CHUNK_COST + item_cost  # every stretch but those beyond the end has a chunk
    quota = jnp.maximum(least, (total + n_stretches - 1) // n_stretches)
    # Borders of stretches, the last one's end too: the chunk at or after so much cost.
    border = jnp.minimum(jnp.arange(n_stretches + 1, dtype=jnp.int32) * quota, total)
    j = jnp.minimum(jnp.sum(ends <= border[:, None], axis=1, dtype=jnp.int32), b - 1)
    n = jnp.maximum((lens[j] + chunk - 1) // chunk, 1)
    cost = n * CHUNK_COST + item_cost
    offset = border - (ends[j] - cost * n_kv)
    head, rest = offset // cost, offset % cost
    i = jnp.where(rest > 0, jnp.maximum((rest - item_cost + CHUNK_COST - 1) // CHUNK_COST, 1), 0)
    line = jnp.where(border < total, chunks[j] - (n_kv - head) * n + i, chunks[-1])  # chunks before
    # An item begins in the stretch of its first cost, and ends in that of the cost before its last chunk.
    owner = (border - rest) // quota
    more = jnp.where(n > 1, (border - rest + cost - CHUNK_COST) // quota - owner, 0)
    head, i = jnp.where(i < n, head, head + 1), jnp.where(i < n, i, 0)
    j, head = jnp.where(head < n_kv, j, jnp.minimum(j + 1, b - 1)), jnp.where(head < n_kv, head, 0)
    begins_before_end = (border < total) & (i > 0) & (owner == jnp.arange(-1, n_stretches, dtype=jnp.int32))
    last = jnp.where(begins_before_end, more, 0)[1:]
    sequences = [x[at] for at in (j, jnp.minimum(j + 1, b - 1)) for x in (seqs, lens)]
    columns = (j, head, i, line[1:] - line[:-1], *sequences, owner, more, last)
    places = jnp.stack([x[:n_stretches] for x in columns], axis=1)
    stretches = jnp.concatenate([places, _first_pages(places, page_table, chunk // page_tokens)], axis=1)
    stretches = jnp.pad(stretches, ((0, 0), (0, -stretches.shape[1] % 16)))
    return DecodePlan(jnp.stack([seqs, lens], axis=1), stretches)


def _first_pages(places: jax.Array, page_table: jax.Array, pages: int) -> jax.Array:
    """i32[n_stretches, pages]: the ids of the first chunk's pages of stretches that start at `places`."""
    seq, chunk = places[:, 4, None], places[:, 2, None]
    column = chunk * pages + jnp.arange(pages, dtype=jnp.int32)
    return page_table[seq, jnp.minimum(column, page_table.shape[1] - 1)]
