"""One model and pool on the device for all parts, engines over them, and what the parts report."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

import slora_jax.engine
from benchmarks.adapters.workload import Workload, kv_room, mean_kv
from benchmarks.engine.models import make_engine
from benchmarks.engine.random_adapters import (
    MODULES,
    SETTINGS,
    attention_groups,
    random_adapters,
    register_adapters,
)
from benchmarks.engine.steps import RUNS
from benchmarks.papers import by_popularity
from benchmarks.record import gpu_name, record
from slora_jax.engine import Engine
from slora_jax.lora.loader import PreparedAdapter
from slora_jax.sharding.mesh import make_mesh
from slora_jax.step_shape import StepShape


class Workbench:
    """One model and pool on the device, and engines of any host configuration over them.

    Of the engines made, only the latest may be used: they share the device's state. `engine` is one to begin
    with, for others to use only when this is done. `lora_groups` are the groups of modules that adapters
    target.
    """

    def __init__(self, args: argparse.Namespace, engine: Engine | None = None) -> None:
        self._began = time.perf_counter()
        self.longest: int = args.longest
        self.batch: int = args.batch
        self._first = engine or make_engine(
            args.model,
            max_batch=self.batch,
            max_model_len=max_model_len(args),
            max_step_tokens=args.step_tokens,
            num_pages=args.num_pages,
            max_lora_rank=max((*SETTINGS[args.setting], *args.load_ranks)),
        )
        self.runner = self._first._runner
        self.layout = self._first._layout
        self.vocab_size = self._first.model_config.vocab_size
        self.num_pages = self.runner.pool.shape[1]
        self.page_tokens = self._first.config.page_tokens
        self.lora_groups = self.runner.expect(attention_groups())
        self._adapters: dict[int, PreparedAdapter] = {}
        self.say(f"{self.num_pages} pages")

    def engine(self, num_pages: int | None = None, **fields: Any) -> Engine:
        """An engine with nothing in it, over the first `num_pages` of the pool."""
        config = dataclasses.replace(self._first.config, num_pages=num_pages or self.num_pages, **fields)
        with mock.patch.object(slora_jax.engine, "ModelRunner", return_value=self.runner):
            return Engine(self._first.model_config, {}, config, make_mesh(1))

    def adapters(self, ranks: Sequence[int]) -> dict[int, PreparedAdapter]:
        """Random adapters by rank, made once."""
        self._adapters |= random_adapters(self._first, [r for r in ranks if r not in self._adapters])
        return {rank: self._adapters[rank] for rank in ranks}

    def usual_shapes(self) -> list[StepShape]:
        """Those of most steps with adapters."""
        buckets = self.runner.buckets
        usual = buckets.usual(self.lora_groups, pages=buckets.pages[-1])
        return [shape for shape in usual if shape.lora]

    def compile(self, shapes: Iterable[StepShape]) -> None:
        """In parallel; the few shapes that the parts do not foresee are met before anything is timed."""
        started = time.perf_counter()
        self.runner.compile(shapes)
        gc.collect()
        gc.freeze()  # as the server does: a full collection over what compiling left takes most of a second
        self.say(f"compiled {self.runner.compilations} steps in {time.perf_counter() - started:.0f} s")

    def measured(self, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What a run finds whose `compilations` are 0; RuntimeError where each of RUNS compiled a step."""
        for _ in range(RUNS):
            found = measure()
            if not found["compilations"]:
                return found
            self.say("a step was compiled: measured again")
        raise RuntimeError(f"steps were compiled in each of {RUNS} runs")

    def say(self, what: str) -> None:
        """Print how far it is, after so many seconds."""
        print(f"[{time.perf_counter() - self._began:6.1f} s] {what}", flush=True)

    def report(self, bench: str, case: dict[str, Any], value: float, unit: str, **extra: Any) -> None:
        """Append one line of results, and print it."""
        extra["backend"] = self.runner.backend.name
        record("engine", bench, case, value, unit, gpu=gpu_name(), **extra)
        self.say(f"{bench} {case}: {value} {unit}, {extra}")


def max_model_len(args: argparse.Namespace) -> int:
    """Tokens of the longest sequence where these parts have an engine of their own."""
    return 2 * int(args.longest) + 16


