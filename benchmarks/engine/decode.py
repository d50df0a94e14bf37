"""A steady decode step against the bytes that it must read (`decode_step`).

Sequences begin with a context that lies in the pool already, whatever it holds; nothing joins or ends.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import time
from collections.abc import Iterator, Sequence

from benchmarks.arguments import COUNT, COUNT_OR_NONE, number
from benchmarks.engine.models import MAX_MODEL_LEN, make_engine
from benchmarks.engine.profile import profile
from benchmarks.engine.random_adapters import (
    MODULES,
    attention_groups,
    random_adapters,
    ranks_of,
    register_adapters,
)
from benchmarks.engine.steps import clear, fill_randomly, report_step, seconds_a_step, start_decoding
from slora_jax import EngineConfig
from slora_jax.checks import Interval
from slora_jax.engine import Engine
from slora_jax.runner import InFlight
from slora_jax.scheduling.scheduler import StepPlan

# Bytes/s of one H200: decode attention reads as fast (bench_kernels), a copy 3.8 to 4.1e12.
READ_RATE = 4.3e12
FIRST_STEPS, PROFILED = 4, 12  # steps before and behind the timed ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of this benchmark alone."""
    parser.add_argument("--batch", type=COUNT, nargs="+", default=[256])
    parser.add_argument("--context", type=COUNT, default=400)
    parser.add_argument(
        "--distinct", type=COUNT_OR_NONE, nargs="+", default=[0], help="distinct adapters in the batch"
    )
    parser.add_argument(
        "--ranks", nargs="+", default=["16"], help="mixes of ranks that take turns: 16, 64/32/16/8"
    )
    parser.add_argument("--steps", type=COUNT, default=40)
    parser.add_argument(
        "--memory-fraction",
        type=number(float, Interval(0, 1, above_low=True)),
        default=EngineConfig.memory_fraction,
    )


def run(args: argparse.Namespace, engine: Engine | None) -> None:
    """Milliseconds of a steady decode step, against the bytes it must read, for each combination.

    Raises SystemExit at the end where the pool does not hold all of them.
    """
    longest, mixes = last_context(args), [ranks_of(mix) for mix in args.ranks]
    if max(args.distinct) > max(args.batch):
        raise SystemExit(
            f"decode: {max(args.distinct)} distinct adapters are more than a batch has sequences"
        )
    if engine is not None and args.memory_fraction != EngineConfig.memory_fraction:
        raise SystemExit("decode: --memory-fraction wants an engine of its own: this one has its pool")
    engine = engine or make_engine(
        args.model,
        max_batch=max(args.batch),
        max_model_len=max(longest, MAX_MODEL_LEN),
        memory_fraction=args.memory_fraction,
    )
    if max(args.batch) > engine.config.max_batch_size or longest > engine.max_model_len:
        raise SystemExit(
            f"decode: the shared engine has batches of {engine.config.max_batch_size} and contexts to "
            f"{engine.max_model_len}; ask for less, or run the command alone"
        )
    compile_decodes(engine, args.batch, with_adapters=max(args.distinct) > 0)
    engine._runner._pool = fill_randomly(engine._runner.pool)
    too_much = []
    for mix, ranks in zip(args.ranks, mixes, strict=True):
        names = register_adapters(engine, random_adapters(engine, ranks), max(args.distinct))
        for batch, distinct in itertools.product(args.batch, args.distinct):
            if distinct > batch or (not distinct and mix != args.ranks[0]):
                continue
            if need := pages_lacking(engine, args, batch, names[:distinct]):
                too_much.append(f"batch {batch}, {distinct} adapters of ranks {mix} ({need} pages more)")
            else:
                measure(engine, args, batch, names[:distinct], ranks)
        for name in names:
            engine.unload_adapter(name)
    if too_much:
        raise SystemExit(
            f"decode: the pool of {engine.stats().pages_total} pages does not hold {'; '.join(too_much)}: "
            "lower --context or --steps, or raise --memory-fraction and XLA_PYTHON_CLIENT_MEM_FRACTION"
        )


