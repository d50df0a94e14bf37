"""Loads that nobody needs any more: reads by real threads stop at their next tensor, pages are given back."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slora_jax import SamplingParams
from slora_jax.engine import Engine
from slora_jax.lora.reader import AdapterReader
from slora_jax.lora.transfer import HostCopy
from slora_jax.memory.layout import PageLayout
from slora_jax.workers import DaemonWorkers
from tests.engine.simulated_runner import simulated_adapter
from tests.engine.slow_loading import Bench, tokens, want
from tests.lora.peft_files import TINY, write_peft_adapter

GREEDY = SamplingParams(max_tokens=6)
TENSORS = 4


class Gate:
    """Where readers' threads stop after each tensor, until the test lets them on."""

    def __init__(self) -> None:
        self._ticks = threading.Semaphore(0)
        self.passed = 0
        self._lock = threading.Lock()

    def stop(self) -> None:
        with self._lock:
            self.passed += 1
        assert self._ticks.acquire(timeout=30)

    def let_on(self, tensors: int = 1) -> None:
        self._ticks.release(tensors)


def until(true: Callable[[], bool], bench: Bench | None = None) -> None:
    """Wait, and step meanwhile; fails after half a minute."""
    for _ in range(30_000):
        if true():
            return
        if bench is not None:
            bench.engine.step()
            bench.engine.check_integrity()
        time.sleep(0.001)
    raise AssertionError("nothing came")


def reading_bench(**fields: Any) -> tuple[Bench, Gate]:
    """Adapters are read by real threads, tensor by tensor."""
    bench, gate = Bench(num_pages=90, max_batch_size=4, max_step_tokens=16, **fields), Gate()
    bench.engine._loader._readers = DaemonWorkers(4, "adapter-reader")
    bench.disk.tensors, bench.disk.between_tensors = TENSORS, gate.stop
    return bench, gate


def states(engine: Engine) -> dict[str, str]:
    return {info.name: info.state for info in engine.adapters()}


def test_a_read_that_has_not_begun_reads_nothing() -> None:
    bench = Bench(num_pages=90, max_batch_size=4, max_step_tokens=16)
    bench.register("a", 7)
    request = bench.engine.add_request([1, 2], "a", GREEDY)
    bench.engine.step()
    assert states(bench.engine) == {"a": "reading"}
    bench.engine.abort(request)
    assert bench.executor.run()
    bench.engine.step()
    assert states(bench.engine) == {"a": "registered"}
    assert (bench.disk.reads, bench.engine.stats().loading.cancelled) == (0, 1)


@pytest.mark.parametrize("how", ["abort", "abort and unload", "deadline"])
def test_a_read_stops_at_its_next_tensor_once_nobody_needs_it(how: str) -> None:
    bench, gate = reading_bench()
    bench.register("a", 7)
    deadline = 0.05 if how == "deadline" else None
    request = bench.engine.add_request([1, 2], "a", GREEDY, deadline_s=deadline)
    bench.engine.step()
    until(lambda: gate.passed == 1)
    if how == "deadline":
        until(lambda: not bench.engine.requests, bench)
    else:
        bench.engine.abort(request)
    if how == "abort and unload":
        bench.engine.unload_adapter("a")
    gate.let_on()
    until(lambda: not bench.engine.stats().loading.reading, bench)
    loading = bench.engine.stats().loading
    assert gate.passed == 1
    assert (loading.cancelled, loading.failures, loading.host_bytes) == (1, 0, 0)
    assert bench.engine._adapters.host.promised == 0
    assert states(bench.engine) == ({} if how == "abort and unload" else {"a": "registered"})


def test_a_read_that_one_of_its_requests_still_needs_goes_on() -> None:
    bench, gate = reading_bench()
    bench.register("a", 7)
    first, second = (bench.engine.add_request([1, 2], "a", GREEDY) for _ in range(2))
    bench.engine.step()
    until(lambda: gate.passed == 1)
    bench.engine.abort(first)
    third = bench.engine.add_request([1, 2], "a", GREEDY)
    bench.engine.abort(second)
    gate.let_on(TENSORS)
    until(lambda: not bench.engine.stats().loading.reading, bench)
    assert tokens(bench.run()[third]) == want([1, 2], 7, 6)
    assert (bench.disk.reads, bench.engine.stats().loading.cancelled) == (1, 0)


