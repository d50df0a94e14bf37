"""The Mosaic kernels on a Hopper GPU, over batches as the engine makes them, against plain JAX in float32.

    JAX_PLATFORMS=cuda python -m pytest -m gpu tests/kernels

The other tests of these kernels run in Pallas's interpreter, which has no swizzled memory, no proxies to
fence and no TMA; what those can get wrong shows only here.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.compare_backends import random_adapter
from slora_jax import ModelConfig
from slora_jax.lora.packing import pack_adapter
from slora_jax.memory.layout import GROUPS, MODULES, PageLayout
from slora_jax.pallas_kernels import mosaic_decode
from slora_jax.pallas_kernels.backend import XLA, AdapterBlocks, LoraShape, lowest_rung
from slora_jax.pallas_kernels.mosaic_backend import MOSAIC

pytestmark = pytest.mark.gpu
MODELS = {
    "mha-64": ModelConfig(512, 512, 2, 8, 8, 64, 768, 2048),
    "gqa3-64": ModelConfig(512, 576, 2, 9, 3, 64, 1536, 2048),
    "gqa4-128": ModelConfig(512, 1024, 2, 8, 2, 128, 2048, 2048),
    "gqa12-128": ModelConfig(512, 1536, 2, 12, 1, 128, 2048, 2048),
    "mha-128": ModelConfig(512, 2048, 2, 16, 16, 128, 5504, 2048),
}
DECODES = (3, 17, 64, 65, 130, 300, 1, 40, 90, 200, 33, 16)  # tokens of KV, the row's own included
CHUNKS = ((0, 3), (0, 17), (0, 64), (65, 65), (100, 130), (0, 2), (255, 33))  # position of the first, tokens
ROWS, TOKENS = 16, 512  # room for decodes and for prompt tokens
PAGE_TOKENS, N_PAGES, LAYER = 16, 400, 1
TOLERANCE = 6e-3  # relative, of bf16 products and outputs


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> ModelConfig:
    return MODELS[request.param]


@dataclasses.dataclass
class Batch:
    """Sequences in shuffled pages of a pool that is NaN wherever nothing was written."""

    pool: np.ndarray  # [layers, pages, elems] float32 that bf16 can hold
    table: np.ndarray  # [sequences, m]


def bf16(rng: np.random.Generator, *dims: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(dims, np.float32), jnp.bfloat16)


def paged(model: ModelConfig, lengths: list[int]) -> Batch:
    rng = np.random.default_rng(0)
    elems = 2 * model.num_key_value_heads * PAGE_TOKENS * model.head_dim
    pool = np.full((model.num_hidden_layers, N_PAGES, elems), np.nan, np.float32)
    pool[:, 0] = 0  # what padding reads
    kv = pool.reshape(*pool.shape[:2], 2, model.num_key_value_heads, PAGE_TOKENS, model.head_dim)
    ids = iter(rng.permutation(np.arange(1, N_PAGES)))
    table = np.zeros((len(lengths), 2048 // PAGE_TOKENS), np.int32)
    for row, n in enumerate(lengths):
        for at in range(0, n, PAGE_TOKENS):
            page = table[row, at // PAGE_TOKENS] = next(ids)
            size = min(PAGE_TOKENS, n - at)
            shape = (2, model.num_key_value_heads, size, model.head_dim)
            kv[LAYER, page, :, :, :size] = np.asarray(bf16(rng, *shape), np.float32)
    return Batch(pool, table)


def relative_error(got: Any, want: Any) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def cut_tiles(seq: int, start: int, size: int, tile: int, alignment: int) -> list[tuple[int, int, int]]:
    """(sequence, first token, tokens) of the tiles of tokens start .. start + size."""
    starts = [start, *range(start - start % alignment + tile, start + size, tile)]
    return [(seq, a, b - a) for a, b in zip(starts, [*starts[1:], start + size], strict=True)]


def sizes(model: ModelConfig) -> dict[str, Any]:
    return {"n_kv": model.num_key_value_heads, "page_tokens": PAGE_TOKENS, "scale": model.head_dim**-0.5}


def test_decode_attention(model: ModelConfig) -> None:
    data = paged(model, list(DECODES))
    table = jnp.asarray(np.pad(data.table, ((0, ROWS - len(DECODES)), (0, 0))))
    lengths = jnp.asarray([*DECODES, *[0] * (ROWS - len(DECODES))], jnp.int32)
    q = bf16(np.random.default_rng(1), ROWS, model.num_attention_heads, model.head_dim)

    def run(backend: Any, dtype: Any) -> jax.Array:
        args = (q.astype(dtype), jnp.asarray(data.pool, dtype), jnp.int32(LAYER), table, lengths)
        out: jax.Array = jax.jit(lambda *a: backend.decode_attention(*a, **sizes(model)))(*args)
        return out

    got, want = run(MOSAIC, jnp.bfloat16), run(XLA, jnp.float32)
    errors = [relative_error(g, w) for g, w in zip(got, want, strict=True) if np.any(w)]
    assert len(errors) == len(DECODES)
    assert max(errors) < TOLERANCE, errors
    assert not np.any(np.asarray(got[len(DECODES) :]))


@pytest.mark.parametrize("n_stretches", [12, mosaic_decode.STRETCHES])  # few long stretches; many short ones
def test_decode_attention_gives_the_same_bits_again(model: ModelConfig, n_stretches: int) -> None:
    """Two calls in a program that runs again and again; items of one, two and many parts.

    Which part of an item is stored last differs from run to run; the bits do not.
    """
    lengths = [*DECODES, 1999]
    data = paged(model, lengths)
    table = jnp.asarray(np.pad(data.table, ((0, ROWS - len(lengths)), (0, 0))))
    kv_len = jnp.asarray([*lengths, *[0] * (ROWS - len(lengths))], jnp.int32)
    q = bf16(np.random.default_rng(1), ROWS, model.num_attention_heads, model.head_dim)
    args = (jnp.int32(LAYER), table, kv_len)

    @jax.jit
    def run(q: jax.Array, pool: jax.Array, *args: jax.Array) -> tuple[jax.Array, jax.Array]:
        attend: Any = functools.partial(
            mosaic_decode.decode_attention, **sizes(model), n_stretches=n_stretches
        )
        once = attend(q, pool, *args)
        return once, attend(once, pool, *args)

    pool = jnp.asarray(data.pool, jnp.bfloat16)
    results = [run(q, pool, *args) for _ in range(20)]
    for asked, got in zip((q, results[0][0]), results[0], strict=True):
        exact = (asked.astype(jnp.float32), jnp.asarray(data.pool, jnp.float32), *args)
        want = XLA.decode_attention(*exact, **sizes(model))
        errors = [relative_error(g, w) for g, w in zip(got, want, strict=True) if np.any(w)]
        assert len(errors) == len(lengths)
        assert max(errors) < TOLERANCE, errors
        assert not np.any(np.asarray(got[len(lengths) :]))
    first = [np.asarray(x).view(np.uint16) for x in results[0]]
    for result in results[1:]:
        for x, y in zip(first, result, strict=True):
            np.testing.assert_array_equal(x, np.asarray(y).view(np.uint16))


def test_prefill_attention(model: ModelConfig) -> None:
    data = paged(model, [before + size for before, size in CHUNKS])
    q = bf16(np.random.default_rng(1), TOKENS, model.num_attention_heads, model.head_dim)

    def run(backend: Any, dtype: Any) -> jax.Array:
        tile, positions, rows = backend.prefill_tile, np.zeros(TOKENS, np.int32), np.zeros(TOKENS, np.int32)
        tiles, at = list[tuple[int, int, int]](), 0
        for seq, (before, size) in enumerate(CHUNKS):
            positions[at : at + size] = np.arange(before, before + size)
            mine = cut_tiles(seq, at, size, tile, backend.row_alignment)
            for n, (_, start, length) in enumerate(mine, len(tiles)):
                rows[start : start + length] = n * tile + np.arange(length)
            tiles += mine
            at += size
        tiles += [(-1, 0, 0)] * 5
        cut = [jnp.asarray(x, jnp.int32) for x in zip(*tiles, strict=True)]
        args = (q.astype(dtype), jnp.asarray(data.pool, dtype), jnp.int32(LAYER), jnp.asarray(data.table))
        attend = jax.jit(lambda *a: backend.prefill_attention(*a, tile=tile, **sizes(model)))
        out: jax.Array = attend(*args, jnp.asarray(positions), *cut, jnp.asarray(rows))
        return out

    got, want = run(MOSAIC, jnp.bfloat16), run(XLA, jnp.float32)
    ends = np.cumsum([size for _, size in CHUNKS])
    errors = [
        relative_error(got[e - size : e], want[e - size : e])
        for e, (_, size) in zip(ends, CHUNKS, strict=True)
    ]
    assert max(errors) < TOLERANCE, errors
    assert not np.any(np.asarray(got[ends[-1] :])), "tokens of no tile"


def test_attention_of_padding_alone_gives_zeros(model: ModelConfig) -> None:
    """As a step that is rehearsed has it."""
    data, zeros = paged(model, [16]), jnp.zeros(ROWS, jnp.int32)
    pool, table = jnp.asarray(data.pool, jnp.bfloat16), jnp.zeros((ROWS, 4), jnp.int32)
    q = bf16(np.random.default_rng(1), TOKENS, model.num_attention_heads, model.head_dim)
    q = q.astype(jnp.bfloat16)
    decode = jax.jit(lambda *a: MOSAIC.decode_attention(*a, **sizes(model)))
    assert not np.any(np.asarray(decode(q[:ROWS], pool, jnp.int32(LAYER), table, zeros)))
    prefill = jax.jit(lambda *a: MOSAIC.prefill_attention(*a, tile=MOSAIC.prefill_tile, **sizes(model)))
    of_tokens = jnp.zeros(TOKENS, jnp.int32)
    got = prefill(q, pool, jnp.int32(LAYER), table, of_tokens, zeros - 1, zeros, zeros, of_tokens)
    assert not np.any(np.asarray(got))


@pytest.mark.parametrize("tokens", [1, 16, 272])
def test_rope_write_kv(model: ModelConfig, tokens: int) -> None:
    rng = np.random.default_rng(2)
    data, n_kv = paged(model, [40]), model.num_key_value_heads
    qkv = bf16(rng, tokens, model.num_attention_heads + 2 * n_kv, model.head_dim)
    angles = rng.standard_normal((tokens, model.head_dim // 2))
    slots = rng.permutation(N_PAGES * PAGE_TOKENS)[:tokens]
    page = np.where(np.arange(tokens) % 5 == 4, -1, slots // PAGE_TOKENS)
    args = (
        *(jnp.asarray(x, jnp.float32) for x in (np.cos(angles), np.sin(angles))),
        *(jnp.asarray(x, jnp.int32) for x in (page, slots % PAGE_TOKENS)),
    )

    def run(backend: Any) -> list[npt.NDArray[np.float32]]:
        write = functools.partial(backend.rope_write_kv, n_kv=n_kv, page_tokens=PAGE_TOKENS)
        pool = jnp.asarray(data.pool, jnp.bfloat16)
        out = jax.jit(write, donate_argnums=0)(pool, jnp.int32(LAYER), qkv, *args)
        return [np.asarray(x, np.float32) for x in out]

    for got, want in zip(run(MOSAIC), run(XLA), strict=True):
        np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-6)
        still = data.pool == want if want.shape == data.pool.shape else np.array(False)
        np.testing.assert_array_equal(got[still], want[still])


RANKS: list[dict[str, int]] = [
    {"q_proj": 8, "v_proj": 8},
    {"q_proj": 16, "k_proj": 16, "v_proj": 16, "o_proj": 16},
    {"gate_proj": 5, "up_proj": 5, "down_proj": 5},
    {"q_proj": 64, "down_proj": 33, "k_proj": 3},
    dict.fromkeys(MODULES, 24),
]


LORA_BATCHES = {  # adapter of each decode row, -1: none; (adapter, tokens) of each prompt
    "each its own": (list(range(5)) + [-1] * 11, []),
    "runs": ([-1, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 4, 4, 4], []),
    "one for all": ([4] * 16, []),
    "many of few": ([-1] * 3 + [0] * 2 + [1] + [3] * 200 + [4] * 210, []),  # runs
    "decodes and prompts": (
        [0, 0, 0, 2, 3, 4, -1, 1],
        [(-1, 17), (0, 3), (1, 64), (2, 65), (3, 130), (4, 23)],
    ),
    "prompts": ([], [(4, 300), (0, 1), (3, 24), (1, 40)]),
    "none": ([-1] * 16, [(-1, 40)]),
}  # fmt: skip


@pytest.mark.parametrize("batch", LORA_BATCHES)
def test_lora(model: ModelConfig, batch: str) -> None:
    layout = PageLayout.for_model(model, PAGE_TOKENS, 1)
    rng = np.random.default_rng(3)
    pool = np.full((model.num_hidden_layers, N_PAGES, layout.page_elems), np.nan, np.float32)
    pool[:, 0] = 0  # what padding reads
    free, adapters = list(rng.permutation(np.arange(1, N_PAGES))), list[AdapterBlocks]()
    for seed, ranks in enumerate(RANKS):
        packed = pack_adapter(random_adapter(model, ranks, seed), layout, jnp.bfloat16)
        pages = [int(free.pop()) for _ in range(packed.layout.num_pages)]
        pool[:, pages] = packed.pages.astype(np.float32)
        adapters.append((np.asarray(pages, np.int32), *packed.layout.tables))
    decodes, prompts = LORA_BATCHES[batch]
    rows = -(-len(decodes) // ROWS) * ROWS
    tokens = rows + (TOKENS if prompts else 0)
    token_adapter = np.full(tokens, -1, np.int32)
    token_adapter[: len(decodes)] = decodes
    at = rows
    for adapter, size in prompts:
        token_adapter[at : at + size] = adapter
        at += size
    shape = LoraShape(
        tokens=tokens,
        decode_rows=rows,
        prefill_seqs=8,
        chunks_per_page=layout.chunks_per_page,
        a_chunks=tuple(layout.a_chunks(m) for m in MODULES),
        b_chunks=tuple(layout.b_chunks(m) for m in MODULES),
    )

    def run(
        backend: Any, dtype: Any, modules: tuple[str, ...], x: jax.Array, y: jax.Array
    ) -> npt.NDArray[np.float32]:
        planner = backend.planner
        needs = planner.needs(token_adapter, adapters, shape)
        built = planner.build(token_adapter, adapters, lowest_rung(planner, needs, shape), shape)
        apply = functools.partial(
            backend.apply_lora,
            modules=tuple(MODULES.index(m) for m in modules),
            in_dim=layout.in_dims[modules[0]],
            out_dims=tuple(layout.out_dims[m] for m in modules),
            chunk_width=layout.chunk_width,
        )
        work = backend.lora_work(**{n: jnp.asarray(a) for n, a in built.items()})
        args = x.astype(dtype), y.astype(dtype), jnp.asarray(pool, dtype), jnp.int32(LAYER), work
        with jax.default_matmul_precision("highest"):
            return np.asarray(jax.jit(apply)(*args), np.float32)

    for modules in GROUPS:
        x = bf16(rng, tokens, layout.in_dims[modules[0]])
        y = bf16(rng, tokens, sum(layout.out_dims[m] for m in modules))
        got, want = (run(b, d, modules, x, y) for b, d in ((MOSAIC, jnp.bfloat16), (XLA, jnp.float32)))
        base = np.asarray(y, np.float32)
        changed = np.any(want != base, axis=1)
        np.testing.assert_array_equal(got[~changed], base[~changed], err_msg=f"{modules}")
        for t in np.flatnonzero(changed):  # y is rounded to bf16 with what is added to it
            delta = want[t] - base[t]
            limit = TOLERANCE + 2**-8 * np.linalg.norm(base[t]) / np.linalg.norm(delta)
            error = relative_error(got[t] - base[t], delta)
            assert error < limit, (
                f"{modules}: token {t}, adapter {token_adapter[t]}: {error:.4f} of {limit:.4f}"
            )
