"""Adapters stream into the pool beside a full batch of decodes (`load_bandwidth`).

Bytes/s, as a share of plain copies of pinned memory in the same run, and the time of a decode step with and
without them, at the same contexts. Steps are timed from return to return: the host runs one ahead, so each
return is a step's end.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.adapters.workbench import Workbench, milliseconds, pinned_copy_bandwidth
from benchmarks.engine.random_adapters import make_resident, register_adapters
from benchmarks.engine.steps import clear, fill_randomly, start_decoding
from slora_jax import SamplingParams
from slora_jax.engine import Engine
from slora_jax.step_shape import StepShape

_RAMP = 4  # first steps that are not measured


def shapes(bench: Workbench, args: argparse.Namespace) -> list[StepShape]:
    """Steps to compile before `run`."""
    pages = -(-(args.context + args.steps + _RAMP) // bench.page_tokens)
    return [
        bench.runner.buckets.fit(decodes=bench.batch, prefill_tokens=0, prefill_seqs=0, pages=pages, bias=0)
    ]


def run(bench: Workbench, args: argparse.Namespace) -> None:
    """Bytes/s of adapters that are prefetched beside a full batch of decodes, and what those steps then take.

    Requests for adapters wait behind the full batch, as many as staging holds three times over; one whose
    adapter is resident gives way to one whose adapter is not. The pool is full of others at the start, and
    those are evicted for them.
    """
    bench.runner._pool = fill_randomly(bench.runner.pool)
    for rank in args.load_ranks:
        prepared = bench.adapters((rank,))
        layout = prepared[rank].packed.layout
        nbytes = prepared[rank].packed.nbytes
        bench.say(f"rank {rank}: an adapter of {nbytes / 1e6:.1f} MB, {layout.num_pages} pages, is made")
        bandwidth = pinned_copy_bandwidth(nbytes, max(1, (1 << 30) // max(nbytes, 1 << 24)))
        bench.say(f"plain copies of pinned memory: {bandwidth / 1e9:.2f} GB/s")
        staging = max(64 << 20, bench.runner.pool.nbytes // 64)
        pages, window = pool_of(
            nbytes,
            layout.num_pages,
            staging=staging,
            batch=bench.batch,
            sequence_pages=-(-last_context(args) // bench.page_tokens),
            num_pages=bench.num_pages,
        )
        if window < 2:
            raise SystemExit(
                f"loads: {bench.num_pages} pages do not hold the batch and adapters of rank {rank}"
            )
        engine = bench.engine(pages, **loading(window, staging))
        held = (pages - 1 - bench.batch * -(-args.context // bench.page_tokens)) // layout.num_pages
        names = register_adapters(engine, prepared, held + 2 * window)
        alone, _ = decode_steps(engine, args, lambda: None)
        bench.say(
            f"{args.steps} steps alone: {milliseconds(alone)[0]} ms each; {held} adapters fill the pool"
        )
        make_resident(engine, names[:held])
        bench.say(f"it is full; {window} of {len(names)} adapters are asked for at a time")
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
        }
        bench.report("load_bandwidth", case, round(rate), "bytes/s", **extra)


def pool_of(
    nbytes: int, adapter_pages: int, *, staging: int, batch: int, sequence_pages: int, num_pages: int
) -> tuple[int, int]:
    """Pages of a pool, of `num_pages` at most, and how many adapters of so many bytes and pages to ask for at
    a time: as many as staging holds three times over, and two such windows have room beside the batch.
    """
    taken = batch * (sequence_pages + 2)
    room = (num_pages - 1 - taken) // (2 * adapter_pages)
    window = min(256, max(16, 3 * staging // nbytes), room)
    return 1 + taken + 2 * window * adapter_pages, window


def loading(window: int, staging: int) -> dict[str, Any]:
    """Fields of an EngineConfig that loads so many adapters ahead."""
    return {"adapter_prefetch": window, "prefetch_watermark": 1.0, "adapter_staging_bytes": staging}


def last_context(args: argparse.Namespace) -> int:
    """Tokens of a sequence behind its last step."""
    return int(args.context + args.steps + 2 * _RAMP + 2)


def decode_steps(
    engine: Engine, args: argparse.Namespace, between: Callable[[], None]
) -> tuple[np.ndarray, list[int]]:
    """Seconds f64[steps] of decode steps of a full batch from `--context` tokens on, and adapters loaded in
    each.
    """
    start_decoding(engine, engine.config.max_batch_size, args.context, [])
    ends, loaded = [], []
    compiled = engine.num_compilations
    for i in range(args.steps + _RAMP + 1):
        between()
        engine.step()
        if i == _RAMP:
            compiled = engine.num_compilations
        ends.append(time.perf_counter())
        loaded.append(engine._loader.loads)
    assert engine.num_compilations == compiled, "a timed step was compiled"
    clear(engine)
    return np.diff(ends)[_RAMP:], np.diff(loaded)[_RAMP:].tolist()


class LoadStream:
    """Keeps `window` requests waiting for adapters that are not resident.

    At any time so many of `names` must be neither resident nor asked for; else `feed` raises RuntimeError.
    """

    def __init__(self, engine: Engine, names: Sequence[str], window: int) -> None:
        self._engine, self._window = engine, window
        self._turn, self._number = itertools.cycle(names), len(names)
        self._open: dict[str, str] = {}  # adapter -> its request
        self.seconds: list[float] = []  # that each call took

    def feed(self) -> None:
        started, get = time.perf_counter(), self._engine._adapters.get
        for name in [n for n in self._open if get(n).resident]:
            self._engine.abort(self._open.pop(name))
        for name in itertools.islice(self._turn, self._number):
            if len(self._open) == self._window:
                break
            if name not in self._open and not get(name).resident:
                self._open[name] = self._engine.add_request([1], name, SamplingParams(max_tokens=1))
        if len(self._open) < self._window:
            raise RuntimeError(f"all of {self._number} adapters are resident or asked for: register more")
        self.seconds.append(time.perf_counter() - started)
