"""Engines of random weights in the shapes of known models."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import gpu_name
from slora_jax import EngineConfig
from slora_jax.engine import Engine
from slora_jax.programs import GPU_OPTIONS

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
MAX_MODEL_LEN = 1040


def hf_config(model: str) -> dict[str, Any]:
    """The `config.json` of one of MODELS."""
    return {"model_type": "llama", "max_position_embeddings": 8192, **MODELS[model]}


def make_engine(model: str, *, max_batch: int, **fields: Any) -> Engine:
    """An engine of random weights in a model's shape; `fields` are EngineConfig's."""
    config = EngineConfig(
        dtype="bfloat16",
        enable_prefix_caching=False,  # every prompt is computed, also in a second run
        load_format="dummy",
        max_batch_size=max_batch,
        max_step_tokens=fields.pop("max_step_tokens", 2048),
        **fields,
    )
    return random_engine(hf_config(model), config)


def random_engine(shape: Mapping[str, Any], config: EngineConfig) -> Engine:
    """An engine over a folder that has this `config.json` and nothing else: `load_format` must be "dummy"."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        return Engine.from_pretrained(folder, config=config)


@contextlib.contextmanager
def compiled_with(options: Sequence[str], engine: Engine | None) -> Iterator[None]:
    """Within, steps are compiled with XLA's OPTION=VALUE too; those compiled before are set aside.

    "true" and "false" may be written as in XLA_FLAGS. Raises SystemExit without a GPU: the engine compiles
    for a CPU without options, and what is measured would not be what its case says.
    """
    if options and gpu_name() is None:
        raise SystemExit(
            f"--xla {' '.join(options)}: the engine gives XLA options on a GPU only; leave --xla out"
        )
    before = dict(GPU_OPTIONS)
    holders = [(engine._runner, "_programs"), (engine._runner._builder, "_compiled")] if engine else []
    kept = [getattr(holder, name) for holder, name in holders]
    if options:
        for name, value in (option.split("=", 1) for option in options):
            GPU_OPTIONS[name] = value.capitalize() if value.lower() in ("true", "false") else value
        for holder, name in holders:
            setattr(holder, name, {})
    try:
        yield
    finally:
        GPU_OPTIONS.clear()
        GPU_OPTIONS.update(before)
        for (holder, name), programs in zip(holders, kept, strict=True):
            setattr(holder, name, programs)
