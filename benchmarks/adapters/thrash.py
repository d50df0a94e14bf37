"""Working sets that do not fit (`thrash`).

A closed loop of 1.25 requests a slot: load is constant, the batch always full, and nothing but the memory
differs. The pool is cut to the KV of a full batch and C adapters; the working set is a multiple of C; the
same requests run with room for all adapters. It begins with sequences as a steady state has them (lengths
biased by their duration, ages uniform), so that a short window measures the steady state.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import numpy as np

from benchmarks.adapters.workbench import Workbench, cut_pool
from benchmarks.adapters.workload import Window, Workload, closed_loop
from benchmarks.engine.random_adapters import SETTINGS, make_resident, register_adapters
from benchmarks.papers import SHORTEST, by_popularity
from slora_jax.step_shape import StepShape


def shapes(bench: Workbench, args: argparse.Namespace) -> list[StepShape]:
    """Steps to compile before `run`."""
    return bench.usual_shapes()


def run(bench: Workbench, args: argparse.Namespace) -> None:
    """Output tokens/s with working sets of 1, 2, 4 times what the pool holds, against room for all."""
    prepared, held = bench.adapters(SETTINGS[args.setting]), args.adapters_in_pool
    cut = cut_pool(bench, args, max(args.working_set))
    memories: dict[str, dict[str, Any]] = {"all-resident": {}, "unified": {"num_pages": cut}}
    for slots in args.adapter_slots if args.no_unified_memory else ():
        memories[f"{slots} slots"] = {"num_pages": cut, "unified_memory": False, "adapter_slots": slots}

    def measure(memory: str, n: int, popularity: str, seconds: float) -> Window:
        engine = bench.engine(**memories[memory])
        names = register_adapters(engine, prepared, n)
        if memory == "all-resident":
            make_resident(engine, names)
        work = Workload(names, by_popularity(popularity, n), bench.longest, bench.vocab_size)
        return closed_loop(engine, work, seconds)

    # What was not foreseen is compiled here.
    measure("all-resident", max(args.working_set) * held, "uniform", min(2.0, args.seconds))
    for popularity, times in itertools.product(args.popularity, args.working_set):
        found: dict[str, Window] = {}
        for memory in memories:
            window = found[memory] = measure(memory, times * held, popularity, args.seconds)
            best, p99 = found["all-resident"], 1e3 * float(np.percentile(window.gaps, 99))
            case = {
                "model": args.model, "setting": args.setting, "popularity": popularity, "memory": memory,
                "adapters_in_pool": held, "working_set": times * held, "batch": bench.batch,
                "lengths": [SHORTEST, bench.longest],
            }  # fmt: skip
            rate = window.tokens / window.seconds
            extra = {
                "share_of_all_resident": round(rate * best.seconds / best.tokens, 4),
                "token_ms_p50": round(1e3 * float(np.median(window.gaps)), 3),
                "token_ms_p99": round(p99, 3),
                "token_ms_max": round(1e3 * float(window.gaps.max()), 3),
                "p99_of_all_resident": round(p99 / (1e3 * float(np.percentile(best.gaps, 99))), 4),
                "requests_per_s": round(window.finished / window.seconds, 2),
                "loads": window.loads,
                "preemptions": window.preemptions,
                "mean_running": round(float(window.held[0]), 1),
                "mean_resident": round(float(window.held[1]), 1),
                "seconds": round(window.seconds, 2),
                "num_pages": memories[memory].get("num_pages", bench.num_pages),
            }
            bench.report("thrash", case, round(rate, 1), "output tokens/s", **extra)
