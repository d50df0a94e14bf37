"""Working sets that do not fit (`thrash`).

A closed loop of 1.25 requests a slot: load is constant, the batch always full, and nothing but the memory
differs. The pool is cut to the KV that a full batch holds on average and C adapters. What it really holds is
measured first: the mean of the adapters resident while far more are asked for, all alike. A working set is a
multiple of that, so "twice" is twice what is resident, whatever room KV leaves at times; each line says the
ratio that it had. The same requests run with room for all adapters, and on fixed slots beside the same KV
(which take more pages: the lines say how many).

The batch has at most C sequences, as those that run hold their adapters: a larger one would run fewer of them
or keep more adapters than the cap. It begins with sequences as a steady state has them (lengths biased by
their duration, ages uniform), so that a short window measures the steady state.
"""

from __future__ import annotations

import argparse
import itertools
import math
from typing import Any

import numpy as np

from benchmarks.adapters.workbench import Workbench, check_room, mean_pool, slot_pool
from benchmarks.adapters.workload import Window, Workload, closed_loop
from benchmarks.engine.random_adapters import SETTINGS, make_resident, register_adapters
from benchmarks.papers import SHORTEST, by_popularity
from slora_jax.step_shape import StepShape


def shapes(bench: Workbench, args: argparse.Namespace) -> list[StepShape]:
    """Steps to compile before `run`."""
    return bench.usual_shapes()


def run(bench: Workbench, args: argparse.Namespace) -> None:
    """Output tokens/s with working sets of 1, 2, 4 times what the pool holds, against room for all."""
    prepared = bench.adapters(SETTINGS[args.setting])
    cut = mean_pool(bench, args)
    memories: dict[str, dict[str, Any]] = {"all-resident": {}, "unified": {"num_pages": cut}}
    for slots in args.adapter_slots if args.no_unified_memory else ():
        memories[f"{slots} slots"] = slot_pool(bench, args, slots)

    def measure(memory: str, n: int, popularity: str, seconds: float) -> Window:
        engine = bench.engine(**memories[memory], max_batch_size=args.thrash_batch)
        names = register_adapters(engine, prepared, n)
        if memory == "all-resident":
            make_resident(engine, names)
        work = Workload(names, by_popularity(popularity, n), bench.longest, bench.vocab_size)
        return closed_loop(engine, work, seconds)

    more_than_fit = cut // min(a.packed.layout.num_pages for a in prepared.values())
    held = math.ceil(measure("unified", more_than_fit, "uniform", min(5.0, args.seconds)).held[1])
    bench.say(f"the pool of {cut} pages holds {held} adapters beside the KV of {args.thrash_batch} sequences")
    check_room(bench, args, held, max(args.working_set))
    # What was not foreseen is compiled here.
    measure("all-resident", max(args.working_set) * held, "uniform", min(2.0, args.seconds))
    for popularity, times in itertools.product(args.popularity, args.working_set):
        found: dict[str, Window] = {}
        for memory in memories:
            window = found[memory] = measure(memory, times * held, popularity, args.seconds)
            best, p99 = found["all-resident"], 1e3 * float(np.percentile(window.gaps, 99))
            case = {
                "model": args.model, "setting": args.setting, "popularity": popularity, "memory": memory,
                "adapters_in_pool": args.adapters_in_pool, "times": times, "batch": args.thrash_batch,
                "lengths": [SHORTEST, bench.longest],
            }  # fmt: skip
            rate = window.tokens / window.seconds
            extra = {
                "pool_holds": held,
                "working_set": times * held,
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
                "working_set_of_resident": round(times * held / float(window.held[1]), 3),
                "seconds": round(window.seconds, 2),
                "num_pages": memories[memory].get("num_pages", bench.num_pages),
            }
            bench.report("thrash", case, round(rate, 1), "output tokens/s", **extra)
