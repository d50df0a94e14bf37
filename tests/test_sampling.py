"""The device sampler against a float64 reference that sorts, and against what a batch must not change."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core
from scipy import stats

from slora_jax import sampling
from slora_jax.sampling import PROMPT_BIT, SampleResult, SamplingRows, sample, update_token_counts

Array = np.ndarray[Any, np.dtype[Any]]

ROWS, SLOTS, VOCAB, BIASES, LOGPROBS = 8, 5, 257, 64, 6
DEFAULTS = {
    "temperature": np.float32(0),
    "top_k": np.int32(0),
    "top_p": np.float32(1),
    "min_p": np.float32(0),
    "repetition_penalty": np.float32(1),
    "presence_penalty": np.float32(0),
    "frequency_penalty": np.float32(0),
    "position": np.int32(0),
    "num_logprobs": np.int32(-1),
}
RESULTS = [field.name for field in dataclasses.fields(SampleResult)]

draw = jax.jit(sample, static_argnames="max_logprobs")
update = jax.jit(update_token_counts, donate_argnums=0)


def make_rows(
    num: int = ROWS, bias: list[tuple[int, int, float]] | None = None, seed: Any = 0, **fields: Any
) -> SamplingRows:
    """Rows whose fields are scalars or one value a row; `bias` as (row, token, value), `seed` 64-bit."""
    arrays: dict[str, Any] = {
        k: np.broadcast_to(np.asarray(fields.get(k, v), v.dtype), num) for k, v in DEFAULTS.items()
    }
    assert fields.keys() <= arrays.keys()
    seeds = np.broadcast_to(np.asarray(seed, np.uint64), num)
    packed = (bias or []) + [(num, 0, 0.0)] * (BIASES - len(bias or []))
    arrays["seed"] = np.stack([seeds >> np.uint64(32), seeds & np.uint64(2**32 - 1)], axis=1).astype(
        np.uint32
    )
    for name, column in zip(("row", "token", "value"), zip(*packed, strict=True), strict=True):
        arrays[f"bias_{name}"] = np.array(column, np.float32 if name == "value" else np.int32)
    return SamplingRows(**arrays)


def take(rows: SamplingRows, index: Array) -> SamplingRows:
    """The given rows, without bias."""
    arrays: dict[str, Any] = {k: np.asarray(getattr(rows, k))[index] for k in (*DEFAULTS, "seed")}
    arrays["bias_row"] = np.full(BIASES, len(index), np.int32)
    arrays["bias_token"] = np.zeros(BIASES, np.int32)
    arrays["bias_value"] = np.zeros(BIASES, np.float32)
    return SamplingRows(**arrays)


def run(
    logits: Array,
    rows: SamplingRows,
    counts: Array | None = None,
    slot: Array | None = None,
    width: int = LOGPROBS,
) -> SampleResult:
    counts = np.zeros((SLOTS, logits.shape[1]), np.int32) if counts is None else counts
    slot = np.zeros(len(logits), np.int32) if slot is None else slot
    result: SampleResult = draw(logits, rows, counts, slot, max_logprobs=width)
    host: SampleResult = jax.tree.map(np.asarray, result)
    return host


def threefry(key: Array, counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32, 20 rounds (Salmon et al. 2011), on Python integers."""
    mask = 0xFFFFFFFF
    schedule = [int(key[0]), int(key[1]), int(key[0]) ^ int(key[1]) ^ 0x1BD11BDA]
    a, b = (counter[0] + schedule[0]) & mask, (counter[1] + schedule[1]) & mask
    for block in range(5):
        for r in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            a = (a + b) & mask
            b = (((b << r) | (b >> (32 - r))) & mask) ^ a
        a = (a + schedule[(block + 1) % 3]) & mask
        b = (b + schedule[(block + 2) % 3] + block + 1) & mask
    return a, b


