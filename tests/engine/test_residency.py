"""Adapters that are read, staged and written while others run: nothing is mixed up, lost or leaked."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from slora_jax import SamplingParams
from slora_jax.lora.loader import AdapterLoader
from slora_jax.outputs import StreamEvent
from tests.engine.histories import History
from tests.engine.simulated_engine import VOCAB
from tests.engine.simulated_runner import (
    BASE,
    DirectCopy,
    SimulatedInFlight,
    StagingRunner,
    expected_tokens,
    simulated_adapter,
)
from tests.engine.slow_loading import Bench


def tokens(events: Sequence[StreamEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def want(prompt: list[int], fingerprint: int, n: int) -> list[int]:
    return expected_tokens(prompt, fingerprint, n, VOCAB)


class ResidencyMachine(History):
    """Loads, reloads, unloads, aborts, changed files, failed reads and copies, at any moment."""

    loads_fail = True

    @initialize(
        num_pages=st.integers(32, 70),
        max_batch_size=st.integers(1, 5),
        host_adapters=st.integers(0, 5),
        staging_adapters=st.integers(0, 3),
        prefetch=st.sampled_from([0, 1, 4, 16]),
        watermark=st.sampled_from([0.0, 0.3]),
        looks=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    )
    def start(
        self,
        num_pages: int,
        max_batch_size: int,
        host_adapters: int,
        staging_adapters: int,
        prefetch: int,
        watermark: float,
        looks: list[int],
    ) -> None:
        turns = itertools.cycle(looks)
        some = 28672  # bytes of an adapter of rank 8
        self.bench = Bench(
            lambda: next(turns),
            num_pages=num_pages,
            max_batch_size=max_batch_size,
            max_step_tokens=24,
            adapter_host_bytes=1 + host_adapters * some,
            adapter_staging_bytes=1 + staging_adapters * some,
            adapter_prefetch=prefetch,
            prefetch_watermark=watermark,
        )
        self.engine, self.disk = self.bench.engine, self.bench.disk
        self.paths: dict[str, str] = {}  # of folders, by name
        self.largest = 0
        for name in "abc":
            self.load(name, 8, given=name == "c")

    @rule(name=st.sampled_from("abcdefgh"), rank=st.sampled_from([3, 8, 20]), given=st.booleans())
    def load(self, name: str, rank: int, given: bool) -> None:
        fingerprint = next(self.fingerprints)
        made = simulated_adapter(self.engine._layout, fingerprint, rank)
        if made.packed.layout.num_pages >= self.engine.stats().pages_total:
            return
        self.paths.pop(name, None)
        if given:
            self.engine.load_adapter(name, made, replace=True)
        else:
            self.paths[name] = self.bench.register(name, fingerprint, rank)
        self.loaded[name] = fingerprint
        self.largest = max(self.largest, made.packed.nbytes)

    @rule(name=st.sampled_from("abcdefgh"))
    def unload(self, name: str) -> None:
        self.paths.pop(name, None)
        if self.loaded.pop(name, None):
            self.engine.unload_adapter(name)

    @rule(name=st.sampled_from("abcdefgh"), deleted=st.booleans())
    def change_files(self, name: str, deleted: bool) -> None:
        path = self.paths.get(name)
        if path in self.disk.folders and deleted:
            del self.disk.folders[path]
        elif path in self.disk.folders:
            self.disk.folders[path] = next(self.fingerprints), self.disk.folders[path][1]

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
        max_tokens=st.integers(1, 20),
        n=st.integers(1, 2),
        pick=st.integers(0, 20),
    )
    def add(self, prompt: list[int], max_tokens: int, n: int, pick: int) -> None:
        names = [None, *self.loaded]
        try:
            self.ask(prompt, max_tokens, n, names[pick % len(names)])
        except ValueError as error:
            assert "pages" in str(error)  # noqa: PT017 (more than the pool holds)

    @rule(what=st.sampled_from(["read", "stage", "copy", "write"]))
    def fail_next(self, what: str) -> None:
        self.disk.failing.append(what)

    @rule(pick=st.integers(0, 9))
    def read(self, pick: int) -> None:
        self.bench.executor.run(pick)

    @rule(steps=st.integers(1, 6), reads=st.booleans())
    def step(self, steps: int, reads: bool) -> None:
        for _ in range(steps):
            self.take_step()
            if reads:
                self.bench.executor.run()

    @invariant()
    def host_memory_is_within_its_budget(self) -> None:
        host = self.engine._adapters.host
        assert host.held + host.promised <= max(host.budget, self.largest)

    def go_on(self) -> None:
        self.bench.executor.run()
        super().go_on()

    def check_end(self) -> None:
        super().check_end()
        while self.bench.executor.run():
            pass
        self.take_step()
        stats, host = self.engine.stats(), self.engine._adapters.host
        assert (host.held, host.promised, host.fixed) == (0, 0, 0), "host copies leaked"
        assert not self.engine._loader._transfers
        assert stats.loading.reading == stats.loading.staged == 0


TestResidency = ResidencyMachine.TestCase
TestResidency.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@pytest.mark.slow
def test_many_more_random_histories() -> None:
    run_state_machine_as_test(
        ResidencyMachine, settings=settings(max_examples=1500, stateful_step_count=100, deadline=None)
    )


def soak(seed: int, operations: int) -> ResidencyMachine:
    """A busy history, drawn with weights that keep pages, host memory and the queue short of room."""
    rng = random.Random(seed)
    machine = ResidencyMachine()
    machine.start(
        num_pages=rng.randint(32, 70),
        max_batch_size=rng.randint(1, 5),
        host_adapters=rng.randint(0, 5),
        staging_adapters=rng.randint(0, 3),
        prefetch=rng.choice([0, 1, 4, 16]),
        watermark=rng.choice([0.0, 0.3]),
        looks=[rng.randint(0, 9) for _ in range(8)],
    )
    names = "abcdefgh"
    rules: list[tuple[int, Callable[[], None]]] = [
        (12, lambda: machine.load(rng.choice(names), rng.choice([3, 8, 8, 20]), rng.random() < 0.3)),
        (4, lambda: machine.unload(rng.choice(names))),
        (2, lambda: machine.change_files(rng.choice(names), rng.random() < 0.5)),
        (30, lambda: machine.add([rng.randrange(VOCAB)] * rng.randint(1, 30), 9, 1, rng.randrange(99))),
        (3, lambda: machine.add([rng.randrange(VOCAB)] * 3, 60, 2, 0)),
        (5, lambda: machine.abort(rng.randrange(99))),
        (3, lambda: machine.fail_next(rng.choice(["read", "stage", "copy", "write"]))),
        (30, lambda: machine.read(rng.randrange(9))),
        (90, lambda: machine.step(rng.randint(1, 6), rng.random() < 0.5)),
    ]
    for _ in range(operations):
        if machine.engine.stats().num_waiting > 20:
            machine.step(6, reads=True)
        rng.choices([call for _, call in rules], [weight for weight, _ in rules])[0]()
        machine.nothing_is_wrong()
        machine.host_memory_is_within_its_budget()
    return machine


@pytest.mark.parametrize(("seed", "operations"), [*((seed, 400) for seed in range(6)), (147, 1500)])
def test_a_busy_history_mixes_nothing_up_and_leaks_nothing(seed: int, operations: int) -> None:
    soak(seed, operations).teardown()


@pytest.mark.slow
def test_many_more_busy_histories() -> None:
    for seed in range(100, 300):
        soak(seed, 1500).teardown()


GREEDY = SamplingParams(max_tokens=6)


def test_a_request_whose_adapter_is_read_does_not_stop_those_behind_it() -> None:
    bench = Bench(num_pages=90, max_batch_size=4, max_step_tokens=16)
    bench.register("slow", 7)
    first = bench.engine.add_request([1, 2], "slow", GREEDY)
    second = bench.engine.add_request([3, 4], None, GREEDY)
    ended: list[str] = []
    while not ended:
        ended = [e.request_id for e in bench.engine.step() if e.finish_reason]
    assert ended == [second]
    assert tokens(bench.run()[first]) == want([1, 2], 7, 6)


def test_who_is_passed_over_is_not_overtaken_for_good() -> None:
    bench = Bench(num_pages=40, max_batch_size=8, max_step_tokens=64)
    bench.register("big", 9)
    big = bench.engine.add_request([5] * 20, "big", SamplingParams(max_tokens=4))
    ended: list[str] = []
    while big not in ended:  # a stream of others that would fill the pool for ever
        assert bench.engine.stats().steps < 60
        if bench.engine.stats().num_waiting < 4:
            bench.engine.add_request([6] * 20, None, SamplingParams(max_tokens=20))
        if bench.engine.stats().steps > 10:
            bench.executor.run()
        ended += [e.request_id for e in bench.engine.step() if e.finish_reason]
        bench.engine.check_integrity()


@pytest.mark.parametrize("what", ["read", "stage", "copy", "write"])
def test_a_load_that_fails_ends_its_own_requests_and_the_next_tries_again(what: str) -> None:
    bench = Bench(num_pages=90, max_batch_size=4, max_step_tokens=16)
    bench.register("bad", 7)
    bench.register("good", 8)
    bench.disk.failing.append(what)
    bad = [bench.engine.add_request([1, 2], "bad", GREEDY) for _ in range(2)]
    events = bench.run()
    good = bench.engine.add_request([1, 2], "good", GREEDY)
    again = bench.engine.add_request([1, 2], "bad", GREEDY)
    events |= bench.run()
    for request in bad:
        [last] = events[request]
        assert last.finish_reason == "error"
        assert last.error == "adapter 'bad' could not be loaded: RuntimeError; the log has the reason"
    assert tokens(events[good]) == want([1, 2], 8, 6)
    assert tokens(events[again]) == want([1, 2], 7, 6)
    assert bench.engine.stats().loading.failures == 1


def test_a_running_request_takes_pages_back_from_an_adapter_on_its_way() -> None:
    looks = itertools.chain([100], itertools.repeat(0))
    bench = Bench(lambda: next(looks), num_pages=30, max_batch_size=2, max_step_tokens=16)
    bench.register("a", 7)
    long = bench.engine.add_request([9], None, SamplingParams(max_tokens=90))
    for _ in range(3):
        bench.engine.step()
    late = bench.engine.add_request([4], "a", GREEDY)
    events = bench.run()
    assert tokens(events[long])[-87:] == want([9], BASE, 90)[3:]
    assert tokens(events[late]) == want([4], 7, 6)
    loading = bench.engine.stats().loading
    assert loading.bytes_staged == 2 * bench.engine.adapters()[0].host_bytes, "its pages were not taken back"
    assert bench.engine.stats().preemptions == 0


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


def test_a_prefetch_does_not_push_out_what_an_earlier_request_needs() -> None:
    bench = Bench(num_pages=31, max_batch_size=1, max_step_tokens=16)
    for i, name in enumerate("ab", 7):
        bench.engine.load_adapter(name, simulated_adapter(bench.engine._layout, i, 8))
    bench.engine.add_request([4], "a", GREEDY)
    bench.run()
    running = bench.engine.add_request([4], None, GREEDY)
    for name in "ab":
        bench.engine.add_request([4], name, GREEDY)
    events: list[StreamEvent] = []
    while not any(e.request_id == running and e.finish_reason for e in events):
        assert [a.name for a in bench.engine.adapters() if a.state == "resident"] == ["a"]
        events += bench.engine.step()
    bench.run()
    assert bench.engine.stats().adapter_loads == 2


def test_a_read_does_not_drop_the_copy_that_an_earlier_request_waits_with() -> None:
    bench = Bench(num_pages=31, max_batch_size=2, max_step_tokens=16, adapter_host_bytes=1)
    for i, name in enumerate("ab", 7):
        bench.register(name, i)
    running = bench.engine.add_request([4] * 16, None, SamplingParams(max_tokens=100))
    for _ in range(60):  # no room for an adapter beside it any more
        bench.engine.step()
    for name in "ab":
        bench.engine.add_request([4], name, GREEDY)
    events: list[StreamEvent] = []
    while not any(e.request_id == running and e.finish_reason for e in events):
        bench.executor.run()
        events += bench.engine.step()
        assert bench.disk.reads <= 1
    bench.run()
    assert bench.disk.reads == 2


def test_a_read_that_ends_after_its_adapter_is_gone_leaves_nothing() -> None:
    bench = Bench(num_pages=90, max_batch_size=4, max_step_tokens=16)
    bench.register("a", 7)
    request = bench.engine.add_request([1, 2], "a", GREEDY)
    bench.engine.step()
    bench.executor.run()
    bench.engine.abort(request)
    bench.engine.unload_adapter("a")
    bench.engine.step()
    bench.engine.check_integrity()
    assert bench.engine.stats().loading.host_bytes == 0
    assert bench.engine._adapters.host.promised == 0


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


@pytest.mark.parametrize(("link", "together"), [(1.0, 1), (75_000.0, 2), (1e9, 8)])
def test_copies_leave_the_link_to_the_input_of_the_next_step_in_time(
    link: float, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters of 28672 bytes, steps of a second: eight tenths of what the link carries in one, but an
    adapter at least. Without a step under way nobody is delayed.
    """
    clock = itertools.count()
    monkeypatch.setattr("slora_jax.engine.time.perf_counter", lambda: next(clock) / 3)  # thrice a step
    bench = Bench(lambda: 1, num_pages=400, max_batch_size=16, max_step_tokens=64, adapter_prefetch=8)
    bench.engine._runner.copy_bytes_per_s = link
    names = [f"a{i}" for i in range(8)]
    for i, name in enumerate(names, 1):
        bench.register(name, i)
    running = bench.engine.add_request([9], None, SamplingParams(max_tokens=80))
    for _ in range(3):
        bench.engine.step()
    for name in names:
        bench.engine.add_request([4], name, GREEDY)
    most = 0
    for _ in range(60):
        bench.executor.run()
        bench.engine.step()
        most = max(most, bench.engine.stats().loading.staged)
    assert most <= together
    assert most == together or link > 1e8  # reads come one a step
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


