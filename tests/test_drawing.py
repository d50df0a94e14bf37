"""Draws from vocabularies wide enough for candidates, against the reference that sorts."""

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
from scipy import stats

from slora_jax import drawing
from slora_jax.sampling import sample
from slora_jax.sampling_params import SamplingParams
from tests.sampling_reference import (
    RESULTS,
    ROWS,
    Array,
    equations,
    make_rows,
    random_case,
    reference_noise,
    reference_tokens,
    run,
    take,
)

WIDE = 4096  # the smallest vocabulary with candidates: 256 groups of 16
KEPT = 128  # groups that are kept


@pytest.fixture(scope="module", autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    """The CPU looks among candidates, too."""
    with mock.patch.dict(drawing.LOOKS_AMONG_CANDIDATES, cpu=True):
        jax.clear_caches()
        yield
    jax.clear_caches()


tokens_of = functools.partial(run, width=0)


def wide_case(seed: int, vocab: int, top_k: list[int]) -> tuple[Array, Any, Array, Array]:
    """A random case whose rows ask for any of `top_k`."""
    rng = np.random.default_rng(seed)
    logits, rows, counts, slot = random_case(rng, vocab)
    return logits, dataclasses.replace(rows, top_k=jnp.asarray(rng.choice(top_k, ROWS))), counts, slot


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([WIDE, 5120, WIDE + 1]))
def test_tokens_equal_the_reference(seed: int, vocab: int) -> None:
    top_k = [0, 1, 50, KEPT - 1, KEPT, KEPT + 1, 4 * KEPT, 4 * KEPT + 1, vocab - 1]
    logits, rows, counts, slot = wide_case(seed, vocab, top_k)
    got = tokens_of(logits, rows, counts, slot)
    for i in range(ROWS):
        assert got.tokens[i] in reference_tokens(logits[i], rows, i, counts[slot[i]]), i


@pytest.mark.parametrize("vocab", [4096, 32000, 49152, 128256, 151936, 262144])
def test_groups_divide_usual_vocabularies(vocab: int) -> None:
    size = drawing.group_size(vocab)
    assert vocab % size == 0
    assert 2 * KEPT <= vocab // size <= 2048


@pytest.mark.parametrize("vocab", [257, 1024, 4095, 4097, 50257, 50288])
def test_other_vocabularies_have_no_groups(vocab: int) -> None:
    assert drawing.group_size(vocab) == 0


@pytest.mark.parametrize("spread", [1, 27], ids=["neighbours", "a group each"])
def test_the_k_largest_are_drawn_and_no_other(spread: int) -> None:
    num, most = 192, KEPT + 20
    logits = np.zeros(WIDE, np.float32)
    best = np.random.default_rng(0).permutation(most) * spread
    logits[best] = np.float32(1) - np.arange(most, dtype=np.float32) * np.float32(2**-24)
    k = KEPT - 1 + np.arange(num) % 3
    rows = make_rows(num, seed=np.arange(num), temperature=1, top_k=k)
    got = tokens_of(np.tile(logits, (num, 1)), rows).tokens
    for i in range(num):
        noise = reference_noise(np.asarray(rows.seed[i]), 0, WIDE)[best[: k[i]]]
        assert got[i] == best[np.argmin(noise)], i


@pytest.mark.parametrize("ties", [60, KEPT + 1, 3000])
@pytest.mark.parametrize("filters", [{"top_k": 50}, {"top_p": 0.5}, {"min_p": 1.0}])
def test_all_ties_at_a_threshold_are_kept(ties: int, filters: dict[str, Any]) -> None:
    num = 128
    logits = np.full(WIDE, -9, np.float32)
    tied = np.random.default_rng(ties).choice(WIDE, ties, replace=False)
    logits[tied] = 9
    rows = make_rows(num, seed=np.arange(num), temperature=1, **filters)
    got = tokens_of(np.tile(logits, (num, 1)), rows).tokens
    assert set(got.tolist()) <= set(tied.tolist())
    places = np.searchsorted(np.sort(tied), got)
    assert stats.kstest((places + np.random.default_rng(0).random(num)) / ties, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("scale", [0.0, 0.01, 1, 5])
@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 200, "top_p": 0.5}, {}])
def test_flat_and_peaked_rows_equal_the_reference(scale: float, filters: dict[str, Any]) -> None:
    logits = scale * np.random.default_rng(1).normal(size=(ROWS, WIDE)).astype(np.float32)
    rows = make_rows(seed=np.arange(ROWS), temperature=0.8, **filters)
    got = tokens_of(logits, rows).tokens
    for i in range(ROWS):
        assert got[i] in reference_tokens(logits[i], rows, i, np.zeros(WIDE, np.int32)), i


