"""Copies of adapters to the device: how many at once, when they begin, what their time is counted as."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from slora_jax import SamplingParams
from tests.engine.simulated_engine import VOCAB
from tests.engine.simulated_runner import BASE, expected_tokens, simulated_adapter
from tests.engine.slow_loading import Bench, tokens, want

GREEDY = SamplingParams(max_tokens=6)


def test_the_seconds_of_reads_and_copies_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    bench = Bench(lambda: 2, num_pages=90, max_batch_size=2, max_step_tokens=16)
    bench.register("a", 7)
    bench.engine.add_request([9], None, SamplingParams(max_tokens=40))
    request = bench.engine.add_request([1, 2], "a", GREEDY)
    ended: list[str] = []
    for step in range(20):
        now += 1.0
        if step == 3:
            bench.executor.run()
        ended += [e.request_id for e in bench.engine.step() if e.finish_reason]
    loading = bench.engine.stats().loading
    assert request in ended
    assert (loading.read_seconds, loading.copy_seconds) == (3.0, 3.0)


@pytest.mark.parametrize(("link", "together"), [(1.0, 1), (75_000.0, 2), (110_000.0, 3)])
@pytest.mark.parametrize("looks", [1, 3, 5])  # 1: done when the next step has been waited for
def test_copies_leave_the_link_to_the_input_of_the_next_step_in_time(
    link: float, together: int, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters of 28672 bytes, steps of a second: eight tenths of what the link carries in one, but an
    adapter at least; each step so much, where what was begun before is done. Without a step under way nobody
    is delayed.
    """
    clock = itertools.count()
    monkeypatch.setattr("slora_jax.step_loop.time.perf_counter", lambda: next(clock) / 3)  # thrice a step
    bench = Bench(lambda: looks, num_pages=400, max_batch_size=16, max_step_tokens=64, adapter_prefetch=8)
    runner: Any = bench.engine._runner
    runner.copy_bytes_per_s = link
    stage, begun, under_way = runner.stage_adapters, [list[Any]()], list[int]()

    def staged(*args: Any) -> Any:
        copies = stage(*args)
        begun.append([c for c in begun[-1] if not c._done] + copies)
        under_way.append(len(begun[-1]))
        return copies

    runner.stage_adapters = staged
    names = [f"a{i}" for i in range(8)]
    for i, name in enumerate(names, 1):
        bench.register(name, i)
    running = bench.engine.add_request([9], None, SamplingParams(max_tokens=80))
    for _ in range(3):
        bench.engine.step()
    while bench.executor.run():
        pass
    for name in names:
        bench.engine.add_request([4], name, GREEDY)
    steps = []
    for _ in range(60):
        while bench.executor.run():
            pass
        before = len(under_way)
        bench.engine.step()
        bench.engine.check_integrity()
        steps.append(len(under_way) - before)
    assert max(under_way) <= together
    assert max(under_way) == together
    if looks == 1:
        first, last = steps.index(1), len(steps) - steps[::-1].index(1)
        assert sum(steps[first:last]) == last - first  # no step without a copy while any is to begin
    bench.engine.abort(running)
    bench.run()
    assert all(bench.engine._adapters.get(name).resident for name in names)


def test_copies_begin_when_no_step_is_under_way_that_may_use_their_pages() -> None:
    """But for the one that was planned since: it knows that the pages are the adapter's."""
    bench = Bench(num_pages=90, max_batch_size=4, max_step_tokens=16)
    bench.register("a", 7)
    runner, under_way = bench.engine._runner, list[int]()
    stage: Any = runner.stage_adapters

    def staged(*args: Any) -> Any:
        under_way.append(len(runner._under_way))  # type: ignore[attr-defined]
        return stage(*args)

    runner.stage_adapters = staged  # type: ignore[method-assign, assignment]
    running = bench.engine.add_request([9], None, SamplingParams(max_tokens=20))
    request = bench.engine.add_request([1, 2], "a", GREEDY)
    events = bench.run()
    assert under_way == [1]
    assert [t for e in events[request] for t in e.token_ids] == expected_tokens([1, 2], 7, 6, VOCAB)
    assert [t for e in events[running] for t in e.token_ids] == expected_tokens([9], BASE, 20, VOCAB)


def test_several_adapters_travel_in_one_transfer() -> None:
    bench = Bench(num_pages=90, max_batch_size=4, max_step_tokens=16)
    transfers: list[int] = []
    stage = bench.engine._runner.stage_adapters

    def counted(copies: Any, pages: Any) -> Any:
        transfers.append(len(copies))
        return stage(copies, pages)

    bench.engine._runner.stage_adapters = counted  # type: ignore[method-assign]
    for i in range(1, 4):
        made = simulated_adapter(bench.engine._layout, i, 8)
        bench.engine.load_adapter(f"a{i}", made)
        bench.engine.add_request([4], f"a{i}", GREEDY)
    bench.run()
    assert transfers == [3]


