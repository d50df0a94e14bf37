"""The k-th largest of each row of [R, v], exact to the last bit of float32, by passes over them, not a sort.

A pass counts what is at least a threshold, for 7 thresholds at once, and so finds 3 bits of one: 11 passes
(on a CPU, by one bit a pass, 32).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

_BLOCK = 128  # columns counted together, before their counts are
_BITS = 32
BITS_A_PASS = {"cpu": 1, "default": 3}  # of a threshold, by platform


def kth_largest(x: jax.Array, largest: jax.Array, k: jax.Array) -> jax.Array:
    """f32[R]: the k-th largest of each row of x f32[R, v], whose `largest` is known; 1 <= k <= v."""
    low = ordered(jnp.full_like(largest, -jnp.inf))
    size = (ordered(largest) + 1 - low).astype(jnp.uint32)
    by_platform = {name: functools.partial(_search, x, k, bits) for name, bits in BITS_A_PASS.items()}
    image: jax.Array = lax.platform_dependent(low, size, **by_platform)
    return lax.bitcast_convert_type(_flip(image), jnp.float32)


def _search(x: jax.Array, k: jax.Array, bits: int, low: jax.Array, size: jax.Array) -> jax.Array:
    """i32[R]: the largest `ordered` image in [low, low + size) which k or more of x reach, `bits` a pass.

    A pass tries 2**bits - 1 thresholds: a GPU reads memory once for all of them, and can compare meanwhile.
    """
    tries = range(1, 2**bits)

    def narrow(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, size = bounds
        step = (size >> bits) + ((size & (2**bits - 1)) != 0)
        images = [low + (n * step).astype(jnp.int32) for n in tries]
        thresholds = [lax.bitcast_convert_type(_flip(image), jnp.float32) for image in images]
        counts = jnp.sum(jnp.stack([_counts_of_blocks(x >= t[:, None]) for t in thresholds]), axis=2)
        up, passed = jnp.zeros_like(step), jnp.full(low.shape, True)
        for n, count in zip(tries, counts, strict=True):
            passed &= (n * step < size) & (count >= k)
            up += jnp.where(passed, step, 0)
        return low + up.astype(jnp.int32), jnp.minimum(step, size - up)

    low, _ = lax.fori_loop(0, -(-_BITS // bits), narrow, (low, size))
    return low


def _counts_of_blocks(x: jax.Array) -> jax.Array:
    """i32[R, blocks]: how many are true of each block of x bool[R, v]."""
    blocks = x.reshape(len(x), -1, x.shape[1] if x.shape[1] % _BLOCK else _BLOCK)
    return jnp.sum(blocks, axis=2, dtype=jnp.int32)


def ordered(x: jax.Array) -> jax.Array:
    """i32 image of f32 x with x < y iff image(x) < image(y) (-0.0 counts as below 0.0)."""
    return _flip(lax.bitcast_convert_type(x, jnp.int32))


def _flip(bits: jax.Array) -> jax.Array:
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)  # its own inverse
