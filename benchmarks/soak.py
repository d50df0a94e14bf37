"""An hour of traffic on a virtual clock over the real engine: nothing is wrong, and nothing is left behind.

    python -m benchmarks.soak                 # 60 virtual minutes
    python -m benchmarks.soak --minutes 5 --seed 3

Engine, scheduler, store, loader and its reader threads are the real ones; the device is the tests' simulated
one, whose tokens are hashes of what the pages hold, so that a page that was shared, freed or overwritten
wrongly gives a wrong token. Bursts of arrivals of known and new tenants, conversations that come back,
clients that leave, deadlines, adapters that are loaded, reloaded, unloaded, pinned, changed on disk, reads
and copies that fail, steps that break off. Every answer is compared with what it must be.

Every five minutes traffic stops until the engine is idle; then nothing may be held but what is idle by
design, and Python's objects, traced memory, threads and resident memory are counted. The largest counts of
the last third may not exceed those of the middle third. At the end everything is unloaded, and all of it
must be gone. The counts go to benchmarks/results/sim.jsonl.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import heapq
import itertools
import logging
import math
import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import record
from slora_jax import LimitExceededError, SamplingParams
from slora_jax.engine import Engine
from slora_jax.lora.transfer import HostCopy
from slora_jax.memory.prefix_cache import CachedPage
from slora_jax.outputs import StreamEvent
from slora_jax.request import Request, Sequence
from slora_jax.scheduling.scheduler import StepPlan
from tests.engine.simulated_engine import VOCAB, simulated_engine
from tests.engine.simulated_runner import (
    BASE,
    DirectCopy,
    Disk,
    SimulatedInFlight,
    StagingRunner,
    expected_tokens,
    simulated_adapter,
)
from tests.engine.virtual_time import VirtualClock, virtual_time

POLICY = "vtc+cluster+early-abort"
NAMES = [f"adapter-{i}" for i in range(40)]
STEMS = [[1, 2, 3, 4] * 8, [1, 2, 3, 4, 5, 6, 7, 8] * 4, [9] * 32]  # that prompts begin with
ADAPTER_BYTES = 28672  # of rank 8
LONGEST_DEADLINE = 20.0  # seconds
_COUNTED = (Request, Sequence, CachedPage, HostCopy, DirectCopy)


class SoakRunner(StagingRunner):
    """A device whose steps take virtual time, and break off when told to."""

    clock: VirtualClock
    interrupt = False

    def launch(self, plan: StepPlan) -> SimulatedInFlight:
        self.clock.now += 0.03 + 1e-3 * plan.num_tokens
        if self.interrupt:
            self.interrupt = False
            raise KeyboardInterrupt
        return super().launch(plan)


@dataclasses.dataclass
class Asked:
    """A request under way, and what came of its sequences."""

    prompt: list[int]
    fingerprint: int
    max_tokens: int
    tokens: list[list[int]]
    ended: list[bool]
    left: bool = False  # its client is gone


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What is there while the engine is idle."""

    minute: float
    objects: int  # that the garbage collector knows
    traced_kb: int  # allocated by Python, but for adapters' host copies
    rss_kb: int
    threads: int
    kept: dict[str, int]  # objects of the engine's by class