def last_context(args: argparse.Namespace) -> int:
    """Tokens of a sequence behind its last step."""
    return int(args.context - args.steps // 2 + FIRST_STEPS + args.steps + PROFILED + 2)


def compile_decodes(engine: Engine, batches: Sequence[int], *, with_adapters: bool) -> None:
    """In parallel, the steps of so many sequences."""
    buckets, groups = engine._runner.buckets, attention_groups() if with_adapters else set()
    rows = {buckets.fit(decodes=n, prefill_tokens=0, prefill_seqs=0, pages=1, bias=0).decode_rows
            for n in batches}  # fmt: skip
    usual = buckets.usual(engine._runner.expect(groups), pages=buckets.pages[-1])
    engine._runner.compile([s for s in usual if not s.prefill_tokens and s.decode_rows in rows])


def pages_lacking(engine: Engine, args: argparse.Namespace, batch: int, names: Sequence[str]) -> int:
    """How many more the pool must have to hold these sequences to their last step and these adapters."""
    adapters = sum(engine._adapters.get(name).num_pages for name in names)
    need = batch * engine._scheduler.pages_for(last_context(args)) + adapters
    return max(0, need - engine.stats().pages_total)


def measure(
    engine: Engine, args: argparse.Namespace, batch: int, names: Sequence[str], ranks: Sequence[int]
) -> None:
    """One line of `decode_step`."""
    runner, run_steps = engine._runner, functools.partial(seconds_a_step, engine)
    start_decoding(engine, batch, args.context - args.steps // 2, names)
    started, preemptions = time.perf_counter(), engine.stats().preemptions
    run_steps(FIRST_STEPS)
    first_steps = time.perf_counter() - started
    with counting_late_launches(engine) as late:
        milliseconds = 1e3 * run_steps(args.steps)
    tokens = sum(s.num_computed for s in engine._scheduler.running) - batch * args.steps // 2
    profiled = profile(run_steps, PROFILED)
    adapters = adapter_bytes(engine)
    params = sum(leaf.nbytes for leaf in runner.parameters())
    if engine.stats().preemptions > preemptions:
        raise RuntimeError(f"sequences were preempted: no step of {batch} was timed")
    clear(engine)
    case = {"model": args.model, "batch": batch, "context": args.context, "distinct": len(names)}
    case["ranks"] = "/".join(map(str, ranks)) if names else ""
    case |= args.variant
    extra = {
        "floor_ms": round((params + kv_bytes(engine, tokens) + adapters) / READ_RATE * 1e3, 3),
        "adapter_floor_ms": round(adapters / READ_RATE * 1e3, 3),
        "mean_context": round(tokens / batch, 1),
        "late_launches": len(late),
        **profiled,
        "backend": runner.backend.name,
    }
    report_step("decode_step", case, milliseconds, first_steps, extra)


def kv_bytes(engine: Engine, tokens: int) -> float:
    """Bytes of K and V of so many tokens in all layers."""
    layout = engine._layout
    return tokens * layout.n_layers * layout.page_elems * layout.tp / layout.page_tokens * 2


def adapter_bytes(engine: Engine) -> int:
    """Bytes of A and B of the adapters that running sequences use, by their ranks rounded up to 8."""
    layout = engine._layout
    columns = {m: layout.in_dims[m] + layout.out_dims[m] for m in MODULES}
    in_use = [a.shape.layout.rank_blocks for a in engine._adapters.resident if a.in_use]
    return layout.n_layers * 2 * sum(blocks[m] * 8 * columns[m] for blocks in in_use for m in MODULES)


@contextlib.contextmanager
def counting_late_launches(engine: Engine) -> Iterator[list[float]]:
    """Times at which a step was enqueued only when the device had ended the one before, and so idled."""
    launch, before, late = engine._runner.launch, list[InFlight](), list[float]()

    def watched(plan: StepPlan) -> InFlight:
        in_flight = launch(plan)
        if before and before.pop().output.tokens.is_ready():  # type: ignore[attr-defined]
            late.append(time.perf_counter())
        before.append(in_flight)
        return in_flight

    engine._runner.launch = watched  # type: ignore[method-assign]
    try:
        yield late
    finally:
        engine._runner.launch = launch  # type: ignore[method-assign]
