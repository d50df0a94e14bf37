"""Cached prefixes: which are found, what shares with what, what stays and what goes."""

from __future__ import annotations

import types
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from slora_jax.memory.page_pool import PagePool
from slora_jax.memory.prefix_cache import PrefixCache
from slora_jax.memory.reclaim import Reclaimer
from slora_jax.outputs import RequestMetrics
from slora_jax.request import Request, Sequence
from slora_jax.sampling_params import SamplingParams

SIZE = 4


class Cache:
    """A pool and its prefix cache, and sequences that run on it."""

    def __init__(self, num_pages: int = 40, **fields: Any) -> None:
        self.pool = PagePool(num_pages)
        self.reclaim = Reclaimer(self.pool)
        self.prefixes = PrefixCache(self.reclaim, SIZE, **fields)
        self.running: list[Sequence] = []

    def start(self, tokens: list[int], generation: int = 0) -> Sequence:
        """A sequence that is let in and has computed all of `tokens`, but that has not been recorded."""
        adapter: Any = types.SimpleNamespace(generation=generation) if generation else None
        request = Request("r", None, tokens, 0, adapter, SamplingParams(), RequestMetrics(0.0))
        sequence = Sequence(request, 0, 0, list(tokens), len(tokens), 10**6, frozenset(), None)
        self.reclaim.admitted()
        self.prefixes.take(sequence, self.prefixes.match(sequence))
        self.grow(sequence)
        self.running.append(sequence)
        return sequence

    def grow(self, sequence: Sequence, *tokens: int) -> None:
        sequence.tokens += tokens
        need = -(-len(sequence.tokens) // SIZE) - len(sequence.pages)
        assert self.reclaim.make_room(need)
        sequence.pages += self.pool.allocate(need, "kv") or []
        sequence.num_computed = len(sequence.tokens)

    def end(self, sequence: Sequence) -> None:
        self.prefixes.record(sequence)
        self.prefixes.release(sequence)
        self.running.remove(sequence)

    def run(self, tokens: list[int], generation: int = 0) -> int:
        """Tokens that a sequence found, which ran to its end."""
        sequence = self.start(tokens, generation)
        self.end(sequence)
        return sequence.num_cached

    def check(self) -> None:
        self.prefixes.check_integrity(self.running)
        self.pool.check_integrity([*(s.pages for s in self.running), self.prefixes.pages()], [])


def test_full_pages_are_found_again_but_for_the_last_token() -> None:
    cache = Cache()
    assert cache.run(list(range(10))) == 0
    assert cache.prefixes.num_pages == 2
    assert cache.run(list(range(10))) == 8
    assert cache.run(list(range(8))) == 4, "its last token must be computed"
    assert cache.run([*range(8), 99]) == 8
    assert cache.run([*range(7), 99, 8, 9]) == 4
    assert cache.run([99, *range(1, 10)]) == 0, "equal pages behind another beginning"
    cache.check()
    stats = cache.prefixes
    assert (stats.lookups, stats.query_tokens, stats.hit_tokens) == (6, 57, 24)


def test_generations_share_nothing_with_one_another_or_with_the_base() -> None:
    cache = Cache()
    for generation in (0, 1, 2):
        assert cache.run(list(range(9)), generation) == 0
        assert cache.run(list(range(9)), generation) == 8
    cache.prefixes.drop(1)
    assert cache.run(list(range(9)), 1) == 0
    assert cache.run(list(range(9)), 2) == 8
    cache.prefixes.drop(7)
    cache.check()


def test_a_page_is_found_only_once_it_is_recorded() -> None:
    cache = Cache()
    first = cache.start(list(range(9)))
    assert cache.prefixes.match(first) == []
    first.num_computed = 6
    cache.prefixes.record(first)
    assert cache.run(list(range(9))) == 4
    cache.end(first)
    cache.check()


def test_sequences_that_computed_the_same_page_end_up_on_one() -> None:
    cache = Cache()
    sequences = [cache.start(list(range(9))) for _ in range(3)]
    assert cache.pool.count("kv") == 9
    for sequence in sequences:
        cache.prefixes.record(sequence)
        cache.check()
    assert cache.pool.count("kv") == 2 + 3
    assert len({tuple(s.pages[:2]) for s in sequences}) == 1
    assert len({s.pages[2] for s in sequences}) == 3
    for sequence in sequences:
        cache.end(sequence)
        cache.check()
    assert cache.prefixes.idle_pages == cache.pool.count("kv") == 2


def test_a_token_that_is_not_known_yet_is_not_cached() -> None:
    cache = Cache()
    sequence = cache.start(list(range(7)))
    sequence.num_computed = 8  # its eighth token is still on the device
    cache.prefixes.record(sequence)
    assert cache.prefixes.num_pages == 1
    cache.grow(sequence, 7)
    cache.prefixes.record(sequence)
    assert cache.prefixes.num_pages == 2


def test_ends_of_prefixes_go_before_their_beginnings_and_held_ones_stay() -> None:
    cache = Cache(num_pages=9)
    cache.run([*range(8), 1])
    cache.run([*range(4), 50, 51, 52, 53, 1])
    running = cache.start([*range(8), 2])
    assert cache.prefixes.idle_pages == 1
    assert cache.reclaim.make_room(5)
    assert not cache.reclaim.can_make_room(6)
    assert cache.prefixes.match(running) == running.cached
    cache.check()
    cache.end(running)
    assert cache.reclaim.make_room(7)
    assert cache.run(list(range(6))) == 4, "the beginning is left"
    assert cache.reclaim.make_room(8)
    assert cache.prefixes.num_pages == 0
    cache.check()


def test_often_used_prefixes_outlive_recent_ones() -> None:
    cache = Cache(num_pages=30)
    for _ in range(5):
        cache.run([1] * 9)
    for i in range(100, 200):
        cache.run([i] * 17)
    assert cache.run([1] * 9) == 8


@pytest.mark.parametrize("fields", [{"enabled": False}, {"max_prompt_tokens": 8}])
def test_prompts_that_must_not_share_leave_nothing_behind(fields: dict[str, Any]) -> None:
    cache = Cache(**fields)
    for _ in range(2):
        assert cache.run(list(range(9))) == 0
    assert cache.prefixes.lookups == 0
    assert cache.pool.num_free == cache.pool.num_usable
    cache.check()


def test_tokens_are_compared_not_their_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Colliding(bytes):
        def __hash__(self) -> int:
            return 7

    keys = PrefixCache._keys
    monkeypatch.setattr(PrefixCache, "_keys", lambda *args: [Colliding(key) for key in keys(*args)])
    cache = Cache()
    for tokens in ([1] * 9, [2] * 9, [1] * 4 + [2] * 5):
        assert cache.run(tokens) == (4 if tokens[0] != tokens[-1] else 0)
        assert cache.run(tokens) == 8
    cache.check()


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["start", "start", "grow", "record", "end", "evict", "drop"]),
            st.integers(0, 1000),
            st.lists(st.integers(0, 1), min_size=1, max_size=20),
        ),
        max_size=60,
    )
)
def test_random_histories(operations: list[tuple[str, int, list[int]]]) -> None:
    cache = Cache(num_pages=60)
    for operation, n, tokens in operations:
        busy = cache.running[n % len(cache.running)] if cache.running else None
        if operation == "start" and len(cache.running) < 5:
            started = cache.start(tokens, n % 3)
            assert started.num_cached < len(tokens)
        elif operation == "grow" and busy is not None and len(busy.tokens) < 30:
            cache.grow(busy, *tokens[:3])
        elif operation == "record" and busy is not None:
            cache.prefixes.record(busy)
        elif operation == "end" and busy is not None:
            cache.end(busy)
        elif operation == "evict":
            assert cache.reclaim.make_room(min(n % 30, cache.pool.num_free + cache.reclaim.idle_pages("kv")))
        elif operation == "drop" and all(s.generation != n % 3 for s in cache.running):
            cache.prefixes.drop(n % 3)
        cache.check()
    while cache.running:
        cache.end(cache.running[0])
    cache.prefixes.clear()
    assert cache.pool.num_free == cache.pool.num_usable