def cut_pool(
    bench: Workbench, args: argparse.Namespace, *, batch: int | None = None, longest: int | None = None
) -> int:
    """Pages that hold the KV of a full batch (None: --batch, --longest) and --adapters-in-pool adapters.

    Ends with a message where the whole pool has fewer.
    """
    batch, longest, held = batch or bench.batch, longest or bench.longest, int(args.adapters_in_pool)
    pages = 1 + kv_room(batch, longest, bench.page_tokens) + round(held * _adapter_pages(bench, args))
    if pages > bench.num_pages:
        raise SystemExit(
            f"{pages} pages are needed to hold the KV of {batch} sequences of up to {longest} + {longest} "
            f"tokens and {held} adapters, the pool has {bench.num_pages}: lower the batch or "
            "--adapters-in-pool, or give JAX more of the GPU (XLA_PYTHON_CLIENT_MEM_FRACTION)"
        )
    return pages


def token_pool(bench: Workbench, tokens: int) -> int:
    """Pages of a pool of so many tokens, and the reserved one.

    Ends with a message where the whole pool has fewer.
    """
    pages = 1 + tokens // bench.page_tokens
    if pages > bench.num_pages:
        raise SystemExit(
            f"a pool of {tokens} tokens has {pages} pages, the one on the device {bench.num_pages}"
        )
    return pages


def fitting(bench: Workbench, args: argparse.Namespace, pages: int) -> int:
    """Sequences of a steady state, each with an adapter of its own, that so many pages hold on average."""
    sequences = 1000
    each = mean_kv(sequences, bench.longest, bench.page_tokens) / sequences + _adapter_pages(bench, args)
    return max(1, min(bench.batch, int((pages - 1) / each)))


def mean_pool(bench: Workbench, args: argparse.Namespace) -> int:
    """Pages that hold the KV of --thrash-batch sequences on average, and --adapters-in-pool adapters."""
    kv = 1 + mean_kv(args.thrash_batch, bench.longest, bench.page_tokens)
    return kv + round(int(args.adapters_in_pool) * _adapter_pages(bench, args))


def slot_pool(bench: Workbench, args: argparse.Namespace, slots: int) -> dict[str, Any]:
    """Fields of an engine with so many slots, of the setting's largest rank, beside the KV of `mean_pool`.

    Ends with a message where the whole pool has fewer pages.
    """
    rank = max(SETTINGS[args.setting])
    slot = bench.layout.adapter(dict.fromkeys(bench.layout.in_dims, rank)).num_pages
    pages = 1 + mean_kv(args.thrash_batch, bench.longest, bench.page_tokens) + slots * slot
    if pages > bench.num_pages:
        raise SystemExit(
            f"{slots} slots of {slot} pages and the KV of a full batch need {pages} pages, the pool has "
            f"{bench.num_pages}: lower --adapter-slots"
        )
    fields = {"unified_memory": False, "adapter_slots": slots, "max_lora_rank": rank}
    return {"num_pages": pages, **fields}


def check_room(bench: Workbench, args: argparse.Namespace, held: int, times: int) -> None:
    """End with a message where the whole pool would not hold `times` as many adapters beside the KV of
    --thrash-batch sequences.
    """
    kv = 1 + kv_room(args.thrash_batch, bench.longest, bench.page_tokens)
    most = kv + round(times * held * _adapter_pages(bench, args))
    if most > bench.num_pages:
        raise SystemExit(
            f"{most} pages are needed to hold the largest working set and the KV of a full batch ({kv}), the "
            f"pool has {bench.num_pages}: lower --adapters-in-pool or --working-set, or give JAX more of the "
            "GPU (XLA_PYTHON_CLIENT_MEM_FRACTION)"
        )


def _adapter_pages(bench: Workbench, args: argparse.Namespace) -> float:
    """Of an adapter of the setting, on average."""
    ranks = SETTINGS[args.setting]
    return float(np.mean([bench.layout.adapter(dict.fromkeys(MODULES, r)).num_pages for r in ranks]))


def contended(
    bench: Workbench,
    args: argparse.Namespace,
    policy: str,
    *,
    pages: int | None = None,
    batch: int | None = None,
    longest: int | None = None,
    **fields: Any,
) -> tuple[Engine, Workload]:
    """An engine under a policy whose pool holds few of its adapters (None: `cut_pool`), and requests for
    them; `batch` and `longest` (None: those of the bench) are at most the bench's.
    """
    cut = pages or cut_pool(bench, args, batch=batch, longest=longest)
    fields |= {"max_batch_size": batch or bench.batch, "ttft_target_s": args.target}
    engine = bench.engine(cut, scheduling_policy=policy, **fields)
    names = register_adapters(engine, bench.adapters(SETTINGS[args.setting]), args.adapters)
    pick = by_popularity(args.alpha, len(names))
    return engine, Workload(names, pick, longest or bench.longest, bench.vocab_size)


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


def milliseconds(seconds: np.ndarray) -> list[float]:
    """Median and 99th percentile in ms."""
    return [round(1e3 * float(np.percentile(seconds, p)), 3) for p in (50, 99)]
