"""The real scheduler, store and pool on a virtual clock: what scheduling costs, and what policies do.

    python -m benchmarks.sim_scheduler schedule-step     # ms: batch 256, 10,000 queued, 100,000 adapters
    python -m benchmarks.sim_scheduler early-abort       # attainment, satisfaction, throughput (S-LoRA)
    python -m benchmarks.sim_scheduler cluster           # throughput, sequences that run, first-token times
    python -m benchmarks.sim_scheduler cluster-arrivals  # S-LoRA's ablation of it: alpha and cv
    python -m benchmarks.sim_scheduler cluster-causes    # what clustering's gain depends on
    python -m benchmarks.sim_scheduler vtc               # fairness gap of two tenants, and its proven bound
    python -m benchmarks.sim_scheduler guesses           # first tokens with and without guessed adapters
    python -m benchmarks.sim_scheduler idle-guesses      # the same, also where a server without work guesses
    python -m benchmarks.sim_scheduler all

Results go to benchmarks/results/sim.jsonl. Only `schedule-step` measures this machine; the others' times are
virtual, of a step's cost model that the results name.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import sim_clustering
from benchmarks.costs import A10G, ROUGH_H200, ROUGH_H200_LOADS
from benchmarks.papers import (
    FAIR_BATCH,
    FAIR_LONGEST,
    LONGEST,
    POLICIES,
    SHORTEST,
    by_popularity,
    gamma_arrivals,
    satisfaction,
    vtc_bound,
)
from benchmarks.record import record
from benchmarks.virtual_server import Arrival, StepCost, VirtualServer
from slora_jax.config import EngineConfig
from slora_jax.lora.store import Adapter
from slora_jax.scheduling.scheduler import StepPlan


def schedule_step(args: argparse.Namespace) -> None:
    """Time `Scheduler.schedule` (with `overdue` before it) at a full batch and a long queue.

    Times are of the thread's CPU: it never waits, so that is its time on a core of its own. `clock_...` are
    by the clock, with what other processes of a shared machine took meanwhile.
    """
    for policy in args.policy or POLICIES:
        times, cpu, served = _time_schedule(policy, args)
        case = {"policy": policy, "batch": args.batch, "queued": args.queued, "registered": args.registered}
        extra = {
            "p99": round(float(np.percentile(cpu, 99)), 4),
            "max": round(float(cpu.max()), 4),
            "clock_median": round(float(np.median(times)), 4),
            "clock_p99": round(float(np.percentile(times, 99)), 4),
            "steps": len(times),
            "gc": "on, frozen after the start",
            "resident": len(served.store.resident),
        }
        _report("schedule_step", case, round(float(np.median(cpu)), 4), "ms", **extra)


def _time_schedule(policy: str, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray, VirtualServer]:
    """Milliseconds of each step: by the clock f64[steps] and of CPU f64[steps]."""
    rng = np.random.default_rng(0)
    served = _server(policy, ROUGH_H200, batch=args.batch, num_pages=args.pages, ttft_target_s=1e9)
    adapters = [served.register(f"adapter-{i}", (9, 17, 33, 65)[i % 4]) for i in range(args.registered)]
    coming = _requests(adapters, 1.0, 50, rng)

    def fill() -> None:
        while len(served.waiting) < args.queued:
            served.add(dataclasses.replace(next(coming), time=served.now))

    times: list[tuple[float, float]] = []

    def schedule() -> StepPlan:
        started, cpu = time.perf_counter(), time.thread_time()
        served.give_up_overdue()
        plan = served.scheduler.schedule()
        times.append((time.perf_counter() - started, time.thread_time() - cpu))
        return plan

    for _ in range(args.warm_steps):
        fill()
        served.step()
    gc.collect()
    gc.freeze()  # as the server does at its start
    for _ in range(args.steps):
        fill()
        served.step(schedule)
    gc.unfreeze()
    served.check_integrity()
    clock, cpu = np.asarray(times).T * 1e3
    return clock, cpu, served


def early_abort(args: argparse.Namespace) -> None:
    """S-LoRA's admission control: how bursty arrivals are (cv), and how many."""
    policies = ("fcfs", "early-abort", "cluster+early-abort")
    sweep = [(args.rate, cv) for cv in (1, 2, 4, 6, 8)] + [(x, 1) for x in (1.8, 3.6, 4.8, 7.2)]
    for (rate, cv), policy in itertools.product(sweep, policies):
        rng = np.random.default_rng(42)
        served = _server(policy, A10G, batch=32, num_pages=1500)
        adapters = [served.register(f"a{i}", (9, 17, 33, 65)[i % 4]) for i in range(200)]
        draws = _requests(adapters, 1.0, 1, rng)
        arrivals = [
            dataclasses.replace(next(draws), time=t) for t in gamma_arrivals(rate, cv, args.seconds, rng)
        ]
        served.run(arrivals)
        first = np.array(
            [
                np.inf if r.request_id in served.reasons else r.metrics.time_to_first_token or np.inf
                for r in served.requests
            ]
        )
        within = first < 6
        finished = len(served.requests) - len(served.reasons)
        case = {"policy": policy, "rate": rate, "cv": cv, "n": 200, "target_s": 6, "cost": "A10G"}
        extra = {
            "satisfaction": round(float(satisfaction(first, 6).mean()), 3),
            "throughput": round(finished / served.now, 3),
            "aborted": len(served.reasons),
            "requests": len(served.requests),
            "late_but_served": int((~within).sum()) - len(served.reasons),
        }
        _report("early_abort", case, round(float(within.mean()), 3), "attainment", **extra)


