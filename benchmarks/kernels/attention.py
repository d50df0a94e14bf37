"""Cases of the attention kernels: paged decode, ragged prefill, RoPE and KV write.

With SLORA_BENCH_VARIANTS=1 there are also cases `*_variant`, which compare tunings of the same kernels.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.common import (
    AGAINST_XLA,
    Case,
    Ceilings,
    Measurement,
    relative_error,
    seconds_per_call,
    xla_seconds,
)
from slora_jax.pallas_kernels import mosaic_decode, mosaic_prefill, mosaic_rope, xla_attention

PAGE_TOKENS = 16
LAYERS = 2
TOLERANCE = 4e-3  # relative, of bf16 weights and outputs against float32
CHECKED = 6  # rows of a batch that are compared


@functools.lru_cache(maxsize=1)
def make_pool(n_pages: int, n_kv: int, e: int, page_tokens: int) -> jax.Array:
    shape = (LAYERS, n_pages, 2 * n_kv * page_tokens * e)
    pool: jax.Array = jax.jit(lambda: jax.random.normal(jax.random.key(1), shape, jnp.bfloat16))()
    pool.block_until_ready()
    return pool


def shuffled_table(rng: np.random.Generator, lengths: np.ndarray, page_tokens: int) -> tuple[jax.Array, int]:
    """Page table [b, m] of sequences of these lengths, and how many pages a pool needs for it."""
    pages = -(-lengths // page_tokens)
    ids = rng.permutation(int(pages.sum())) + 1
    table = np.zeros((len(lengths), max(int(pages.max()), 1)), np.int32)
    at = 0
    for row, count in enumerate(pages):
        table[row, :count] = ids[at : at + count]
        at += count
    return jnp.asarray(table), int(pages.sum()) + 1


def reference(
    q: jax.Array, pool: jax.Array, layer: int, table: jax.Array, last: jax.Array, n_kv: int, page_tokens: int
) -> jax.Array:
    """Plain float32 attention of q [x, h, e] (one sequence) over context 0 .. last[x] of pages table [m]."""
    x, h, e = q.shape
    kv = pool[layer][table].reshape(-1, 2, n_kv, page_tokens, e).astype(jnp.float32)
    k, v = kv.transpose(1, 2, 0, 3, 4).reshape(2, n_kv, -1, e)
    grouped = q.reshape(x, n_kv, h // n_kv, e).astype(jnp.float32)
    score = jnp.einsum("xkge,kce->xkgc", grouped, k, precision="highest") * e**-0.5
    score = jnp.where(jnp.arange(k.shape[1]) <= last[:, None, None, None], score, -jnp.inf)
    out = jnp.einsum("xkgc,kce->xkge", jax.nn.softmax(score, axis=-1), v, precision="highest")
    return out.reshape(x, h, e)


def decode(
    ceilings: Ceilings,
    *,
    batch: int,
    context: int,
    n_q: int,
    n_kv: int,
    head_dim: int,
    lengths: str = "equal",
    page_tokens: int = PAGE_TOKENS,
    against_xla: bool = False,
    **tuning: Any,
) -> Measurement:
    rng = np.random.default_rng(0)
    kv_len = np.full(batch, context) if lengths == "equal" else rng.integers(8, 2 * context - 8, batch)
    table, n_pages = shuffled_table(rng, kv_len, page_tokens)
    pool = make_pool(n_pages, n_kv, head_dim, page_tokens)
    q = jax.random.normal(jax.random.key(2), (batch, n_q, head_dim), jnp.bfloat16)
    lens = jnp.asarray(kv_len, jnp.int32)
    sizes: dict[str, Any] = {"n_kv": n_kv, "page_tokens": page_tokens, "scale": head_dim**-0.5}

    def step(i: int, q: jax.Array, pool: jax.Array, table: jax.Array, lens: jax.Array) -> jax.Array:
        return mosaic_decode.decode_attention(q, pool, jnp.int32(i % LAYERS), table, lens, **sizes, **tuning)

    out = jax.jit(functools.partial(step, 1))(q, pool, table, lens)
    error = 0.0
    for row in range(0, batch, max(1, batch // CHECKED)):
        want = reference(q[row : row + 1], pool, 1, table[row], lens[row : row + 1] - 1, n_kv, page_tokens)
        error = max(error, relative_error(out[row : row + 1], want))
    assert error < TOLERANCE, f"relative error {error:.1e}"
    seconds = seconds_per_call(step, q, pool, table, lens, calls=32)
    moved = int(kv_len.sum()) * n_kv * head_dim * 2 * 2
    extra: dict[str, Any] = {
        "us": round(seconds * 1e6, 1),
        "tb_s": round(moved / seconds / 1e12, 2),
        "error": error,
    }
    if against_xla:

        def xla(i: int, q: jax.Array, pool: jax.Array, table: jax.Array, lens: jax.Array) -> jax.Array:
            return xla_attention.decode_attention(q, pool, jnp.int32(i % LAYERS), table, lens, **sizes)

        again = jax.random.normal(jax.random.key(2), q.shape, jnp.bfloat16)
        extra["xla_us"] = round(xla_seconds(xla, again, pool, table, lens) * 1e6)
    return Measurement(round(moved / seconds / ceilings.copy, 4), extra)


def prefill(
    ceilings: Ceilings,
    *,
    tokens: int,
    n_q: int,
    n_kv: int,
    head_dim: int,
    prompts: int = 1,
    before: int = 0,
    tile: int = 128,
    page_tokens: int = PAGE_TOKENS,
    against_xla: bool = False,
    **tuning: Any,
) -> Measurement:
    """`prompts` chunks of tokens / prompts each, `before` tokens of each sequence already in its pages."""
    rng = np.random.default_rng(0)
    size = tokens // prompts
    table, n_pages = shuffled_table(rng, np.full(prompts, before + size), page_tokens)
    pool = make_pool(n_pages, n_kv, head_dim, page_tokens)
    count = -(-size // tile)
    offset = np.tile(np.arange(count) * tile, prompts)
    seq = np.repeat(np.arange(prompts), count)
    tiles = [seq, seq * size + offset, np.minimum(size - offset, tile)]
    # Room for padding, as the engine's shapes have it.
    tiles = [np.append(x, [pad] * 3).astype(np.int32) for x, pad in zip(tiles, (-1, 0, 0), strict=True)]
    row = np.concatenate([(n * count * tile) + np.arange(size) for n in range(prompts)]).astype(np.int32)
    positions = np.tile(np.arange(before, before + size), prompts).astype(np.int32)
    args = [jnp.asarray(x) for x in (positions, *tiles, row)]
    q = jax.random.normal(jax.random.key(2), (tokens, n_q, head_dim), jnp.bfloat16)
    sizes: dict[str, Any] = {"n_kv": n_kv, "page_tokens": page_tokens, "scale": head_dim**-0.5, "tile": tile}

    def step(i: int, q: jax.Array, pool: jax.Array, table: jax.Array, *args: Any) -> jax.Array:
        attend: Any = mosaic_prefill.prefill_attention
        out: jax.Array = attend(q, pool, jnp.int32(i % LAYERS), table, *args, **sizes, **tuning)
        return out

    out = jax.jit(functools.partial(step, 1))(q, pool, table, *args)
    error = 0.0
    for n in sorted({0, prompts - 1}):
        some = np.unique(np.linspace(0, size - 1, 48).astype(int))
        mine, last = q[n * size + some], jnp.asarray(before + some)
        want = reference(mine, pool, 1, table[n], last, n_kv, page_tokens)
        error = max(error, relative_error(out[n * size + some], want))
    assert error < TOLERANCE, f"relative error {error:.1e}"
    seconds = seconds_per_call(step, q, pool, table, *args, calls=8)
    flops = 4 * n_q * head_dim * prompts * sum(range(before + 1, before + size + 1))
    extra: dict[str, Any] = {
        "us": round(seconds * 1e6, 1),
        "share_of_matmul": round(flops / seconds / ceilings.matmul, 3),
        "error": error,
    }
    if against_xla:

        def xla(i: int, q: jax.Array, pool: jax.Array, table: jax.Array, *args: jax.Array) -> jax.Array:
            return xla_attention.prefill_attention(q, pool, jnp.int32(i % LAYERS), table, *args, **sizes)

        again = jax.random.normal(jax.random.key(2), q.shape, jnp.bfloat16)
        extra["xla_us"] = round(xla_seconds(xla, again, pool, table, *args) * 1e6)
    return Measurement(round(flops / seconds / 1e12, 1), extra)


def write(
    ceilings: Ceilings, *, tokens: int, n_q: int, n_kv: int, head_dim: int, against_xla: bool = False
) -> Measurement:
    """One layer's q and k of `tokens` tokens rotated, its K and V written into a pool."""
    rng = np.random.default_rng(0)
    n_pages = max(2048, 2 * tokens // PAGE_TOKENS)
    shape = (LAYERS, n_pages, 2 * n_kv * PAGE_TOKENS * head_dim)
    qkv = jax.random.normal(jax.random.key(1), (tokens, n_q + 2 * n_kv, head_dim), jnp.bfloat16)
    angles = jax.random.normal(jax.random.key(2), (tokens, head_dim // 2))
    slots = rng.permutation(n_pages * PAGE_TOKENS)[:tokens]
    page, offset = (jnp.asarray(x, jnp.int32) for x in (slots // PAGE_TOKENS, slots % PAGE_TOKENS))
    args = qkv, jnp.cos(angles), jnp.sin(angles), page, offset

    def step(module: Any, i: int, carry: Any, *args: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The pool, and q."""
        out: tuple[jax.Array, jax.Array] = module.rope_write_kv(
            carry[0], jnp.int32(i % LAYERS), *args, n_kv=n_kv, page_tokens=PAGE_TOKENS
        )
        return out

    def start() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(shape, jnp.bfloat16), jnp.zeros((tokens, n_q, head_dim), jnp.bfloat16)

    ours, xla = (functools.partial(step, module) for module in (mosaic_rope, xla_attention))
    out, want = (jax.jit(functools.partial(f, 1))(start(), *args) for f in (ours, xla))
    for got, wanted in zip(out, want, strict=True):
        assert bool(jnp.allclose(got, wanted, rtol=2**-7, atol=1e-6)), "wrong"
    assert float(jnp.abs(out[0][0]).max()) == 0, "another layer was touched"
    del want
    seconds = seconds_per_call(ours, out, *args)
    extra: dict[str, Any] = {"of_copy": round(2 * qkv.nbytes / seconds / ceilings.copy, 3)}
    if against_xla:
        extra["xla_us"] = round(xla_seconds(xla, start(), *args, calls=8) * 1e6, 2)
    return Measurement(round(seconds * 1e6, 2), extra)


def _case(bench: str, unit: str, run: Any, *, hidden: dict[str, Any] | None = None, **case: Any) -> Case:
    return Case(bench, case, unit, functools.partial(run, **case, **(hidden or {})))


def _decode(batch: int, context: int, n_q: int, n_kv: int, head_dim: int = 128, **case: Any) -> Case:
    unit, hidden = "fraction of copy bandwidth", case.pop("hidden", None)
    name = case.pop("bench", "paged_decode_attention")
    return _case(
        name,
        unit,
        decode,
        hidden=hidden,
        batch=batch,
        context=context,
        n_q=n_q,
        n_kv=n_kv,
        head_dim=head_dim,
        **case,
    )


def _prefill(tokens: int, n_q: int, n_kv: int, head_dim: int = 128, **case: Any) -> Case:
    hidden, name = case.pop("hidden", None), case.pop("bench", "prefill_attention")
    return _case(
        name, "TFLOP/s", prefill, hidden=hidden, tokens=tokens, n_q=n_q, n_kv=n_kv, head_dim=head_dim, **case
    )


def _write(tokens: int, n_q: int, n_kv: int) -> Case:
    return _case("rope_kv_write", "us", write, hidden=XLA, tokens=tokens, n_q=n_q, n_kv=n_kv, head_dim=128)


XLA = {"against_xla": AGAINST_XLA}
CASES: list[Case] = [
    _decode(256, 400, 32, 32),
    _decode(256, 400, 32, 8, hidden=XLA),
    _decode(256, 400, 32, 8, lengths="8..792"),
    _decode(256, 400, 32, 32, lengths="8..792"),
    _decode(256, 2048, 32, 8),
    _decode(128, 1024, 32, 32),
    _decode(128, 1024, 32, 8),
    _decode(128, 4096, 32, 8),
    _decode(16, 4096, 32, 8),
    _decode(16, 4096, 32, 32),
    _decode(1, 4096, 32, 8),
    _decode(64, 512, 32, 8),
    _decode(128, 1024, 32, 8, head_dim=64),
    _prefill(4096, 32, 8, hidden=XLA),
    _prefill(4096, 32, 32),
    _prefill(2048, 32, 8),
    _prefill(2048, 32, 8, prompts=8),
    _prefill(512, 32, 8, before=3584),
    _prefill(4096, 32, 8, head_dim=64),
    *(_write(tokens, 32, n_kv) for tokens in (256, 4096) for n_kv in (8, 32)),
]
if os.environ.get("SLORA_BENCH_VARIANTS"):
    for name, value in (("item_cost", 0), ("item_cost", 2), ("item_cost", 4), ("stages", 2)):
        for n_kv in (32, 8):
            variant: dict[str, Any] = {"bench": "paged_decode_variant", name: value}
            CASES.append(_decode(256, 400, 32, n_kv, lengths="8..792", **variant))
    for tuning in ({"overlap": False}, {"pingpong": True}, {"auto_barriers": True}, {"tile": 64}):
        CASES.append(_prefill(4096, 32, 8, bench="prefill_variant", **tuning))
    for n_kv in (32, 8):
        for heads in (32, 16, 4):
            CASES.append(_prefill(4096, 32, n_kv, bench="prefill_variant", heads_together=heads))
