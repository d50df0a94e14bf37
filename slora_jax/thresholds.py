"""Thresholds of rows of [R, v], exact to the last bit of float32, by passes over them instead of a sort.

A pass counts or sums what is at least a threshold, for 7 thresholds at once, and so finds 3 bits of one:
`kth_largest` takes 11 passes, `nucleus` 10 and one for the sum (on a CPU, by one bit a pass, 32 and 31).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

_BLOCK = 128  # columns reduced together, before their results are
_ONE = 0x3F800000  # the bits of float32 1.0
BITS_A_PASS = {"cpu": 1, "default": 3}  # of a threshold, by platform


def kth_largest(x: jax.Array, largest: jax.Array, k: jax.Array) -> jax.Array:
    """f32[R]: the k-th largest of each row of x f32[R, v], 1 <= k <= v; exact."""
    low = jnp.full_like(largest, -jnp.inf)
    return _last_true(lambda t: x >= t[:, None], lambda n: n >= k, ordered(low), ordered(largest) + 1, 32)


def nucleus(weight: jax.Array, top_p: jax.Array) -> jax.Array:
    """f32[R]: the largest t with the weights >= t adding up to top_p of all; weight f32[R, v] in [0, 1]."""
    mass = top_p * jnp.sum(weight, axis=1)
    low = jnp.zeros_like(mass, dtype=jnp.int32)
    return _last_true(
        lambda t: jnp.where(weight >= t[:, None], weight, 0.0),
        lambda sums: sums >= mass,
        low,
        low + (_ONE + 1),
        30,
    )


def _last_true(
    parts: Callable[[jax.Array], jax.Array],
    holds: Callable[[jax.Array], jax.Array],
    low: jax.Array,
    high: jax.Array,
    bits: int,
) -> jax.Array:
    """f32[R]: the largest float t in [low, high), bounds as `ordered` images, up to which it holds.

    `parts` maps t f32[R] to [R, v], bool or f32; `holds` maps their sums [R] to bool[R], is true at low, and
    once false stays so. Exact if high - low <= 2**bits.
    """
    by_platform = {name: functools.partial(_search, parts, holds, bits, n) for name, n in BITS_A_PASS.items()}
    image: jax.Array = lax.platform_dependent(low, (high - low).astype(jnp.uint32), **by_platform)
    return lax.bitcast_convert_type(_flip(image), jnp.float32)


def _search(
    parts: Callable[[jax.Array], jax.Array],
    holds: Callable[[jax.Array], jax.Array],
    bits: int,
    digit: int,
    low: jax.Array,
    size: jax.Array,
) -> jax.Array:
    """The image in [low, low + size) that `_last_true` looks for, `digit` bits of it a pass.

    A pass tries 2**digit - 1 thresholds: a GPU reads memory once for all of them, and can compare meanwhile.
    """
    tries = range(1, 2**digit)

    def narrow(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, size = bounds
        step = (size >> digit) + ((size & (2**digit - 1)) != 0)
        images = [low + (n * step).astype(jnp.int32) for n in tries]
        thresholds = [lax.bitcast_convert_type(_flip(image), jnp.float32) for image in images]
        sums = jnp.sum(jnp.stack([_sums_of_blocks(parts(t)) for t in thresholds]), axis=2)
        up, passed = jnp.zeros_like(step), jnp.full(low.shape, True)
        for n, total in zip(tries, sums, strict=True):
            passed &= (n * step < size) & holds(total)
            up += jnp.where(passed, step, 0)
        return low + up.astype(jnp.int32), jnp.minimum(step, size - up)

    low, _ = lax.fori_loop(0, -(-bits // digit), narrow, (low, size))
    return low


def _sums_of_blocks(x: jax.Array) -> jax.Array:
    """[R, blocks]: what sums of x [R, v] consist of; int32 where x is bool."""
    blocks = x.reshape(len(x), -1, x.shape[1] if x.shape[1] % _BLOCK else _BLOCK)
    return jnp.sum(blocks, axis=2, dtype=jnp.int32 if x.dtype == bool else x.dtype)


def ordered(x: jax.Array) -> jax.Array:
    """i32 image of f32 x with x < y iff image(x) < image(y) (-0.0 counts as below 0.0)."""
    return _flip(lax.bitcast_convert_type(x, jnp.int32))


def _flip(bits: jax.Array) -> jax.Array:
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)  # its own inverse
