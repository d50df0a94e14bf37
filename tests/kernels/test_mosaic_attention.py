"""The Mosaic attention kernels in Pallas's GPU interpreter, races detected, against loops in float64.

Pools are NaN wherever no token of the sequence was written, so that a kernel that reads too far is caught.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from slora_jax.pallas_kernels import mosaic_kv, mosaic_rope, xla_attention
from slora_jax.pallas_kernels.decode_plan import FIRST_PAGES, plan_decode
from slora_jax.pallas_kernels.mosaic_attention_operands import unsupported
from slora_jax.pallas_kernels.mosaic_decode import decode_attention
from slora_jax.pallas_kernels.mosaic_kv import write_kv
from slora_jax.pallas_kernels.mosaic_prefill import ROW_ALIGNMENT, plan_prefill, prefill_attention
from slora_jax.pallas_kernels.mosaic_rope import rope_write_kv

pytestmark = [
    pytest.mark.usefixtures("clean_interpreter"),
    # Rows of a tile beyond the group are whatever lay in shared memory.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
]
ON_GPU = jax.default_backend() == "gpu"  # then on the chip, without the interpreter
INTERPRET = None if ON_GPU else plgpu.InterpretGPUParams(detect_races=True)
LAYERS, LAYER = 2, 1
TOLERANCE = 6e-3  # relative, of bf16 weights and outputs; another head's or token's K or V gives more than 1


@dataclasses.dataclass
class Paged:
    """Sequences of the given lengths in shuffled pages."""

    pool: jax.Array
    table: np.ndarray  # [b, m]; -1 where a sequence has no page
    kv: list[np.ndarray]  # a sequence [length, 2, k, e]


def paged(rng: np.random.Generator, lengths: list[int], n_kv: int, e: int, page_tokens: int) -> Paged:
    counts = [-(-n // page_tokens) for n in lengths]
    ids = iter(rng.permutation(np.arange(1, sum(counts) + 4)))
    pool = np.full((LAYERS, sum(counts) + 4, 2, n_kv, page_tokens, e), np.nan, np.float32)
    table = np.full((len(lengths), max(counts) + 1), -1, np.int32)
    rows = []
    for row, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = [next(ids) for _ in range(count)]
        kv = np.asarray(jnp.asarray(rng.standard_normal((n, 2, n_kv, e)), jnp.bfloat16), np.float32)
        for c in range(n):
            pool[LAYER, table[row, c // page_tokens], :, :, c % page_tokens] = kv[c]
        rows.append(kv)
    return Paged(jnp.asarray(pool.reshape(LAYERS, -1, 2 * n_kv * page_tokens * e), jnp.bfloat16), table, rows)


def attend_one(q: np.ndarray, kv: np.ndarray, scale: float) -> np.ndarray:
    """One token's attention: q [h, e] over kv [c, 2, k, e]."""
    out = np.zeros(q.shape)
    for head, vector in enumerate(q.astype(np.float64)):
        k, v = kv[:, :, head // (q.shape[0] // kv.shape[2])].astype(np.float64).transpose(1, 0, 2)
        score = k @ vector * scale
        weight = np.exp(score - score.max())
        out[head] = (weight / weight.sum()) @ v
    return out


def random_q(rng: np.random.Generator, *dims: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(dims), jnp.bfloat16)


def assert_close(got: jax.Array, want: np.ndarray) -> None:
    error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
    assert error < TOLERANCE


@pytest.mark.parametrize(
    ("lengths", "h", "n_kv", "e", "page_tokens", "n_stretches"),
    [
        ([70, 0, 1], 2, 1, 128, 16, 2),  # a padding row; a stretch's border inside an item
        ([33, 3, 0, 64, 130], 8, 2, 64, 16, 3),  # GQA 4, head_dim 64
        ([130, 65, 64], 3, 3, 128, 32, 4),  # MHA
        ([200], 16, 1, 64, 64, 4),  # a group of 16; one sequence over all stretches
        ([970, 5], 12, 1, 128, 8, 8),  # an item of many parts, more than are loaded at once
        ([257, 1], 7, 1, 64, 16, 1),  # an odd group; one stretch
        ([0, 0], 2, 1, 64, 16, 2),  # padding alone
    ],
)
def test_decode(
    lengths: list[int],
    h: int,
    n_kv: int,
    e: int,
    page_tokens: int,
    n_stretches: int,
) -> None:
    rng = np.random.default_rng(0)
    data = paged(rng, lengths, n_kv, e, page_tokens)
    q = random_q(rng, len(lengths), h, e)
    got = decode_attention(
        q,
        data.pool,
        LAYER,
        jnp.asarray(data.table),
        jnp.asarray(lengths, jnp.int32),
        n_kv=n_kv,
        page_tokens=page_tokens,
        scale=0.2,
        n_stretches=n_stretches,
        consumers=2 if n_stretches % 2 == 0 else 1,
        interpret=INTERPRET,
    )
    assert got.shape == q.shape
    assert got.dtype == q.dtype
    for row, n in enumerate(lengths):
        if n:
            assert_close(got[row], attend_one(np.asarray(q[row], np.float64), data.kv[row], 0.2))
        else:
            assert not np.asarray(got[row], np.float32).any()


@pytest.mark.parametrize("seed", range(20))
def test_plan_deals_every_chunk_once(seed: int) -> None:
    """The walk that stretches make, in Python: each chunk of each item once, and who shares an item knows."""
    rng = np.random.default_rng(seed)
    n_kv, chunk, page_tokens = int(rng.integers(1, 5)), 64, 16
    n_stretches, b = int(rng.integers(1, 12)), int(rng.integers(1, 9))
    lengths = rng.integers(0, 400, b) * (rng.random(b) < 0.8)
    table = rng.permutation(b * 25).reshape(b, 25)
    plan = plan_decode(
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(table, jnp.int32),
        n_kv=n_kv,
        page_tokens=page_tokens,
        chunk=chunk,
        n_stretches=n_stretches,
    )
    walk, stretches = np.asarray(plan.walk), np.asarray(plan.stretches)
    live = np.flatnonzero(lengths)
    np.testing.assert_array_equal(walk[: len(live)], np.stack([live, lengths[live]], axis=1))
    assert not walk[len(live) :].any()
    parts: dict[int, list[tuple[int, bool]]] = {}  # item -> its parts: stretch, whether it begins the item
    seen = set()
    for at, (j, head, i, count, *_) in enumerate(stretches):
        for n in range(count):
            seq = walk[j, 0]
            item = int(seq * n_kv + head)
            seen.add((item, int(i)))
            if n == 0 or i == 0:
                parts.setdefault(item, []).append((at, bool(i == 0)))
            i += 1
            if i * chunk >= lengths[seq]:
                i, head = 0, head + 1
                if head == n_kv:
                    j, head = j + 1, 0
    steps = -(-lengths // chunk)
    assert seen == {(s * n_kv + k, i) for s in range(b) for k in range(n_kv) for i in range(steps[s])}
    assert stretches[:, 3].sum() == len(seen)
    np.testing.assert_array_equal(stretches[:, 4:6], walk[stretches[:, 0]])
    np.testing.assert_array_equal(stretches[:, 6:8], walk[np.minimum(stretches[:, 0] + 1, b - 1)])
    cut = {item: where for item, where in parts.items() if len(where) > 1}
    goes_on = {at: int(more) for at, more in enumerate(stretches[:, 10]) if more}
    assert goes_on == {where[0][0]: len(where) - 1 for where in cut.values()}
    for item, where in cut.items():  # who stores a part knows whose it is, and how many there are
        assert [begins for _, begins in where] == [True] + [False] * (len(where) - 1)
        for at, begins in where:
            told = (at, stretches[at, 10]) if begins else tuple(stretches[at, 8:10])
            assert told == (where[0][0], len(where) - 1)
        following = stretches[where[0][0] + 1]  # starts inside the item, which a merging kernel reads there
        assert following[4] * n_kv + following[1] == item
    pages = chunk // page_tokens
    assert stretches.shape[1] % 16 == 0
    for _, _, i, _, seq, *others in stretches[stretches[:, 3] > 0]:
        assert others[FIRST_PAGES - 5 :][:pages] == table[seq, i * pages : (i + 1) * pages].tolist()


@pytest.mark.parametrize(
    ("chunks", "h", "n_kv", "e", "page_tokens", "tile", "pad", "tuning"),
    [
        ([(0, 20), (30, 133)], 2, 1, 128, 16, 64, 5, {}),  # two heads a thread block
        (
            [(5, 150)],
            2,
            2,
            64,
            16,
            128,
            0,
            {"pingpong": True, "heads_together": 1},
        ),  # MHA, 128 rows of a head
        ([(300, 3), (0, 1)], 3, 1, 64, 32, 64, 70, {}),  # an odd group: one multiplying warpgroup
        ([(60, 70)], 1, 1, 64, 64, 128, 0, {"block_kv": 64, "stages": 3}),
    ],
)
def test_prefill(
    chunks: list[tuple[int, int]],
    h: int,
    n_kv: int,
    e: int,
    page_tokens: int,
    tile: int,
    pad: int,
    tuning: dict[str, Any],
) -> None:
    """Chunks (position of the first token, tokens) of several sequences, and `pad` tokens of no tile."""
    rng = np.random.default_rng(1)
    data = paged(rng, [before + size for before, size in chunks], n_kv, e, page_tokens)
    tiles, positions, rows = [(-1, 0, 0)], list[int](), list[int]()
    for row, (before, size) in enumerate(chunks):
        first, end = len(positions), len(positions) + size
        starts = [first, *range(first - first % ROW_ALIGNMENT + tile, end, tile)]
        tiles += [(row, a, b - a) for a, b in zip(starts, [*starts[1:], end], strict=True)]
        positions += range(before, before + size)
        rows += [row] * size
    live = len(positions)
    q = random_q(rng, live + pad, h, e)
    seq, start, length = (jnp.asarray(x, jnp.int32) for x in zip(*tiles, strict=True))
    got = prefill_attention(
        q,
        data.pool,
        LAYER,
        jnp.asarray(data.table),
        jnp.asarray(positions + [0] * pad, jnp.int32),
        seq,
        start,
        length,
        jnp.zeros(live + pad, jnp.int32),
        n_kv=n_kv,
        page_tokens=page_tokens,
        tile=tile,
        scale=0.2,
        interpret=INTERPRET,
        **tuning,
    )
    assert got.shape == q.shape
    assert got.dtype == q.dtype
    for t, (row, position) in enumerate(zip(rows, positions, strict=False)):
        assert_close(got[t], attend_one(np.asarray(q[t], np.float64), data.kv[row][: position + 1], 0.2))
    assert not np.asarray(got[live:], np.float32).any()


def test_longest_context_starts_first() -> None:
    i32 = jnp.int32
    tiles = plan_prefill(
        jnp.asarray([7, 8, 9, 0, 1, 50], i32),
        jnp.asarray([0, -1, 1, 2], i32),
        jnp.asarray([0, 0, 3, 5], i32),
        jnp.asarray([3, 9, 2, 1], i32),
    )
    want = [[2, 5, 50, 1], [0, 0, 7, 3], [1, 3, 0, 2], [-1, 0, 7, 0], [0, 6, 0, 0]]
    np.testing.assert_array_equal(np.asarray(tiles).reshape(-1, 4), want)


@pytest.mark.parametrize(("t", "n_kv", "e", "page_tokens"), [(7, 2, 64, 16), (1, 3, 128, 8)])
def test_write_kv(monkeypatch: pytest.MonkeyPatch, t: int, n_kv: int, e: int, page_tokens: int) -> None:
    """Rows go where they belong, padding nowhere, and every other element stays."""
    monkeypatch.setattr(mosaic_kv, "BLOCKS", 2)
    rng = np.random.default_rng(2)
    n_pages = 9
    pool = random_q(rng, LAYERS, n_pages, 2 * n_kv * page_tokens * e)
    k, v = random_q(rng, t, n_kv, e), random_q(rng, t, n_kv, e)
    slots = rng.permutation(n_pages * page_tokens)[:t]
    page, offset = slots // page_tokens, slots % page_tokens
    page[2:3] = -1
    want = np.asarray(pool, np.float32).reshape(LAYERS, n_pages, 2, n_kv, page_tokens, e).copy()
    for i in np.flatnonzero(page >= 0):
        want[LAYER, page[i], 0, :, offset[i]] = np.asarray(k[i], np.float32)
        want[LAYER, page[i], 1, :, offset[i]] = np.asarray(v[i], np.float32)
    places = (jnp.asarray(x, jnp.int32) for x in (page, offset))
    got = write_kv(pool, LAYER, k, v, *places, page_tokens=page_tokens, interpret=INTERPRET)
    np.testing.assert_array_equal(np.asarray(got, np.float32), want.reshape(pool.shape))


@pytest.mark.parametrize(
    ("t", "h", "n_kv", "e", "page_tokens"),
    [
        (7, 32, 32, 128, 16),  # 64 heads are rotated at once: all of a token
        (1, 16, 8, 128, 8),
        (10, 48, 24, 64, 16),  # more than 64, and a last block whose window begins earlier
        (9, 9, 3, 64, 16),  # heads that fill no tiles
        (2, 8, 8, 192, 8),  # and wider ones than swizzling is
        (2, 16, 8, 256, 8),
        (0, 8, 8, 64, 16),
    ],
)
def test_rope_write_kv(
    monkeypatch: pytest.MonkeyPatch, t: int, h: int, n_kv: int, e: int, page_tokens: int
) -> None:
    """q and k are rotated by their own token's angles, k and v go where they belong, nothing else changes."""
    for module in (mosaic_kv, mosaic_rope):
        monkeypatch.setattr(module, "BLOCKS", 3)
    rng = np.random.default_rng(2)
    pool = random_q(rng, LAYERS, 9, 2 * n_kv * page_tokens * e)
    qkv = random_q(rng, t, h + 2 * n_kv, e)
    angles = rng.standard_normal((t, e // 2))
    slots = rng.permutation(9 * page_tokens)[:t]
    page = np.where(np.arange(t) == 2, -1, slots // page_tokens)
    cos, sin = (jnp.asarray(x, jnp.float32) for x in (np.cos(angles), np.sin(angles)))
    at, slot = (jnp.asarray(x, jnp.int32) for x in (page, slots % page_tokens))
    args = pool, LAYER, qkv, cos, sin, at, slot
    want = xla_attention.rope_write_kv(*args, n_kv=n_kv, page_tokens=page_tokens)
    got = rope_write_kv(*args, n_kv=n_kv, page_tokens=page_tokens, interpret=INTERPRET)
    assert got[1].shape == (t, h, e)
    for a, b in zip(got, want, strict=True):  # XLA may contract a product and a sum
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-7, atol=1e-6
        )
    untouched = np.asarray(want[0] == pool)
    np.testing.assert_array_equal(np.asarray(got[0])[untouched], np.asarray(pool)[untouched])


def arguments(**changes: Any) -> tuple[list[Any], dict[str, Any]]:
    """Valid arguments of decode_attention, with some changed."""
    values: dict[str, Any] = {
        "q": jnp.zeros((2, 4, 64), jnp.bfloat16),
        "pool": jnp.zeros((1, 3, 2 * 2 * 16 * 64), jnp.bfloat16),
        "layer": 0,
        "page_table": jnp.zeros((2, 3), jnp.int32),
        "kv_len": jnp.ones(2, jnp.int32),
    }
    sizes = {"n_kv": 2, "page_tokens": 16, "scale": 1.0}
    return [changes.get(n, x) for n, x in values.items()], {n: changes.get(n, x) for n, x in sizes.items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((2, 4, 64))}, "bfloat16"),
        ({"q": jnp.zeros((2, 4, 96), jnp.bfloat16)}, "head_dim must be 64 or 128, not 96"),
        ({"q": jnp.zeros((2, 5, 64), jnp.bfloat16)}, "5 query heads over 2 KV heads"),
        ({"q": jnp.zeros((2, 34, 64), jnp.bfloat16)}, "group of 1 to 16"),
        ({"page_tokens": 12}, "page_tokens 12"),
        ({"page_tokens": 32}, "pool pages have 4096 elements"),
        ({"kv_len": jnp.ones(3, jnp.int32)}, "a row for each of 2 queries"),
        *(
            ({name: jnp.zeros(dims, jnp.bfloat16)}, r"need q \[t, h, e\], pool .* got")
            for name in ("q", "pool", "page_table")
            for dims in ((), (128,), (1, 2, 3, 128))
        ),
    ],
)
def test_limits_are_named(changes: dict[str, Any], message: str) -> None:
    values, sizes = arguments(**changes)
    with pytest.raises(ValueError, match=message):
        decode_attention(*values, **sizes)


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        ({"n_stretches": 3}, "n_stretches 3 must be a multiple of consumers 2"),
        ({"stages": 99}, "stages 99 must be 1 to"),
        ({"chunk": 256}, "chunk 256 of head_dim 128 does not fit the shared memory of 2 consumers"),
    ],
)
def test_tunings_are_checked(tuning: dict[str, Any], message: str) -> None:
    values, sizes = arguments(
        q=jnp.zeros((2, 4, 128), jnp.bfloat16), pool=jnp.zeros((1, 3, 2 * 2 * 16 * 128), jnp.bfloat16)
    )
    with pytest.raises(ValueError, match=message):
        decode_attention(*values, **(sizes | tuning))


