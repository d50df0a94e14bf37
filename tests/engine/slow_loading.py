"""An engine whose adapters are read and copied when a test says so."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from slora_jax import SamplingParams
from slora_jax.outputs import StreamEvent
from tests.engine.simulated_engine import VOCAB, simulated_engine
from tests.engine.simulated_runner import BASE, Disk, StagingRunner, expected_tokens, simulated_adapter


def tokens(events: Sequence[StreamEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def want(prompt: list[int], fingerprint: int, n: int) -> list[int]:
    """The tokens that an engine over the simulated device must give."""
    return expected_tokens(prompt, fingerprint, n, VOCAB)


class DeferredWorkers:
    """Takes DaemonWorkers' place: runs jobs when it is told to."""

    def __init__(self) -> None:
        self.jobs: list[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = []

    def submit(self, what: str, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.jobs.append((future, lambda: function(*args)))
        return future

    def run(self, pick: int = 0) -> bool:
        """Run one of the jobs that wait; False where none does."""
        if not self.jobs:
            return False
        future, job = self.jobs.pop(pick % len(self.jobs))
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)
        return True


class Bench:
    """An engine over a slow device and a slow disk, both in the test's hands."""

    def __init__(self, looks: Callable[[], int] = lambda: 0, **fields: Any) -> None:
        self.disk, self.executor = Disk(), DeferredWorkers()
        self.engine = engine = simulated_engine(StagingRunner, **fields)
        engine._runner.disk, engine._runner.looks = self.disk, looks  # type: ignore[attr-defined]
        loader: Any = engine._loader
        loader._readers = self.executor
        loader._read = lambda path, checkpoint: self.disk.prepare(engine._layout, path, checkpoint)
        loader.wait = lambda timeout: False  # the test decides when a read ends

    def register(self, name: str, fingerprint: int, rank: int = 8, path: str | None = None) -> str:
        """A new folder, registered lazily; its path."""
        path = path or f"/disk/{fingerprint}"
        self.disk.folders[path] = fingerprint, rank
        shape = simulated_adapter(self.engine._layout, fingerprint, rank).packed.shape
        self.engine._registry.enter(name, path, shape, self.disk.stamp(path), None, replace=True)
        return path

    def run(self) -> dict[str, list[StreamEvent]]:
        """Step until all requests have ended, reading as asked; their events."""
        events: dict[str, list[StreamEvent]] = {}
        for _ in range(3000):
            if not self.engine.has_unfinished():
                return events
            self.executor.run()
            for event in self.engine.step():
                events.setdefault(event.request_id, []).append(event)
            self.engine.check_integrity()
        raise AssertionError("requests do not end")


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