def busy_bench() -> tuple[Bench, dict[str, list[int]]]:
    """Adapters that come and go, for want of pages, beside others' steps; what each request must give."""
    bench = Bench(lambda: 1, num_pages=64, max_batch_size=3, max_step_tokens=16)
    wanted = {bench.engine.add_request([9], None, SamplingParams(max_tokens=20)): want([9], BASE, 20)}
    for i in range(1, 5):
        bench.register(f"a{i}", i)
    for length, i in itertools.product((3, 4), range(1, 5)):
        prompt = [i] * length
        request = bench.engine.add_request(prompt, f"a{i}", SamplingParams(max_tokens=5))
        wanted[request] = want(prompt, i, 5)
    return bench, wanted


def finish(bench: Bench) -> dict[str, list[int]]:
    """Step until all requests have ended, through every Ctrl-C; their tokens."""
    got: dict[str, list[int]] = {}
    for _ in range(600):
        if not bench.engine.has_unfinished():
            return got
        bench.executor.run()
        events: list[StreamEvent] = []
        with contextlib.suppress(KeyboardInterrupt):
            events = bench.engine.step()
        bench.engine.check_integrity()
        for event in events:
            got.setdefault(event.request_id, []).extend(event.token_ids)
    raise AssertionError("requests do not end")


