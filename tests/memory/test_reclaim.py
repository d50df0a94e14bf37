"""Who gives way when pages are wanted: the cheapest to bring back, the least used, in batches, never half."""

from __future__ import annotations

import dataclasses
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from slora_jax.memory.page_pool import PagePool
from slora_jax.memory.reclaim import HALF_LIFE, HolderKind, IdleHeap, PageCosts, Reclaimer


@dataclasses.dataclass(eq=False)
class Thing:
    name: str
    pages: list[int]
    usage: float = -math.inf


class Holder:
    """Keeps idle things of some pages."""

    def __init__(self, kind: HolderKind, reclaim: Reclaimer) -> None:
        self.kind, self._reclaim = kind, reclaim
        self.idle: IdleHeap[Thing] = IdleHeap()
        self.evicted: list[str] = []
        reclaim.add(self)

    def keep(self, name: str, pages: int, uses: int = 1) -> None:
        got = self._reclaim.pool.allocate(pages, "kv")
        assert got is not None
        thing = Thing(name, got)
        for _ in range(uses):
            self._reclaim.used(thing)
        self.idle.push(thing)

    @property
    def idle_pages(self) -> int:
        return sum(len(t.pages) for t in self.idle)

    def least_usage(self) -> float:
        return self.idle.least().usage

    def evict(self, pages: int, limit: float) -> int:
        freed = gone = 0
        while freed < pages and self.idle and (not gone or self.idle.least().usage <= limit):
            thing = self.idle.pop()
            freed += len(thing.pages)
            self._reclaim.pool.release(thing.pages)
            self.evicted.append(thing.name)
            gone += 1
        return gone


def holders(num_pages: int) -> tuple[Reclaimer, Holder, Holder]:
    reclaim = Reclaimer(PagePool(num_pages))
    return reclaim, Holder("adapter", reclaim), Holder("prefix", reclaim)


def pass_time(reclaim: Reclaimer, admissions: int) -> None:
    for _ in range(admissions):
        reclaim.admitted()


def test_what_is_used_less_goes_first_whoever_holds_it() -> None:
    reclaim, adapters, prefixes = holders(11)
    adapters.keep("popular", 3, uses=9)
    prefixes.keep("twice", 4, uses=2)
    adapters.keep("once", 3, uses=1)
    assert reclaim.make_room(1)
    assert (adapters.evicted, prefixes.evicted) == (["once"], [])
    assert reclaim.make_room(4)
    assert (adapters.evicted, prefixes.evicted) == (["once"], ["twice"])
    assert reclaim.evictions == {"adapter": 1, "prefix": 1}


@pytest.mark.parametrize(("adapter_ms", "prefix_ms"), [(1.0, 40.0), (40.0, 1.0)])
def test_what_is_cheap_to_bring_back_goes_first(adapter_ms: float, prefix_ms: float) -> None:
    reclaim, adapters, prefixes = holders(9)
    adapters.keep("a", 4, uses=3)
    prefixes.keep("p", 4, uses=3)
    reclaim.costs.measured("adapter", 10, 10 * adapter_ms)
    reclaim.costs.measured("prefix", 2, 2 * prefix_ms)
    assert reclaim.make_room(1)
    assert bool(adapters.evicted) == (adapter_ms < prefix_ms)
    assert bool(prefixes.evicted) == (prefix_ms < adapter_ms)


def test_a_use_weighs_half_after_a_half_life() -> None:
    reclaim, adapters, _ = holders(5)
    adapters.keep("three uses, long ago", 2, uses=3)
    pass_time(reclaim, 2 * HALF_LIFE)
    adapters.keep("one use, now", 2)
    assert reclaim.make_room(1)
    assert adapters.evicted == ["three uses, long ago"]  # 3/4 of a use
    adapters.keep("one use, then", 2)
    pass_time(reclaim, HALF_LIFE // 2)
    thing = adapters.idle.least()
    before = thing.usage
    reclaim.kept(thing)
    assert thing.usage == pytest.approx(before + 0.5)


def test_a_compilation_does_not_move_a_measured_cost() -> None:
    costs = PageCosts()
    assert costs.seconds("prefix") is None
    for seconds in (0.1, 0.1, 23.0, 0.1, 0.1):
        costs.measured("prefix", 10, seconds)
    costs.measured("prefix", 0, 5.0)
    assert costs.seconds("prefix") == pytest.approx(0.01)
    assert costs.log2("prefix") == costs.log2("adapter") == 0, "one kind alone says nothing"


def test_pages_are_freed_in_batches() -> None:
    reclaim, _, prefixes = holders(641)
    for i in range(640):
        prefixes.keep(str(i), 1)
    rounds = []
    for _ in range(44):
        before = len(prefixes.evicted)
        assert reclaim.make_room(1)
        assert reclaim.pool.allocate(1, "kv") is not None
        rounds.append(len(prefixes.evicted) - before)
    assert rounds == [11, *[0] * 10] * 4


def test_kinds_are_evicted_in_the_order_of_value_within_one_batch() -> None:
    reclaim, adapters, prefixes = holders(7)
    for i in range(3):
        pass_time(reclaim, HALF_LIFE)
        adapters.keep(f"a{i}", 1)
        pass_time(reclaim, HALF_LIFE)
        prefixes.keep(f"p{i}", 1)
    assert reclaim.make_room(3)
    assert (adapters.evicted, prefixes.evicted) == (["a0", "a1"], ["p0"])
    assert reclaim.make_room(6)
    assert (adapters.evicted, prefixes.evicted) == (["a0", "a1", "a2"], ["p0", "p1", "p2"])


def test_nothing_goes_where_it_would_not_be_enough() -> None:
    reclaim, adapters, prefixes = holders(21)
    adapters.keep("a", 5)
    prefixes.keep("p", 5)
    assert reclaim.can_make_room(20)
    assert not reclaim.can_make_room(21)
    assert not reclaim.make_room(21)
    assert adapters.evicted == prefixes.evicted == []
    assert reclaim.make_room(20)
    assert reclaim.pool.num_free == 20


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["push", "discard", "pop"]), st.integers(0, 30)), max_size=300))
def test_the_heap_pops_the_least_used_of_those_in_it(operations: list[tuple[str, int]]) -> None:
    heap: IdleHeap[Thing] = IdleHeap()
    inside: list[Thing] = []
    for operation, n in operations:
        if operation == "push":
            thing = Thing("", [], usage=n % 7)
            heap.push(thing)
            inside.append(thing)
        elif operation == "discard" and inside:
            heap.discard(inside.pop(n % len(inside)))
        elif operation == "pop" and inside:
            want = min(inside, key=lambda t: t.usage)  # the first of equals
            assert heap.least() is want
            assert heap.pop() is want
            inside.remove(want)
        assert len(heap) == len(inside)
        assert set(heap) == set(inside)
    heap.discard(Thing("a stranger", []))
