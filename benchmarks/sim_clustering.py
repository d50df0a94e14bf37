"""Adapter clustering on a virtual clock: what `bench_adapters cluster` and `online` measure on a GPU.

The steps' and loads' seconds are those of Llama-2-7B on an H200 (`costs`), the pool in pages of 16 tokens.
The first of the runs of a case has the very requests of the GPU's.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.adapters.backlog import serve_backlog
from benchmarks.adapters.workload import Draw, Workload, mean_kv
from benchmarks.costs import H200, H200_LOADS, ROUGH_H200, adapter_pages
from benchmarks.engine.random_adapters import SETTINGS
from benchmarks.papers import (
    CLUSTER_ADAPTERS,
    CLUSTER_TOKENS,
    CLUSTER_WAITING,
    LONGEST,
    by_popularity,
    gamma_arrivals,
    most_overtaken,
    satisfaction,
)
from benchmarks.virtual_server import Arrival, LoadCost, StepCost, VirtualServer
from slora_jax.config import EngineConfig
from slora_jax.lora.store import Adapter, AdapterStore
from slora_jax.scheduling.scheduler import Scheduler

VOCAB = 32_000
PASSES = (("fcfs", 0), ("cluster", 16), ("cluster", 64), ("cluster", 256))
RUNS = range(42, 50)  # seeds
WINDOW_S = 10.0
# Arrivals: all times of S-LoRA's ablation in units of the gap between two requests. 240 come, a fifth to a
# quarter more than fcfs serves; a first token is wanted within 12 gaps.
RATE, SECONDS, TARGET_S = 15.0, 16.0, 0.8

type Case = tuple[dict[str, Any], dict[str, Any]]  # and what was found


@dataclasses.dataclass(frozen=True)
class Setup:
    """A server, and adapters of the sizes of setting S2 in host memory, or of these pages."""

    num_pages: int
    n: int
    batch: int = 256
    step_tokens: int = 2048
    cost: StepCost = H200
    loads: LoadCost | None = H200_LOADS
    adapter_pages: tuple[int, ...] = tuple(adapter_pages(rank) for rank in SETTINGS["S2"])


def of_tokens(tokens: int, n: int) -> Setup:
    """An H200 with a pool of so many tokens."""
    return Setup(1 + tokens // 16, n)


def backlogs() -> Iterator[Case]:
    """Requests of which so many always wait.

    S-LoRA's workload first; then with more adapters; with four times the pool, adapters and queue; and with
    an H200's whole pool, 2000 adapters, and a queue of some 8 s, where slots are the limit.
    """
    slora = (CLUSTER_TOKENS, CLUSTER_ADAPTERS, CLUSTER_WAITING)
    others = (CLUSTER_TOKENS, 200, CLUSTER_WAITING), tuple(4 * n for n in slora), (198_000, 2000, 256)
    for (tokens, n, waiting), alpha in itertools.product((slora, *others), (1.0, 0.3)):
        fcfs: np.ndarray | None = None
        for policy, passes in PASSES:
            runs = [backlog(policy, passes, tokens, n, waiting, alpha, seed) for seed in RUNS]
            rates = np.array([run["output_tokens_per_s"] for run in runs])
            fcfs = rates if fcfs is None else fcfs
            case = _case(policy, passes, tokens, n, alpha) | {"waiting": waiting}
            of_fcfs = {
                "of_fcfs": _rounded((rates / fcfs).mean()),
                "of_fcfs_std": _rounded((rates / fcfs).std()),
            }
            yield case, {**_means(runs), **of_fcfs, "runs": len(runs)}


def arrivals() -> Iterator[Case]:
    """S-LoRA's sweeps of its ablation: alpha with cv 1, and cv with alpha 1."""
    sweep = [(alpha, 1) for alpha in (1.0, 0.6, 0.3, 0.1)] + [(1.0, cv) for cv in (2, 4, 6, 8)]
    for (alpha, cv), (policy, passes) in itertools.product(sweep, PASSES):
        runs = [arriving(policy, passes, alpha, cv, seed) for seed in RUNS]
        case = _case(policy, passes, CLUSTER_TOKENS, CLUSTER_ADAPTERS, alpha)
        case |= {"rate": RATE, "cv": cv, "target_s": TARGET_S, "seconds": SECONDS}
        std = _rounded(np.std([run["attainment"] for run in runs]))
        yield case, {**_means(runs), "attainment_std": std, "runs": len(runs)}


