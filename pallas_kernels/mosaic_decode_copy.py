"""Decode's copying warps: they follow the page table and fill the stages of the warpgroups that multiply.

Names as in mosaic_decode_shape.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from slora_jax.pallas_kernels.decode_plan import FIRST_PAGES
from slora_jax.pallas_kernels.mosaic_decode_shape import DecodeMemory, DecodeShape
from slora_jax.pallas_kernels.mosaic_decode_walk import Place, numbers, place_after


def copy_stretch(z: DecodeShape, m: DecodeMemory, first_stretch: Any, warp: Any) -> None:
    """One warp's pages of every chunk of one warpgroup's stretch; the first of its warps copies q too."""
    to, part = lax.div(warp, z.warps), lax.rem(warp, z.warps)
    *start, count = numbers(z, m, first_stretch + to, 0, 4)
    first_page = m.layer[0] * z.n_pages

    def copy(half: int, ids: list[Any], at: Place, slot: Any) -> None:
        """Start the copies of K (0) or V (1); pages beyond the length arrive without bytes."""
        dst, bar = ((m.k_s, m.k_bar), (m.v_s, m.v_bar))[half]
        bar = bar.at[to * z.stages + slot]
        for p, page in enumerate(ids):
            token = (part * z.pages_each + p) * z.page_tokens
            row = (((first_page + page) * 2 + half) * z.n_kv + at.head) * z.page_tokens
            source = m.pool.at[pl.ds(row, z.page_tokens)]
            target = dst.at[to, slot, pl.ds(token, z.page_tokens)]
            has = at.i * z.chunk + token < at.length
            if not z.interpreted:
                plgpu.copy_gmem_to_smem(source, target, bar, predicate=has)
            else:  # it knows no predicates
                pl.when(has)(functools.partial(plgpu.copy_gmem_to_smem, source, target, bar))
                pl.when(jnp.logical_not(has))(functools.partial(plgpu.barrier_arrive, bar))

    def copy_q(at: Place, segment: Any) -> None:
        slot = lax.rem(segment, z.stages)
        source = m.q.at[pl.ds((at.seq * z.n_kv + at.head) * z.stride, z.rows)]
        plgpu.copy_gmem_to_smem(source, m.q_s.at[to, slot], m.q_bar.at[to * z.stages + slot])

    def page_ids(at: Place) -> list[Any]:
        first, last = at.i * z.pages + part * z.pages_each, z.max_pages - 1
        return [m.table[at.seq * z.max_pages + jnp.minimum(first + p, last)] for p in range(z.pages_each)]

    def step(c: Any, carry: Any) -> Any:
        at, ids, segment = carry
        slot = lax.rem(c, z.stages)
        opens = (c == 0) | (at.i == 0)
        used = c >= z.stages
        mine = part * z.pages_each < z.pages
        pl.when(used)(lambda: plgpu.barrier_wait(m.k_free.at[to * z.stages + slot]))
        # q's slot is free: every chunk before c - stages + 1 has been multiplied with its own.
        pl.when(opens & (part == 0))(lambda: copy_q(at, segment))
        pl.when(mine)(lambda: copy(0, ids, at, slot))
        # Loads of the next chunk's place travel while V's stage is awaited.
        there = place_after(z, m, at, at.i)
        next_ids = page_ids(there)
        pl.when(used)(lambda: plgpu.barrier_wait(m.v_free.at[to * z.stages + slot]))
        pl.when(mine)(lambda: copy(1, ids, at, slot))
        return there, next_ids, segment + opens.astype(jnp.int32)

    at = Place(*start, *numbers(z, m, first_stretch + to, 4, 8))
    first = (first_stretch + to) * z.columns + FIRST_PAGES + part * z.pages_each
    ids = [m.stretches[first + p] for p in range(z.pages_each)]
    # Never true. It has what the first copies need loaded before the first branch, at once.
    loaded = [*at, first_page, *ids]
    count = jnp.where(functools.reduce(jnp.minimum, loaded) == -(2**31), 0, count)
    lax.fori_loop(0, count, step, (at, ids, jnp.int32(0)))

    def drain(c: Any, _: Any) -> None:  # the interpreter wants every phase seen
        for free in (m.k_free, m.v_free):
            wait = functools.partial(plgpu.barrier_wait, free.at[to * z.stages + lax.rem(c, z.stages)])
            pl.when(c >= z.stages)(wait)

    lax.fori_loop(count, count + z.stages, drain, None)