def test_a_copy_for_pages_that_were_taken_back_is_not_written() -> None:
    looks = itertools.chain([1], itertools.repeat(0))
    bench = Bench(lambda: next(looks), num_pages=90, max_batch_size=2, max_step_tokens=16)
    bench.engine.load_adapter("a", simulated_adapter(bench.engine._layout, 7, 8))
    request = bench.engine.add_request([4], "a", GREEDY)
    bench.engine.step()
    store, loader, adapter = bench.engine._adapters, bench.engine._loader, bench.engine._adapters.get("a")
    store.withdraw(adapter)
    taken = bench.engine._pool.allocate(3, "kv")
    assert taken
    loader.seek(adapter, room=True, waits=True)
    loader.transfer()
    bench.engine._pool.release(taken)
    assert tokens(bench.run()[request]) == want([4], 7, 6)
    assert bench.engine.stats().adapter_loads == 1


def test_pages_that_are_taken_back_are_left_by_the_copy_first() -> None:
    """An adapter that is unloaded while it is copied: its pages are KV's at once."""
    bench = Bench(lambda: 3, num_pages=40, max_batch_size=4, max_step_tokens=16, enable_prefix_caching=False)
    bench.register("a", 7)
    running = bench.engine.add_request([9], None, SamplingParams(max_tokens=60))
    request = bench.engine.add_request([1, 2], "a", GREEDY)
    while not bench.engine.stats().loading.staged:
        bench.executor.run()
        bench.engine.step()
    bench.engine.abort(request)
    bench.engine.unload_adapter("a")
    others = [bench.engine.add_request([i] * 20, None, SamplingParams(max_tokens=40)) for i in range(1, 4)]
    events = bench.run()
    for i, other in enumerate(others, 1):
        want = expected_tokens([i] * 20, BASE, 40, VOCAB)
        assert [t for e in events[other] for t in e.token_ids] == want
    got = [t for e in events[running] for t in e.token_ids]
    assert got == expected_tokens([9], BASE, 60, VOCAB)[-len(got) :]


def counting_transfers(bench: Bench) -> list[tuple[int, int]]:
    """Of each transfer to come: its copies, and the steps under way when they begin."""
    transfers: list[tuple[int, int]] = []
    runner: Any = bench.engine._runner
    stage = runner.stage_adapters

    def counted(copies: Any, pages: Any) -> Any:
        transfers.append((len(copies), len(runner._under_way)))
        return stage(copies, pages)

    runner.stage_adapters = counted
    return transfers


def test_copies_are_not_paced_by_steps_of_a_generate_that_is_over() -> None:
    bench = Bench(lambda: 1, num_pages=400, max_batch_size=16, max_step_tokens=64)
    bench.engine._runner.copy_bytes_per_s = 1.0
    transfers = counting_transfers(bench)
    for i in range(1, 4):
        bench.engine.load_adapter(f"a{i}", simulated_adapter(bench.engine._layout, i, 8))
    stream = bench.engine.stream([[9]], None, SamplingParams(max_tokens=20))
    for _ in range(8):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    for i in range(1, 4):
        bench.engine.add_request([4], f"a{i}", GREEDY)
    bench.run()
    assert transfers == [(3, 0)]


def test_the_first_step_after_an_idle_time_is_not_delayed_by_all_copies_at_once() -> None:
    bench = Bench(lambda: 1, num_pages=400, max_batch_size=16, max_step_tokens=64, adapter_prefetch=8)
    bench.engine._runner.copy_bytes_per_s = 1.0
    transfers = counting_transfers(bench)
    for i in range(1, 9):
        bench.engine.load_adapter(f"a{i}", simulated_adapter(bench.engine._layout, i, 8))
    bench.engine.add_request([9], None, SamplingParams(max_tokens=60))
    for i in range(1, 9):
        bench.engine.add_request([4], f"a{i}", GREEDY)
    bench.engine.step()
    assert transfers == [(1, 1)]
    bench.engine.check_integrity()
    bench.run()


def test_a_copy_that_does_not_end_is_told_once_and_who_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    bench = Bench(lambda: 10**6, num_pages=400, max_batch_size=16, max_step_tokens=64, adapter_prefetch=8)
    bench.engine._runner.copy_bytes_per_s = 1.0
    for i in (1, 2):
        bench.engine.load_adapter(f"a{i}", simulated_adapter(bench.engine._layout, i, 8))
    bench.engine.add_request([9], None, SamplingParams(max_tokens=60))
    for i in (1, 2):
        bench.engine.add_request([4], f"a{i}", GREEDY)
    for _ in range(50):
        now += 1.0
        bench.engine.step()
    told = [r.getMessage() for r in caplog.records if "has not ended in" in r.getMessage()]
    assert len(told) == 1
    assert "'a1'" in told[0]
    assert "'a2' (waits for its copy)" in bench.engine.under_way()


def test_a_check_of_what_is_under_way_changes_nothing() -> None:
    bench = Bench(num_pages=64, max_batch_size=1, max_step_tokens=16)
    bench.engine._loader._bytes_on_way += 1
    for _ in range(2):
        with pytest.raises(AssertionError, match="miscounted"):
            bench.engine._loader.check_integrity()
