"""What the host does for a step of Llama-3-8B on a Hopper GPU, in ms of its thread's CPU time.

    python -m benchmarks.bench_host [--record]

The engine, the scheduler and the planner of the Mosaic kernels are the real ones, over the 8B page layout; a
step's program is a stand-in that computes nothing. A batch of 256 runs without adapters and
with 256 distinct ones of ranks 64, 32, 16 and 8; in mixed batches every fourth step ends 8 requests, for
which 8 prompts come. Medians over steps, in mixed batches means, by part; building is a part of launching.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import slora_jax.engine
import slora_jax.runner
from benchmarks.engine.models import hf_config
from benchmarks.record import record
from slora_jax import EngineConfig, ModelConfig, SamplingParams
from slora_jax.batch import BatchBuilder
from slora_jax.engine import Engine
from slora_jax.lora.loader import PreparedAdapter
from slora_jax.lora.packing import PackedAdapter
from slora_jax.lora.transfer import ArrayCopy, HostCopy, StagedCopy
from slora_jax.memory.layout import MODULES, PageLayout
from slora_jax.memory.sizing import PoolSize
from slora_jax.pallas_kernels.mosaic_backend import MOSAIC
from slora_jax.runner import ModelRunner
from slora_jax.sharding.mesh import make_mesh
from slora_jax.step_loop import StepLoop
from slora_jax.step_shape import StepShape

BATCH, RANKS, PROMPT_TOKENS, NUM_PAGES = 256, (64, 32, 16, 8), 128, 400_000
JOIN_EVERY, JOINING = 4, 8  # of mixed batches: steps between prompts, and how many come
MODEL = ModelConfig.from_hf(hf_config("llama-3-8b"))
PAGE_TOKENS, DTYPE = EngineConfig().page_tokens, jnp.dtype(EngineConfig().dtype)
PARTS = {  # of a step: the method that does it
    "schedule": (StepLoop, "schedule"),
    "build": (BatchBuilder, "build"),
    "launch": (ModelRunner, "launch"),
    "collect": (StepLoop, "collect"),
    "step": (StepLoop, "step"),
}


@dataclasses.dataclass(frozen=True)
class _Output:
    tokens: jax.Array
    logits: None = None


@functools.cache
def _output(rows: int) -> _Output:
    return _Output(jnp.full(rows, 7, jnp.int32))


class HostRunner(ModelRunner):
    """A ModelRunner whose programs and copies are stand-ins."""

    def __init__(self, model_config: ModelConfig, *args: Any) -> None:
        stand_ins: dict[str, Any] = dict.fromkeys(
            ("_fuse", "Llama", "ProgramBuilder", "AdapterTransfer"), mock.MagicMock()
        )
        stand_ins |= {"select_backend": lambda *_: MOSAIC, "_initial_state": lambda *_: (None, None)}
        with mock.patch.multiple(slora_jax.runner, **stand_ins):
            super().__init__(model_config, *args)
        self.copy_bytes_per_s = None

    stages_adapters = False
    pinned_host_limit = None

    def host_copy(self, pages: np.ndarray) -> HostCopy:
        return HostCopy(np.empty(0))

    def stage_adapters(self, copies: Any, pages: Any) -> list[StagedCopy]:
        return [ArrayCopy(np.empty(0), np.empty(0)) for _ in copies]

    def write_adapter(self, staged: StagedCopy) -> None:
        pass

    def program(self, shape: StepShape) -> Any:
        output = _output(shape.rows)
        return lambda pool, slots, packed: (pool, slots, output)


class Clock:
    """Seconds of CPU time that each of PARTS takes, while it is entered."""

    def __enter__(self) -> Self:
        self.spent: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._patches = [
            mock.patch.object(owner, method, self._timed(part, getattr(owner, method)))
            for part, (owner, method) in PARTS.items()
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.spent[part] += time.thread_time() - started

        return timed


def new_engine(
    adapters: int,
    *,
    ranks: Sequence[int] = RANKS,
    modules: Sequence[str] = MODULES,
    num_pages: int = NUM_PAGES,
    runner: type[HostRunner] = HostRunner,
    **fields: Any,
) -> Engine:
    """An engine with so many adapters "a0", "a1", ... of these ranks in turn."""
    config = EngineConfig(max_batch_size=BATCH, max_step_tokens=2048, adapter_host_bytes=1 << 47, **fields)
    size = PoolSize(num_pages, MODEL.max_position_embeddings)
    stand_ins: dict[str, Any] = {"ModelRunner": runner, "size_pool": lambda *_: size}
    with mock.patch.multiple(slora_jax.engine, **stand_ins):
        engine = Engine(MODEL, {}, config, make_mesh(1))
    for i in range(adapters):
        packed = stand_in_adapter(ranks[i % len(ranks)], modules)
        engine.load_adapter(f"a{i}", PreparedAdapter(f"/none/{i}", packed))
    return engine


def stand_in_adapter(rank: int, modules: Sequence[str]) -> PackedAdapter:
    """An adapter of zeros, which take no memory."""
    layout = PageLayout.for_model(MODEL, PAGE_TOKENS, 1)
    placed = layout.adapter(dict.fromkeys(modules, rank))
    shape = layout.n_layers, placed.num_pages, layout.page_elems
    return PackedAdapter(np.broadcast_to(np.zeros((), DTYPE), shape), placed, rank, tuple(modules), {})


def requests(engine: Engine, adapters: int, mixed: bool) -> Iterator[None]:
    """Ask for one more request at each turn."""
    rng = np.random.default_rng(0)
    for i in range(1 << 30):
        prompt = rng.integers(0, MODEL.vocab_size, PROMPT_TOKENS).tolist()
        length = JOIN_EVERY * (1 + i // JOINING % (BATCH // JOINING)) if mixed and i < BATCH else None
        length = length or (JOIN_EVERY * BATCH // JOINING if mixed else 4096)
        params = SamplingParams(max_tokens=length, temperature=0.8, seed=i, ignore_eos=True)
        engine.add_request(prompt, f"a{i % adapters}" if adapters else None, params)
        yield


def steps(adapters: int, mixed: bool, count: int) -> dict[str, list[float]]:
    """Of each part, ms in each of `count` steps of a full batch."""
    engine = new_engine(adapters)
    more = requests(engine, adapters, mixed)
    for _ in range(BATCH):
        next(more)
    for _ in range(40):  # prompts, then decodes
        engine.step()
    gc.collect()
    gc.freeze()  # as the server does
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    with Clock() as clock:
        for _ in range(count):
            for _ in range(BATCH - len(engine.requests)):
                next(more)
            clock.spent.clear()
            engine.step()
            for part, spent in times.items():
                spent.append(1e3 * clock.spent[part])
    gc.unfreeze()
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table; with --record, also to benchmarks/results/cpu.jsonl."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each case (default 200)")
    parser.add_argument("--record", action="store_true", help="add the figures to results/cpu.jsonl")
    args = parser.parse_args(arguments)
    print("".join(f"{name:>10}" for name in ("adapters", "mixed", *PARTS)))
    for adapters in (0, BATCH):
        for mixed in (False, True):
            times = steps(adapters, mixed, args.steps)
            # Most mixed steps are decodes alone: their mean has the prompts' share.
            middle = statistics.mean if mixed else statistics.median
            ms = {part: middle(spent) for part, spent in times.items()}
            print(f"{adapters:>10}{mixed!s:>10}" + "".join(f"{figure:>10.2f}" for figure in ms.values()))
            if args.record:
                case = {"model": "Llama-3-8B", "decodes": BATCH, "adapters": adapters, "mixed": mixed}
                parts = {part: round(ms[part], 3) for part in PARTS}
                record("cpu", "host_step", case, round(ms["step"], 2), "ms", parts=parts)


if __name__ == "__main__":
    main()
