"""Thousands of adapters on the real engine: loads beside decodes, cold first tokens, thrashing, policies.

    python -m benchmarks.bench_adapters loads cold thrash --model llama-2-7b
    python -m benchmarks.bench_adapters online fairness --model llama-2-7b --rate 60
    python -m benchmarks.bench_adapters cluster

Each part is a module of benchmarks/adapters, which says what it measures. All parts of a command share one
model, one pool on the device and its compiled steps (`Workbench`); a part that wants another budget, policy
or prefetch gets a new engine over the same device state. Results are appended to
benchmarks/results/engine.jsonl as soon as they are known.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Protocol

from benchmarks.adapters import clustering, cold, fairness, loads, online, thrash
from benchmarks.adapters.workbench import (
    Workbench,
    check_room,
    cut_pool,
    max_model_len,
    slot_pool,
    token_pool,
)
from benchmarks.arguments import COUNT, COUNT_OR_NONE, MOST, POSITIVE, number, policy, popularity
from benchmarks.engine.models import MODELS
from benchmarks.papers import (
    CLUSTER_ADAPTERS,
    CLUSTER_TOKENS,
    CLUSTER_WAITING,
    FAIR_BATCH,
    FAIR_LONGEST,
    POLICIES,
    SHORTEST,
)
from slora_jax.checks import Interval
from slora_jax.engine import Engine
from slora_jax.step_shape import StepShape


class Part(Protocol):
    """A module that measures something: the steps to compile before it, and the measurement."""

    def shapes(self, bench: Workbench, args: argparse.Namespace) -> list[StepShape]: ...
    def run(self, bench: Workbench, args: argparse.Namespace) -> None: ...


PARTS: dict[str, Part] = {
    "loads": loads,
    "cold": cold,
    "thrash": thrash,
    "online": online,
    "fairness": fairness,
    "cluster": clustering,
}


def main(argv: Sequence[str] | None = None, engine: Engine | None = None) -> None:
    """Parse, and run the parts one after the other, on an engine of their own or on one that is shared."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=tuple(PARTS))
    parser.add_argument("--model", choices=tuple(MODELS), default="llama-2-7b")
    parser.add_argument("--setting", choices=("S1", "S2", "S4"), default="S2", help="adapters' ranks")
    parser.add_argument("--batch", type=COUNT, default=256)
    parser.add_argument(
        "--longest",
        type=number(int, Interval(SHORTEST, MOST)),
        default=512,
        help="longest prompt and longest output, tokens",
    )
    parser.add_argument("--step-tokens", type=COUNT, default=2048, help="max_step_tokens")
    parser.add_argument(
        "--num-pages",
        type=number(int, Interval(2, 2**31 - 1)),
        help="of the pool on the device; default: what is free",
    )
    some = parser.add_argument_group("loads and cold")
    some.add_argument("--load-ranks", type=number(int, Interval(1, 256)), nargs="+", default=[8, 64])
    some.add_argument("--context", type=COUNT, default=400, help="loads: tokens of the decodes at the start")
    some.add_argument("--steps", type=COUNT, default=80, help="loads: decode steps measured")
    some.add_argument("--prompt", type=COUNT, default=128, help="cold: tokens")
    some.add_argument("--repeats", type=COUNT, default=30, help="cold: adapters")
    some = parser.add_argument_group("thrash")
    some.add_argument("--adapters-in-pool", type=COUNT, default=64, help="C: those that fit beside the KV")
    some.add_argument("--thrash-batch", type=COUNT, help="sequences; default: C, at most --batch")
    some.add_argument(
        "--working-set", type=COUNT, nargs="+", default=[1, 2, 4], help="times what the pool is found to hold"
    )
    some.add_argument(
        "--popularity",
        type=popularity,
        nargs="+",
        default=["zipf", "uniform"],
        help="zipf, uniform, or alpha",
    )
    some.add_argument("--seconds", type=POSITIVE, default=10.0, help="of a window")
    some.add_argument("--no-unified-memory", action="store_true", help="the same points on fixed slots, too")
    some.add_argument("--adapter-slots", type=COUNT, nargs="+", help="of these; default: C")
    some = parser.add_argument_group("online and fairness")
    some.add_argument("--adapters", type=COUNT, default=200, help="registered")
    some.add_argument("--alpha", type=POSITIVE, default=1.0, help="S-LoRA's: 1 is uniform, less is skewed")
    some.add_argument("--rate", type=POSITIVE, default=60.0, help="online: requests a second")
    some.add_argument("--cv", type=POSITIVE, default=2.0, help="online: of the gaps between arrivals")
    some.add_argument("--target", type=POSITIVE, default=6.0, help="online: seconds to a first token")
    some.add_argument("--online-seconds", type=POSITIVE, default=18.0, help="that requests come")
    some.add_argument("--pool-tokens", type=COUNT, help="online: of the pool, instead of --adapters-in-pool")
    some.add_argument("--policies", type=policy, nargs="+", default=list(POLICIES))
    some.add_argument("--fair-policies", type=policy, nargs="+", default=["fcfs", "vtc", "vtc+cluster"])
    some.add_argument("--fair-seconds", type=POSITIVE, default=10.0, help="of a window, at least")
    some.add_argument(
        "--fair-batch", type=COUNT, help=f"fairness: sequences; default: {FAIR_BATCH}, at most --batch"
    )
    some.add_argument(
        "--fair-longest",
        type=number(int, Interval(SHORTEST, MOST)),
        help=f"fairness: as --longest; default: {FAIR_LONGEST}, at most --longest",
    )
    some = parser.add_argument_group("cluster")
    some.add_argument("--cluster-tokens", type=COUNT, default=CLUSTER_TOKENS, help="of the pool")
    some.add_argument("--cluster-adapters", type=COUNT, default=CLUSTER_ADAPTERS, help="registered")
    some.add_argument("--cluster-waiting", type=COUNT, default=CLUSTER_WAITING, help="requests, at any time")
    some.add_argument("--cluster-seconds", type=POSITIVE, default=10.0, help="of a window")
    some.add_argument(
        "--cluster-passes", type=COUNT_OR_NONE, nargs="+", default=[16, 64, 256], help="cluster_max_passes"
    )
    some.add_argument("--cluster-alpha", type=POSITIVE, nargs="+", default=[1.0, 0.3])
    args = parser.parse_args(argv)
    args.adapter_slots = args.adapter_slots or [args.adapters_in_pool]
    args.fair_batch = args.fair_batch or min(args.batch, FAIR_BATCH)
    args.fair_longest = args.fair_longest or min(args.longest, FAIR_LONGEST)
    args.thrash_batch = args.thrash_batch or min(args.batch, args.adapters_in_pool)
    if told := next(_unmeasurable(args, engine), None):
        parser.error(told)
    bench = Workbench(args, engine)
    if "fairness" in args.what or ("online" in args.what and not args.pool_tokens):  # before time is spent
        cut_pool(bench, args)
    for what, tokens in (("online", args.pool_tokens), ("cluster", args.cluster_tokens)):
        if what in args.what and tokens:
            token_pool(bench, tokens)
    if "thrash" in args.what:
        check_room(bench, args, args.adapters_in_pool, max(args.working_set))
        for slots in args.adapter_slots if args.no_unified_memory else ():
            slot_pool(bench, args, slots)
    bench.compile([shape for what in args.what for shape in PARTS[what].shapes(bench, args)])
    for what in args.what:
        bench.say(f"{what} begins")
        PARTS[what].run(bench, args)
    bench.say("done")