def reference_noise(seed: Array, position: int, vocab: int) -> Array:
    def mix(x: Array) -> Array:  # lowbias32 on uint64
        x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & np.uint64(0xFFFFFFFF)
        x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B)) & np.uint64(0xFFFFFFFF)
        return np.asarray(x ^ (x >> np.uint64(16)))

    a, b = threefry(seed, (position, 0))
    bits = mix((mix(np.arange(vocab, dtype=np.uint64) ^ np.uint64(a)) + np.uint64(b)) & np.uint64(0xFFFFFFFF))
    return np.asarray(-np.log1p(-(bits.astype(np.float64) + 0.5) / 2.0**32))


def reference_edit(logits: Array, rows: SamplingRows, i: int, history: Array) -> Array:
    x = logits.astype(np.float64)
    for row, token, value in zip(rows.bias_row, rows.bias_token, rows.bias_value, strict=True):
        if row == i:
            x[token] += value
    output = history & (PROMPT_BIT - 1)
    seen = history != 0
    penalty = float(rows.repetition_penalty[i])
    x[seen] = np.where(x[seen] > 0, x[seen] / penalty, x[seen] * penalty)
    presence, frequency = float(rows.presence_penalty[i]), float(rows.frequency_penalty[i])
    return np.asarray(x - frequency * output - presence * (output > 0))


def reference_kept(x: Array, rows: SamplingRows, i: int, slack: float = 0.0) -> Array:
    """bool[v]: tokens that survive min_p, top_k, top_p; `slack` moves p by rounding's worth."""
    k, p = int(rows.top_k[i]), float(rows.top_p[i])
    weight = np.exp((x - x.max()) / float(rows.temperature[i]))
    keep = weight >= min(1.0, float(rows.min_p[i]) * (1 - slack))
    if 0 < k < len(x):
        keep &= x >= np.sort(x)[-k]
    weight = np.where(keep, weight / weight[keep].sum(), 0)
    if p < 1:
        order = np.sort(weight)[::-1]
        last = min(int(np.searchsorted(np.cumsum(order), p + slack)), len(x) - 1)
        keep &= weight >= order[last] * (1 - 1e-9)
    return np.asarray(keep)


def reference_tokens(logits: Array, rows: SamplingRows, i: int, history: Array) -> set[int]:
    """The token that must be drawn; both where the choice between two lies within rounding."""
    x = reference_edit(logits, rows, i, history)
    if rows.temperature[i] == 0:
        # float32 edits may round two float64 values together: then the first is right, too.
        return {int(t) for t in np.flatnonzero(x >= x.max() - 1e-6 * max(1, abs(x.max())))}
    noise = reference_noise(np.asarray(rows.seed[i]), int(rows.position[i]), len(x))
    out: set[int] = set()
    for slack in (-1e-5, 0.0, 1e-5):
        keep = reference_kept(x, rows, i, slack)
        score = np.where(keep, (x - x.max()) / float(rows.temperature[i]) - np.log(noise), -np.inf)
        rounding = 1e-4 + 1e-6 * abs(x.max()) / float(rows.temperature[i])
        out |= {int(t) for t in np.flatnonzero(score >= score.max() - rounding)}
    return out