def cluster(args: argparse.Namespace) -> None:
    """Adapter clustering while requests always wait: throughput, sequences that run, whom it makes wait."""
    for case, found in sim_clustering.backlogs():
        _report("cluster", case, found.pop("output_tokens_per_s"), "output tokens/s", **found)


def cluster_arrivals(args: argparse.Namespace) -> None:
    """S-LoRA's ablation of clustering: how skewed popularity is (alpha), and how bursty arrivals are (cv)."""
    for case, found in sim_clustering.arrivals():
        _report("cluster_arrivals", case, found.pop("attainment"), "attainment", **found)


def cluster_causes(args: argparse.Namespace) -> None:
    """Why clustering gained less on a GPU than it did here, at 8c587b6: one thing after the other changed."""
    for case, found in sim_clustering.causes():
        _report("cluster_causes", case, found.pop("rate"), "requests/s", **found)


def guesses(args: argparse.Namespace) -> None:
    """What it is worth to guess: zipf over 200 adapters, of which the pool and host memory hold a part.

    Off (watermark 1) and on, over the same requests. `cold_...` are first tokens of those that found their
    adapter not resident where nothing is guessed. The first quarter of the time, in which host memory fills,
    is left out. Without a prefix cache, which would fill the free pages that guesses take.
    """
    hosts = {"all": 1 << 60, "a third": 2000}
    for cv, rate, (host, pages) in itertools.product((1, 4), (8, 12), hosts.items()):
        cold = None
        for watermark in (1.0, 0.2, 0.0):
            runs = [_guess(rate, cv, pages, watermark, args.seconds, seed) for seed in range(4)]
            first, found = (np.concatenate([run[i] for run in runs]) for i in (0, 1))
            cold = found != "resident" if cold is None else cold
            case = {"watermark": watermark, "rate": rate, "cv": cv, "n": 200, "host": host, "cost": "H200"}
            _report("guesses", case, _seconds(first.mean()), "s", **_guess_extra(first, found, cold, runs))


