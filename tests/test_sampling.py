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

from slora_jax import thresholds
from slora_jax.sampling import PROMPT_BIT, finite_rows, sample, update_token_counts
from tests.sampling_reference import (
    LOGPROBS,
    RESULTS,
    ROWS,
    SLOTS,
    VOCAB,
    equations,
    make_rows,
    random_case,
    reference_kept,
    reference_tokens,
    run,
    take,
)

update = jax.jit(update_token_counts, donate_argnums=0)


@pytest.fixture(params=sorted(thresholds.BITS_A_PASS))
def draws_as(request: pytest.FixtureRequest) -> Iterator[None]:
    """The CPU searches thresholds as this platform does."""
    with mock.patch.dict(thresholds.BITS_A_PASS, cpu=thresholds.BITS_A_PASS[request.param]):
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
    some = make_rows(2048, seed=np.arange(2048), temperature=1, top_k=2 * k, top_p=0.5 - 0.25 / k)
    assert set(run(logits, some, width=0).tokens.tolist()) == set(order[:k].tolist())


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


@pytest.mark.parametrize("vocab", [1, 7, 257, 4096, 32000])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_a_row_that_is_not_finite_is_found_wherever_that_is(rows: int, vocab: int) -> None:
    logits = np.random.default_rng(0).normal(size=(rows, vocab)).astype(np.float32)
    logits[:, 1 : vocab // 2] = -np.inf
    of_all = jax.jit(finite_rows)
    for value in (np.nan, -np.float32(np.nan), np.inf):
        for token in {0, vocab // 3, vocab - 1}:
            for row in {0, rows - 1}:
                broken = logits.copy()
                broken[row, token] = value
                np.testing.assert_array_equal(of_all(broken), np.arange(rows) != row)
    logits[0] = -np.inf
    np.testing.assert_array_equal(of_all(logits), np.arange(rows) != 0)