class Soak:
    """Random traffic, and the proofs that it left nothing behind. `minutes` are virtual."""

    def __init__(self, minutes: float, seed: int, checkpoint_minutes: float = 5.0) -> None:
        self._clock = VirtualClock()
        self._rng = np.random.default_rng(seed)
        self._disk = Disk()
        self.engine = self._make_engine()
        self._start = self._clock.now
        self._until = self._start + 60 * minutes
        self._every = 60 * checkpoint_minutes
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._asked: dict[str, Asked] = {}
        self._loaded: dict[str, tuple[int, str | None]] = {}  # name -> fingerprint, path (None: from memory)
        self._turns: collections.deque[tuple[str | None, list[int]]] = collections.deque(maxlen=50)
        self._fingerprints = itertools.count(1)
        self.counts: collections.Counter[str] = collections.Counter()
        self.checkpoints: list[Checkpoint] = []

    def run(self) -> None:
        """All of it; raises AssertionError saying what is wrong or left."""
        with virtual_time(self._clock):
            for name in NAMES[:20]:
                self._load(name)
            self._again(self._arrive, lambda: 1 / self._rate())
            self._again(self._administrate, lambda: 2.0)
            self._again(self._fail_something, lambda: 15.0)
            self._again(self._break_off, lambda: 60.0)
            self._again(self._stream_and_close, lambda: 20.0)
            following = self._start + self._every
            while self._clock.now < self._until:
                if self._clock.now >= following:
                    self._check_idle()
                    following += self._every
                self._let_happen()
                if self.engine.has_unfinished():
                    self._step()
                else:
                    self._clock.now = max(self._clock.now, self._events[0][0])
            self._check_idle()
            self._check_end()

    def check_growth(self) -> None:
        """The largest counts of the last third are not above those of the middle third."""
        third = len(self.checkpoints) // 3
        assert third, "too short to say what grows: let it run for three checkpoints"
        middle, last = self.checkpoints[third : 2 * third], self.checkpoints[2 * third :]
        for field, slack in (("objects", 1.02), ("traced_kb", 1.02), ("rss_kb", 1.02), ("threads", 1.0)):
            before, after = (max(getattr(c, field) for c in part) for part in (middle, last))
            assert after <= before * slack, f"{field} grew from {before} to {after}: {self.checkpoints}"

    # -- what happens --

    def _arrive(self) -> None:
        rng, names = self._rng, [None, *self._loaded]
        if self._turns and rng.random() < 0.3:  # a conversation goes on
            name, prompt = self._turns[int(rng.integers(len(self._turns)))]
            prompt = (prompt + self._some_tokens(6))[:50]
            name = name if name in self._loaded else None
        else:
            name = names[int(len(names) * rng.power(0.5))]
            stem = STEMS[int(rng.integers(len(STEMS)))]
            prompt = stem[: int(rng.integers(0, 33))] + self._some_tokens(8)
        regular = rng.random() < 0.7
        tenant = f"tenant-{int(rng.integers(4))}" if regular else f"visitor-{next(self._numbers)}"
        n, max_tokens = 1 + int(rng.random() < 0.1), int(rng.integers(1, 40))
        deadline = float(rng.uniform(0.5, LONGEST_DEADLINE)) if rng.random() < 0.1 else None
        self.counts["asked"] += 1
        try:
            request = self.engine.add_request(
                prompt,
                name,
                SamplingParams(max_tokens=max_tokens, n=n),
                tenant=tenant,
                priority=int(rng.integers(-1, 2)),
                deadline_s=deadline,
            )
        except LimitExceededError as error:
            self.counts[f"refused_by_{error.limit}"] += 1
            return
        fingerprint = BASE if name is None else self._loaded[name][0]
        self._asked[request] = Asked(prompt, fingerprint, max_tokens, [[] for _ in range(n)], [False] * n)
        self._turns.append((name, prompt))
        if rng.random() < 0.15:
            self._at(float(rng.exponential(3.0)), lambda: self._leave(request))

    def _leave(self, request: str) -> None:
        """A client disconnects."""
        if request in self._asked:
            self.counts["left"] += 1
            self._asked[request].left = True
            self._take(self.engine.abort(request))

    def _administrate(self) -> None:
        rng, name = self._rng, NAMES[int(self._rng.integers(len(NAMES)))]
        what = str(rng.choice(["load", "unload", "pin", "unpin", "change"]))
        if name not in self._loaded or what == "load":
            self._load(name)
        elif what == "unload":
            self.engine.unload_adapter(name)
            self._forget(name)
            self.counts["unloads"] += 1
        elif what in ("pin", "unpin"):
            with contextlib.suppress(ValueError):  # no room for it beside what runs
                (self.engine.pin_adapter if what == "pin" else self.engine.unpin_adapter)(name)
                self.counts[what] += 1
            for pinned in [a.name for a in self.engine.adapters() if a.pinned][:-2]:
                self.engine.unpin_adapter(pinned)
        elif (path := self._loaded[name][1]) is not None:
            self._disk.folders[path] = next(self._fingerprints), self._disk.folders[path][1]
            self.counts["changed_files"] += 1
            self._at(10.0, lambda: self._load(name))  # its requests fail until then, if they read it again

    def _load(self, name: str) -> None:
        fingerprint, rank = next(self._fingerprints), int(self._rng.choice([3, 8, 20]))
        made = simulated_adapter(self.engine._layout, fingerprint, rank)
        known = name in self._loaded
        try:
            if self._rng.random() < 0.2:
                path = None
                self.engine.load_adapter(name, made, replace=True)
            else:
                path = f"/disk/{fingerprint}"
                self._disk.folders[path] = fingerprint, rank
                stamp = self._disk.stamp(path)
                self.engine._registry.enter(name, path, made.packed.shape, stamp, None, replace=True)
        except ValueError as error:
            if "is pinned" not in str(error):  # a larger one under a pinned name
                raise
            self._disk.folders.pop(f"/disk/{fingerprint}", None)
            return
        self.counts["reloads" if known else "loads"] += 1
        self._forget(name)
        self._loaded[name] = fingerprint, path

    def _forget(self, name: str) -> None:
        """Its files go a while after: requests of the old generation may still read them."""
        _, path = self._loaded.pop(name, (0, None))
        if path is not None:
            self._at(30.0, lambda: self._disk.folders.pop(path, None) and None)

    def _fail_something(self) -> None:
        self._disk.failing.append(str(self._rng.choice(["read", "stage", "copy", "write"])))

    def _break_off(self) -> None:
        self.engine._runner.interrupt = True  # type: ignore[attr-defined]

    def _stream_and_close(self) -> None:
        """Somebody reads a stream for a while, beside the others, and closes it."""
        prompt, tokens = self._some_tokens(8), list[int]()
        self.counts["asked"] += 1
        try:
            with contextlib.closing(
                self.engine.stream([prompt], None, SamplingParams(max_tokens=30))
            ) as stream:  # type: ignore[type-var]
                for event in itertools.islice(stream, int(self._rng.integers(0, 40))):
                    tokens += event.token_ids
        except KeyboardInterrupt:
            self.counts["broken_off"] += 1
        self.counts["streams"] += 1
        assert tokens == expected_tokens(prompt, BASE, 30, VOCAB)[: len(tokens)]

    # -- how it goes --

    def _step(self) -> None:
        try:
            self._take(self.engine.step())
        except KeyboardInterrupt:
            self.counts["broken_off"] += 1
        self.counts["steps"] += 1
        if self.counts["steps"] % 100 == 0:
            self.engine.check_integrity()

    def _take(self, events: list[StreamEvent]) -> None:
        for event in events:
            asked = self._asked[event.request_id]  # KeyError: an event after the last one
            assert not asked.ended[event.index], "an event after the last one"
            tokens = asked.tokens[event.index]
            tokens += event.token_ids
            if event.finish_reason is None:
                continue
            asked.ended[event.index] = True
            want = expected_tokens(asked.prompt, asked.fingerprint, asked.max_tokens, VOCAB)
            assert tokens == want[: len(tokens)], f"wrong tokens of {asked}"
            if event.finish_reason == "error":
                assert "could not be loaded" in str(event.error), event
                self.counts["failed"] += 1
            elif event.finish_reason == "abort":
                assert asked.left or event.error, f"given up without a reason: {event}"
                self.counts["left_sequences" if asked.left else "given_up"] += 1
            else:
                assert event.finish_reason == "length", event
                assert tokens == want, f"tokens are missing of {asked}"
                self.counts["answered"] += 1
            if all(asked.ended):
                del self._asked[event.request_id]

    def _check_idle(self) -> None:
        """Let what is under way end; nothing is held then but what is idle, and count what there is."""
        for _ in range(100_000):
            if not self.engine.has_unfinished():
                break
            self._step()
        assert not self._asked, f"requests never ended: {list(self._asked.values())[:3]}"
        self._settle_reads()
        self._clock.now += LONGEST_DEADLINE  # ended requests are remembered until their deadline
        self._step()
        engine, stats = self.engine, self.engine.stats()
        engine.check_integrity()
        assert (len(engine.requests), stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert stats.pages_kv == 0, f"{stats.pages_kv} pages of KV are left"
        assert stats.pages_free + stats.pages_cached + stats.pages_adapter == stats.pages_total
        assert not any(a.users or a.in_use for a in engine._adapters), "references are left"
        assert {a.name for a in engine._adapters} == set(self._loaded), "adapters are left, or lost"
        assert (stats.loading.reading, stats.loading.staged) == (0, 0)
        host = engine._adapters.host
        assert host.promised == 0
        assert host.held <= host.budget
        found = self._count()
        assert (found.kept["Request"], found.kept["Sequence"]) == (0, 0), "requests are kept"
        self.checkpoints.append(found)

    def _check_end(self) -> None:
        """Everything is unloaded: all of it is gone."""
        for name in list(self._loaded):
            self.engine.unload_adapter(name)
        self._loaded.clear()
        self._turns.clear()
        self.engine.reset_prefix_cache()
        self.engine.check_integrity()
        stats, host = self.engine.stats(), self.engine._adapters.host
        assert stats.pages_free == stats.pages_total, "pages are left"
        assert (host.held, host.promised, host.fixed) == (0, 0, 0), "host copies are left"
        assert not self.engine.adapters()
        kept = self._count().kept
        assert kept.pop("CachedPage") <= 1, "cached pages are kept beside the base's root"
        assert not any(kept.values()), f"these are kept: {kept}"

    def _count(self) -> Checkpoint:
        waiting, host = self.engine._scheduler.waiting, self.engine._adapters.host
        assert waiting._vtc is not None
        assert waiting._limits is not None
        waiting._vtc._forget()  # idle tenants, who are remembered till they are 1024: counts would swing
        waiting._limits._forget()
        gc.collect()
        objects = gc.get_objects()
        kept = collections.Counter(type(o).__name__ for o in objects if isinstance(o, _COUNTED))
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Checkpoint(
            minute=round((self._clock.now - self._start) / 60, 1),
            objects=len(objects),
            traced_kb=(tracemalloc.get_traced_memory()[0] - host.held - host.fixed) >> 10,
            rss_kb=rss >> 10,
            threads=threading.active_count(),
            kept={kind.__name__: kept[kind.__name__] for kind in _COUNTED},
        )

    def _settle_reads(self) -> None:
        """Let reads end that nobody waits for any more."""
        while self.engine.stats().loading.reading or self.engine.stats().loading.staged:
            self.engine._loader.wait(1.0)
            self._take(self.engine.step())

    # -- tools --

    def _make_engine(self) -> Engine:
        with virtual_time(self._clock):
            engine = simulated_engine(
                SoakRunner,
                num_pages=240,  # so few that sequences are preempted
                max_batch_size=16,
                max_step_tokens=64,
                adapter_host_bytes=12 * ADAPTER_BYTES,
                adapter_staging_bytes=3 * ADAPTER_BYTES,
                adapter_prefetch=8,
                scheduling_policy=POLICY,
                tenant_max_queue=14,
                tenant_limits={"tenant-0": {"tokens_per_minute": 1200, "max_queue": None}},
                adapter_max_concurrency=6,
            )
        runner: Any = engine._runner
        runner.clock, runner.disk = self._clock, self._disk
        looks = itertools.cycle([0, 0, 1, 0, 3, 1, 8])
        runner.looks = lambda: next(looks)
        engine._loader._read = lambda path, checkpoint: self._disk.prepare(engine._layout, path, checkpoint)
        return engine

    def _rate(self) -> float:
        """Requests a second: quiet and busy minutes, the busiest beyond what can be served."""
        return 14 + 12 * math.sin((self._clock.now - self._start) / 47)

    def _again(self, function: Callable[[], None], mean: Callable[[], float]) -> None:
        """Let something happen again and again, in gaps of a gamma process of coefficient of variation 2."""

        def happen() -> None:
            function()
            self._at(float(self._rng.gamma(0.25, 4 * mean())), happen)

        self._at(mean(), happen)

    def _at(self, seconds: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._clock.now + seconds, next(self._numbers), function))

    def _let_happen(self) -> None:
        while self._events and self._events[0][0] <= self._clock.now:
            heapq.heappop(self._events)[2]()

    def _some_tokens(self, most: int) -> list[int]:
        return [int(t) for t in self._rng.integers(0, VOCAB, int(self._rng.integers(1, most + 1)))]


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Trace Python's allocations; the loader's warnings of injected failures are not shown."""
    logger = logging.getLogger("slora_jax.lora.loader")
    level = logger.level
    logger.setLevel(logging.ERROR)
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        logger.setLevel(level)


def main() -> None:
    """Parse, run and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="virtual")
    parser.add_argument("--checkpoint-minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.perf_counter()
    with traced():
        soak = Soak(args.minutes, args.seed, args.checkpoint_minutes)
        soak.run()
    soak.check_growth()
    stats = soak.engine.stats()
    case = {"minutes": args.minutes, "seed": args.seed, "policy": POLICY}
    extra: dict[str, Any] = {
        **dict(sorted(soak.counts.items())),
        "injected_failures": soak._disk.failures,
        "adapter_loads": stats.adapter_loads,
        "adapter_evictions": stats.adapter_evictions,
        "preemptions": stats.preemptions,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "wall_seconds": round(time.perf_counter() - started),
        "checkpoints": [dataclasses.asdict(c) for c in soak.checkpoints],
    }
    record("sim", "soak", case, soak.counts["answered"], "answers", **extra)
    print(f"soak {case}: {soak.counts['answered']} answers, all right; {extra}", flush=True)


if __name__ == "__main__":
    main()