def causes() -> Iterator[Case]:
    """Requests that all wait from the start on, as `bench_adapters cluster` had them at 8c587b6, whose lines
    have the same 600 requests; then with one thing changed. And as `cluster` was simulated until then.
    """
    gpu = Setup(num_pages=7891, n=200)  # 99.9% of what KV of 256 sequences takes, a page each, and 60
    before = Setup(3000, 200, 64, 512, ROUGH_H200, None, (9, 17, 33, 65))
    at_once = dataclasses.replace(H200, loaded_page=H200_LOADS.copy_page)
    setups = {
        "as measured": (gpu, 600),
        "copies take no time": (dataclasses.replace(gpu, loads=LoadCost(None, 0.0)), 600),
        "steps wait for copies": (dataclasses.replace(gpu, cost=at_once, loads=None), 600),
        "steps read adapters in no time": (
            dataclasses.replace(gpu, cost=dataclasses.replace(H200, adapter_page=0.0)),
            600,
        ),
        "2000 requests": (gpu, 2000),
        "a pool of 5000 pages": (dataclasses.replace(gpu, num_pages=5000), 600),
        "adapters of 9 to 65 pages": (dataclasses.replace(gpu, adapter_pages=before.adapter_pages), 600),
        "as simulated before": (before, 1000),
        "as simulated before, copies take no time": (
            dataclasses.replace(before, cost=dataclasses.replace(ROUGH_H200, loaded_page=0.0)),
            1000,
        ),
        "as simulated before, adapters of 2 to 16 pages": (
            dataclasses.replace(before, adapter_pages=gpu.adapter_pages),
            1000,
        ),
    }
    for (what, (setup, requests)), alpha in itertools.product(setups.items(), (1.0, 0.3)):
        fcfs = 0.0
        for policy, passes in (PASSES[0], *PASSES[2:]):
            found = _all_at_once(policy, passes, setup, requests, alpha)
            fcfs = fcfs or found["rate"]
            case = {"what": what, "policy": policy, "passes": passes, "n": 200, "alpha": alpha}
            yield case | {"requests": requests}, {**found, "of_fcfs": _rounded(found["rate"] / fcfs)}


def _all_at_once(policy: str, passes: int, setup: Setup, requests: int, alpha: float) -> dict[str, Any]:
    """Requests/s, and what there was while any waited."""
    simulated = _simulated(policy, passes, setup)
    served = simulated.served
    work = Workload([*simulated.adapters], by_popularity(alpha, setup.n), LONGEST, VOCAB)
    for _ in range(requests):
        simulated.ask(work.draw())
    held, waited = list[tuple[int, int, int]](), 0.0
    while served.live:
        served.step()
        if served.waiting:
            running, waited = served.scheduler.running, served.now
            held.append((len(running), len({s.adapter for s in running}), len(served.store.resident)))
    first = [r.metrics.time_to_first_token or 0.0 for r in served.requests]
    running, adapters, resident = np.mean(held, axis=0).round(1).tolist()
    return {
        "rate": round(requests / served.now, 2),
        "mean_running": running,
        "mean_adapters_running": adapters,
        "mean_resident": resident,
        "ttft_s": np.percentile(first, (50, 99)).round(2).tolist(),
        "loads": served.loads,
        "preemptions": served.scheduler.preemptions,
        "share_of_time_in_which_some_wait": _rounded(waited / served.now),
    }


def backlog(
    policy: str, passes: int, tokens: int, n: int, waiting: int, alpha: float, seed: int
) -> dict[str, Any]:
    """What `serve_backlog` finds in a window."""
    simulated = _simulated(policy, passes, of_tokens(tokens, n))
    work = Workload([*simulated.adapters], by_popularity(alpha, n), LONGEST, VOCAB, seed)
    found = serve_backlog(
        simulated, work, begun=min(256, simulated.fitting), waiting=waiting, seconds=WINDOW_S
    )
    simulated.served.check_integrity()
    return found