def idle_guesses(args: argparse.Namespace) -> None:
    """What it would be worth to guess on while no request is there: bursts, between which a server idles.

    `guesses`: none; those of an engine, while it steps; and those that go on while it idles, above the
    watermark or into all free pages. `cold_...` are first tokens as in `guesses`.
    """
    kinds: dict[str, dict[str, Any]] = {
        "none": {"watermark": 1.0},
        "steps": {"watermark": 0.2},
        "idle": {"watermark": 0.2, "idle_watermark": 0.2},
        "idle, all free pages": {"watermark": 0.2, "idle_watermark": 0.0},
    }
    hosts = {"all": 1 << 60, "a third": 2000}
    for prefix_cache, cv, rate, (host, pages) in itertools.product(
        (False, True), (4, 8), (1, 4, 8), hosts.items()
    ):
        cold = None
        for guesses, fields in kinds.items():
            runs = [
                _guess(rate, cv, pages, seconds=args.seconds, seed=seed, prefix_cache=prefix_cache, **fields)
                for seed in range(4)
            ]
            first, found = (np.concatenate([run[i] for run in runs]) for i in (0, 1))
            cold = found != "resident" if cold is None else cold
            case = {"guesses": guesses, "rate": rate, "cv": cv, "n": 200, "host": host, "cost": "H200"}
            idle = sum(served.idle_seconds for *_, served in runs) / sum(served.now for *_, served in runs)
            extra = {"idle_share": round(idle, 3), **_guess_extra(first, found, cold, runs)}
            case |= {"prefix_cache": prefix_cache}
            _report("idle_guesses", case, _seconds(first.mean()), "s", **extra)


type _GuessRun = tuple[np.ndarray, np.ndarray, VirtualServer]


def _guess(
    rate: float,
    cv: float,
    host_pages: int,
    watermark: float,
    seconds: float,
    seed: int,
    idle_watermark: float | None = None,
    prefix_cache: bool = False,
) -> _GuessRun:
    """Seconds to first tokens f64[requests], and in which states their adapters were found, str[requests]."""
    rng = np.random.default_rng(seed)
    loads = dataclasses.replace(ROUGH_H200_LOADS, host_pages=host_pages)
    config = _config("fcfs", batch=64, prefetch_watermark=watermark)
    served = VirtualServer(
        config, 3000, ROUGH_H200, loads=loads, idle_watermark=idle_watermark, prefix_cache=prefix_cache
    )
    adapters = [served.register(f"a{i}", (9, 17, 33, 65)[i % 4]) for i in rng.permutation(200)]
    draws = _requests(adapters, "zipf", 1, rng)
    served.run(dataclasses.replace(next(draws), time=t) for t in gamma_arrivals(rate, cv, seconds, rng))
    served.check_integrity()
    counted = [r.metrics.arrival_time > seconds / 4 for r in served.requests]
    first = np.array([r.metrics.time_to_first_token for r in served.requests])
    return first[counted], np.array(served.found)[counted], served


def _guess_extra(
    first: np.ndarray, found: np.ndarray, cold: np.ndarray, runs: list[_GuessRun]
) -> dict[str, Any]:
    stats = [served.loader.stats() for *_, served in runs]
    return {
        "p99": _seconds(np.percentile(first, 99)),
        "cold_mean": _seconds(first[cold].mean()),
        "cold_p99": _seconds(np.percentile(first[cold], 99)),
        "resident_at_arrival": round(float((found == "resident").mean()), 4),
        "under_way_at_arrival": round(float(np.isin(found, ("reading", "staged")).mean()), 4),
        "guesses": sum(s.guesses for s in stats),
        "guesses_useful": sum(s.guesses_useful for s in stats),
        "guesses_wasted": sum(s.guesses_wasted for s in stats),
        "loads": sum(served.loads for *_, served in runs),
        "requests": len(first),
    }


def _seconds(value: Any) -> float:
    return round(float(value), 5)


