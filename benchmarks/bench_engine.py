"""The engine on dummy-weight Llama shapes: decode-step time against its byte floor, and offline throughput.

    python -m benchmarks.bench_engine decode --model llama-2-7b --batch 256 --distinct 0 256 --ranks 16
    python -m benchmarks.bench_engine offline --model llama-2-7b --setting S2 --n 0 100 1000

Offline: requests submitted at once, input and output lengths uniform in [8, 512], output length forced,
adapter i of n drawn with P(i) proportional to 1 / (i + 1) ("zipf") or uniformly; LoRA on q, k, v, o; at most
256 sequences at a time; adapters registered in host memory and none resident at the start. Adapters of one
rank share their host copy (2000 of them would not fit otherwise); each is copied into the pool on its own.
One warm-up run of 300 requests compiles what the timed run needs; a run that compiled something all the
same is made again. Results are appended to benchmarks/results/engine.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import glob
import itertools
import json
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.record import record
from slora_jax import EngineConfig, SamplingParams
from slora_jax.config import LORA_MODES
from slora_jax.engine import Engine
from slora_jax.lora.loader import PreparedAdapter
from slora_jax.lora.packing import PackedAdapter
from slora_jax.memory.layout import GROUPS
from slora_jax.programs import GPU_OPTIONS
from slora_jax.runner import InFlight
from slora_jax.scheduling.scheduler import StepPlan
from slora_jax.step_shape import StepShape

COPY_BANDWIDTH = 4.3e12  # bytes/s of one H200, measured by bench_kernels
MODELS: dict[str, dict[str, Any]] = {
    "llama-2-7b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                   "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000},
    "llama-3-8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                   "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
    "llama-2-13b": {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
                    "num_key_value_heads": 40, "intermediate_size": 13824, "vocab_size": 32000},
    "tiny": {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 512},
}  # fmt: skip
SETTINGS = {"none": (), "S1": (8,), "S2": (64, 32, 16, 8), "S4": (64, 32, 16)}
MAX_MODEL_LEN = 1040
WARM_UP = 300  # requests
RUNS = 3  # tries to measure one in which nothing is compiled
FIRST_STEPS, PROFILED = 4, 12  # steps of `decode`
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
SHARES = {  # kernels of a profile by what they do
    "lora": r"lora",
    "attention": r"decode_mosaic|prefill",
    "gemm": r"gemm|nvjet|cutlass|xmma|dot|cublas",
}


def make_engine(model: str, *, max_batch: int, **fields: Any) -> Engine:
    """An engine of random weights in a model's shape."""
    shape = {"model_type": "llama", "max_position_embeddings": 8192, **MODELS[model]}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        config = EngineConfig(
            dtype="bfloat16",
            enable_prefix_caching=False,  # every prompt is computed, also in a second run
            load_format="dummy",
            max_batch_size=max_batch,
            max_step_tokens=fields.pop("max_step_tokens", 2048),
            **fields,
        )
        return Engine.from_pretrained(folder, config=config)


def ranks_of(mix: str) -> list[int]:
    """Ranks of "64/32/16/8"; raises SystemExit."""
    ranks = [int(rank) if rank.isdecimal() else 0 for rank in mix.split("/")]
    if min(ranks) < 1:
        raise SystemExit(f"--ranks: '{mix}' must be ranks of 1 and more, joined by /: 16, or 64/32/16/8")
    return ranks


def random_adapters(engine: Engine, ranks: Iterable[int]) -> dict[int, PreparedAdapter]:
    """By rank, a random adapter on q, k, v, o with its host copy, which all of that rank may share."""
    layout, rng, prepared = engine._layout, np.random.default_rng(0), {}
    for rank in ranks:
        placed = layout.adapter(dict.fromkeys(MODULES, rank))
        pages = np.empty(
            (layout.n_layers, placed.num_pages, layout.tp * layout.page_elems), jnp.dtype(engine.config.dtype)
        )
        pages[...] = (0.02 * rng.standard_normal(pages.shape[1:], np.float32)).astype(pages.dtype)
        packed = PackedAdapter(pages=pages, layout=placed, rank=rank, target_modules=MODULES, features={})
        host = engine._runner.host_copy(pages)
        prepared[rank] = PreparedAdapter(f"random/rank{rank}", packed, host=host)
    return prepared


def register_adapters(engine: Engine, prepared: Mapping[int, PreparedAdapter], n: int) -> list[str]:
    """n adapters whose ranks take turns."""
    names, ranks = [f"a{i}" for i in range(n)], list(prepared)
    for i, name in enumerate(names):
        engine.load_adapter(name, prepared[ranks[i % len(ranks)]])
    return names


