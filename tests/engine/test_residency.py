"""Adapters that are read, staged and written while others run: nothing is mixed up, lost or leaked."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from slora_jax import SamplingParams
from slora_jax.lora.loader import AdapterLoader
from slora_jax.outputs import StreamEvent
from tests.engine.histories import NOBODY, History, Who, askers, scheduling
from tests.engine.policy_server import POLICIES
from tests.engine.simulated_engine import VOCAB
from tests.engine.simulated_runner import BASE, simulated_adapter
from tests.engine.slow_loading import Bench, tokens, want


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
        order=scheduling(),
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
        order: dict[str, Any],
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
            **order,
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
        who=askers(),
    )
    def add(self, prompt: list[int], max_tokens: int, n: int, pick: int, who: Who = NOBODY) -> None:
        names = [None, *self.loaded]
        try:
            self.ask(prompt, max_tokens, n, names[pick % len(names)], who)
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
TestResidency.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


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
        order={
            "scheduling_policy": rng.choice(POLICIES),
            "ttft_target_s": rng.choice([0.3, 1e6]),
            "tenant_weights": {"a": 3.0},
            "tenant_max_concurrency": rng.choice([None, 3]),
            "adapter_max_concurrency": rng.choice([None, 2]),
        },
    )
    names = "abcdefgh"

    def someone() -> Who:
        return rng.choice("abc"), rng.randint(-2, 2), rng.choice([None, None, None, 0.5])

    rules: list[tuple[int, Callable[[], None]]] = [
        (12, lambda: machine.load(rng.choice(names), rng.choice([3, 8, 8, 20]), rng.random() < 0.3)),
        (4, lambda: machine.unload(rng.choice(names))),
        (2, lambda: machine.change_files(rng.choice(names), rng.random() < 0.5)),
        (
            30,
            lambda: machine.add(
                [rng.randrange(VOCAB)] * rng.randint(1, 30), 9, 1, rng.randrange(99), someone()
            ),
        ),
        (3, lambda: machine.add([rng.randrange(VOCAB)] * 3, 60, 2, 0, someone())),
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


@pytest.mark.parametrize(("seed", "operations"), [*((seed, 400) for seed in range(12)), (147, 1500)])
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


@pytest.mark.parametrize("steps", range(4))  # a page of KV has 4 tokens
def test_a_name_pinned_while_its_adapter_is_sought_is_not_evicted(steps: int) -> None:
    bench = Bench(num_pages=64, max_batch_size=1, max_step_tokens=16, enable_prefix_caching=False)
    bench.register("a", 7)
    bench.engine.add_request([4], "a", GREEDY)
    bench.run()
    adapter = bench.engine._adapters.get("a")
    bench.engine.add_request([9] * 4, None, SamplingParams(max_tokens=80))
    bench.engine.add_request([5], "a", GREEDY)  # waits for the only slot
    for _ in range(4 + steps):
        bench.engine.step()
    bench.engine.pin_adapter("a")
    taken = bench.engine._pool.allocate(bench.engine._pool.free_for("kv"), "kv")
    bench.engine.step()
    bench.engine._pool.release(taken or [])
    assert adapter.resident


def test_the_host_copy_of_an_adapter_that_is_copied_is_not_dropped() -> None:
    """Its memory is not free before the copy has ended."""
    bench = Bench(
        lambda: 10**6, num_pages=400, max_batch_size=4, max_step_tokens=64, adapter_host_bytes=30_000
    )
    for i in (1, 2):
        bench.register(f"a{i}", i)
    bench.engine.add_request([9], None, SamplingParams(max_tokens=80))
    for name in ("a1", "a2"):
        bench.engine.add_request([4], name, GREEDY)
        for _ in range(4):
            bench.engine.step()
            bench.executor.run()
    alive = sum(t.host.pages.nbytes for t in bench.engine._loader._transfers)
    assert alive <= bench.engine._adapters.host.budget