@pytest.mark.parametrize("nth", [1, 2, 3, 5])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(
    ("owner", "place"),
    [
        *((StagingRunner, name) for name in ("launch", "stage_adapters", "write_adapter")),
        *((DirectCopy, name) for name in ("is_ready", "wait", "leave_pages")),
        (SimulatedInFlight, "fetch"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_ctrl_c_before_or_behind_what_the_device_does_costs_nothing(
    owner: type, place: str, behind: bool, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, wanted = busy_bench()
    whole, calls = getattr(owner, place), itertools.count(1)

    def interrupted(*args: Any) -> Any:
        now = next(calls) == nth
        if now and not behind:
            raise KeyboardInterrupt
        result = whole(*args)
        if now:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, place, interrupted)
    assert finish(bench) == wanted
    assert next(calls) > nth


def test_a_second_ctrl_c_while_the_first_waits_for_the_device_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, wanted = busy_bench()
    fetch, wait, calls = SimulatedInFlight.fetch, StagingRunner.wait, itertools.count(1)

    def interrupted_fetch(step: SimulatedInFlight) -> Any:
        fetched = fetch(step)
        if next(calls) == 5:
            raise KeyboardInterrupt
        return fetched

    def interrupted_wait(runner: StagingRunner) -> None:
        wait(runner)
        raise KeyboardInterrupt

    monkeypatch.setattr(SimulatedInFlight, "fetch", interrupted_fetch)
    monkeypatch.setattr(StagingRunner, "wait", interrupted_wait)
    assert finish(bench) == wanted


@pytest.mark.parametrize("part", range(8))
def test_a_ctrl_c_at_any_line_of_the_loader_costs_nothing(part: int) -> None:
    """Python raises it wherever it is; a line that is met once a load is one of two thousand."""

    def interrupted(at: int) -> int:
        """Break off at line number `at` that the loader meets; how many it met."""
        bench, wanted = busy_bench()
        step, before, lines, met = bench.engine.step, sys.gettrace(), itertools.count(1), 0

        def trace(frame: types.FrameType, event: str, _: Any) -> Any:
            nonlocal met
            if not frame.f_code.co_filename.endswith("lora/loader.py"):
                return None
            if event in ("line", "return"):
                met = next(lines)
                if met == at:
                    raise KeyboardInterrupt
            return trace

        def traced() -> list[StreamEvent]:
            sys.settrace(trace)
            try:
                return step()
            finally:
                sys.settrace(before)

        bench.engine.step = traced  # type: ignore[method-assign]
        assert finish(bench) == wanted
        return met

    most = interrupted(0)
    for at in random.Random(part).sample(range(1, most + 1), 25):
        assert interrupted(at) >= at


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


def test_files_that_changed_since_they_were_registered_are_refused() -> None:
    bench = Bench(num_pages=90, max_batch_size=4, max_step_tokens=16)
    path = bench.register("a", 7)
    bench.disk.folders[path] = 8, 8
    request = bench.engine.add_request([1, 2], "a", GREEDY)
    [event] = bench.run()[request]
    assert "its files have changed since adapter 'a' was registered" in str(event.error)


def test_a_reload_while_the_old_generation_is_read_serves_both() -> None:
    bench = Bench(num_pages=90, max_batch_size=4, max_step_tokens=16)
    bench.register("a", 7)
    old = bench.engine.add_request([1, 2], "a", GREEDY)
    bench.engine.step()
    bench.register("a", 8)
    new = bench.engine.add_request([1, 2], "a", GREEDY)
    events = bench.run()
    assert tokens(events[old]) == want([1, 2], 7, 6)
    assert tokens(events[new]) == want([1, 2], 8, 6)


def test_a_host_copy_that_was_dropped_is_read_again() -> None:
    bench = Bench(
        num_pages=30, max_batch_size=1, max_step_tokens=16, adapter_host_bytes=1, adapter_prefetch=0
    )
    for i in range(1, 4):
        bench.register(f"a{i}", i)
    for _ in range(2):
        requests = {bench.engine.add_request([4], f"a{i}", GREEDY): i for i in range(1, 4)}
        events = bench.run()
        assert all(tokens(events[r]) == want([4], i, 6) for r, i in requests.items())
    loading = bench.engine.stats().loading
    assert (bench.disk.reads, loading.host_misses, loading.host_hits) == (6, 6, 0)


@pytest.mark.parametrize(
    ("num_pages", "budget"), [(60, "adapter_host_bytes"), (400, "adapter_staging_bytes")]
)
def test_small_adapters_do_not_keep_a_large_one_from_coming_in(num_pages: int, budget: str) -> None:
    bench = Bench(
        lambda: 7, num_pages=num_pages, max_batch_size=4, max_step_tokens=64, **{budget: 3 * 28672 + 1}
    )
    bench.register("large", 1, rank=20)  # 86016 bytes; a small one has 28672
    names = [f"a{i}" for i in range(2, 60)]
    for i, name in enumerate(names, 2):
        bench.register(name, i)
    small = itertools.cycle(names)
    for _ in range(3):
        bench.engine.add_request([4], next(small), SamplingParams(max_tokens=1))
    bench.engine.step()  # their reads begin
    large = bench.engine.add_request([4], "large", GREEDY)
    ended: list[str] = []
    for _ in range(150):
        for _ in range(2):
            bench.engine.add_request([4], next(small), SamplingParams(max_tokens=1))
            bench.executor.run()
        ended += [e.request_id for e in bench.engine.step() if e.finish_reason]
    assert large in ended


def test_an_adapter_in_host_memory_is_not_read_again() -> None:
    bench = Bench(num_pages=30, max_batch_size=1, max_step_tokens=16, adapter_prefetch=0)
    for i in range(1, 4):
        bench.register(f"a{i}", i)
    for _ in range(2):
        for i in range(1, 4):
            bench.engine.add_request([4], f"a{i}", GREEDY)
        bench.run()
    loading = bench.engine.stats().loading
    assert (bench.disk.reads, loading.host_misses, loading.host_hits) == (3, 3, 3)
    assert bench.engine.stats().adapter_loads == 6
    assert loading.bytes_staged == 2 * sum(a.host_bytes for a in bench.engine.adapters())


def test_an_aborted_request_cancels_a_read_that_has_not_begun() -> None:
    bench = Bench(num_pages=90, max_batch_size=4, max_step_tokens=16)
    bench.register("a", 7)
    request = bench.engine.add_request([1, 2], "a", GREEDY)
    bench.engine.step()
    assert [a.state for a in bench.engine.adapters()] == ["reading"]
    bench.engine.abort(request)
    bench.engine.step()
    assert [a.state for a in bench.engine.adapters()] == ["registered"]
    while bench.executor.run():
        pass
    assert bench.disk.reads == 0


def test_waiting_requests_have_their_adapters_loaded_before_their_turn() -> None:
    bench = Bench(num_pages=90, max_batch_size=1, max_step_tokens=16)
    for i in range(1, 4):
        bench.register(f"a{i}", i)
    first = bench.engine.add_request([9], None, SamplingParams(max_tokens=30))
    later = [bench.engine.add_request([4], f"a{i}", GREEDY) for i in range(1, 4)]
    for _ in range(12):
        bench.executor.run()
        bench.engine.step()
    assert bench.engine.stats().adapters_resident == 3
    events = bench.run()
    assert [tokens(events[r]) for r in later] == [want([4], i, 6) for i in range(1, 4)]
    assert bench.engine.stats().loading.prefetches_useful == 3
    assert bench.engine.stats().loading.wait_seconds == 0
    assert events[first][-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("policy", "first"), [("fcfs", "b"), ("cluster", "a"), ("vtc+cluster", "a")], ids=str
)
def test_cluster_prefers_an_adapter_that_is_on_its_way_to_one_that_would_have_to_be_read(
    policy: str, first: str
) -> None:
    bench = Bench(
        num_pages=90, max_batch_size=1, max_step_tokens=16, adapter_prefetch=1, scheduling_policy=policy
    )
    bench.register("a", 7)
    bench.register("b", 8)
    bench.engine.add_request([9], None, SamplingParams(max_tokens=12))
    bench.engine.step()
    gone = bench.engine.add_request([1, 2], "a", GREEDY)
    asked = {bench.engine.add_request([1, 2], name, GREEDY): name for name in ("b", "a")}
    bench.engine.step()  # the one that is next has its adapter read
    assert bench.engine._adapters.get("a").state == "reading"
    bench.engine.abort(gone)
    bench.engine.step()
    assert bench.engine._adapters.get("b").state == ("reading" if first == "b" else "registered")
    ended = [request for request in bench.run() if request in asked]
    assert [asked[request] for request in ended] == [first, "ab".replace(first, "")]


def test_cluster_prefers_an_adapter_that_is_loaded_on_a_guess() -> None:
    sizes: dict[str, Any] = {"num_pages": 30, "max_batch_size": 1, "max_step_tokens": 32}
    fields: dict[str, Any] = {
        "adapter_prefetch": 1,
        "prefetch_watermark": 0.0,
        "enable_prefix_caching": False,
    }
    bench = Bench(**sizes, **fields, scheduling_policy="cluster")
    bench.register("a", 7)
    bench.register("b", 8)
    bench.engine.add_request([4], "a", GREEDY)
    bench.run()
    bench.engine.add_request([4] * 60, None, SamplingParams(max_tokens=56))  # needs every page
    bench.run()
    assert bench.engine.stats().adapters_resident == 0
    running, following = (bench.engine.add_request([9], None, GREEDY) for _ in range(2))
    second, first = (bench.engine.add_request([1, 2], name, GREEDY) for name in ("b", "a"))
    bench.engine.step()  # nobody but the next one has its adapter loaded, and that is the base's
    assert [info.state for info in bench.engine.adapters()] == ["staged", "registered"]
    with contextlib.closing(bench.engine._scheduler.waiting.candidates()) as candidates:
        assert [s.request.request_id for s in candidates] == [following, first, second]
    assert running in bench.run()


def test_an_adapter_that_gave_way_comes_back_when_pages_are_free() -> None:
    sizes: dict[str, Any] = {"num_pages": 30, "max_batch_size": 2, "max_step_tokens": 32}
    bench = Bench(**sizes, prefetch_watermark=0.2, enable_prefix_caching=False)
    bench.register("a", 7)
    bench.engine.add_request([4], "a", GREEDY)
    bench.run()
    bench.engine.add_request([4] * 60, None, SamplingParams(max_tokens=56))  # needs every page
    bench.run()
    assert bench.engine.stats().adapter_evictions == 1
    bench.engine.add_request([4], None, SamplingParams(max_tokens=12))
    bench.run()
    assert [a.state for a in bench.engine.adapters()] == ["resident"]
    assert bench.engine.stats().loading.prefetches_useful == 0
    bench.engine.add_request([4], "a", GREEDY)
    bench.run()
    assert bench.engine.stats().loading.prefetches_useful == 1


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


def test_a_step_that_can_do_nothing_else_waits_for_a_load() -> None:
    bench = Bench(num_pages=90, max_batch_size=4, max_step_tokens=16)
    bench.register("a", 7)
    waits: list[float] = []

    def wait(timeout: float) -> bool:
        waits.append(timeout)
        return bench.executor.run() or AdapterLoader.wait(bench.engine._loader, timeout)

    bench.engine._loader.wait = wait  # type: ignore[method-assign]
    bench.engine.add_request([1, 2], "a", GREEDY)
    bench.engine.step()
    assert waits
    assert max(waits) <= 0.01
    assert bench.engine.stats().num_running == 1


def test_host_bytes_are_those_of_the_copies_held() -> None:
    bench = Bench(num_pages=90, max_batch_size=4, max_step_tokens=16)
    bench.register("a", 7)
    assert bench.engine.stats().loading.host_bytes == 0
    bench.engine.add_request([1, 2], "a", GREEDY)
    bench.run()
    nbytes = simulated_adapter(bench.engine._layout, 7, 8).packed.nbytes
    assert bench.engine.stats().loading.host_bytes == nbytes
    assert bench.engine.adapters()[0].host_bytes == nbytes
    bench.engine.unload_adapter("a")
    assert bench.engine.stats().loading.host_bytes == 0


def test_pages_given_as_numpy_share_one_host_copy() -> None:
    bench = Bench(num_pages=90, max_batch_size=4, max_step_tokens=16)
    made = simulated_adapter(bench.engine._layout, 7, 8)
    for name in "ab":
        bench.engine.load_adapter(name, made)
    a, b = (bench.engine._adapters.get(name) for name in "ab")
    assert a.host is b.host
    assert a.host is not None
    assert np.shares_memory(np.asarray(a.host.pages), made.packed.pages)


def test_what_a_failed_load_logs_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A client chose the path, and could forge lines of the log with it."""
    bench = Bench(num_pages=90, max_batch_size=4, max_step_tokens=16)
    path = bench.register("bad", 7, path="/disk/7\nERROR all is lost \x1b[31m")
    del bench.disk.folders[path]
    bench.engine.add_request([1, 2], "bad", GREEDY)
    bench.run()
    told = [r.getMessage() for r in caplog.records if "could not be loaded" in r.getMessage()]
    assert len(told) == 1
    assert told[0].isprintable()