def random_case(rng: np.random.Generator, vocab: int = VOCAB) -> tuple[Array, SamplingRows, Array, Array]:
    """Logits (every other row on a coarse grid, so full of ties), rows of all kinds, histories, slots.

    Penalties are dyadic, so that float32 and float64 agree on which edited logits tie.
    """
    logits = rng.normal(size=(ROWS, vocab)).astype(np.float32) * rng.choice([0.3, 3, 10], (ROWS, 1))
    logits[::2] = np.round(logits[::2])
    logits[rng.random(logits.shape) < 0.02] = -np.inf
    logits = logits.astype(np.float32)
    counts = np.where(rng.random((SLOTS, vocab)) < 0.2, rng.integers(0, 4, (SLOTS, vocab)), 0)
    counts = (counts + np.where(rng.random((SLOTS, vocab)) < 0.2, PROMPT_BIT, 0)).astype(np.int32)
    values = [100.0, -100.0, 1.5, -np.inf]
    used = rng.choice(ROWS * vocab, BIASES // 2, replace=False)
    bias = [(int(u) // vocab, int(u) % vocab, float(rng.choice(values))) for u in used]
    rows = make_rows(
        bias=bias,
        seed=rng.integers(0, 2**64, ROWS, dtype=np.uint64),
        temperature=rng.choice([0, 0.01, 0.7, 1, 5], ROWS),
        top_k=rng.choice([0, 1, 2, 40, vocab - 1, vocab, vocab + 9], ROWS),
        top_p=rng.choice([1e-6, 0.3, 0.9, 0.999, 1], ROWS),
        min_p=rng.choice([0, 0, 0.05, 1], ROWS),
        repetition_penalty=rng.choice([1, 2, 0.5], ROWS),
        presence_penalty=rng.choice([0, 1, -0.5], ROWS),
        frequency_penalty=rng.choice([0, 0.75, -0.25], ROWS),
        position=rng.integers(0, 1000, ROWS),
        num_logprobs=rng.integers(-1, LOGPROBS + 1, ROWS),
    )
    return logits, rows, counts, rng.integers(0, SLOTS, ROWS).astype(np.int32)


@pytest.fixture(params=sorted(sampling.BITS_A_PASS))
def draws_as(request: pytest.FixtureRequest) -> Iterator[None]:
    """The CPU searches thresholds as this platform does."""
    with mock.patch.dict(sampling.BITS_A_PASS, cpu=sampling.BITS_A_PASS[request.param]):
        jax.clear_caches()
        yield
    jax.clear_caches()


@pytest.mark.usefixtures("draws_as")
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([VOCAB, 256]))
def test_tokens_equal_the_reference(seed: int, vocab: int) -> None:
    logits, rows, counts, slot = random_case(np.random.default_rng(seed), vocab)
    got = run(logits, rows, counts, slot)
    for i in range(ROWS):
        assert got.tokens[i] in reference_tokens(logits[i], rows, i, counts[slot[i]]), i


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_logprobs_equal_the_reference(seed: int) -> None:
    logits, rows, counts, slot = random_case(np.random.default_rng(seed))
    got = run(logits, rows, counts, slot)
    for i, wanted in enumerate(rows.num_logprobs):
        x = logits[i].astype(np.float64)
        normal = x - x.max() - np.log(np.exp(x - x.max()).sum())
        if wanted < 0:
            assert got.logprob[i] == got.rank[i] == 0
        else:
            np.testing.assert_allclose(got.logprob[i], normal[got.tokens[i]], atol=1e-5, rtol=1e-6)
            assert got.rank[i] == np.sum(x >= x[got.tokens[i]])
        top = np.argsort(-x, kind="stable")[: max(0, wanted)]
        np.testing.assert_array_equal(got.top_tokens[i, : len(top)], top)
        np.testing.assert_allclose(got.top_logprobs[i, : len(top)], normal[top], atol=1e-5, rtol=1e-6)
        assert (got.top_tokens[i, len(top) :] == -1).all()
        assert (got.top_logprobs[i, len(top) :] == -np.inf).all()


def test_no_more_alternatives_than_possible_tokens() -> None:
    logits = np.full((2, VOCAB), -np.inf, np.float32)
    logits[:, [3, 9]] = 1, 2
    got = run(logits, make_rows(2, num_logprobs=LOGPROBS))
    np.testing.assert_array_equal(got.top_tokens[0], [9, 3, -1, -1, -1, -1])
    assert run(logits, make_rows(2, num_logprobs=4), width=0).top_tokens.shape == (2, 0)


def test_greedy_takes_the_first_of_ties() -> None:
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[1:, 200] = logits[1:, 70] = 2
    logits[2, 5] = -0.0
    got = run(logits, make_rows(num_logprobs=0))
    assert got.tokens.tolist() == [0] + [70] * (ROWS - 1)
    assert got.rank.tolist() == [VOCAB] + [2] * (ROWS - 1)
    mixed = run(logits, make_rows(temperature=[0, 0, 0, 0, 1, 1, 1, 1]))
    assert mixed.tokens[:4].tolist() == got.tokens[:4].tolist()


def test_zeros_of_both_signs_tie() -> None:
    logits = np.full((512, VOCAB), -1, np.float32)
    logits[:, 4], logits[:, 8] = 0.0, -0.0
    got = run(logits, make_rows(512, seed=np.arange(512), temperature=1, top_k=1))
    assert set(got.tokens.tolist()) == {4, 8}


@pytest.mark.usefixtures("draws_as")
@pytest.mark.parametrize("k", [1, 2, 37])
def test_thresholds_are_exact_to_the_last_bit(k: int) -> None:
    order = np.random.default_rng(k).permutation(VOCAB)
    neighbours = np.float32(1) - np.arange(VOCAB, dtype=np.float32) * np.float32(2**-24)  # consecutive floats
    logits = np.tile(neighbours[np.argsort(order)], (2048, 1))  # the best token is order[0]
    by_k = run(logits, make_rows(2048, seed=np.arange(2048), temperature=1, top_k=k), width=0)
    assert set(by_k.tokens.tolist()) == set(order[:k].tolist())
    by_p = run(logits, make_rows(2048, seed=np.arange(2048), temperature=1, top_p=(k - 0.5) / VOCAB), width=0)
    assert set(by_p.tokens.tolist()) == set(order[:k].tolist())


def test_bans_and_large_biases() -> None:
    inf = float("inf")
    logits = np.random.default_rng(0).normal(size=(ROWS, VOCAB)).astype(np.float32)
    bias = [(0, 11, 100.0), (1, 11, inf), (2, 11, inf), (2, 11, -inf), (2, 12, 60.0), (3, 13, 1e38)]
    bias += [(4, int(np.argmax(logits[4])), -inf), (5, 7, inf), (5, 8, inf)]
    for temperature in (0, 1, 1e-20):
        rows = make_rows(bias=bias, temperature=temperature, top_p=0.999, top_k=100, num_logprobs=0)
        got = run(logits, rows)
        assert got.tokens[:4].tolist() == [11, 11, 12, 13]
        assert got.tokens[4] != np.argmax(logits[4])
        assert got.tokens[5] in (7, 8)
        assert np.isfinite(got.logprob).all()


def test_a_row_without_any_possible_token_still_gives_a_valid_one() -> None:
    logits = np.full((ROWS, VOCAB), -np.inf, np.float32)
    got = run(logits, make_rows(temperature=[0, 1] * 4, top_k=3, top_p=0.5))
    assert ((got.tokens >= 0) & (got.tokens < VOCAB)).all()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 2.5},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.9, "top_k": 6, "top_p": 0.7, "min_p": 0.05},
    ],
)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_distribution(fields: dict[str, Any], vary: str) -> None:
    num, vocab = 1 << 14, 12
    logits = np.random.default_rng(7).normal(size=vocab).astype(np.float32) * 1.5
    one = make_rows(1, **fields)
    keep = reference_kept(logits.astype(np.float64), one, 0)
    expected = np.where(keep, np.exp(logits.astype(np.float64) / fields["temperature"]), 0)
    expected *= num / expected.sum()
    many: dict[str, Any] = (
        {"seed": np.arange(num) + 2**33} if vary == "seed" else {"position": np.arange(num), "seed": 5}
    )
    rows = make_rows(num, **fields, **many)
    got = np.bincount(run(np.tile(logits, (num, 1)), rows, width=0).tokens, minlength=vocab)
    assert (got[~keep] == 0).all()
    assert stats.chisquare(got[keep], expected[keep]).pvalue > 1e-4