def test_limits_can_be_asked_before() -> None:
    assert unsupported(n_q=32, n_kv=8, head_dim=128, page_tokens=16) is None
    assert unsupported(n_q=9, n_kv=3, head_dim=64, page_tokens=64) is None
    assert "head_dim" in str(unsupported(n_q=4, n_kv=4, head_dim=80, page_tokens=16))
    assert "page_tokens" in str(unsupported(n_q=4, n_kv=4, head_dim=64, page_tokens=48))


def test_prefill_and_write_name_their_limits() -> None:
    (q, pool, layer, table, _), sizes = arguments()
    ints = jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="tile must be 64 or 128 tokens, not 16"):
        prefill_attention(q, pool, layer, table, *[ints] * 5, **sizes, tile=16)
    with pytest.raises(ValueError, match="positions"):
        prefill_attention(q, pool, layer, table, jnp.zeros(3, jnp.int32), *[ints] * 4, **sizes, tile=64)
    k = jnp.zeros((2, 2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="one entry for each of 2 tokens"):
        write_kv(pool, layer, k, k, ints, jnp.zeros(3, jnp.int32), page_tokens=16)
    with pytest.raises(ValueError, match="pool pages have 4096 elements"):
        write_kv(pool, layer, k, k, ints, ints, page_tokens=8)
    angles = jnp.zeros((2, 32))
    for bad in (jnp.zeros((2, 4, 64)), jnp.zeros((2, 256), jnp.bfloat16)):
        with pytest.raises(ValueError, match=r"need qkv .*\[t, h \+ 4, e\]"):
            rope_write_kv(pool, layer, bad, angles, angles, ints, ints, n_kv=2, page_tokens=16)
    qkv = jnp.zeros((2, 8, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"cos and sin float32 \[t, e/2\]"):
        rope_write_kv(pool, layer, qkv, angles, angles[:1], ints, ints, n_kv=2, page_tokens=16)
    for heads in (8, 32):  # rotated by XLA; by the kernel
        qkv = jnp.zeros((2, heads, 64), jnp.float32)
        with pytest.raises(ValueError, match="qkv must be bfloat16, as the pool is, not float32"):
            rope_write_kv(pool, layer, qkv, angles, angles, ints, ints, n_kv=heads // 4, page_tokens=16)
