"""What the host does for loads beside decodes of Llama-3-8B on a Hopper GPU: ms of CPU time, copies begun.

    python -m benchmarks.bench_host_loads [--record]

256 decodes, and adapters of one rank on q, k, v and o that are asked for as in `bench_adapters loads`: a
full pool from which others are evicted for them, at a pace of most of the link. Steps' programs and copies
are stand-ins; the engine, the loader, the pool and what comes before the CUDA driver are the real ones. Steps
follow each other in the time that an H200 takes for one. `copies` are calls of the driver, each of pages that
lie side by side; `asking` is the benchmark's own share.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from benchmarks.adapters.loads import LoadStream, loading, pool_of
from benchmarks.bench_host import (
    BATCH,
    DTYPE,
    MODEL,
    PAGE_TOKENS,
    Clock,
    HostRunner,
    new_engine,
    stand_in_adapter,
)
from benchmarks.record import record
from slora_jax import ModelConfig, SamplingParams
from slora_jax.engine import Engine
from slora_jax.lora.transfer import AdapterTransfer, HostCopy, StagedCopy
from slora_jax.step import POOL_SPEC

RANKS, MODULES = (64, 16, 8), ("q_proj", "k_proj", "v_proj", "o_proj")
NUM_PAGES = 37_973  # of an H200 (689eddc)
CONTEXT, WARM = 400, 120  # tokens; steps until loads are steady
PAGE_ELEMS = 8  # as what is copied does not matter
STEP_SECONDS, LINK, STAGING = 0.0112, 50e9, 1_244_299_264  # of an H200 (load_bandwidth, 689eddc): s, bytes/s


@dataclasses.dataclass(eq=False)
class _Event:
    """Done when it is looked at a second time: a step later."""

    looks: int = 0

    def is_done(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def wait(self) -> None:
        pass


class _Dma:
    """Counts copies."""

    def __init__(self) -> None:
        self.copies = 0

    def copy(self, source: int, target: int, **sizes: int) -> None:
        self.copies += 1

    def event(self) -> _Event:
        return _Event()

    def wait(self) -> None:
        pass


class _LoadingRunner(HostRunner):
    """A HostRunner whose adapters come as on a GPU, but for the copies."""

    stages_adapters = True

    def __init__(
        self, model_config: ModelConfig, config: Any, mesh: Any, layout: Any, num_pages: int, *more: Any
    ) -> None:
        super().__init__(model_config, config, mesh, layout, num_pages, *more)
        self._zeros = jnp.zeros((MODEL.num_hidden_layers, num_pages, PAGE_ELEMS), DTYPE)
        self._pinned = NamedSharding(mesh, POOL_SPEC, memory_kind="pinned_host")
        self.dma = _Dma()
        self._transfer = AdapterTransfer(mesh, self._zeros, POOL_SPEC, staged=True, dma=[self.dma])
        self.copy_bytes_per_s = LINK

    def host_copy(self, pages: np.ndarray) -> HostCopy:
        return HostCopy(jax.device_put(np.zeros((*pages.shape[:2], PAGE_ELEMS), DTYPE), self._pinned))

    def stage_adapters(self, copies: Any, pages: Any) -> list[StagedCopy]:
        return list(self._transfer.stage(self._zeros, copies, pages))

    def write_adapter(self, staged: StagedCopy) -> None:
        self._transfer.write(self._zeros, staged)


def start(engine: Engine) -> None:
    """A batch of decodes that last, of prompts that share nothing."""
    rng = np.random.default_rng(0)
    for seed in range(BATCH):
        params = SamplingParams(max_tokens=4096, temperature=0.8, seed=seed, ignore_eos=True)
        engine.add_request(rng.integers(0, MODEL.vocab_size, CONTEXT).tolist(), None, params)
    while engine._scheduler.waiting or any(s.remaining > 1 for s in engine._scheduler.running):
        engine.step()


def measure(rank: int, steps: int) -> dict[str, float]:
    """Medians over steps of the host's ms beside loads and alone, and means of what is begun in a step."""
    packed = stand_in_adapter(rank, MODULES)
    sequence_pages = -(-(CONTEXT + 2 * WARM + 2 * steps) // PAGE_TOKENS)
    pages, window = pool_of(
        packed.nbytes,
        packed.layout.num_pages,
        staging=STAGING,
        batch=BATCH,
        sequence_pages=sequence_pages,
        num_pages=NUM_PAGES,
    )
    held = (pages - 1 - BATCH * (CONTEXT // PAGE_TOKENS)) // packed.layout.num_pages
    adapters = held + 2 * window
    engine = new_engine(
        adapters,
        ranks=(rank,),
        modules=MODULES,
        num_pages=pages,
        runner=_LoadingRunner,
        **loading(window, STAGING),
    )
    runner: Any = engine._runner
    start(engine)
    stream = LoadStream(engine, [f"a{i}" for i in range(adapters)], window)
    gc.collect()
    gc.freeze()  # as the server does
    alone: list[float] = []
    beside: list[float] = []
    asking: list[float] = []
    loads = copies = 0
    end = time.perf_counter()
    with Clock() as clock:
        for i in range(2 * (WARM + steps)):
            streams, counts = i >= WARM + steps, i % (WARM + steps) >= WARM
            if i == 2 * WARM + steps:
                loads, copies = engine._loader.loads, runner.dma.copies
            began = time.thread_time()
            if streams:
                stream.feed()
            asked = time.thread_time() - began
            clock.spent.clear()
            engine.step()
            if counts:
                (beside if streams else alone).append(1e3 * clock.spent["step"])
            if counts and streams:
                asking.append(1e3 * asked)
            end = max(end + STEP_SECONDS, time.perf_counter())
            time.sleep(max(0.0, end - time.perf_counter()))
    gc.unfreeze()
    return {
        "step": statistics.median(beside),
        "alone": statistics.median(alone),
        "asking": statistics.median(asking),
        "loads": (engine._loader.loads - loads) / steps,
        "copies": (runner.dma.copies - copies) / steps,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table; with --record, also to benchmarks/results/cpu.jsonl."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help="timed steps of each case (default 100)")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--record", action="store_true", help="add the figures to results/cpu.jsonl")
    args = parser.parse_args(arguments)
    print("      rank      step     alone    asking     loads    copies")
    for rank in args.ranks:
        figures = {name: round(figure, 2) for name, figure in measure(rank, args.steps).items()}
        print(f"{rank:>10}" + "".join(f"{figure:>10.2f}" for figure in figures.values()), flush=True)
        if args.record:
            case = {"model": "Llama-3-8B", "decodes": BATCH, "rank": rank}
            more: dict[str, Any] = {name: figure for name, figure in figures.items() if name != "step"}
            record("cpu", "host_loads", case, figures["step"], "ms", **more)


if __name__ == "__main__":
    main()
