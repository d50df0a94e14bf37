"""Policies under S-LoRA's gamma arrivals in real time (`online`): first tokens in time, and throughput."""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import numpy as np

from benchmarks.adapters.workbench import Workbench, contended, fitting, token_pool
from benchmarks.adapters.workload import add, closed_loop
from benchmarks.engine.steps import clear
from benchmarks.papers import SHORTEST, gamma_arrivals, satisfaction
from slora_jax.step_shape import StepShape

TENANTS = ("small", "large")


def shapes(bench: Workbench, args: argparse.Namespace) -> list[StepShape]:
    """Steps to compile before `run`."""
    return bench.usual_shapes()


def run(bench: Workbench, args: argparse.Namespace) -> None:
    """Share of requests whose first token comes in time, while more arrive than can be served.

    The batch is full at the start, of sequences in a steady state; these are not judged. A quarter of the
    requests are a "small" tenant's, the others a "large" one's. With `--pool-tokens` memory is the limit.
    """
    closed_loop(*contended(bench, args, "fcfs", pages=_pages(bench, args)), min(1.0, args.online_seconds))
    for policy in args.policies:
        served = bench.measured(functools.partial(serve_arrivals, bench, args, policy))
        case = {
            "policy": policy, "model": args.model, "rate": args.rate, "cv": args.cv, "n": args.adapters,
            "alpha": args.alpha, "target_s": args.target, "setting": args.setting, "batch": bench.batch,
            "lengths": [SHORTEST, bench.longest], "seconds": args.online_seconds,
        }  # fmt: skip
        if args.pool_tokens is None:
            case["adapters_in_pool"] = args.adapters_in_pool
        else:
            case["pool_tokens"] = args.pool_tokens
        bench.report("online", case, served.pop("attainment"), "attainment", **served)


def _pages(bench: Workbench, args: argparse.Namespace) -> int | None:
    """Of a pool of `--pool-tokens`, where they are given."""
    return None if args.pool_tokens is None else token_pool(bench, args.pool_tokens)


def arrivals(args: argparse.Namespace) -> list[tuple[float, str]]:
    """Seconds and tenants of the requests that come, the same ones for the same arguments."""
    rng = np.random.default_rng(43)
    due = list(gamma_arrivals(args.rate, args.cv, args.online_seconds, rng))
    return [(at, TENANTS[rng.random() >= 0.25]) for at in due]


def serve_arrivals(bench: Workbench, args: argparse.Namespace, policy: str) -> dict[str, Any]:
    """What came of a gamma process of requests under a policy."""
    pages = _pages(bench, args)
    engine, work = contended(bench, args, policy, pages=pages)
    due = arrivals(args)
    coming = [work.draw() for _ in due]
    for _ in range(bench.batch if pages is None else fitting(bench, args, pages)):
        add(engine, work.begun())
    while any(r.metrics.first_token_time is None for r in engine.requests.values()):
        engine.step()
    first: dict[str, float] = {}  # seconds from when a request was due
    asked: dict[str, tuple[float, str]] = {}
    finished = aborted = 0
    before, compiled = engine.stats(), bench.runner.compilations
    began, until = time.perf_counter(), args.online_seconds + args.target
    while (now := time.perf_counter() - began) < until:
        while len(asked) < len(due) and due[len(asked)][0] <= now:
            (at, tenant), draw = due[len(asked)], coming[len(asked)]
            asked[add(engine, draw, tenant=tenant)] = at, tenant
        if not engine.has_unfinished():
            time.sleep((due[len(asked)][0] if len(asked) < len(due) else until) - now)
            continue
        events, now = engine.step(), time.perf_counter() - began
        for event in events:
            if event.request_id in asked and event.token_ids:
                first.setdefault(event.request_id, now - asked[event.request_id][0])
            finished += event.finish_reason == "length"
            aborted += event.finish_reason == "abort" and event.request_id in asked
    after = engine.stats()
    clear(engine)
    seconds = np.array([first.get(r, np.inf) for r in asked])
    small = np.array([tenant == "small" for _, tenant in asked.values()])
    within = seconds < args.target
    came = seconds[np.isfinite(seconds)]
    return {
        "attainment": round(float(within.mean()), 3),
        "satisfaction": round(float(satisfaction(seconds, args.target).mean()), 3),
        "attainment_small": round(float(within[small].mean()), 3),
        "attainment_large": round(float(within[~small].mean()), 3),
        "throughput": round(finished / now, 2),
        "ttft_s": [round(float(np.percentile(came, p)), 2) for p in (50, 99)],
        "aborted": aborted,
        "requests": len(asked),
        "late_but_served": int((came >= args.target).sum()),
        "loads": after.adapter_loads - before.adapter_loads,
        "preemptions": after.preemptions - before.preemptions,
        "compilations": bench.runner.compilations - compiled,
    }
