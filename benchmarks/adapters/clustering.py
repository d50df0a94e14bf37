"""Adapter clustering (`cluster`): requests all there at once, for more adapters than the pool holds.

As sim_scheduler's: what runs together should need few adapters, so that more of the pool is KV and fewer
adapters come twice. `passes` is how many later requests may go before one (`cluster_max_passes`).
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import numpy as np

from benchmarks.adapters.workbench import Workbench, contended
from benchmarks.adapters.workload import add
from benchmarks.papers import SHORTEST
from slora_jax.step_shape import StepShape


def shapes(bench: Workbench, args: argparse.Namespace) -> list[StepShape]:
    """Steps to compile before `run`."""
    return bench.usual_shapes()


def run(bench: Workbench, args: argparse.Namespace) -> None:
    """Requests/s of as many as `cluster_requests`, first come first served and clustered, for each alpha."""
    for alpha in args.cluster_alpha:
        for policy, passes in (("fcfs", 0), *(("cluster", n) for n in args.cluster_passes)):
            served = bench.measured(functools.partial(serve_all, bench, args, policy, passes, alpha))
            case = {
                "policy": policy, "passes": passes, "model": args.model, "n": args.adapters, "alpha": alpha,
                "setting": args.setting, "batch": bench.batch, "adapters_in_pool": args.adapters_in_pool,
                "requests": args.cluster_requests, "lengths": [SHORTEST, bench.longest],
            }  # fmt: skip
            bench.report("cluster", case, served.pop("rate"), "requests/s", **served)


def serve_all(
    bench: Workbench, args: argparse.Namespace, policy: str, passes: int, alpha: float
) -> dict[str, Any]:
    """What came of requests that wait from the start on."""
    engine, work = contended(bench, args, policy, alpha=alpha, cluster_max_passes=passes)
    for _ in range(args.cluster_requests):
        add(engine, work.draw())
    compiled, running, adapters = bench.runner.compilations, list[int](), list[int]()
    first: dict[str, float] = {}
    began = time.perf_counter()
    while engine.has_unfinished():
        for event in engine.step():
            first.setdefault(event.request_id, time.perf_counter() - began)
            if event.finish_reason not in (None, "length"):
                raise RuntimeError(f"a request ended by {event.finish_reason}: {event.error}")
        if engine.stats().num_waiting:  # the batch is as full as memory lets it be
            together = engine._scheduler.running
            running.append(len(together))
            adapters.append(len({sequence.adapter for sequence in together}))
    seconds, stats = time.perf_counter() - began, engine.stats()
    return {
        "rate": round(args.cluster_requests / seconds, 2),
        "mean_running": round(float(np.mean(running)), 1),
        "mean_adapters_running": round(float(np.mean(adapters)), 1),
        "ttft_s": [round(float(np.percentile([*first.values()], p)), 2) for p in (50, 99)],
        "loads": stats.adapter_loads,
        "preemptions": stats.preemptions,
        "compilations": bench.runner.compilations - compiled,
    }