def run_all(engine: Engine, requests: Iterable[tuple[list[int], str | None, int]]) -> int:
    """Submit (prompt, adapter, output length) all at once, run until all have ended; tokens put out."""
    for prompt, adapter, length in requests:
        engine.add_request(prompt, adapter, SamplingParams(max_tokens=length, temperature=0, ignore_eos=True))
    tokens = 0
    while engine.has_unfinished():
        tokens += sum(len(e.token_ids) for e in engine.step())
    return tokens


def ablation(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig that the command line sets otherwise than their defaults."""
    chosen = {"lora_mode": args.lora_mode, "scheduling_policy": args.scheduling_policy}
    chosen |= {"unified_memory": args.unified_memory, "adapter_slots": args.adapter_slots}
    return {name: value for name, value in chosen.items() if value != getattr(EngineConfig, name)}


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


def attention_groups() -> set[int]:
    """The groups of modules that random adapters are on."""
    return {i for i, g in enumerate(GROUPS) if set(g) & set(MODULES)}


def offline(args: argparse.Namespace) -> None:
    """Requests/s of the workload for each setting and n, in one engine."""
    chosen = ablation(args)
    largest = max((rank for setting in args.setting for rank in SETTINGS[setting]), default=0)
    slot = {"max_lora_rank": largest} if args.adapter_slots and largest else {}
    if args.engine is not None and chosen:
        raise SystemExit(f"offline: {', '.join(chosen)} need an engine of their own")
    engine = args.engine or make_engine(
        args.model, max_batch=256, max_model_len=MAX_MODEL_LEN, **chosen, **slot
    )
    vocab, warm_with = engine.model_config.vocab_size, set[bool]()
    for setting, n in itertools.product(args.setting, args.n):
        ranks, rng = SETTINGS[setting], np.random.default_rng(42)
        prepared = random_adapters(engine, ranks)
        names = register_adapters(engine, prepared, n)
        weights = 1 / np.arange(1, n + 1) if args.popularity == "zipf" else np.ones(max(n, 1))
        requests: list[tuple[list[int], str | None, int]] = []
        for _ in range(args.requests):
            length_in, length_out = rng.integers(8, 513, 2)
            name = names[rng.choice(n, p=weights / weights.sum())] if n else None
            requests.append((rng.integers(0, vocab, length_in).tolist(), name, int(length_out)))
        started, before, compiling = time.perf_counter(), engine.num_compilations, 0.0
        if bool(n) not in warm_with:
            warm_with.add(bool(n))
            lora = n and args.lora_mode != "merge"
            engine._runner.compile(offline_shapes(engine, ranks=ranks if lora else ()))
            compiling = time.perf_counter() - started
            run_all(engine, requests[:WARM_UP])
            gc.collect()
            gc.freeze()  # as the server does
            print(f"compiled and warm after {time.perf_counter() - started:.0f} s", flush=True)
        warm = engine.num_compilations
        for _ in range(RUNS):
            for name in names:  # so that none is resident
                engine.unload_adapter(name)
            register_adapters(engine, prepared, n)
            compiled = engine.num_compilations
            loads, merges, started = engine.stats().adapter_loads, engine._runner.merges, time.perf_counter()
            tokens = run_all(engine, requests)
            seconds = time.perf_counter() - started
            if engine.num_compilations == compiled:
                break
            print(f"a step was compiled in a run of {seconds:.1f} s: measured again", flush=True)
        else:
            raise RuntimeError(f"steps were compiled in each of {RUNS} runs")
        stats = engine.stats()
        case = {"model": args.model, "setting": setting, "n": n, "popularity": args.popularity}
        case |= chosen
        extra = {
            "seconds": round(seconds, 2),
            "output_tokens_per_s": round(tokens / seconds, 1),
            "requests": args.requests,
            "adapter_loads": stats.adapter_loads - loads,
            "merges": engine._runner.merges - merges,
            "preemptions": stats.preemptions,
            "compilations": {"before": warm - before, "seconds": round(compiling, 1), "while_timed": 0},
            "backend": engine._runner.backend.name,
        }
        value = round(args.requests / seconds, 2)
        record("engine", "offline_throughput", case, value, "requests/s", gpu=gpu_name(), **extra)
        print(f"offline {case}: {value} requests/s, {extra}", flush=True)
        for name in names:
            engine.unload_adapter(name)


def decode(args: argparse.Namespace) -> None:
    """Milliseconds of a steady decode step, against the bytes it must read, for each combination.

    Raises SystemExit at the end where the pool does not hold all of them.
    """
    longest = last_context(args)
    engine = args.engine or make_engine(
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
    buckets, groups = engine._runner.buckets, attention_groups() if max(args.distinct) else set()
    rows = {buckets.fit(decodes=n, prefill_tokens=0, prefill_seqs=0, pages=1, bias=0).decode_rows
            for n in args.batch}  # fmt: skip
    usual = buckets.usual(engine._runner.expect(groups), pages=buckets.pages[-1])
    engine._runner.compile([s for s in usual if not s.prefill_tokens and s.decode_rows in rows])
    engine._runner._pool = fill_randomly(engine._runner.pool)
    too_much = []
    if max(args.distinct) > max(args.batch):
        raise SystemExit(
            f"decode: {max(args.distinct)} distinct adapters are more than a batch has sequences"
        )
    for mix in args.ranks:
        ranks = ranks_of(mix)
        names = register_adapters(engine, random_adapters(engine, ranks), max(args.distinct))
        for batch in args.batch:
            for distinct in args.distinct:
                if distinct > batch or (not distinct and mix != args.ranks[0]):
                    continue
                if need := pages_lacking(engine, args, batch, names[:distinct]):
                    too_much.append(f"batch {batch}, {distinct} adapters of ranks {mix} ({need} pages more)")
                else:
                    measure_decode(engine, args, batch, names[:distinct], ranks)
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


def pages_lacking(engine: Engine, args: argparse.Namespace, batch: int, names: Sequence[str]) -> int:
    """How many more the pool must have to hold these sequences to their last step and these adapters."""
    adapters = sum(engine._adapters.get(name).num_pages for name in names)
    need = batch * engine._scheduler.pages_for(last_context(args)) + adapters
    return max(0, need - engine.stats().pages_total)


def clear(engine: Engine) -> None:
    """End whatever it runs."""
    for request in list(engine.requests):
        engine.abort(request)
    while engine.has_unfinished():
        engine.step()


@functools.partial(jax.jit, donate_argnums=0)
def fill_randomly(pool: jax.Array) -> jax.Array:
    """64 random pages over and over, in place: zeros would be read and multiplied faster than data.

    The reserved page stays zero.
    """
    pages = jax.random.normal(jax.random.key(1), (64, pool.shape[2]), pool.dtype)
    layer = pages[jnp.arange(pool.shape[1]) % 64].at[0].set(0)[None]
    filled: jax.Array = lax.fori_loop(
        0, pool.shape[0], lambda i, p: lax.dynamic_update_slice(p, layer, (i, 0, 0)), pool
    )
    return filled


def start_decoding(engine: Engine, batch: int, context: int, names: Sequence[str]) -> None:
    """Sequences whose `context` tokens lie in the pool already (whatever it holds), one to go for each."""
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    scheduler = engine._scheduler
    for i in range(batch):
        prompt = rng.integers(0, engine.model_config.vocab_size, context).tolist()
        engine.add_request(prompt, names[i % len(names)] if names else None, sampling)
    make_resident(engine, names)
    for sequence in list(scheduler.waiting):
        scheduler._start(sequence, time.monotonic())
        assert scheduler._ensure_pages(StepPlan([], []), sequence, context)
        sequence.num_computed = context - 1


def make_resident(engine: Engine, names: Sequence[str]) -> None:
    """Load adapters into the pool; raises RuntimeError where it does not hold all of them, or one fails."""
    adapters, loader, stats = [engine._adapters.get(name) for name in names], engine._loader, engine.stats()
    need, room = sum(a.num_pages for a in adapters), stats.pages_total - stats.pages_kv
    if need > room:  # each would push another one out, for ever
        raise RuntimeError(f"{len(adapters)} adapters need {need} pages, the pool has {room} beside the KV")
    while not all([loader.seek(a, room=True, waits=False) for a in adapters]):
        loader.transfer()
        loader.wait(1.0)
        loader.settle()
        if failed := loader.take_failures():
            raise RuntimeError(failed[0][1])


def mixed(args: argparse.Namespace) -> None:
    """Milliseconds of a step that decodes for nearly a full batch and computes so many prompt tokens."""
    if args.engine is not None:
        raise SystemExit("mixed: prompts must not gather, which needs an engine of its own")
    engine = make_engine(args.model, max_batch=256, max_model_len=MAX_MODEL_LEN, prefill_delay_steps=0)
    runner = engine._runner
    runner._pool = fill_randomly(runner.pool)
    ranks = ranks_of(args.ranks)
    names = register_adapters(engine, random_adapters(engine, ranks), args.distinct)
    start_decoding(engine, 240, args.context, names)
    turns = itertools.cycle(names or [None])
    rng = np.random.default_rng(0)

    def run(steps: int, prompt_tokens: int) -> float:
        """Seconds a step, each with prompts of 226 tokens at most that end with it."""
        jax.block_until_ready(runner.pool)
        started = time.perf_counter()
        for _ in range(steps):
            prompts = max(1, round(prompt_tokens / 224)) if prompt_tokens else 0
            for i in range(prompts):
                size = prompt_tokens * (i + 1) // prompts - prompt_tokens * i // prompts
                prompt = rng.integers(0, engine.model_config.vocab_size, size).tolist()
                sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
                engine.add_request(prompt, next(turns), sampling)
            engine.step()
        jax.block_until_ready(runner.pool)
        return (time.perf_counter() - started) / steps

    for prompt_tokens in args.prompt_tokens:
        started = time.perf_counter()
        run(4, prompt_tokens)
        compiling = time.perf_counter() - started
        milliseconds = 1e3 * run(args.steps, prompt_tokens)
        computed = engine.stats().last_step_tokens
        with tempfile.TemporaryDirectory() as trace:
            with jax.profiler.trace(trace):
                run(4, prompt_tokens)
            profile = read_profile(trace, 4, milliseconds)
        case = {"model": args.model, "decodes": 240, "context": args.context, "prompt_tokens": prompt_tokens}
        case |= {"distinct": args.distinct, "ranks": args.ranks} if names else {}
        extra = {"tokens_of_last_step": computed, **profile, "backend": runner.backend.name}
        record("engine", "mixed_step", case, round(milliseconds, 3), "ms", gpu=gpu_name(), **extra)
        print(
            f"mixed_step {case}: {milliseconds:.2f} ms (first steps {compiling:.0f} s), {extra}", flush=True
        )


def measure_decode(
    engine: Engine, args: argparse.Namespace, batch: int, names: Sequence[str], ranks: Sequence[int]
) -> None:
    """One line of `decode_step`."""
    layout, runner = engine._layout, engine._runner
    start_decoding(engine, batch, args.context - args.steps // 2, names)

    def run(steps: int) -> float:
        """Seconds a step, the device's work included."""
        jax.block_until_ready(runner.pool)
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        jax.block_until_ready(runner.pool)
        return (time.perf_counter() - started) / steps

    started, preemptions = time.perf_counter(), engine.stats().preemptions
    run(FIRST_STEPS)
    compiling = time.perf_counter() - started
    with counting_late_launches(engine) as late:
        milliseconds = 1e3 * run(args.steps)
    tokens = sum(s.num_computed for s in engine._scheduler.running) - batch * args.steps // 2
    with tempfile.TemporaryDirectory() as trace:
        with jax.profiler.trace(trace):
            run(PROFILED)
        profile = read_profile(trace, PROFILED, milliseconds)
    params = sum(leaf.nbytes for leaf in runner.parameters())
    kv = tokens * layout.n_layers * layout.page_elems * layout.tp / layout.page_tokens * 2
    adapters = (
        layout.n_layers
        * 2
        * sum(
            a.shape.layout.rank_blocks[m] * 8 * (layout.in_dims[m] + layout.out_dims[m])
            for a in engine._adapters.resident
            if a.in_use
            for m in MODULES
        )
    )
    if engine.stats().preemptions > preemptions:
        raise RuntimeError(f"sequences were preempted: no step of {batch} was timed")
    clear(engine)
    case = {"model": args.model, "batch": batch, "context": args.context, "distinct": len(names)}
    case["ranks"] = "/".join(map(str, ranks)) if names else ""
    extra = {
        "floor_ms": round((params + kv + adapters) / COPY_BANDWIDTH * 1e3, 3),
        "adapter_floor_ms": round(adapters / COPY_BANDWIDTH * 1e3, 3),
        "mean_context": round(tokens / batch, 1),
        "late_launches": len(late),
        **profile,
        "backend": runner.backend.name,
    }
    record("engine", "decode_step", case, round(milliseconds, 3), "ms", gpu=gpu_name(), **extra)
    print(f"decode_step {case}: {milliseconds:.2f} ms (first steps {compiling:.0f} s), {extra}", flush=True)


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


def read_profile(folder: str, steps: int, milliseconds: float) -> dict[str, Any]:
    """Share of a step that the GPU idles, and the shares of its busy time by kind of kernel.

    `idle_share` is of a step of so many milliseconds as timed without the profiler, which holds the host up:
    what the traced steps' kernels do not fill of it, between steps or between kernels.
    """
    files = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    spans: list[tuple[float, float, str]] = []
    for plane in jax.profiler.ProfileData.from_file(files[0]).planes if files else ():
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    spans += [(e.start_ns, e.start_ns + e.duration_ns, e.name) for e in line.events]
    if not spans:
        return {"idle_share": None, "shares": None}
    spans.sort()
    busy, end = 0.0, spans[0][0]
    total: dict[str, float] = {}
    for start, stop, name in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        kind = next((k for k, pattern in SHARES.items() if re.search(pattern, name, re.I)), "other")
        total[kind] = total.get(kind, 0.0) + stop - start
    shares = {k: round(v / sum(total.values()), 3) for k, v in sorted(total.items())}
    top: dict[str, float] = {}
    for start, stop, name in spans:
        top[name] = top.get(name, 0.0) + (stop - start) / (steps * 1e6)
    largest = dict(sorted(((n[:60], round(v, 3)) for n, v in top.items()), key=lambda p: -p[1])[:12])
    return {
        "idle_share": round(max(0.0, 1 - busy / steps / 1e6 / milliseconds), 4),
        "busy_ms": round(busy / steps / 1e6, 3),
        "longest_gaps_us": gaps(spans),
        "shares": shares,
        "kernels_ms": largest,
    }


def gaps(spans: list[tuple[float, float, str]]) -> list[float]:
    """The ten longest times, in microseconds, in which nothing ran."""
    found, end = [], spans[0][0]
    for start, stop, _ in spans:
        found.append(start - end)
        end = max(end, stop)
    return [round(g / 1e3, 1) for g in sorted(found, reverse=True)[:10]]


def gpu_name() -> str | None:
    """The accelerator's name; None on a CPU."""
    device = jax.devices()[0]
    return None if device.platform == "cpu" else device.device_kind


def main(argv: Sequence[str] | None = None, engine: Engine | None = None) -> None:
    """Parse and run one benchmark, on an engine of its own or on one that is shared."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("offline", help="requests/s of 1000 requests submitted at once")
    command.add_argument("--setting", nargs="+", choices=tuple(SETTINGS), default=["none"])
    command.add_argument(
        "--n", type=int, nargs="+", default=[0], help="registered adapters; several: several runs"
    )
    command.add_argument("--popularity", choices=("zipf", "uniform"), default="zipf")
    command.add_argument("--requests", type=int, default=1000)
    command.add_argument("--lora-mode", choices=LORA_MODES, default=EngineConfig.lora_mode)
    command.add_argument("--unified-memory", action=argparse.BooleanOptionalAction, default=True)
    command.add_argument("--adapter-slots", type=int, help="with --no-unified-memory: of the largest rank")
    command.add_argument("--scheduling-policy", default=EngineConfig.scheduling_policy)
    command.set_defaults(run=offline)
    step = commands.add_parser("decode", help="milliseconds of a steady decode step")
    step.add_argument("--batch", type=int, nargs="+", default=[256])
    step.add_argument("--context", type=int, default=400)
    step.add_argument("--distinct", type=int, nargs="+", default=[0], help="distinct adapters in the batch")
    step.add_argument(
        "--ranks", nargs="+", default=["16"], help="mixes of ranks that take turns: 16, 64/32/16/8"
    )
    step.add_argument("--steps", type=int, default=40)
    step.add_argument("--memory-fraction", type=float, default=EngineConfig.memory_fraction)
    step.set_defaults(run=decode)
    both = commands.add_parser("mixed", help="milliseconds of a step of decodes and prompts")
    both.add_argument("--context", type=int, default=400)
    both.add_argument("--prompt-tokens", type=int, nargs="+", default=[1792], help="of each step")
    both.add_argument("--distinct", type=int, default=0, help="adapters that sequences take in turn")
    both.add_argument("--ranks", default="16", help="of the adapters, in turn: 16, 64/32/16/8")
    both.add_argument("--steps", type=int, default=20)
    both.set_defaults(run=mixed)
    for one in (command, step, both):
        one.add_argument(
            "--xla", nargs="+", default=[], metavar="OPTION=VALUE", help="compile with these too"
        )
        one.add_argument("--model", choices=tuple(MODELS), default="llama-2-7b")
    args = parser.parse_args(argv)
    if getattr(args, "steps", 1) < 1:
        parser.error("--steps must be at least 1")
    if getattr(args, "context", 1) <= getattr(args, "steps", 0) // 2:
        parser.error("--context must be above half of --steps: the steps have this context in the mean")
    if any("=" not in option for option in args.xla):
        parser.error("--xla takes OPTION=VALUE")
    args.engine = engine
    GPU_OPTIONS.update(option.split("=", 1) for option in args.xla)
    args.run(args)


if __name__ == "__main__":
    main()