def test_a_flat_distribution_over_many_tokens_is_flat() -> None:
    num, vocab = 64, 1 << 17
    logits = np.zeros((num, vocab), np.float32)
    for rows in (
        make_rows(num, seed=np.arange(num), temperature=1),
        make_rows(num, seed=999, position=np.arange(num), temperature=1),
    ):
        got = np.asarray(run(logits, rows, width=0).tokens)
        assert stats.kstest(got / vocab, "uniform").pvalue > 1e-4
        assert len(set(got.tolist())) > num - 3


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    num = 64
    seed, position = np.divmod(np.arange(num * num), num)
    logits = np.zeros((num * num, 16), np.float32)
    got = run(logits, make_rows(num * num, seed=seed, position=position, temperature=1), width=0).tokens
    grid = got.reshape(num, num)
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid, grid.T[::-1])):
        table = np.histogram2d(a.ravel(), b.ravel(), bins=[range(17), range(17)])[0]
        assert stats.chi2_contingency(table).pvalue > 1e-4


def test_both_halves_of_the_seed_count() -> None:
    logits = np.zeros((4, VOCAB), np.float32)
    seeds = np.array([1, 2, 1 << 32, (1 << 32) + 1], np.uint64)
    assert len(set(run(logits, make_rows(4, seed=seeds, temperature=1)).tokens.tolist())) == 4


