"""Offline throughput (`offline_throughput`): requests submitted at once, until all have ended.

Input and output lengths uniform in [8, 512], output length forced, adapter i of n drawn with P(i)
proportional to 1 / (i + 1) ("zipf") or uniformly; LoRA on q, k, v, o; at most 256 sequences at a time;
adapters registered in host memory and none resident at the start. Adapters of one rank share their host copy
(2000 of them would not fit otherwise); each is copied into the pool on its own. One warm-up run of 300
requests compiles what the timed run needs; a run that compiled something all the same is made again. Behind
the timed run the same requests begin once more, for a profile of some steps of a full batch.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.arguments import COUNT, COUNT_OR_NONE, policy
from benchmarks.engine.models import MAX_MODEL_LEN, make_engine
from benchmarks.engine.profile import profile
from benchmarks.engine.random_adapters import (
    SETTINGS,
    attention_groups,
    random_adapters,
    register_adapters,
)
from benchmarks.engine.steps import RUNS, clear, seconds_a_step
from benchmarks.papers import LONGEST, SHORTEST, by_popularity
from benchmarks.record import gpu_name, record
from slora_jax import EngineConfig, SamplingParams
from slora_jax.config import LORA_MODES
from slora_jax.engine import Engine
from slora_jax.lora.loader import PreparedAdapter
from slora_jax.step_shape import StepShape

WARM_UP = 300  # requests
# Steps before the profiled ones: all sequences have begun, and the first have ended. Together they take some
# 2.5 s of a 7B model.
SETTLING, PROFILED = 64, 24

Offline = tuple[list[int], str | None, int]  # prompt, adapter, output length


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of this benchmark alone."""
    parser.add_argument("--setting", nargs="+", choices=tuple(SETTINGS), default=["none"])
    parser.add_argument(
        "--n", type=COUNT_OR_NONE, nargs="+", default=[0], help="registered adapters; several: several runs"
    )
    parser.add_argument("--popularity", choices=("zipf", "uniform"), default="zipf")
    parser.add_argument("--requests", type=COUNT, default=1000)
    parser.add_argument("--lora-mode", choices=LORA_MODES, default=EngineConfig.lora_mode)
    parser.add_argument("--unified-memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--adapter-slots", type=COUNT, help="with --no-unified-memory: of the largest rank")
    parser.add_argument("--scheduling-policy", type=policy, default=EngineConfig.scheduling_policy)


def run(args: argparse.Namespace, engine: Engine | None) -> None:
    """Requests/s of the workload for each setting and n, in one engine."""
    chosen = ablation(args)
    largest = max((rank for setting in args.setting for rank in SETTINGS[setting]), default=0)
    slot = {"max_lora_rank": largest} if args.adapter_slots and largest else {}
    if engine is not None and chosen:
        raise SystemExit(f"offline: {', '.join(chosen)} need an engine of their own")
    if max(args.n) and not all(SETTINGS[setting] for setting in args.setting):
        some = ", ".join(setting for setting, ranks in SETTINGS.items() if ranks)
        raise SystemExit(f"offline: adapters (--n above 0) have the ranks of a --setting: one of {some}")
    engine = engine or make_engine(args.model, max_batch=256, max_model_len=MAX_MODEL_LEN, **chosen, **slot)
    warm_with = set[bool]()
    for setting, n in itertools.product(args.setting, args.n):
        ranks = SETTINGS[setting]
        prepared = random_adapters(engine, ranks)
        names = register_adapters(engine, prepared, n)
        requests = draw_requests(args, engine.model_config.vocab_size, names)
        before, compiling = engine.num_compilations, 0.0
        if bool(n) not in warm_with:
            warm_with.add(bool(n))
            compiling = warm_up(engine, requests, ranks if n and args.lora_mode != "merge" else ())
        warm = engine.num_compilations
        seconds, done = measure(engine, requests, names, prepared)
        case = {"model": args.model, "setting": setting, "n": n, "popularity": args.popularity}
        case |= chosen | args.variant
        value = round(args.requests / seconds, 2)
        print(f"offline {case}: {value} requests/s", flush=True)
        extra = {
            **done,
            "idle_share": None,
            "shares": None,
            "compilations": {"before": warm - before, "seconds": round(compiling, 1), "while_timed": 0},
            "backend": engine._runner.backend.name,
        }
        try:
            extra |= profile_full_batch(engine, requests)
        finally:  # a profiler that fails loses no timed run of minutes
            record("engine", "offline_throughput", case, value, "requests/s", gpu=gpu_name(), **extra)
        print(extra, flush=True)
        for name in names:
            engine.unload_adapter(name)


