"""Two tenants that always wait, one with three times as many requests (`vtc_gap`).

The largest gap of their services and VTC's bound, as in sim_scheduler. The bound grows with the batch and its
longest sequences: both are small here, and a window lasts until the services are several times the bound, so
that a policy which shares by requests exceeds it.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.adapters.workbench import Workbench, contended
from benchmarks.adapters.workload import add
from benchmarks.engine.steps import clear
from benchmarks.papers import SHORTEST, vtc_bound
from slora_jax.request import Request
from slora_jax.step_shape import StepShape


def shapes(bench: Workbench, args: argparse.Namespace) -> list[StepShape]:
    """Steps to compile before `run`."""
    return bench.usual_shapes()


_SERVICE = 6  # times the bound, at least: of a quarter and three quarters of it the gap is half


def run(bench: Workbench, args: argparse.Namespace) -> None:
    """Two tenants that always wait, one with three times as many requests: the largest gap of what they get.

    Services are priced as VTC prices them. The bound is the one it proves for tenants whose requests can all
    run at once; a wait for an adapter may add to it (`VtcOrder`). RuntimeError, and no line, where vtc
    exceeds it all the same, or fcfs does not: then the window tells nothing.
    """
    batch, longest = args.fair_batch, args.fair_longest
    bound = vtc_bound(batch, longest)
    for policy in args.fair_policies:
        engine, work = contended(bench, args, policy, batch=batch, longest=longest)
        services, gap = {"small": 0.0, "large": 0.0}, 0.0
        waiting: dict[str, set[Request]] = {"small": set(), "large": set()}
        tenants: dict[str, str] = {}
        began = time.perf_counter()
        while (passed := time.perf_counter() - began) < args.fair_seconds or sum(
            services.values()
        ) < _SERVICE * bound:
            for tenant, wanted in (("small", batch // 2), ("large", 3 * batch // 2)):
                while len(waiting[tenant]) < wanted:
                    request = engine.requests[add(engine, work.draw(), tenant=tenant)]
                    waiting[tenant].add(request)
                    tenants[request.request_id] = tenant
            events = engine.step()
            for tenant, requests in waiting.items():
                admitted = [r for r in requests if r.metrics.first_scheduled_time is not None]
                services[tenant] += sum(1.0 * len(r.prompt_token_ids) for r in admitted)
                requests.difference_update(admitted)
            for event in events:
                services[tenants[event.request_id]] += 2.0 * len(event.token_ids)
            gap = max(gap, abs(services["small"] - services["large"]))
        clear(engine)
        if "vtc" in policy and gap > bound:
            raise RuntimeError(f"the gap {gap} is above what VTC proves, {bound}")
        if policy == "fcfs" and gap <= bound:
            raise RuntimeError(
                f"the gap {gap} of fcfs is within VTC's bound {bound}: the window tells nothing"
            )
        case = {"policy": policy, "tenants": 2, "batch": batch, "longest": longest, "model": args.model}
        extra = {
            "bound": bound,
            "gap_of_bound": round(gap / bound, 4),
            "service_of_bound": round(sum(services.values()) / bound, 2),
            "seconds": round(passed, 1),
            "services": services,
            "share_of_small": round(services["small"] / sum(services.values()), 4),
            "loads": engine.stats().adapter_loads,
            "lengths": [SHORTEST, longest],
        }
        bench.report("vtc_gap", case, gap, "priced tokens", **extra)