def vtc(args: argparse.Namespace) -> None:
    """Two tenants that always wait, one asking for thrice as much: the largest gap of their services.

    A batch of the papers' lengths, and the one of bench_adapters' fairness.
    """
    shapes = ((32, LONGEST), (FAIR_BATCH, FAIR_LONGEST))
    for (batch, longest), policy in itertools.product(shapes, ("fcfs", "vtc", "vtc+cluster")):
        bound = vtc_bound(batch, longest)
        rng = np.random.default_rng(42)
        served = _server(policy, ROUGH_H200, batch=batch, num_pages=4000)
        adapters = [served.register(f"a{i}", 17) for i in range(50)]
        draws = _requests(adapters, 1.0, 1, rng, longest)
        services, gap = {"small": 0.0, "large": 0.0}, 0.0
        waiting = {"small": 0, "large": 0}
        for _ in range(5 * args.steps):
            for tenant, wanted in (("small", batch // 2), ("large", 3 * batch // 2)):
                while waiting[tenant] < wanted:
                    served.add(dataclasses.replace(next(draws), time=served.now, tenant=tenant))
                    waiting[tenant] += 1
            admitted = len(served.admitted)
            plan = served.step()
            for sequence in served.admitted[admitted:]:
                services[sequence.request.tenant] += 1.0 * sequence.prompt_len
                waiting[sequence.request.tenant] -= 1
            for chunk in plan:
                services[chunk.sequence.request.tenant] += 2.0 * chunk.samples
            gap = max(gap, abs(services["small"] - services["large"]))
        case = {"policy": policy, "tenants": 2, "batch": batch, "longest": longest, "cost": "H200"}
        extra = {"bound": bound, "seconds": round(served.now, 1), "services": services}
        assert policy == "fcfs" or gap <= bound, f"the gap {gap} is above what VTC proves, {bound}"
        _report("vtc_gap", case, gap, "priced tokens", **extra)


def _config(policy: str, *, batch: int, **fields: Any) -> EngineConfig:
    return EngineConfig(
        scheduling_policy=policy, max_batch_size=batch, max_step_tokens=max(512, 2 * batch), **fields
    )


def _server(policy: str, cost: StepCost, *, batch: int, num_pages: int, **fields: Any) -> VirtualServer:
    return VirtualServer(_config(policy, batch=batch, **fields), num_pages, cost)


def _requests(
    adapters: list[Adapter],
    alpha: float | str,
    tenants: int,
    rng: np.random.Generator,
    longest: int = LONGEST,
) -> Iterator[Arrival]:
    """Requests of the paper's lengths, or shorter ones, one adapter each, of so many tenants. Without end."""
    pick = by_popularity(alpha, len(adapters))
    while True:
        prompt, output = (int(x) for x in rng.integers(SHORTEST, longest + 1, 2))
        adapter = adapters[pick(rng)]
        yield Arrival(0.0, prompt, output, adapter, f"tenant-{int(rng.integers(tenants))}")


def _report(bench: str, case: dict[str, Any], value: float, unit: str, **extra: Any) -> None:
    record("sim", bench, case, value, unit, **extra)
    print(f"{bench} {case}: {value} {unit} {extra}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {
        "schedule-step": schedule_step, "early-abort": early_abort, "cluster": cluster,
        "cluster-arrivals": cluster_arrivals, "cluster-causes": cluster_causes, "vtc": vtc,
        "guesses": guesses, "idle-guesses": idle_guesses,
    }  # fmt: skip
    parser.add_argument("what", choices=[*commands, "all"])
    parser.add_argument("--policy", action="append", help="schedule-step: this one only; may be given again")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--registered", type=int, default=100_000)
    parser.add_argument("--pages", type=int, default=20_000, help="schedule-step: pages in the pool")
    parser.add_argument("--warm-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=3000, help="steps that are measured")
    parser.add_argument("--rate", type=float, default=2.4, help="early-abort: requests a second")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="early-abort, (idle-)guesses: how long they come"
    )
    args = parser.parse_args()
    for name, function in commands.items():
        if args.what in (name, "all"):
            function(args)


if __name__ == "__main__":
    main()
