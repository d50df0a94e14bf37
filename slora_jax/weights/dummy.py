"""Random weights of a given shape, made on the devices that hold them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from slora_jax.models.params import ParamSpec

STANDARD_DEVIATION = 0.02  # Llama's initializer_range


def dummy_array(
    name: str, spec: ParamSpec, sharding: NamedSharding, dtype: DTypeLike, seed: int
) -> jax.Array:
    """normal(0, 0.02), or ones for norms, in `sharding`: every device makes its own part.

    The values are a function of (seed, name, shape) alone: threefry's counter is an element's place in the
    whole array (jax_threefry_partitionable, JAX's default), so that no sharding changes them.
    """
    make = _maker(spec.shape, spec.init, sharding, jnp.dtype(dtype).name)
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), zlib.crc32(name.encode()))
    return make(key)


@functools.lru_cache(maxsize=32)  # one compilation for each kind of array, not for each layer
def _maker(
    shape: tuple[int, ...], init: str, sharding: NamedSharding, dtype: str
) -> Callable[..., jax.Array]:
    def make(key: jax.Array) -> jax.Array:
        if init == "ones":
            return jnp.ones(shape, dtype)
        return (STANDARD_DEVIATION * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return jax.jit(make, out_shardings=sharding)