def test_a_row_does_not_depend_on_its_batch() -> None:
    rng = np.random.default_rng(3)
    logits, rows, counts, slot = random_case(rng)
    rows = take(rows, np.arange(ROWS))
    whole = run(logits, rows, counts, slot)
    for index in (rng.permutation(ROWS), np.array([4, 1, 6]), *np.arange(ROWS)[:, None]):
        some = run(logits[index], take(rows, index), counts, slot[index])
        for name in RESULTS:
            got, want = getattr(some, name), getattr(whole, name)[index]
            tolerance = 1e-6 if "logprob" in name else 0  # another R may add up in another order
            np.testing.assert_allclose(got, want, tolerance, tolerance, err_msg=f"{name} of {index}")


def test_padding_rows_change_nothing() -> None:
    logits, rows, counts, slot = random_case(np.random.default_rng(4))
    rows = take(rows, np.arange(ROWS))
    want = run(logits, rows, counts, slot)
    index = np.r_[np.arange(ROWS), 0, 1, 2]
    padded = run(logits[index], take(rows, index), counts, np.r_[slot, [SLOTS] * 3].astype(np.int32))
    np.testing.assert_array_equal(padded.tokens[:ROWS], want.tokens)
    np.testing.assert_array_equal(padded.top_tokens[:ROWS], want.top_tokens)
    assert (padded.rank[ROWS:] == 0).all()


def test_a_row_of_nan_spoils_only_itself() -> None:
    logits, rows, counts, slot = random_case(np.random.default_rng(5))
    for vocab in (VOCAB, 256):
        broken = logits[:, :vocab].copy()
        rows = take(rows, np.arange(ROWS))
        want = run(broken, rows, counts[:, :vocab], slot)
        broken[2] = np.nan
        broken[5, 17] = np.nan
        got = run(broken, rows, counts[:, :vocab], slot)
        healthy = [0, 1, 3, 4, 6, 7]
        for name in RESULTS:
            np.testing.assert_array_equal(getattr(got, name)[healthy], getattr(want, name)[healthy])
        assert ((got.tokens >= 0) & (got.tokens < vocab)).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_token_counts_equal_a_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompt, output = np.zeros((SLOTS, 11), bool), np.zeros((SLOTS, 11), np.int64)
    counts = jnp.zeros((SLOTS, 11), jnp.int32)
    for _ in range(4):
        slot, token = rng.integers(0, SLOTS + 1, 24, np.int32), rng.integers(0, 11, 24, np.int32)
        is_prompt, reset = rng.random(24) < 0.5, rng.integers(0, SLOTS + 1, 2, np.int32)
        counts = update(counts, slot, token, is_prompt, reset)
        for s in reset[reset < SLOTS]:
            prompt[s], output[s] = False, 0
        for s, t, p in zip(slot, token, is_prompt, strict=True):
            if s < SLOTS and p:
                prompt[s, t] = True
            elif s < SLOTS:
                output[s, t] += 1
        np.testing.assert_array_equal(counts, output + prompt * PROMPT_BIT)


