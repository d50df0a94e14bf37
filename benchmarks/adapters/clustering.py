"""Adapter clustering (`cluster`) where adapters take the room of sequences.

Fewer adapters in a batch leave more of the pool to KV, so that more sequences run: that is what S-LoRA
clusters for. It pays where memory limits the batch, not its slots, and where enough requests wait to choose
from. So the pool, the adapters and the queue are those of S-LoRA's ablation (`papers.CLUSTER_...`): 14,500
tokens, of which 32 adapters of setting S2 would take a quarter, and always 40 requests that wait, as in its
bursts. `passes` is how many later requests may go before one (`cluster_max_passes`); its price are the first
tokens of those that are passed over. sim_scheduler's `cluster` is the same on a virtual clock.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

from benchmarks.adapters.backlog import EngineServer, serve_backlog
from benchmarks.adapters.workbench import Workbench, fitting, token_pool
from benchmarks.adapters.workload import Workload
from benchmarks.engine.random_adapters import SETTINGS, register_adapters
from benchmarks.engine.steps import clear
from benchmarks.papers import SHORTEST, by_popularity
from slora_jax.step_shape import StepShape


def shapes(bench: Workbench, args: argparse.Namespace) -> list[StepShape]:
    """Steps to compile before `run`."""
    return bench.usual_shapes()


def run(bench: Workbench, args: argparse.Namespace) -> None:
    """Output tokens/s while requests always wait, first come first served and clustered, for each alpha.

    RuntimeError, and no line, where the batch's slots are the limit or the pool holds all adapters.
    """
    for alpha in args.cluster_alpha:
        for policy, passes in (("fcfs", 0), *(("cluster", n) for n in args.cluster_passes)):
            served = bench.measured(functools.partial(serve, bench, args, policy, passes, alpha))
            running, resident, n = served["mean_running"], served["mean_resident"], args.cluster_adapters
            if running > 0.95 * bench.batch or resident > 0.95 * n:
                raise RuntimeError(
                    f"{running} sequences of {bench.batch} run beside {resident} adapters of {n}: the pool "
                    "is no limit, and nothing is compared; lower --cluster-tokens"
                )
            served["working_set_of_resident"] = round(n / resident, 2)
            case = {
                "policy": policy, "passes": passes, "model": args.model, "n": n, "alpha": alpha,
                "setting": args.setting, "pool_tokens": args.cluster_tokens,
                "waiting": args.cluster_waiting, "lengths": [SHORTEST, bench.longest],
            }  # fmt: skip
            bench.report("cluster", case, served.pop("output_tokens_per_s"), "output tokens/s", **served)


def serve(
    bench: Workbench, args: argparse.Namespace, policy: str, passes: int, alpha: float
) -> dict[str, Any]:
    """What comes of requests of which so many always wait."""
    pages, n = token_pool(bench, args.cluster_tokens), args.cluster_adapters
    fields = {"scheduling_policy": policy, "cluster_max_passes": passes, "max_batch_size": bench.batch}
    engine = bench.engine(pages, **fields)
    names = register_adapters(engine, bench.adapters(SETTINGS[args.setting]), n)
    served = serve_backlog(
        EngineServer(engine),
        Workload(names, by_popularity(alpha, n), bench.longest, bench.vocab_size),
        begun=fitting(bench, args, pages),
        waiting=args.cluster_waiting,
        seconds=args.cluster_seconds,
    )
    clear(engine)
    return served