def arriving(policy: str, passes: int, alpha: float, cv: float, seed: int) -> dict[str, Any]:
    """What comes of requests that arrive for SECONDS; the batch is full at the start."""
    simulated = _simulated(policy, passes, of_tokens(CLUSTER_TOKENS, CLUSTER_ADAPTERS))
    served, names = simulated.served, [*simulated.adapters]
    work = Workload(names, by_popularity(alpha, len(names)), LONGEST, VOCAB, seed)
    due = list(gamma_arrivals(RATE, cv, SECONDS, np.random.default_rng(seed + 1)))
    coming = [(at, work.draw()) for at in due][::-1]
    for _ in range(simulated.fitting):
        simulated.ask(work.begun())
    while any(r.metrics.first_token_time is None for r in served.requests):
        served.step()
    begun, began, running = len(served.requests), served.now, list[int]()
    while (now := served.now - began) < SECONDS + TARGET_S:
        while coming and coming[-1][0] <= now:
            at, draw = coming.pop()
            simulated.ask(draw, began + at)
        if not served.live:
            served.now = began + (coming[-1][0] if coming else SECONDS + TARGET_S)
            continue
        served.step()
        if served.waiting:
            running.append(len(served.scheduler.running))
    judged = served.requests[begun:]
    first = np.array([np.inf if (t := r.metrics.time_to_first_token) is None else t for r in judged])
    came = np.isfinite(first)
    ended = first + [r.metrics.arrival_time for r in judged]
    started = [int(i) for i in np.argsort(ended, kind="stable") if came[i]]
    return {
        "attainment": float((first < TARGET_S).mean()),
        "satisfaction": float(satisfaction(first, TARGET_S).mean()),
        "throughput": sum(r.finished for r in served.requests) / now,
        "ttft_s": np.percentile(first[came], (50, 99)).tolist(),
        "most_overtaken": most_overtaken(started, np.flatnonzero(~came).tolist()),
        "mean_running": float(np.mean(running)),
        "loads": served.loads,
        "requests": len(judged),
    }


@dataclasses.dataclass(frozen=True)
class _Simulated:
    """A virtual server and its adapters, as `serve_backlog` wants it."""

    served: VirtualServer
    adapters: dict[str, Adapter]
    compilations = 0

    @property
    def scheduler(self) -> Scheduler:
        return self.served.scheduler

    @property
    def store(self) -> AdapterStore:
        return self.served.store

    @property
    def loads(self) -> int:
        return self.served.loads

    @property
    def fitting(self) -> int:
        """As `workbench.fitting`."""
        each = mean_kv(1000, LONGEST, 16) / 1000 + np.mean([a.num_pages for a in self.adapters.values()])
        return int(self.served.pool.num_usable / each)

    def now(self) -> float:
        return self.served.now

    def ask(self, draw: Draw, at: float | None = None) -> str:
        """`at`: when it came, if not now."""
        time, adapter = self.served.now if at is None else at, self.adapters[draw.adapter]
        return self.served.add(Arrival(time, len(draw.prompt), draw.output_len, adapter)).request_id

    def step(self) -> list[tuple[str, int, bool]]:
        sampled = [chunk.sequence for chunk in self.served.step() if chunk.samples]
        return [(s.request.request_id, 1, s.finish_reason is not None) for s in sampled]


def _simulated(policy: str, passes: int, setup: Setup) -> _Simulated:
    config = EngineConfig(
        scheduling_policy=policy,
        cluster_max_passes=passes,
        max_batch_size=setup.batch,
        max_step_tokens=setup.step_tokens,
    )
    served = VirtualServer(config, setup.num_pages, setup.cost, loads=setup.loads)
    sizes = itertools.islice(itertools.cycle(setup.adapter_pages), setup.n)
    return _Simulated(served, {f"a{i}": served.register(f"a{i}", size) for i, size in enumerate(sizes)})


def _case(policy: str, passes: int, tokens: int, n: int, alpha: float) -> dict[str, Any]:
    return {
        "policy": policy, "passes": passes, "model": "llama-2-7b", "n": n, "alpha": alpha, "setting": "S2",
        "pool_tokens": tokens, "cost": "H200",
    }  # fmt: skip


def _means(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each number, or list of numbers, that they have."""
    return {key: np.mean([run[key] for run in runs], axis=0).round(3).tolist() for key in runs[0]}


def _rounded(value: Any) -> float:
    return round(float(value), 4)