def test_a_read_that_came_to_its_end_all_the_same_serves_the_next_request() -> None:
    bench, gate = reading_bench()
    bench.register("a", 7)
    request = bench.engine.add_request([1, 2], "a", GREEDY)
    bench.engine.step()
    for passed in range(1, TENSORS + 1):
        until(lambda passed=passed: gate.passed == passed)  # type: ignore[misc]
        if passed < TENSORS:
            gate.let_on()
    bench.engine.abort(request)
    gate.let_on()
    until(lambda: not bench.engine.stats().loading.reading, bench)
    loading = bench.engine.stats().loading
    assert (loading.cancelled, loading.host_bytes) == (0, bench.engine.adapters()[0].host_bytes)
    again = bench.engine.add_request([1, 2], "a", GREEDY)
    assert tokens(bench.run()[again]) == want([1, 2], 7, 6)
    assert bench.disk.reads == 1


def test_who_comes_after_a_read_has_stopped_has_it_read_again() -> None:
    bench, gate = reading_bench()
    bench.register("a", 7)
    bench.engine.abort(bench.engine.add_request([1, 2], "a", GREEDY))
    gone = bench.engine.add_request([1, 2], "a", GREEDY)
    bench.engine.step()
    until(lambda: gate.passed == 1)
    bench.engine.abort(gone)
    [read] = bench.engine._loader._reading.values()
    gate.let_on()
    concurrent.futures.wait([read.future], 30)
    again = bench.engine.add_request([1, 2], "a", GREEDY)  # before a step has seen the end of the first
    gate.let_on(TENSORS)
    until(lambda: bench.engine.stats().adapters_resident == 1, bench)
    assert bench.engine.requests[again].adapter is bench.engine._adapters.get("a")
    assert (bench.disk.reads, bench.engine.stats().loading.cancelled) == (2, 1)


def test_readers_of_requests_that_left_do_not_keep_those_that_came() -> None:
    """All threads are taken, and host memory is promised, until their next tensor."""
    bench, gate = reading_bench(adapter_host_bytes=4 * 28672, adapter_prefetch=8)
    for i in range(1, 6):
        bench.register(f"a{i}", i)
    gone = [bench.engine.add_request([4], f"a{i}", GREEDY) for i in range(1, 5)]
    bench.engine.step()
    until(lambda: gate.passed == 4)
    late = bench.engine.add_request([4], "a5", GREEDY)
    bench.engine.step()
    assert states(bench.engine)["a5"] == "registered"
    for request in gone:
        bench.engine.abort(request)
    gate.let_on(4 + TENSORS)
    until(lambda: bench.engine.stats().adapters_resident == 1, bench)
    assert tokens(bench.run()[late]) == want([4], 5, 6)
    assert (gate.passed, bench.engine.stats().loading.cancelled) == (4 + TENSORS, 4)


def guessing_bench() -> tuple[Bench, Gate]:
    """A bench whose adapter "a" gave way and is being brought back, though nobody asks for it."""
    bench, gate = Bench(num_pages=30, max_batch_size=2, max_step_tokens=32, adapter_host_bytes=28672), Gate()
    bench.register("a", 7)
    bench.engine.add_request([4], "a", GREEDY)
    bench.run()
    bench.engine.add_request([4] * 60, None, SamplingParams(max_tokens=56))  # needs every page
    bench.run()
    bench.engine.reset_prefix_cache()
    bench.engine._adapters.host.drop(bench.engine._adapters.get("a"))
    bench.engine._loader._readers = DaemonWorkers(4, "adapter-reader")
    bench.disk.tensors, bench.disk.between_tensors = TENSORS, gate.stop
    bench.engine.step()
    assert states(bench.engine) == {"a": "reading"}
    until(lambda: gate.passed == 1)
    return bench, gate


def test_a_guess_is_given_up_for_what_a_request_needs() -> None:
    bench, gate = guessing_bench()
    bench.register("b", 8)
    request = bench.engine.add_request([4], "b", GREEDY)
    bench.engine.step()  # host memory is promised to the guess
    gate.let_on(1 + TENSORS)
    until(lambda: bench.engine.stats().loading.cancelled == 1, bench)
    gate.let_on(TENSORS)  # of a guess that is made anew
    assert tokens(bench.run()[request]) == want([4], 8, 6)
    assert bench.engine.stats().loading.failures == 0
    assert bench.engine.stats().loading.guesses_wasted >= 1


