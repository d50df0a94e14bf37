"""Paged attention against loops over single tokens in float32 NumPy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slora_jax.pallas_kernels import xla_attention
from slora_jax.pallas_kernels.xla_attention import (
    apply_rope,
    decode_attention,
    prefill_attention,
    rope_write_kv,
    write_kv,
)

HEADS = [(9, 3, 8), (4, 4, 16), (8, 1, 4)]  # query heads, KV heads, head dim
DTYPES = [(jnp.float32, 3e-6), (jnp.bfloat16, 1.5e-2)]
LAYERS, LAYER = 3, 1


@dataclasses.dataclass
class Paged:
    """Sequences of the given lengths in shuffled pages of a pool whose every other element is NaN."""

    pool: jax.Array
    table: np.ndarray  # [b, m]
    k: list[np.ndarray]  # a sequence [length, k, e]
    v: list[np.ndarray]


def paged(
    rng: np.random.Generator, lengths: list[int], n_kv: int, e: int, page_tokens: int, dtype: jnp.dtype
) -> Paged:
    pages = [-(-n // page_tokens) for n in lengths]
    n_pages = sum(pages) + 5
    ids = iter(rng.permutation(np.arange(1, n_pages)))
    pool = np.full((LAYERS, n_pages, 2, n_kv, page_tokens, e), np.nan, np.float32)
    pool[:, 0] = 0
    table = np.zeros((len(lengths), max(pages) + 2), np.int32)
    k, v = [], []
    for row, (n, count) in enumerate(zip(lengths, pages, strict=True)):
        table[row, :count] = [next(ids) for _ in range(count)]
        kv = np.asarray(jnp.asarray(rng.standard_normal((2, n, n_kv, e)), dtype), np.float32)
        for c in range(n):
            pool[LAYER, table[row, c // page_tokens], :, :, c % page_tokens] = kv[:, c]
        k.append(kv[0])
        v.append(kv[1])
    return Paged(jnp.asarray(pool.reshape(LAYERS, n_pages, -1), dtype), table, k, v)


def attend_one(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """One token's attention: q [h, e] over k, v [c, n_kv, e]."""
    group = q.shape[0] // k.shape[1]
    out = np.zeros(q.shape, np.float64)
    for head in range(q.shape[0]):
        score = np.array([q[head].astype(np.float64) @ row[head // group] for row in k]) * scale
        weight = np.exp(score - score.max())
        out[head] = (weight / weight.sum()) @ v[:, head // group]
    return out.astype(np.float32)


@pytest.fixture(params=[256, 16])
def block_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Context read by one unit of work: more than any sequence here has, and less than most (a loop then)."""
    monkeypatch.setattr(xla_attention, "BLOCK_TOKENS", request.param)
    monkeypatch.setattr(xla_attention, "LOOP_QUERIES", 3 * request.param // 16)
    return int(request.param)


@pytest.mark.usefixtures("block_tokens")
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("h", "n_kv", "e"), HEADS)
@pytest.mark.parametrize("page_tokens", [4, 16])
def test_decode_equals_loops(
    h: int, n_kv: int, e: int, page_tokens: int, dtype: jnp.dtype, tolerance: float
) -> None:
    rng = np.random.default_rng(0)
    lengths = [1, 3, 16, 0, 17, 33, 5, 64, 0]
    data = paged(rng, lengths, n_kv, e, page_tokens, dtype)
    q = jnp.asarray(rng.standard_normal((len(lengths), h, e)), dtype)
    table, kv_len = jnp.asarray(data.table), jnp.asarray(lengths, jnp.int32)
    out = jax.jit(
        lambda q, pool: decode_attention(
            q, pool, LAYER, table, kv_len, n_kv=n_kv, page_tokens=page_tokens, scale=0.3
        )
    )(q, data.pool)
    assert out.shape == q.shape
    assert out.dtype == dtype
    got = np.asarray(out, np.float32)
    assert np.isfinite(got).all()
    for row, n in enumerate(lengths):
        if n:
            want = attend_one(np.asarray(q[row], np.float32), data.k[row], data.v[row], 0.3)
            np.testing.assert_allclose(got[row], want, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("block_tokens")
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("h", "n_kv", "e"), HEADS)
@pytest.mark.parametrize("tile", [4, 16])
def test_prefill_equals_loops(
    h: int, n_kv: int, e: int, tile: int, dtype: jnp.dtype, tolerance: float
) -> None:
    rng = np.random.default_rng(1)
    lengths, fresh = [37, 1, 20, 16, 9], [37, 1, 7, 4, 0]  # in the pages; of them, tokens of this chunk
    data = paged(rng, lengths, n_kv, e, 8, dtype)
    tiles: list[tuple[int, int, int]] = []
    tile_row: list[int] = []
    positions: list[int] = []
    seq: list[int] = []
    for row, (n, count) in enumerate(zip(lengths, fresh, strict=True)):
        for first in range(0, count, tile):
            size = min(tile, count - first)
            tile_row += [len(tiles) * tile + o for o in range(size)]
            tiles.append((row, len(positions), size))
            positions += range(n - count + first, n - count + first + size)
            seq += [row] * size
    t, pad = len(positions), 3
    tiles += [(-1, 0, 0)] * 2
    tile_seq, tile_start, tile_len = np.array(tiles, np.int32).T
    q = jnp.asarray(rng.standard_normal((t + pad, h, e)), dtype)
    batch = [
        jnp.asarray(x, jnp.int32)
        for x in (positions + [0] * pad, tile_seq, tile_start, tile_len, tile_row + [0] * pad)
    ]
    out = jax.jit(
        lambda q, pool: prefill_attention(
            q, pool, LAYER, jnp.asarray(data.table), *batch, n_kv=n_kv, page_tokens=8, tile=tile, scale=0.25
        )
    )(q, data.pool)
    assert out.dtype == dtype
    got = np.asarray(out, np.float32)
    assert np.isfinite(got).all()
    for i, (row, position) in enumerate(zip(seq, positions, strict=True)):
        k, v = data.k[row][: position + 1], data.v[row][: position + 1]
        want = attend_one(np.asarray(q[i], np.float32), k, v, 0.25)
        np.testing.assert_allclose(got[i], want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_write_kv_changes_only_its_rows_and_drops_padding(dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(2)
    n_pages, n_kv, page_tokens, e = 6, 3, 4, 8
    pool = jnp.asarray(rng.standard_normal((LAYERS, n_pages, 2 * n_kv * page_tokens * e)), dtype)
    k, v = (jnp.asarray(rng.standard_normal((5, n_kv, e)), dtype) for _ in range(2))
    page, offset = np.array([3, -1, 5, 3, -1], np.int32), np.array([1, 0, 3, 2, 2], np.int32)
    want = np.asarray(pool, np.float32).reshape(LAYERS, n_pages, 2, n_kv, page_tokens, e).copy()
    for i in (0, 2, 3):
        want[LAYER, page[i], 0, :, offset[i]] = np.asarray(k[i], np.float32)
        want[LAYER, page[i], 1, :, offset[i]] = np.asarray(v[i], np.float32)
    got = jax.jit(write_kv, static_argnums=1, static_argnames="page_tokens", donate_argnums=0)(
        pool, LAYER, k, v, page, offset, page_tokens=page_tokens
    )
    np.testing.assert_array_equal(np.asarray(got, np.float32).reshape(want.shape), want)


def test_apply_rope_rotates_each_half_pair() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 4)), jnp.float32)
    cos, sin = jnp.full((3, 2), 0.6), jnp.full((3, 2), 0.8)
    out = np.asarray(apply_rope(x, cos, sin))
    first, second = np.asarray(x[..., :2]), np.asarray(x[..., 2:])
    np.testing.assert_allclose(out[..., :2], first * 0.6 - second * 0.8, rtol=1e-6)
    np.testing.assert_allclose(out[..., 2:], second * 0.6 + first * 0.8, rtol=1e-6)


def test_rope_write_kv_rotates_q_and_k_and_not_v() -> None:
    rng = np.random.default_rng(3)
    t, h, n_kv, e, page_tokens = 3, 4, 2, 8, 4
    pool = jnp.zeros((LAYERS, 3, 2 * n_kv * page_tokens * e))
    qkv = jnp.asarray(rng.standard_normal((t, h + 2 * n_kv, e)), jnp.float32)
    cos, sin = (jnp.asarray(rng.standard_normal((t, e // 2)), jnp.float32) for _ in range(2))
    page, offset = jnp.asarray([2, -1, 0]), jnp.asarray([1, 0, 3])
    sizes = {"n_kv": n_kv, "page_tokens": page_tokens}
    got, q = rope_write_kv(pool, LAYER, qkv, cos, sin, page, offset, **sizes)
    rotated = np.asarray(apply_rope(qkv, cos, sin))
    np.testing.assert_array_equal(q, rotated[:, :h])
    kv = np.asarray(got)[LAYER].reshape(3, 2, n_kv, page_tokens, e)
    for i in (0, 2):
        np.testing.assert_array_equal(kv[page[i], 0, :, offset[i]], rotated[i, h : h + n_kv])
        np.testing.assert_array_equal(kv[page[i], 1, :, offset[i]], np.asarray(qkv)[i, h + n_kv :])


def test_write_then_attend_makes_no_copy_of_the_pool() -> None:
    """The donated pool is written in place: no instruction of the compiled step yields a second pool."""
    n_kv, page_tokens, e = 3, 16, 64
    pool = jax.ShapeDtypeStruct((2, 11, 2 * n_kv * page_tokens * e), jnp.float32)
    ints = jax.ShapeDtypeStruct((4,), jnp.int32)
    heads = jax.ShapeDtypeStruct((4, n_kv, e), jnp.float32)

    def step(
        pool: jax.Array,
        x: jax.Array,
        first: jax.Array,
        page: jax.Array,
        offset: jax.Array,
        table: jax.Array,
        kv_len: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        for i in range(2):
            pool = write_kv(pool, first + i, x, x, page, offset, page_tokens=page_tokens)
            x = decode_attention(
                x, pool, first + i, table, kv_len, n_kv=n_kv, page_tokens=page_tokens, scale=0.125
            )
        return pool, x

    table, index = jax.ShapeDtypeStruct((4, 3), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    lowered = jax.jit(step, donate_argnums=0).lower(pool, heads, index, ints, ints, table, ints)
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    pool_bytes = 2 * 11 * 2 * n_kv * page_tokens * e * 4
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes


@pytest.mark.parametrize("lengths", [[300, 1, 40, 0, 513], [0, 0], [256, 257]])
def test_decode_of_long_and_short_sequences_together(lengths: list[int]) -> None:
    """Real block sizes: rows of none, one and three units, and a batch of padding alone."""
    rng = np.random.default_rng(3)
    data = paged(rng, [*lengths, 700], 1, 4, 16, jnp.float32)
    table = jnp.asarray(data.table[:-1])
    q = jnp.asarray(rng.standard_normal((len(lengths), 2, 4)), jnp.float32)
    kv_len = jnp.asarray(lengths, jnp.int32)
    got = jax.jit(
        lambda q, pool: decode_attention(q, pool, LAYER, table, kv_len, n_kv=1, page_tokens=16, scale=1.0)
    )(q, data.pool)
    for row, n in enumerate(lengths):
        want = attend_one(np.asarray(q[row]), data.k[row], data.v[row], 1.0) if n else np.zeros((2, 4))
        np.testing.assert_allclose(np.asarray(got[row]), want, rtol=3e-6, atol=3e-6)


def test_huge_scores_do_not_overflow() -> None:
    rng = np.random.default_rng(4)
    data = paged(rng, [5, 40], 2, 8, 16, jnp.float32)
    q = jnp.asarray(rng.standard_normal((2, 2, 8)) * 1e4, jnp.float32)
    got = decode_attention(
        q, data.pool, LAYER, jnp.asarray(data.table), jnp.array([5, 40]), n_kv=2, page_tokens=16, scale=1.0
    )
    for row in range(2):
        want = attend_one(np.asarray(q[row]), data.k[row], data.v[row], 1.0)
        np.testing.assert_allclose(np.asarray(got[row]), want, rtol=1e-3, atol=1e-3)
