"""The page pool's book: allocation, sharing, release and the proof that they add up."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from slora_jax.memory.page_pool import PagePool, runs


def test_page_zero_is_never_given_out() -> None:
    pool = PagePool(5)
    pages = pool.allocate(4, "kv")
    assert pages is not None
    assert sorted(pages) == [1, 2, 3, 4]
    assert pool.allocate(1, "adapter") is None


def test_too_many_pages_leave_the_pool_as_it_was() -> None:
    pool = PagePool(5)
    assert pool.allocate(5, "kv") is None
    assert pool.num_free == 4


def test_a_pool_without_usable_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 pages"):
        PagePool(1)


def test_integrity_names_the_page_that_leaked_or_is_held_twice() -> None:
    pool = PagePool(6)
    pages = pool.allocate(2, "kv")
    assert pages is not None
    with pytest.raises(AssertionError, match=f"page {min(pages)}"):
        pool.check_integrity([], [])
    with pytest.raises(AssertionError, match=f"page {min(pages)}"):
        pool.check_integrity([pages, pages], [])
    with pytest.raises(AssertionError, match=f"page {min(pages)}"):
        pool.check_integrity([], [pages])
    pool.check_integrity([pages], [])
    adapter = pool.allocate(2, "adapter")
    assert adapter is not None
    for adapters in ([], [adapter, adapter], [adapter, [5]]):
        with pytest.raises(AssertionError, match=r"page \d: its references are 0"):
            pool.check_integrity([pages], adapters)
    with pytest.raises(AssertionError, match=f"page {min(adapter)}: its references are 0"):
        pool.check_integrity([pages, adapter], [])
    pool.check_integrity([pages], [adapter])


def test_without_unified_paging_neither_use_takes_the_other_s_pages() -> None:
    pool = PagePool(10, adapter_pages=4)
    kv, adapter = pool.allocate(5, "kv"), pool.allocate(4, "adapter")
    assert kv is not None
    assert adapter is not None
    assert (sorted(kv), sorted(adapter)) == ([1, 2, 3, 4, 5], [6, 7, 8, 9])
    pool.check_integrity([kv], [adapter])
    pool.release(kv)
    assert (pool.num_free, pool.free_for("kv"), pool.free_for("adapter")) == (5, 5, 0)
    assert pool.allocate(1, "adapter") is None
    assert (pool.usable_for("kv"), pool.usable_for("adapter"), pool.num_usable) == (5, 4, 9)


def scattered(num_pages: int, free: list[range]) -> PagePool:
    """A pool of which KV holds all but these."""
    pool = PagePool(num_pages)
    assert pool.allocate(num_pages - 1, "kv") is not None
    pool.release([page for run in free for page in run])
    return pool


def test_an_adapter_gets_pages_side_by_side_where_there_are_such() -> None:
    pool = scattered(60, [range(30, 39), range(1, 4), range(50, 55), range(10, 13)])
    assert pool.allocate(5, "adapter") == list(range(50, 55)), "the shortest run that holds it"
    assert pool.allocate(4, "adapter") == list(range(35, 39)), "from the end of a longer one"
    assert pool.allocate(7, "adapter") == [2, 3, *range(30, 35)], "few where none holds it"
    pool = scattered(60, [range(30, 39), range(1, 4), range(50, 55)])
    assert pool.allocate(1, "adapter") == [3]
    assert pool.allocate(3, "kv") == [1, 2, 50], "KV takes what is short"
    assert pool.allocate(9, "adapter") == list(range(30, 39))


def test_adapters_stay_in_one_piece_or_few_while_all_comes_and_goes() -> None:
    rng = random.Random(0)
    pool = PagePool(4000)
    sequences: list[list[int]] = []
    adapters: list[list[int]] = []
    pieces = pages = 0
    for _ in range(4000):
        while len(sequences) > 60:
            pool.release(sequences.pop(rng.randrange(len(sequences))))
        size = rng.choice([7, 13, 26, 52])
        while pool.num_free < size + 100:
            pool.release(adapters.pop(rng.randrange(len(adapters))), "adapter")
        sequences.append([*(pool.allocate(rng.randint(1, 20), "kv") or [])])
        rng.choice(sequences).extend(pool.allocate(1, "kv") or [])
        adapter = pool.allocate(size, "adapter")
        assert adapter is not None
        adapters.append(adapter)
        pieces += len(list(runs(adapter)))
        pages += size
    pool.check_integrity(sequences, adapters)
    assert pieces < pages / 3


@pytest.mark.parametrize("adapter_pages", [0, 9, 20])
def test_each_use_has_a_page(adapter_pages: int) -> None:
    with pytest.raises(ValueError, match=f"{adapter_pages} pages of 9 for adapters alone"):
        PagePool(10, adapter_pages)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["kv", "adapter", "share", "release"]), st.integers(0, 6))),
    st.sampled_from([None, None, 7]),
)
def test_random_operations_keep_the_book_right(
    operations: list[tuple[str, int]], adapter_pages: int | None
) -> None:
    pool = PagePool(20, adapter_pages)
    kv: list[list[int]] = []
    adapters: list[list[int]] = []
    for operation, n in operations:
        if operation == "release" and kv + adapters:
            if n < len(kv) or not adapters:
                pool.release(kv.pop(n % len(kv)))
            else:
                pool.release(adapters.pop(n % len(adapters)), "adapter")
        elif operation == "share" and kv:
            pool.share(kv[n % len(kv)])
            kv.append(list(kv[n % len(kv)]))
        elif operation in ("kv", "adapter"):
            pages = pool.allocate(n, "kv" if operation == "kv" else "adapter")
            if pages:
                (kv if operation == "kv" else adapters).append(pages)
        pool.check_integrity(kv, adapters)
    assert pool.count("adapter") == sum(map(len, adapters))