def test_token_counts_are_updated_in_place() -> None:
    counts = jax.block_until_ready(jnp.zeros((SLOTS, VOCAB), jnp.int32))
    before = counts.unsafe_buffer_pointer()
    ints = np.zeros(4, np.int32)
    assert update(counts, ints, ints, ints == 0, ints).unsafe_buffer_pointer() == before


def test_history_reaches_the_penalties() -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, [1, 2, 3]] = 4.0, 3.5, 3.0
    ids = functools.partial(np.array, dtype=np.int32)
    history = ids([0, 0, 0]), ids([1, 2, 2]), np.array([True, False, False])
    counts = np.asarray(update(jnp.zeros((SLOTS, VOCAB), jnp.int32), *history, ids([SLOTS])))
    slot = ids([0, 0, 1])
    # The prompt has 1, the output has 2 twice: repetition hits both, the other two only the output.
    assert run(logits, make_rows(3, repetition_penalty=2), counts, slot).tokens.tolist() == [3, 3, 1]
    assert run(logits - 5, make_rows(3, repetition_penalty=2), counts, slot).tokens.tolist() == [1, 1, 1]
    assert run(logits - 9, make_rows(3, repetition_penalty=2), counts, slot).tokens.tolist() == [3, 3, 1]
    logits[:, 1] = -1
    assert run(logits, make_rows(3, presence_penalty=0.4), counts, slot).tokens.tolist() == [2, 2, 2]
    assert run(logits, make_rows(3, frequency_penalty=0.4), counts, slot).tokens.tolist() == [3, 3, 2]


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: isinstance(p, core.Jaxpr | core.ClosedJaxpr)
        ):
            if isinstance(inner, core.ClosedJaxpr):
                yield from equations(inner.jaxpr)
            elif isinstance(inner, core.Jaxpr):
                yield from equations(inner)


def size(equation: core.JaxprEqn) -> int:
    return max(int(np.prod(v.aval.shape)) for v in equation.outvars)  # type: ignore[attr-defined]


def test_no_sort_and_nothing_larger_than_the_logits() -> None:
    logits, rows, counts, slot = random_case(np.random.default_rng(0), vocab := 1024)
    traced = jax.make_jaxpr(functools.partial(sample, max_logprobs=20))(logits, rows, counts, slot)
    found = list(equations(traced.jaxpr))
    assert {"while", "cond", "reduce_max"} <= {e.primitive.name for e in found}
    assert not {"sort", "top_k", "approx_top_k", "argsort"} & {e.primitive.name for e in found}
    assert max(size(e) for e in found) <= ROWS * vocab
    # Outside the branches nothing of [R, v] is made, so an all-greedy batch pays for its argmax only.
    assert max(size(e) for e in traced.jaxpr.eqns) < ROWS * vocab


@pytest.mark.parametrize("split", [False, True])
def test_works_in_shard_map(split: bool) -> None:
    logits, rows, counts, slot = random_case(np.random.default_rng(6))
    rows = take(rows, np.arange(ROWS))
    devices = np.array(jax.devices()[: 2 if len(jax.devices()) > 1 else 1])
    mesh = jax.sharding.Mesh(devices, ("tp",))
    along = jax.P("tp") if split else jax.P()
    row_specs = dataclasses.replace(
        jax.tree.map(lambda _: along, rows), bias_row=jax.P(), bias_token=jax.P(), bias_value=jax.P()
    )
    sharded = jax.shard_map(
        functools.partial(sample, max_logprobs=LOGPROBS),
        mesh=mesh,
        in_specs=(along, row_specs, jax.P(), along),
        out_specs=along,
    )
    got, want = jax.jit(sharded)(logits, rows, counts, slot), run(logits, rows, counts, slot)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.top_tokens, want.top_tokens)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="sampling rows"):
        run(np.zeros((3, VOCAB), np.float32), make_rows(4))