def ablation(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig that the command line sets otherwise than their defaults."""
    chosen = {"lora_mode": args.lora_mode, "scheduling_policy": args.scheduling_policy}
    chosen |= {"unified_memory": args.unified_memory, "adapter_slots": args.adapter_slots}
    return {name: value for name, value in chosen.items() if value != getattr(EngineConfig, name)}


def draw_requests(args: argparse.Namespace, vocab_size: int, names: Sequence[str]) -> list[Offline]:
    """The same ones for the same arguments."""
    rng, n = np.random.default_rng(42), len(names)
    pick = by_popularity(args.popularity, n)
    requests: list[Offline] = []
    for _ in range(args.requests):
        length_in, length_out = rng.integers(SHORTEST, LONGEST + 1, 2)
        name = names[pick(rng)] if n else None
        requests.append((rng.integers(0, vocab_size, length_in).tolist(), name, int(length_out)))
    return requests


def warm_up(engine: Engine, requests: Sequence[Offline], ranks: Sequence[int]) -> float:
    """Compile the steps with adapters of such ranks and run some of the requests; seconds of compiling."""
    started = time.perf_counter()
    engine._runner.compile(offline_shapes(engine, ranks=ranks))
    compiling = time.perf_counter() - started
    run_all(engine, requests[:WARM_UP])
    gc.collect()
    gc.freeze()  # as the server does
    print(f"compiled and warm after {time.perf_counter() - started:.0f} s", flush=True)
    return compiling


def measure(
    engine: Engine, requests: Sequence[Offline], names: Sequence[str], prepared: Mapping[int, PreparedAdapter]
) -> tuple[float, dict[str, Any]]:
    """Seconds of a run in which nothing was compiled, and what was done in it.

    Raises RuntimeError where steps were compiled in each of RUNS.
    """
    for _ in range(RUNS):
        for name in names:  # so that none is resident
            engine.unload_adapter(name)
        register_adapters(engine, prepared, len(names))
        compiled = engine.num_compilations
        before, merges, started = engine.stats(), engine._runner.merges, time.perf_counter()
        tokens = run_all(engine, requests)
        seconds = time.perf_counter() - started
        if engine.num_compilations == compiled:
            break
        print(f"a step was compiled in a run of {seconds:.1f} s: measured again", flush=True)
    else:
        raise RuntimeError(f"steps were compiled in each of {RUNS} runs")
    stats = engine.stats()
    return seconds, {
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round(tokens / seconds, 1),
        "requests": len(requests),
        "adapter_loads": stats.adapter_loads - before.adapter_loads,
        "merges": engine._runner.merges - merges,
        "preemptions": stats.preemptions - before.preemptions,
    }


def profile_full_batch(engine: Engine, requests: Sequence[Offline]) -> dict[str, Any]:
    """`profile` of some steps in mid-run of these requests, which then end.

    The adapters in the pool are those of the run before.
    """

    def refill() -> None:
        if not engine.requests:  # few and short ones
            submit(engine, requests)

    run_steps = functools.partial(seconds_a_step, engine, before_each=refill)
    run_steps(SETTLING)
    for _ in range(RUNS):
        compiled = engine.num_compilations
        profiled = profile(run_steps, PROFILED)
        if engine.num_compilations == compiled:
            break
    else:
        print(f"steps were compiled in each of {RUNS} profiles: none is kept", flush=True)
        profiled = {"idle_share": None, "shares": None}
    clear(engine)
    return profiled


def offline_shapes(engine: Engine, *, ranks: Sequence[int]) -> list[StepShape]:
    """The shapes of these steps, to be compiled in parallel: with adapters of such ranks; (): without any.

    All prompts wait from the begin, so that only the first step has no decodes.
    """
    buckets = engine._runner.buckets
    usual = buckets.usual(engine._runner.expect(attention_groups() if ranks else ()), pages=buckets.pages[-1])
    shapes = [s for s in usual if s.decode_rows or s.prefill_tokens == buckets.prefill_tokens[-1]]
    if ranks and engine.config.lora_mode == "padded-bmm":
        padded = -(-max(ranks) // 8)
        return [buckets.with_lora(s, (padded,), s.lora_groups) for s in shapes if s.lora]
    return [s for s in shapes if bool(s.lora) == bool(ranks)]


def submit(engine: Engine, requests: Iterable[Offline]) -> None:
    """All at once."""
    for prompt, adapter, length in requests:
        engine.add_request(prompt, adapter, SamplingParams(max_tokens=length, temperature=0, ignore_eos=True))


def run_all(engine: Engine, requests: Iterable[Offline]) -> int:
    """Submit all, run until they have ended; tokens put out."""
    submit(engine, requests)
    tokens = 0
    while engine.has_unfinished():
        tokens += sum(len(e.token_ids) for e in engine.step())
    return tokens