def _unmeasurable(args: argparse.Namespace, engine: Engine | None) -> Iterator[str]:
    """What options together leave the parts that are asked for nothing to measure."""
    longest = max_model_len(args) if engine is None else engine.max_model_len
    step_tokens = args.step_tokens if engine is None else engine.config.max_step_tokens
    if "thrash" in args.what and args.thrash_batch > args.batch:
        yield "--thrash-batch must be at most --batch: steps are compiled for that many sequences"
    if "fairness" in args.what:
        if args.fair_batch < 2:
            yield "--fair-batch must be at least 2, and --batch with it: two tenants share it"
        if args.fair_batch > args.batch or args.fair_longest > args.longest:
            yield "--fair-batch and --fair-longest must be at most --batch and --longest, which are compiled"
    if "loads" in args.what and loads.last_context(args) > longest:
        yield (
            f"--context and --steps: loads decodes to {loads.last_context(args)} tokens, a sequence has "
            f"{longest} at most; raise --longest"
        )
    if "cold" in args.what and args.prompt > (most := min(step_tokens, longest - 1)):
        yield f"--prompt must be at most {most}: one step computes it; raise --step-tokens or --longest"
    if "online" in args.what and {tenant for _, tenant in online.arrivals(args)} != set(online.TENANTS):
        yield "--rate and --online-seconds: of one tenant no request comes; raise one of them"


if __name__ == "__main__":
    main()
