"""What the Mosaic attention kernels (decode, prefill, KV write) take: limits of shapes and dtypes; layout.

Letters as in xla_attention.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

MAX_GROUP = 16  # query heads of a KV head
# Of K, V and other operands in shared memory: what wgmma reads, swizzled 8-row tiles.
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]


def unsupported(*, n_q: int, n_kv: int, head_dim: int, page_tokens: int, chunk: int = 64) -> str | None:
    """The limit of the attention kernels that a model's shard is beyond, or None where it has kernels."""
    if head_dim not in (64, 128):
        return f"head_dim must be 64 or 128, not {head_dim}"
    if n_kv < 1 or n_q % n_kv or n_q // n_kv > MAX_GROUP:
        return f"{n_q} query heads over {n_kv} KV heads: need a whole group of 1 to {MAX_GROUP}"
    if page_tokens < 8 or page_tokens % 8 or chunk % 64 or chunk > 256 or chunk % page_tokens:
        return f"page_tokens {page_tokens} must be a multiple of 8 that divides {chunk} (use 16, 32 or 64)"
    return None


def check_attention(
    q: jax.Array, pool: jax.Array, page_table: jax.Array, *, n_kv: int, page_tokens: int, chunk: int
) -> None:
    """Raise ValueError, naming the limit, for what the attention kernels cannot do."""
    if q.ndim != 3 or pool.ndim != 3 or page_table.ndim != 2:
        raise ValueError(
            "need q [t, h, e], pool [layers, pages, elems], page_table [s, m]; "
            f"got {q.shape}, {pool.shape}, {page_table.shape}"
        )
    h, e = q.shape[1:]
    if q.dtype != jnp.bfloat16 or pool.dtype != jnp.bfloat16:
        raise ValueError(
            f"q and pool must be bfloat16, not {q.dtype} and {pool.dtype}; use kernel_backend='xla'"
        )
    limit = unsupported(n_q=h, n_kv=n_kv, head_dim=e, page_tokens=page_tokens, chunk=chunk)
    if limit:
        raise ValueError(f"{limit}; kernel_backend='xla' has no such limit")
    check_pages(pool, n_kv=n_kv, page_tokens=page_tokens, e=e)
    if pool.size // e >= 2**31:
        raise ValueError(f"pool of {pool.size // e} rows of head_dim: row numbers must fit int32")


def check_pages(pool: jax.Array, *, n_kv: int, page_tokens: int, e: int) -> None:
    """Raise ValueError where a page of pool [layers, pages, elems] is not K and V of `page_tokens` tokens."""
    if pool.shape[2] != 2 * n_kv * page_tokens * e:
        raise ValueError(
            f"pool pages have {pool.shape[2]} elements, not 2 * {n_kv} * {page_tokens} * {e} "
            "(n_kv, page_tokens, head_dim)"
        )


def whole_tiles(x: jax.Array) -> jax.Array:
    """x with rows (axis 0) added to a multiple of 8, which swizzled copies need; few shapes need any."""
    missing = -x.shape[0] % 8
    return jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) if missing else x
