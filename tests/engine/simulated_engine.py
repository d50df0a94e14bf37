"""Engines of a tiny shape over a simulated device, and adapters for them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import slora_jax.engine
from slora_jax import EngineConfig, ModelConfig, SamplingParams
from slora_jax.engine import Engine
from slora_jax.sharding.mesh import make_mesh
from tests.engine.simulated_runner import BASE, SimulatedRunner, expected_tokens, simulated_adapter

VOCAB = 97
MODEL = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_position_embeddings=96,
)
SLOT_RANK = 24
SLOT_PAGES = 96  # of a slot for that rank: 8 rank rows of every module are 32


def simulated_engine(runner: type[SimulatedRunner] = SimulatedRunner, **fields: Any) -> Engine:
    """An engine of MODEL over a simulated device; `fields` are EngineConfig's."""
    config = EngineConfig(dtype="float32", page_tokens=4, **fields)
    with mock.patch.object(slora_jax.engine, "ModelRunner", runner):
        return Engine(MODEL, {}, config, make_mesh(1))


def engine_with(*ranks: int, **fields: Any) -> Engine:
    """An engine with adapters "a0", "a1", ... of these ranks, whose fingerprints are 1, 2, ..."""
    engine = simulated_engine(max_batch_size=4, max_step_tokens=32, **fields)
    engine._reclaim.costs.measured = lambda *_: None  # type: ignore[method-assign]  # of no real device
    for i, rank in enumerate(ranks):
        load(engine, f"a{i}", i + 1, rank)
    return engine


def load(engine: Engine, name: str, fingerprint: int, rank: int = 8) -> int:
    adapter = simulated_adapter(engine._runner.layout, fingerprint, rank)  # type: ignore[attr-defined]
    return engine.load_adapter(name, adapter, replace=True).pages


def resident(engine: Engine) -> set[str]:
    engine.check_integrity()
    return {a.name for a in engine._adapters.resident}


def ask(engine: Engine, prompt: list[int], name: str | None = None, max_tokens: int = 4) -> None:
    fingerprint = BASE if name is None else int(name[1:]) + 1
    out = engine.generate([prompt], name, SamplingParams(max_tokens=max_tokens))[0]
    assert out.token_ids == expected_tokens(prompt, fingerprint, max_tokens, VOCAB)