def test_a_guess_goes_on_beside_requests_that_have_what_they_need() -> None:
    bench, gate = guessing_bench()
    bench.engine.generate([[1, 2]], None, GREEDY)
    gate.let_on(TENSORS)
    until(lambda: not bench.engine.stats().loading.reading, bench)
    assert bench.engine.stats().loading.cancelled == 0
    until(lambda: bench.engine.stats().adapters_resident == 1, bench)


def test_a_guess_that_is_unloaded_is_not_read_on() -> None:
    bench, gate = guessing_bench()
    bench.engine.unload_adapter("a")
    gate.let_on(TENSORS)
    until(lambda: not bench.engine.stats().loading.reading, bench)
    assert (gate.passed, bench.engine.stats().loading.cancelled) == (1, 1)
    assert (bench.engine.stats().loading.guesses, bench.engine.stats().loading.guesses_wasted) == (1, 1)


def test_what_was_guessed_once_is_not_read_on_for_a_request_that_left() -> None:
    bench, gate = guessing_bench()
    gate.let_on(TENSORS)
    until(lambda: bench.engine.stats().adapters_resident == 1, bench)
    bench.engine.add_request([4] * 60, None, SamplingParams(max_tokens=56))  # needs every page
    bench.run()
    bench.engine._adapters.host.drop(bench.engine._adapters.get("a"))
    passed = gate.passed
    gone = bench.engine.add_request([4], "a", GREEDY)
    bench.engine.step()
    until(lambda: gate.passed == passed + 1)
    bench.engine.abort(gone)
    gate.let_on(TENSORS)
    until(lambda: not bench.engine.stats().loading.reading, bench)
    assert (gate.passed, bench.engine.stats().loading.cancelled) == (passed + 1, 1)


@pytest.mark.parametrize("unloaded", [False, True])
def test_pages_whose_copy_has_not_begun_are_given_back_as_the_last_request_leaves(unloaded: bool) -> None:
    bench = Bench(
        lambda: 50,
        num_pages=200,
        max_batch_size=4,
        max_step_tokens=16,
        adapter_prefetch=8,
        adapter_staging_bytes=3 * 28672,
    )
    bench.engine._runner.copy_bytes_per_s = 1.0  # one copy at a time beside steps
    for i in (1, 2):
        bench.engine.load_adapter(f"a{i}", simulated_adapter(bench.engine._layout, i, 8))
    bench.engine.add_request([9], None, SamplingParams(max_tokens=80))
    first, second, also = (bench.engine.add_request([4], name, GREEDY) for name in ("a1", "a2", "a2"))
    bench.engine.step()
    assert states(bench.engine) == {"a1": "staged", "a2": "staged"}
    sent, pages = bench.engine.stats().loading.bytes_staged, bench.engine.stats().pages_adapter
    bench.engine.abort(second)
    assert states(bench.engine)["a2"] == "staged"
    bench.engine.abort(also)
    if unloaded:
        bench.engine.unload_adapter("a2")
    bench.engine.check_integrity()
    stats = bench.engine.stats()
    assert (stats.loading.staged, stats.pages_adapter, stats.loading.cancelled) == (1, pages // 2, 1)
    bench.engine.abort(first)  # whose copy is under way: it is let go on
    assert states(bench.engine)["a1"] == "staged"
    bench.run()
    assert bench.engine.stats().loading.bytes_staged == sent
    assert states(bench.engine)["a1"] == "resident"


def reader() -> AdapterReader:
    layout = PageLayout.for_model(TINY, 4, 1)
    return AdapterReader(TINY, layout, np.dtype(np.float32), 64, HostCopy)


def test_a_folder_is_left_at_any_checkpoint_and_there_is_one_for_each_module(tmp_path: Path) -> None:
    modules = {"q_proj": 8, "down_proj": 3}
    write_peft_adapter(tmp_path, ranks=modules)
    calls = 0

    def checkpoint() -> None:
        nonlocal calls
        calls += 1
        if calls == last:
            raise concurrent.futures.CancelledError

    last = 0
    whole = reader().prepare(tmp_path, checkpoint)
    assert whole.packed.rank == 8
    total, calls = calls, 0
    assert total == 2 * TINY.num_hidden_layers * len(modules) + 1  # read, pack; copied to host memory
    for last in range(1, total + 1):
        calls = 0
        with pytest.raises(concurrent.futures.CancelledError):
            reader().prepare(tmp_path, checkpoint)
        assert calls == last
