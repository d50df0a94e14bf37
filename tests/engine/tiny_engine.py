"""Real engines over the tiny model of `tests/conftest.py`, what is asked of them, less memory for them."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slora_jax import EngineConfig, SamplingParams
from slora_jax.engine import Engine

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [[1, 2, 3], [5] * 20, [7], list(range(100)), [9, 8, 7, 6]]
ADAPTERS: dict[str, dict[str, Any]] = {
    "qv_r3": {"ranks": {"q_proj": 3, "v_proj": 3}},
    "all_r8": {
        "ranks": dict.fromkeys(
            ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 8
        )
    },
    "mlp_r17": {"ranks": dict.fromkeys(("gate_proj", "up_proj", "down_proj"), 17), "use_rslora": True},
    "one_layer_r40": {"ranks": {"o_proj": 40, "k_proj": 40}, "layers": [1]},
}


def make_engine(model: Path, adapters: Mapping[str, Path] | None = None, **fields: Any) -> Engine:
    """An engine with random weights in the folder's shape, and these adapters loaded.

    Engines whose pools are as large share compiled programs.
    """
    sizes = {"max_batch_size": 4, "max_step_tokens": 64, "max_model_len": 256, "num_pages": 900}
    config = EngineConfig(**{"dtype": "float32", "load_format": "dummy", **sizes, **fields})
    engine = Engine.from_pretrained(model, config=config)
    for name, path in (adapters or {}).items():
        engine.load_adapter(name, path)
    return engine


@contextlib.contextmanager
def constrained(
    engine: Engine, *, free_pages: int, chunk: int | None = None, seed: int = 0
) -> Iterator[None]:
    """Leave the pool so many pages in random order, and prefill in chunks of `chunk` tokens.

    Compiled steps know nothing of either: an engine made for it would compile its own.
    """
    pool, scheduler = engine._pool, engine._scheduler
    for adapter in engine._adapters.resident:
        engine._adapters._evict(adapter)
    engine.reset_prefix_cache()
    hostages = pool.allocate(pool.num_free, "kv")
    assert hostages is not None
    random.Random(seed).shuffle(hostages)
    pool.release([hostages.pop() for _ in range(free_pages)])
    limits = scheduler._limits
    scheduler._limits = dataclasses.replace(limits, max_chunk_tokens=chunk or limits.max_chunk_tokens)
    try:
        yield
    finally:
        scheduler._limits = limits
        pool.release(hostages)
        engine.check_integrity()
