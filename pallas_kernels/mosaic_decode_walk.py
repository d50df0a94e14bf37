"""How the warps of a decode kernel walk a stretch of the line of chunks.

The plan of a batch (`decode_plan`) has a row of numbers for each stretch, and a walk: the sequences that have
context, each with its length. Those of the next sequence are loaded while this one is worked on.

Names as in mosaic_decode_shape.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from slora_jax.pallas_kernels.mosaic_decode_shape import DecodeMemory, DecodeShape


class Place(NamedTuple):
    """A chunk of the line, with its sequence and the one that follows in the walk.

    A stretch's first place is columns 0 to 2 and 4 to 7 of its row in the plan.
    """

    j: Any  # row of the walk
    head: Any  # KV head
    i: Any  # chunk of the item
    seq: Any  # sequence in row j
    length: Any  # its tokens of context
    next_seq: Any  # in row j + 1
    next_length: Any


class Cut(NamedTuple):
    """How the borders of a stretch cut its first and last item: columns 8 to 10 of its row in the plan."""

    owner: Any  # the stretch in which its first item begins
    others: Any  # how many stretches after that one go on with the item
    last_others: Any  # how many after this one go on with its last item, if that begins in it; else 0


def numbers(z: DecodeShape, m: DecodeMemory, stretch: Any, first: int, end: int) -> list[Any]:
    """Columns first .. end of the row of a stretch in the plan."""
    return [m.stretches[stretch * z.columns + at] for at in range(first, end)]


def place_after(z: DecodeShape, m: DecodeMemory, here: Place, i: Any) -> Place:
    """The place that follows chunk i of the item at `here`."""
    ends = (i + 1) * z.chunk >= here.length
    last = ends & (here.head + 1 == z.n_kv)
    head = jnp.where(last, 0, jnp.where(ends, here.head + 1, here.head))
    j, i = jnp.where(last, here.j + 1, here.j), jnp.where(ends, 0, i + 1)
    stays = j == here.j
    seq = jnp.where(stays, here.seq, here.next_seq)
    length = jnp.where(stays, here.length, here.next_length)
    at = jnp.minimum(j + 1, z.batch - 1) * 2
    return Place(j, head, i, seq, length, m.walk[at], m.walk[at + 1])
