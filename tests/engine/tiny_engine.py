"""Real engines over the tiny model of `tests/conftest.py`, and what is asked of them."""

from __future__ import annotations

from collections.abc import Mapping
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
    """An engine with random weights in the folder's shape, and these adapters loaded."""
    config = EngineConfig(
        dtype="float32",
        load_format="dummy",
        max_batch_size=4,
        max_step_tokens=64,
        max_model_len=256,
        num_pages=fields.pop("num_pages", 300),
        **fields,
    )
    engine = Engine.from_pretrained(model, config=config)
    for name, path in (adapters or {}).items():
        engine.load_adapter(name, path)
    return engine
