"""Thousands of adapters on the real engine: thrashing, cold first tokens, loads beside decodes, policies.

    python -m benchmarks.bench_adapters loads cold thrash --model llama-2-7b
    python -m benchmarks.bench_adapters online fairness --model llama-2-7b --rate 42

All parts of a command share one model, one pool on the device and its compiled steps (`Workbench`); a part
that wants another budget, policy or prefetch gets a new engine over the same device state. Results are
appended to benchmarks/results/engine.jsonl as soon as they are known:

- `load_bandwidth`: adapters stream into the pool beside a full batch of decodes. Bytes/s, as a share of plain
  copies of pinned memory in the same run, and the time of a decode step with and without them, at the same
  contexts. Steps are timed from return to return: the host runs one ahead, so each return is a step's end.
- `cold_first_token`: requests one at a time, each for an adapter that is not resident, then again for the
  same one that now is. The penalty is the difference of the medians.
- `thrash`: a closed loop of 1.25 requests a slot: load is constant, the batch always full, and nothing but
  the memory differs. The pool is cut to the KV of a full batch and C adapters; the working set is a multiple
  of C; the same requests run with room for all adapters. It begins with sequences as a steady state has them
  (lengths biased by their duration, ages uniform), so that a short window measures the steady state.
- `online`: gamma arrivals in real time (S-LoRA), first tokens in time, satisfaction, throughput.
- `vtc_gap`: two tenants that always wait, one with three times as many requests; the largest gap of their
  services and VTC's bound, as in sim_scheduler.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import save_file

import slora_jax.engine
from benchmarks.bench_engine import (
    MODELS,
    MODULES,
    SETTINGS,
    fill_randomly,
    gpu_name,
    make_engine,
    make_resident,
    offline_shapes,
    random_adapters,
    register_adapters,
    start_decoding,
)
from benchmarks.record import record
from benchmarks.sim_scheduler import POLICIES, gamma_arrivals
from slora_jax import EngineConfig, SamplingParams
from slora_jax.batch import StepShape
from slora_jax.engine import Engine
from slora_jax.lora.loader import PreparedAdapter
from slora_jax.lora.peft import module_features
from slora_jax.memory.layout import GROUPS
from slora_jax.request import Request
from slora_jax.sharding.mesh import make_mesh

SHORTEST = 8  # tokens of a prompt or an output
_RAMP = 4  # first steps that are not measured
_WINDOWS = 20  # tries to measure one in which nothing is compiled


class Workbench:
    """One model and pool on the device, and engines of any host configuration over them.

    Of the engines made, the latest may be used: they share the device's state.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.longest: int = args.longest
        self.batch: int = args.batch
        self._first = make_engine(
            args.model,
            max_batch=self.batch,
            max_model_len=2 * self.longest + 16,
            max_step_tokens=args.step_tokens,
            num_pages=args.num_pages,
            max_lora_rank=max((*SETTINGS[args.setting], *args.load_ranks)),
        )
        self.runner = self._first._runner
        self.layout = self._first._layout
        self.vocab_size = self._first.model_config.vocab_size
        self.num_pages = self.runner.pool.shape[1]
        self.page_tokens = self._first.config.page_tokens
        self._adapters: dict[int, PreparedAdapter] = {}

    def engine(self, num_pages: int | None = None, **fields: Any) -> Engine:
        """An engine with nothing in it, over the first `num_pages` of the pool."""
        config = dataclasses.replace(self._first.config, num_pages=num_pages or self.num_pages, **fields)
        with mock.patch.object(slora_jax.engine, "ModelRunner", return_value=self.runner):
            return Engine(self._first.model_config, {}, config, make_mesh(1))

    def adapters(self, ranks: Sequence[int]) -> dict[int, PreparedAdapter]:
        """Random adapters by rank, made once."""
        self._adapters |= random_adapters(self._first, [r for r in ranks if r not in self._adapters])
        return {rank: self._adapters[rank] for rank in ranks}

    def compile(self, args: argparse.Namespace) -> None:
        """What the parts need, in parallel; the few shapes that this misses are met before anything is
        timed.
        """
        started, buckets = time.perf_counter(), self.runner.buckets
        groups = self.runner.expect(i for i, g in enumerate(GROUPS) if set(g) & set(MODULES))
        shapes: list[StepShape] = []
        if {"thrash", "online", "fairness"} & set(args.what):
            shapes += offline_shapes(self._first, ranks=SETTINGS["S2"])
        if "loads" in args.what:
            pages = -(-(args.context + args.steps + _RAMP) // self.page_tokens)
            shapes.append(
                buckets.fit(decodes=self.batch, prefill_tokens=0, prefill_seqs=0, pages=pages, bias=0)
            )
        if "cold" in args.what:
            pages = -(-(args.prompt + 1) // self.page_tokens)
            plain = buckets.fit(decodes=0, prefill_tokens=args.prompt, prefill_seqs=1, pages=pages, bias=0)
            shapes += [buckets.with_lora(plain, (n,), groups) for n in (1, 256)]
        self.runner.compile(shapes)
        print(
            f"compiled {self.runner.compilations} steps in {time.perf_counter() - started:.0f} s", flush=True
        )


@dataclasses.dataclass(frozen=True)
class Draw:
    """A request to come."""

    prompt: list[int]
    adapter: str
    output_len: int


class Workload:
    """Requests without end: prompts and outputs of SHORTEST to `longest` tokens (uniform), adapters by
    `pick(rng)`.
    """

    def __init__(
        self, names: Sequence[str], pick: Callable[[np.random.Generator], int], longest: int, vocab: int
    ) -> None:
        self._names, self._pick, self._longest, self._vocab = names, pick, longest, vocab
        self._rng = np.random.default_rng(42)

    def draw(self) -> Draw:
        """The next one that arrives."""
        prompt, output = self._rng.integers(SHORTEST, self._longest + 1, 2)
        return self._draw(int(prompt), int(output))

    def begun(self) -> Draw:
        """One that runs in a steady state: what it has put out belongs to its prompt."""
        prompt, age, output = (int(x[0]) for x in running_lengths(1, self._longest, self._rng))
        return self._draw(prompt + age, output - age)

    def _draw(self, prompt: int, output: int) -> Draw:
        tokens = self._rng.integers(0, self._vocab, prompt).tolist()
        return Draw(tokens, self._names[self._pick(self._rng)], output)


def running_lengths(n: int, longest: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Prompt, tokens put out so far, and output of n sequences that run in a steady state, i64[n] each.

    An output of twice the length runs twice as long, so it is met twice as often, at any age alike.
    """
    lengths = np.arange(SHORTEST, longest + 1)
    output = rng.choice(lengths, n, p=lengths / lengths.sum())
    return rng.integers(SHORTEST, longest + 1, n), (rng.random(n) * output).astype(np.int64), output


def kv_room(batch: int, longest: int, page_tokens: int) -> int:
    """Pages that the KV of a full batch seldom exceeds (99.9th percentile in a steady state), and one a
    sequence for its next tokens, which admission keeps free.
    """
    prompt, age, _ = running_lengths(2000 * batch, longest, np.random.default_rng(0))
    pages = -(-(prompt + age) // page_tokens)
    return int(np.percentile(pages.reshape(2000, batch).sum(1), 99.9)) + batch


def by_popularity(name: str, n: int) -> Callable[[np.random.Generator], int]:
    """Draws adapters of n: "zipf" with P(i) proportional to 1 / (i + 1), "uniform"; a number is S-LoRA's
    alpha, floor(n * u^(1/alpha)).
    """
    if name not in ("zipf", "uniform"):
        alpha = float(name)
        return lambda rng: int(n * rng.power(alpha))
    weights = 1 / np.arange(1, n + 1) if name == "zipf" else np.ones(n)
    cumulative = np.cumsum(weights / weights.sum())
    return lambda rng: min(n - 1, int(np.searchsorted(cumulative, rng.random(), side="right")))


def add(engine: Engine, draw: Draw, **fields: Any) -> str:
    """Queue a request whose output length is forced; its id."""
    sampling = SamplingParams(max_tokens=draw.output_len, temperature=0, ignore_eos=True)
    return engine.add_request(draw.prompt, draw.adapter, sampling, **fields)


def clear(engine: Engine) -> None:
    """End whatever it runs."""
    for request in list(engine._requests):
        engine.abort(request)
    while engine.has_unfinished():
        engine.step()


# -- loads beside decodes --


def pinned_copy_bandwidth(nbytes: int, together: int) -> float:
    """bytes/s of plain copies of pinned host memory to the device, so many of this size at a time; median."""
    device = jax.devices()[0]
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    target = SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    host = jax.block_until_ready([jax.device_put(data, pinned) for _ in range(together)])
    seconds = []
    for _ in range(9):
        started = time.perf_counter()
        jax.block_until_ready(jax.device_put(host, target))
        seconds.append(time.perf_counter() - started)
    return together * nbytes / float(np.median(seconds[2:]))


def loads(bench: Workbench, args: argparse.Namespace) -> None:
    """Bytes/s of adapters that are prefetched beside a full batch of decodes, and what those steps then take.

    Requests for adapters wait behind the full batch, as many as staging holds three times over; one whose
    adapter is resident gives way to one whose adapter is not. The pool holds half of them, so others are
    evicted all the time.
    """
    bench.runner._pool = fill_randomly(bench.runner.pool)
    for rank in args.load_ranks:
        prepared = bench.adapters((rank,))
        layout = prepared[rank].packed.layout
        nbytes = prepared[rank].packed.nbytes
        bandwidth = pinned_copy_bandwidth(nbytes, max(1, (1 << 30) // max(nbytes, 1 << 24)))
        staging = max(64 << 20, bench.runner.pool.nbytes // 64)
        taken = (
            bench.batch * -(-(args.context + args.steps + 2 * _RAMP + 2) // bench.page_tokens)
            + 2 * bench.batch
        )
        room = (bench.num_pages - 1 - taken) // (2 * layout.num_pages)
        window = min(256, max(16, 3 * staging // nbytes), room)
        if window < 2:
            raise SystemExit(
                f"loads: {bench.num_pages} pages do not hold the batch and adapters of rank {rank}"
            )
        pages = 1 + taken + 2 * window * layout.num_pages
        engine = bench.engine(
            pages, adapter_prefetch=window, prefetch_watermark=1.0, adapter_staging_bytes=staging
        )
        names = register_adapters(engine, prepared, 4 * window)
        alone, _ = decode_steps(engine, args, lambda: None)
        stream = LoadStream(engine, names, window)
        beside, moved = decode_steps(engine, args, stream.feed)
        rate = sum(moved) * nbytes / float(beside.sum())
        slower = float(np.median(beside) / np.median(alone)) - 1
        case = {"model": args.model, "batch": bench.batch, "context": args.context, "rank": rank}
        extra = {
            "share_of_pinned_copy": round(rate / bandwidth, 4),
            "pinned_copy_bytes_per_s": round(bandwidth),
            "step_slower_by": round(slower, 4),
            "step_ms_alone": milliseconds(alone),
            "step_ms_beside_loads": milliseconds(beside),
            "mean_step_slower_by": round(float(beside.mean() / alone.mean()) - 1, 4),
            "harness_ms": round(1e3 * float(np.median(stream.seconds)), 3),
            "adapter_bytes": nbytes,
            "adapters_loaded": sum(moved),
            "staging_bytes": staging,
            "waiting": window,
            "backend": bench.runner.backend.name,
        }
        report("load_bandwidth", case, round(rate), "bytes/s", **extra)


def decode_steps(
    engine: Engine, args: argparse.Namespace, between: Callable[[], None]
) -> tuple[np.ndarray, list[int]]:
    """Seconds f64[steps] of decode steps of a full batch from `--context` tokens on, and adapters loaded in
    each.
    """
    start_decoding(engine, engine.config.max_batch_size, args.context, [])
    ends, loaded = [], []
    compiled = engine._runner.compilations
    for i in range(args.steps + _RAMP + 1):
        between()
        engine.step()
        if i == _RAMP:
            compiled = engine._runner.compilations
        ends.append(time.perf_counter())
        loaded.append(engine._loader.loads)
    assert engine._runner.compilations == compiled, "a timed step was compiled"
    clear(engine)
    return np.diff(ends)[_RAMP:], np.diff(loaded)[_RAMP:].tolist()


class LoadStream:
    """Keeps requests waiting for adapters that are not resident."""

    def __init__(self, engine: Engine, names: Sequence[str], window: int) -> None:
        self._engine, self._window = engine, window
        self._turn = itertools.cycle(names)
        self._open: dict[str, str] = {}  # adapter -> its request
        self.seconds: list[float] = []  # that each call took

    def feed(self) -> None:
        started, get = time.perf_counter(), self._engine._adapters.get
        for name in [n for n in self._open if get(n).resident]:
            self._engine.abort(self._open.pop(name))
        while len(self._open) < self._window:
            name = next(n for n in self._turn if n not in self._open and not get(n).resident)
            self._open[name] = self._engine.add_request([1], name, SamplingParams(max_tokens=1))
        self.seconds.append(time.perf_counter() - started)


# -- the first token of a cold adapter --


def cold(bench: Workbench, args: argparse.Namespace) -> None:
    """Milliseconds that a request's first token takes longer where its adapter must be brought in."""
    for rank in args.load_ranks:
        engine, prepared = bench.engine(), bench.adapters((rank,))
        nbytes = prepared[rank].packed.nbytes
        bandwidth = pinned_copy_bandwidth(nbytes, 1)
        rng = np.random.default_rng(0)

        def first_token(name: str, engine: Engine = engine, rng: np.random.Generator = rng) -> float:
            prompt = rng.integers(0, engine.model_config.vocab_size, args.prompt).tolist()
            started = time.perf_counter()
            engine.add_request(prompt, name, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
            while not any(e.token_ids for e in engine.step()):
                pass
            return 1e3 * (time.perf_counter() - started)

        with tempfile.TemporaryDirectory() as folder:
            write_adapter(Path(folder), engine, rank)
            hosts = register_adapters(engine, prepared, args.repeats + 2)
            disks = [f"disk{i}" for i in range(max(3, args.repeats // 3) + 2)]
            for name in disks:
                engine.register_adapter(name, folder)
            for source, names in (("host", hosts), ("disk", disks)):
                for name in names[:2] * 2:  # what is compiled is compiled here
                    first_token(name)
                compiled = bench.runner.compilations
                first = np.array([(first_token(n), first_token(n)) for n in names[2:]])
                assert bench.runner.compilations == compiled, "a timed step was compiled"
                come, there = np.median(first, axis=0).tolist()
                transfer = 1e3 * nbytes / bandwidth
                case = {"model": args.model, "rank": rank, "source": source, "prompt_tokens": args.prompt}
                extra = {
                    "cold_ms": round(come, 3),
                    "cold_p90_ms": round(float(np.percentile(first[:, 0], 90)), 3),
                    "resident_ms": round(there, 3),
                    "transfer_ms": round(transfer, 3),
                    "limit_ms": round(transfer + 5, 3),
                    "adapter_bytes": nbytes,
                    "pinned_copy_bytes_per_s": round(bandwidth),
                    "requests": len(first),
                    "backend": bench.runner.backend.name,
                }
                report("cold_first_token", case, round(come - there, 3), "ms", **extra)


def write_adapter(folder: Path, engine: Engine, rank: int) -> None:
    """A random adapter on q, k, v, o as PEFT saves it, in the engine's dtype."""
    rng, tensors = np.random.default_rng(0), {}
    dtype = jax.numpy.dtype(engine.config.dtype)
    features = module_features(engine.model_config)
    for layer, module in itertools.product(range(engine.model_config.num_hidden_layers), MODULES):
        key = f"base_model.model.model.layers.{layer}.self_attn.{module}"
        n_in, n_out = features[module]
        for name, shape in (("lora_A", (rank, n_in)), ("lora_B", (n_out, rank))):
            tensors[f"{key}.{name}.weight"] = (0.02 * rng.standard_normal(shape, np.float32)).astype(dtype)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(MODULES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


# -- working sets that do not fit --


@dataclasses.dataclass(frozen=True)
class Window:
    """What a closed loop did in some seconds."""

    seconds: float
    tokens: int  # put out
    finished: int  # requests
    gaps: np.ndarray  # f64[n] seconds between two tokens of a sequence, preemptions included
    loads: int
    preemptions: int
    held: np.ndarray  # f64[2] sequences that run and adapters that are resident, means over steps


def thrash(bench: Workbench, args: argparse.Namespace) -> None:
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
                "backend": bench.runner.backend.name,
            }
            report("thrash", case, round(rate, 1), "output tokens/s", **extra)


def cut_pool(bench: Workbench, args: argparse.Namespace, largest: int = 1) -> int:
    """Pages that hold the KV of a full batch and --adapters-in-pool adapters.

    Ends with a message where the whole pool would not hold `largest` times as many beside that KV.
    """
    layout, ranks, held = bench.layout, SETTINGS[args.setting], int(args.adapters_in_pool)
    mean = float(np.mean([layout.adapter(dict.fromkeys(MODULES, rank)).num_pages for rank in ranks]))
    kv = 1 + kv_room(bench.batch, bench.longest, bench.page_tokens)
    most = kv + round(largest * held * mean)
    if most > bench.num_pages:
        raise SystemExit(
            f"{most} pages are needed to hold the largest working set and the KV of a full batch ({kv}), the "
            f"pool has {bench.num_pages}: lower --adapters-in-pool or --working-set, or give JAX more of the "
            "GPU (XLA_PYTHON_CLIENT_MEM_FRACTION)"
        )
    return kv + round(held * mean)


def closed_loop(engine: Engine, work: Workload, seconds: float) -> Window:
    """Keep a quarter more requests than slots under way, from a steady state on; measure `seconds` of it."""
    batch = engine.config.max_batch_size
    last: dict[str, float] = {}  # request -> when its latest token came
    for i in range(batch + batch // 4):
        add(engine, work.begun() if i < batch else work.draw())
    gaps: list[float] = []
    tokens = finished = 0

    def step() -> None:
        nonlocal tokens, finished
        events, now = engine.step(), time.perf_counter()
        for event in events:
            tokens += len(event.token_ids)
            before = last.pop(event.request_id, None)
            if before is not None:
                gaps.append(now - before)
            if event.finish_reason is None:
                last[event.request_id] = now
                continue
            if event.finish_reason != "length":
                raise RuntimeError(f"a request ended by {event.finish_reason}: {event.error}")
            finished += 1
            add(engine, work.draw())

    while tokens < 3 * batch:
        step()
    for _ in range(_WINDOWS):
        gaps, tokens, finished = [], 0, 0
        compiled, before, started = engine._runner.compilations, engine.stats(), time.perf_counter()
        held: list[tuple[int, int]] = []  # sequences that run, adapters that are resident
        while (passed := time.perf_counter() - started) < seconds and engine._runner.compilations == compiled:
            step()
            held.append((len(engine._scheduler.running), len(engine._adapters.resident)))
        after = engine.stats()
        if engine._runner.compilations == compiled:
            clear(engine)
            return Window(
                seconds=passed,
                tokens=tokens,
                finished=finished,
                gaps=np.array(gaps),
                loads=after.adapter_loads - before.adapter_loads,
                preemptions=after.preemptions - before.preemptions,
                held=np.mean(held, axis=0),
            )
        print("a step was compiled: measured again", flush=True)
    raise RuntimeError(f"steps were compiled in each of {_WINDOWS} windows of {seconds} s")


# -- policies --


def online(bench: Workbench, args: argparse.Namespace) -> None:
    """Share of requests whose first token comes in time, while more arrive than can be served.

    The batch is full at the start, of sequences in a steady state; these are not judged. A quarter of the
    requests are a "small" tenant's, the others a "large" one's.
    """
    names, engine = policy_engine(bench, args, "fcfs")
    closed_loop(engine, policy_workload(bench, args, names), min(1.0, args.online_seconds))  # compiles
    for policy in args.policies:
        served = serve_arrivals(bench, args, policy)
        if served["compilations"]:
            print("a step was compiled: measured again", flush=True)
            served = serve_arrivals(bench, args, policy)
        case = {
            "policy": policy, "model": args.model, "rate": args.rate, "cv": args.cv, "n": args.adapters,
            "alpha": args.alpha, "target_s": args.target, "setting": args.setting, "batch": bench.batch,
            "adapters_in_pool": args.adapters_in_pool, "lengths": [SHORTEST, bench.longest],
            "seconds": args.online_seconds,
        }  # fmt: skip
        report("online", case, served.pop("attainment"), "attainment", **served)


def policy_engine(
    bench: Workbench, args: argparse.Namespace, policy: str, **fields: Any
) -> tuple[list[str], Engine]:
    """Adapters' names, and an engine whose pool holds few of them."""
    cut = cut_pool(bench, args)
    engine = bench.engine(cut, scheduling_policy=policy, ttft_target_s=args.target, **fields)
    return register_adapters(engine, bench.adapters(SETTINGS[args.setting]), args.adapters), engine


def policy_workload(bench: Workbench, args: argparse.Namespace, names: Sequence[str]) -> Workload:
    pick = by_popularity(str(args.alpha), len(names))
    return Workload(names, pick, bench.longest, bench.vocab_size)


def serve_arrivals(bench: Workbench, args: argparse.Namespace, policy: str) -> dict[str, Any]:
    """What came of a gamma process of requests under a policy."""
    names, engine = policy_engine(bench, args, policy)
    work, rng = policy_workload(bench, args, names), np.random.default_rng(43)
    due = list(gamma_arrivals(args.rate, args.cv, args.online_seconds, rng))
    coming = [(work.draw(), "small" if rng.random() < 0.25 else "large") for _ in due]
    for _ in range(bench.batch):
        add(engine, work.begun())
    while any(r.metrics.first_token_time is None for r in engine._requests.values()):
        engine.step()
    first: dict[str, float] = {}  # seconds from when a request was due
    asked: dict[str, tuple[float, str]] = {}
    finished = aborted = 0
    before, compiled = engine.stats(), bench.runner.compilations
    began, until = time.perf_counter(), args.online_seconds + args.target
    while (now := time.perf_counter() - began) < until:
        while len(asked) < len(due) and due[len(asked)] <= now:
            at, (draw, tenant) = due[len(asked)], coming[len(asked)]
            asked[add(engine, draw, tenant=tenant)] = at, tenant
        if not engine.has_unfinished():
            time.sleep((due[len(asked)] if len(asked) < len(due) else until) - now)
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
    satisfaction = np.where(within, 1 - (np.minimum(seconds, args.target) / args.target) ** 2, 0)
    came = seconds[np.isfinite(seconds)]
    return {
        "attainment": round(float(within.mean()), 3),
        "satisfaction": round(float(satisfaction.mean()), 3),
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
        "backend": bench.runner.backend.name,
    }


def fairness(bench: Workbench, args: argparse.Namespace) -> None:
    """Two tenants that always wait, one with three times as many requests: the largest gap of what they get.

    Services are priced as VTC prices them, and the bound is the one it proves.
    """
    bound = 2 * max(1.0 * bench.longest, 2.0 * bench.batch * 2 * bench.longest)
    for policy in args.fair_policies:
        names, engine = policy_engine(bench, args, policy)
        work = policy_workload(bench, args, names)
        services, gap = {"small": 0.0, "large": 0.0}, 0.0
        waiting: dict[str, set[Request]] = {"small": set(), "large": set()}
        tenants: dict[str, str] = {}
        began = time.perf_counter()
        while (passed := time.perf_counter() - began) < args.fair_seconds:
            for tenant, wanted in (("small", bench.batch // 2), ("large", 3 * bench.batch // 2)):
                while len(waiting[tenant]) < wanted:
                    request = engine._requests[add(engine, work.draw(), tenant=tenant)]
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
        case = {"policy": policy, "tenants": 2, "batch": bench.batch, "model": args.model}
        extra = {
            "bound": bound,
            "seconds": round(passed, 1),
            "services": services,
            "share_of_small": round(services["small"] / sum(services.values()), 4),
            "lengths": [SHORTEST, bench.longest],
            "backend": bench.runner.backend.name,
        }
        if "vtc" in policy and gap > bound:
            raise RuntimeError(f"the gap {gap} is above what VTC proves, {bound}")
        report("vtc_gap", case, gap, "priced tokens", **extra)


def milliseconds(seconds: np.ndarray) -> list[float]:
    """Median and 99th percentile in ms."""
    return [round(1e3 * float(np.percentile(seconds, p)), 3) for p in (50, 99)]


def report(bench: str, case: dict[str, Any], value: float, unit: str, **extra: Any) -> None:
    """Append one line, and print it."""
    record("engine", bench, case, value, unit, gpu=gpu_name(), **extra)
    print(f"{bench} {case}: {value} {unit}, {extra}", flush=True)


PARTS = {"loads": loads, "cold": cold, "thrash": thrash, "online": online, "fairness": fairness}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, and run the parts one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=tuple(PARTS))
    parser.add_argument("--model", choices=tuple(MODELS), default="llama-2-7b")
    parser.add_argument("--setting", choices=("S1", "S2", "S4"), default="S2", help="adapters' ranks")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--longest", type=int, default=512, help="longest prompt and longest output, tokens")
    parser.add_argument("--step-tokens", type=int, default=2048, help="max_step_tokens")
    parser.add_argument("--num-pages", type=int, help="of the pool on the device; default: what is free")
    some = parser.add_argument_group("loads and cold")
    some.add_argument("--load-ranks", type=int, nargs="+", default=[8, 64])
    some.add_argument("--context", type=int, default=400, help="loads: tokens of the decodes at the start")
    some.add_argument("--steps", type=int, default=80, help="loads: decode steps measured")
    some.add_argument("--prompt", type=int, default=128, help="cold: tokens")
    some.add_argument("--repeats", type=int, default=30, help="cold: adapters")
    some = parser.add_argument_group("thrash")
    some.add_argument("--adapters-in-pool", type=int, default=64, help="C: those that fit beside the KV")
    some.add_argument("--working-set", type=int, nargs="+", default=[1, 2, 4], help="times C")
    some.add_argument("--popularity", nargs="+", default=["zipf", "uniform"], help="zipf, uniform, or alpha")
    some.add_argument("--seconds", type=float, default=10.0, help="of a window")
    some.add_argument("--no-unified-memory", action="store_true", help="the same points on fixed slots, too")
    some.add_argument("--adapter-slots", type=int, nargs="+", help="of these; default: C")
    some = parser.add_argument_group("online and fairness")
    some.add_argument("--adapters", type=int, default=200, help="registered")
    some.add_argument("--alpha", type=float, default=1.0, help="S-LoRA's: 1 is uniform, less is skewed")
    some.add_argument("--rate", type=float, default=42.0, help="online: requests a second")
    some.add_argument("--cv", type=float, default=2.0, help="online: of the gaps between arrivals")
    some.add_argument("--target", type=float, default=6.0, help="online: seconds to a first token")
    some.add_argument("--online-seconds", type=float, default=25.0, help="that requests come")
    some.add_argument("--policies", nargs="+", default=list(POLICIES))
    some.add_argument("--fair-policies", nargs="+", default=["fcfs", "vtc", "vtc+cluster"])
    some.add_argument("--fair-seconds", type=float, default=12.0)
    args = parser.parse_args(argv)
    args.adapter_slots = args.adapter_slots or [args.adapters_in_pool]
    if args.no_unified_memory and "unified_memory" not in {f.name for f in dataclasses.fields(EngineConfig)}:
        parser.error("--no-unified-memory: this engine has no EngineConfig.unified_memory")
    began = time.perf_counter()
    bench = Workbench(args)
    print(f"{bench.num_pages} pages, begun after {time.perf_counter() - began:.0f} s", flush=True)
    if {"thrash", "online", "fairness"} & set(args.what):  # before time is spent
        cut_pool(bench, args, max(args.working_set) if "thrash" in args.what else 1)
    bench.compile(args)
    for what in args.what:
        started = time.perf_counter()
        PARTS[what](bench, args)
        print(f"{what}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