@pytest.mark.parametrize("vocab", [257, WIDE])
@pytest.mark.parametrize("value", [1e-45, 1e-39, 1e-300])
@pytest.mark.parametrize("name", ["top_p", "temperature"])
def test_what_float32_rounds_to_nothing_leaves_the_likeliest(name: str, value: float, vocab: int) -> None:
    fields: dict[str, Any] = {name: value}
    SamplingParams(**fields)
    logits = np.random.default_rng(4).normal(size=(ROWS, vocab)).astype(np.float32)
    logits[1, ::2] = 9
    got = tokens_of(logits, make_rows(seed=np.arange(ROWS), **({"temperature": 1} | fields))).tokens
    np.testing.assert_array_equal(logits[np.arange(ROWS), got], logits.max(axis=1))


def rule_of(temperature: float = 1, top_k: int = WIDE, top_p: float = 1, min_p: float = 0) -> drawing.Rule:
    full = functools.partial(jnp.full, ROWS)
    return drawing.Rule(
        temperature=full(temperature, jnp.float32),
        top_k=full(top_k, jnp.int32),
        top_p=full(top_p, jnp.float32),
        min_p=full(min_p, jnp.float32),
        words=jnp.zeros((ROWS, 2), jnp.uint32),
    )


@pytest.mark.parametrize(
    ("filters", "flat", "peaked"),
    [
        ({"top_k": 1}, True, True),
        ({"top_k": KEPT}, True, True),
        ({"top_k": 2 * KEPT}, False, False),
        ({"top_p": 0.9}, False, True),
        ({"top_k": 50, "top_p": 0.9}, True, True),
        ({"min_p": 0.01}, False, True),
        ({"temperature": 1e-3, "top_p": 0.9999}, True, True),
    ],
)
def test_usual_rows_are_settled_among_their_candidates(
    filters: dict[str, Any], flat: bool, peaked: bool
) -> None:
    """Were they not, tokens would be right, and every step slow."""
    normal = np.random.default_rng(2).normal(size=(ROWS, WIDE)).astype(np.float32)
    for logits, expected in ((jnp.asarray(0.1 * normal), flat), (jnp.asarray(8 * normal), peaked)):
        groups = drawing.maxima(logits)
        _, settled = drawing._draw_candidates(logits, groups, logits.max(axis=1), rule_of(**filters))
        assert settled.tolist() == [expected] * ROWS


def mixed_case() -> tuple[Array, Any, Array, Array]:
    """Greedy, unfiltered, settled and searched rows."""
    logits, rows, counts, slot = random_case(np.random.default_rng(3), WIDE)
    rows = dataclasses.replace(
        take(rows, np.arange(ROWS)),
        temperature=jnp.array([0, 1, 1, 0.7, 5, 5, 1, 1], jnp.float32),
        top_k=jnp.array([0, 0, 50, 0, 2000, 0, 128, 0], jnp.int32),
        top_p=jnp.array([1, 1, 0.9, 0.5, 0.9, 0.99, 1, 1], jnp.float32),
        min_p=jnp.array([0, 0, 0, 0, 0, 0, 0, 0.3], jnp.float32),
    )
    return logits, rows, counts, slot


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits, rows, counts, slot = mixed_case()
    whole = tokens_of(logits, rows, counts, slot).tokens
    for index in (np.arange(ROWS)[::-1], np.array([4, 1, 6]), *np.arange(ROWS)[:, None]):
        some = tokens_of(logits[index], take(rows, index), counts, slot[index]).tokens
        np.testing.assert_array_equal(some, whole[index], err_msg=f"{index}")


def test_a_row_of_nan_spoils_only_itself() -> None:
    logits, rows, counts, slot = mixed_case()
    want = run(logits, rows, counts, slot)
    broken = logits.copy()
    broken[2], broken[6] = np.nan, -np.float32(np.nan)
    broken[3, 17] = np.nan
    got = run(broken, rows, counts, slot)
    healthy = [0, 1, 4, 5, 7]
    for name in RESULTS:
        np.testing.assert_array_equal(getattr(got, name)[healthy], getattr(want, name)[healthy])
    assert ((got.tokens >= 0) & (got.tokens < WIDE)).all()


@pytest.mark.parametrize("filters", [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}, {}])
def test_infinite_logits(filters: dict[str, Any]) -> None:
    inf = float("inf")
    logits = np.random.default_rng(0).normal(size=(ROWS, WIDE)).astype(np.float32)
    logits[1] = -inf
    logits[2] = logits[3] = -inf
    logits[2, 4000] = logits[3, 5] = logits[3, 4090] = 3
    bias = [(4, 7, inf), (4, 3007, inf), (5, 9, inf), (5, 9, -inf), (5, 12, 60.0)]
    for seed in range(8):
        got = tokens_of(logits, make_rows(bias=bias, seed=seed, temperature=1, **filters)).tokens
        assert 0 <= got[1] < WIDE
        assert got[2] == 4000
        assert got[3] in (5, 4090)
        assert got[4] in (7, 3007)
        assert got[5] == 12


def test_no_sort() -> None:
    logits, rows, counts, slot = mixed_case()
    traced = jax.make_jaxpr(functools.partial(sample, max_logprobs=20))(logits, rows, counts, slot)
    found = list(equations(traced.jaxpr))
    assert not {"sort", "top_k", "approx_top_k", "argsort"} & {e.primitive.name for e in found}
