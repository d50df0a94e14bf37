"""A queue that never empties, before an engine or a virtual server: what is served, and who waits for it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from benchmarks.adapters.workload import Draw, Workload, add
from benchmarks.papers import most_overtaken
from slora_jax.engine import Engine
from slora_jax.lora.store import AdapterStore
from slora_jax.scheduling.scheduler import Scheduler


class Server(Protocol):
    """What serves, in seconds of a clock of its own."""

    @property
    def scheduler(self) -> Scheduler: ...
    @property
    def store(self) -> AdapterStore: ...
    @property
    def loads(self) -> int:
        """Adapters that came into the pool so far."""

    @property
    def compilations(self) -> int:
        """Steps compiled so far."""

    def now(self) -> float: ...
    def ask(self, draw: Draw) -> str:
        """Queue a request; its id."""

    def step(self) -> Iterable[tuple[str, int, bool]]:
        """Of one step: requests that put out something, how many tokens, whether these were the last."""


@dataclasses.dataclass(frozen=True)
class EngineServer:
    """A real engine, in real time."""

    engine: Engine

    @property
    def scheduler(self) -> Scheduler:
        return self.engine._scheduler

    @property
    def store(self) -> AdapterStore:
        return self.engine._adapters

    @property
    def loads(self) -> int:
        return self.engine._loader.loads

    @property
    def compilations(self) -> int:
        return self.engine.num_compilations

    def now(self) -> float:
        return time.perf_counter()

    def ask(self, draw: Draw) -> str:
        return add(self.engine, draw)

    def step(self) -> Iterable[tuple[str, int, bool]]:
        events = self.engine.step()
        for event in events:
            if event.finish_reason not in (None, "length"):
                raise RuntimeError(f"a request ended by {event.finish_reason}: {event.error}")
        return [(e.request_id, len(e.token_ids), e.finish_reason is not None) for e in events]


def serve_backlog(
    server: Server, work: Workload, *, begun: int, waiting: int, seconds: float
) -> dict[str, Any]:
    """Keep so many requests waiting, from `begun` sequences of a steady state on, and measure `seconds`.

    The window begins when as many have their first token as were there at the start, so that all who wait in
    it came one by one, and ends early where a step is compiled. First tokens are those that came in it.
    `most_overtaken` counts all requests, those that still wait too, and so does `oldest_waiting_s`.
    """
    scheduler, store = server.scheduler, server.store
    asked: dict[str, float] = {}  # requests in the order in which they came -> when
    first: dict[str, float] = {}  # in the order of their first tokens -> after how many seconds
    tokens = finished = 0

    def ask(draw: Draw) -> None:
        asked[server.ask(draw)] = server.now()

    def step() -> None:
        nonlocal tokens, finished
        came = server.step()
        for request, count, last in came:
            tokens += count
            finished += last
            if count and request not in first:
                first[request] = server.now() - asked[request]
        while len(scheduler.waiting) < waiting:
            ask(work.draw())

    for _ in range(begun):
        ask(work.begun())
    for _ in range(waiting):
        ask(work.draw())
    while len(first) < begun + waiting:
        step()
    tokens, finished, skipped = 0, 0, len(first)
    began, compiled = server.now(), server.compilations
    loads, preemptions = server.loads, scheduler.preemptions
    held: list[tuple[int, int, int]] = []  # sequences, their adapters, resident adapters
    while (passed := server.now() - began) < seconds and server.compilations == compiled:
        step()
        running = scheduler.running
        held.append((len(running), len({s.adapter for s in running}), len(store.resident)))
    numbers = {request: number for number, request in enumerate(asked)}
    not_begun = [r for r in asked if r not in first]
    mean_running, mean_adapters, mean_resident = np.mean(held, axis=0).round(1).tolist()
    waited = [*first.values()][skipped:]
    return {
        "output_tokens_per_s": round(tokens / passed, 1),
        "requests_per_s": round(finished / passed, 2),
        "mean_running": mean_running,
        "most_running": max(n for n, *_ in held),
        "mean_adapters_running": mean_adapters,
        "mean_resident": mean_resident,
        "ttft_s": [round(float(np.percentile(waited, p)), 2) for p in (50, 99)],
        "oldest_waiting_s": round(max(server.now() - asked[r] for r in not_begun), 2),
        "most_overtaken": most_overtaken((numbers[r] for r in first), (numbers[r] for r in not_begun)),
        "loads": server.loads - loads,
        "preemptions": scheduler.preemptions - preemptions,
        "seconds": round(passed, 2),
        "compilations": server.compilations - compiled,
    }
