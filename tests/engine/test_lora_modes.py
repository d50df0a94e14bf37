"""Every way to apply adapters, and to keep them in memory, gives the same tokens on a real (tiny) model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slora_jax import EngineConfig, SamplingParams
from slora_jax.engine import Engine
from tests.engine.test_engine import ADAPTERS, GREEDY, PROMPTS, adapters, make_engine

__all__ = ["adapters"]  # a fixture
SLOTS = {"unified_memory": False, "adapter_slots": 2, "max_lora_rank": 40, "num_pages": 900}
MODES: dict[str, dict[str, Any]] = {
    "slots": SLOTS,
    "padded-bmm": {"lora_mode": "padded-bmm"},
    "padded-bmm in slots": {"lora_mode": "padded-bmm", **SLOTS},
}


def start(model: Path, adapters: dict[str, Path], **fields: Any) -> Engine:
    engine = make_engine(model, **fields)
    for name, path in adapters.items():
        engine.load_adapter(name, path)
    return engine


@pytest.fixture(scope="module")
def gathered(tiny_model_dir: Path, adapters: dict[str, Path]) -> Engine:
    return start(tiny_model_dir, adapters)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_gives_the_tokens_of_the_gathered_kernels(
    gathered: Engine, tiny_model_dir: Path, adapters: dict[str, Path], mode: str
) -> None:
    """Mixed batches: base, odd ranks, other modules, one layer only; greedy, then sampled with penalties."""
    engine = start(tiny_model_dir, adapters, **MODES[mode])
    names = [None, *ADAPTERS, None, *reversed(ADAPTERS)]
    prompts = [*PROMPTS, *([i, *prompt] for i, prompt in enumerate(PROMPTS))]
    drawn = SamplingParams(max_tokens=9, temperature=0.8, top_k=30, presence_penalty=0.5, seed=7)
    for params in (GREEDY, drawn):
        want = [o.token_ids for o in gathered.generate(prompts, names, params)]
        assert [o.token_ids for o in engine.generate(prompts, names, params)] == want
    engine.check_integrity()


def test_padded_bmm_over_a_tensor_parallel_mesh(
    gathered: Engine, tiny_model_dir: Path, adapters: dict[str, Path]
) -> None:
    engine = start(tiny_model_dir, adapters, lora_mode="padded-bmm", tensor_parallel_size=2)
    names = [None, *ADAPTERS]
    want = [o.token_ids for o in gathered.generate(PROMPTS, names, GREEDY)]
    assert [o.token_ids for o in engine.generate(PROMPTS, names, GREEDY)] == want


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lora_mode must be one of gathered, padded-bmm, .*got 'bmm'"):
        EngineConfig(lora_mode="bmm")  # type: ignore[arg-type]
