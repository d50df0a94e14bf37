"""The plan of paged decode attention: how the chunks of a batch are dealt to stretches.

Multiprocessors are not equally fast: on an H200 those of some GPCs read a fifth more in the same time. So
only most of the work is dealt beforehand, in stretches of equal cost, one for each warpgroup; the rest is cut
into rounds of ever shorter stretches, which whoever is done takes next.

The plan depends on lengths and page table alone, so all layers of a step share one. It is plain JAX, a few
fusions of small integers: sums over b x b comparisons are one fusion each, where sorts, scans and scatters
would be several.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK_COST = 2  # of a chunk, and
ITEM_COST = 2  # of an item beside its chunks (q, the first scores, the output), in one unit
MIN_CHUNKS = 2  # of a stretch: a shorter one costs more to merge than it saves
DEALT = 0.72  # of the cost: dealt beforehand, and
ROUND = 0.6  # of what is then left: each round of shorter stretches, but the last, which is all of it
ROUNDS = 5  # the first included
FIRST_PAGES = 12  # the column of a stretch's first page id


class DecodePlan(NamedTuple):
    """Where each of blocks * ROUNDS stretches of chunks starts and ends, and what its first copies need.

    The first `blocks` have their warpgroups; the others are taken in order. An *item* is a (sequence, KV
    head); a *part* of one is its chunks in a stretch whose border cuts it.
    """

    walk: jax.Array  # i32[b, 2] sequences that have context, in order, each with its length; then zeros
    # i32[blocks * ROUNDS, n], n a multiple of 16, so that a stretch lies in whole lines of 64 bytes. Columns:
    #  0-2  where it starts: row of `walk`, KV head, chunk;  3  how many chunks it has
    #  4-7  the sequence that it starts in and its length, and those of the next, as in `walk`
    #  8-9  the stretch in which its first item begins, and how many after that one go on with the item
    #   10  how many after this one go on with the item that its end cuts, if that begins in it; else 0
    #   11  how many stretches have chunks: the first ones
    #  12-  page ids of its first chunk, then zeros
    stretch: jax.Array


def plan_decode(
    kv_len: jax.Array,
    page_table: jax.Array,
    *,
    n_kv: int,
    page_tokens: int,
    chunk: int,
    blocks: int,
    item_cost: int = ITEM_COST,
    dealt: float = DEALT,
) -> DecodePlan:
    """Deal ceil(kv_len / chunk) * n_kv chunks of all sequences to rounds of `blocks` stretches of equal cost.

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
    begins, quotas = _rounds(total, blocks, least, dealt)
    # Borders of stretches, the last one's end too: the chunk at or after so much cost.
    nth = jnp.arange(blocks * ROUNDS + 1, dtype=jnp.int32)
    of = jnp.minimum(nth // blocks, ROUNDS - 1)
    border = jnp.minimum(begins[of] + (nth - of * blocks) * quotas[of], total)
    j = jnp.minimum(jnp.sum(ends <= border[:, None], axis=1, dtype=jnp.int32), b - 1)
    n = jnp.maximum((lens[j] + chunk - 1) // chunk, 1)
    cost = n * CHUNK_COST + item_cost
    offset = border - (ends[j] - cost * n_kv)
    head, rest = offset // cost, offset % cost
    i = jnp.where(rest > 0, jnp.maximum((rest - item_cost + CHUNK_COST - 1) // CHUNK_COST, 1), 0)
    line = jnp.where(border < total, chunks[j] - (n_kv - head) * n + i, chunks[-1])  # chunks before
    # An item begins in the stretch of its first cost, and ends in that of the cost before its last chunk.
    owner, final = (
        of * blocks + (at - begins[of]) // quotas[of]
        for at in (border - rest, border - rest + cost - CHUNK_COST)
        for of in (jnp.sum(begins[1:] <= at[:, None], axis=1, dtype=jnp.int32),)
    )
    more = jnp.where(n > 1, final - owner, 0)
    head, i = jnp.where(i < n, head, head + 1), jnp.where(i < n, i, 0)
    j, head = jnp.where(head < n_kv, j, jnp.minimum(j + 1, b - 1)), jnp.where(head < n_kv, head, 0)
    begins_before_end = (border < total) & (i > 0) & (owner == nth - 1)
    last = jnp.where(begins_before_end, more, 0)[1:]
    sequences = [x[at] for at in (j, jnp.minimum(j + 1, b - 1)) for x in (seqs, lens)]
    counts = line[1:] - line[:-1]
    end = jnp.full(nth.shape, jnp.sum(counts > 0, dtype=jnp.int32))
    columns = (j, head, i, counts, *sequences, owner, more, last, end)
    places = jnp.stack([x[: blocks * ROUNDS] for x in columns], axis=1)
    stretch = jnp.concatenate([places, _first_pages(places, page_table, chunk // page_tokens)], axis=1)
    stretch = jnp.pad(stretch, ((0, 0), (0, -stretch.shape[1] % 16)))
    return DecodePlan(jnp.stack([seqs, lens], axis=1), stretch)


def _rounds(total: jax.Array, blocks: int, least: int, dealt: float) -> tuple[jax.Array, jax.Array]:
    """i32[ROUNDS] each: the cost before each round, and that of each of its stretches, at least `least`."""
    begins, quotas, left = [jnp.int32(0)], [], total
    for nth in range(ROUNDS):
        share = (left + blocks - 1) // blocks
        if nth < ROUNDS - 1:
            share = jnp.ceil(share * jnp.float32(ROUND if nth else dealt)).astype(jnp.int32)
        quotas.append(jnp.maximum(least, share))
        left = jnp.maximum(left - quotas[-1] * blocks, 0)
        begins.append(begins[-1] + quotas[-1] * blocks)
    return jnp.stack(begins[:-1]), jnp.stack(quotas)


def _first_pages(places: jax.Array, page_table: jax.Array, pages: int) -> jax.Array:
    """i32[stretches, pages]: the ids of the first chunk's pages of stretches that start at `places`."""
    seq, chunk = places[:, 4, None], places[:, 2, None]
    column = chunk * pages + jnp.arange(pages, dtype=jnp.int32)
    return page_table[seq, jnp.minimum(column, page_table.shape[1] - 1)]
