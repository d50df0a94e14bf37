"""Every way to apply adapters, and to keep them in memory, gives the same tokens on a real (tiny) model."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slora_jax import EngineConfig, SamplingParams
from slora_jax.engine import Engine
from tests.engine.tiny_engine import ADAPTERS, GREEDY, PROMPTS, make_engine

SLOTS = {"unified_memory": False, "adapter_slots": 2, "max_lora_rank": 40}
MODES: dict[str, dict[str, Any]] = {
    "slots": SLOTS,
    "padded-bmm": {"lora_mode": "padded-bmm"},
    "padded-bmm in slots": {"lora_mode": "padded-bmm", **SLOTS},
    "merge": {"lora_mode": "merge"},
    "merge in slots": {"lora_mode": "merge", **SLOTS},
}
COMBINED = [name for name in MODES if "in" in name.split()]


@pytest.fixture(scope="module")
def gathered(tiny_model_dir: Path, adapters: dict[str, Path]) -> Engine:
    return make_engine(tiny_model_dir, adapters)


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[pytest.mark.slow] * (mode in COMBINED)) for mode in MODES]
)
def test_a_mode_gives_the_tokens_of_the_gathered_kernels(
    gathered: Engine, tiny_model_dir: Path, adapters: dict[str, Path], mode: str
) -> None:
    """Mixed batches: base, odd ranks, other modules, one layer only; greedy, then sampled with penalties."""
    engine = make_engine(tiny_model_dir, adapters, **MODES[mode])
    names = [None, *ADAPTERS, None, *reversed(ADAPTERS)]
    prompts = [*PROMPTS, *([i, *prompt] for i, prompt in enumerate(PROMPTS))]
    drawn = SamplingParams(max_tokens=9, temperature=0.8, top_k=30, presence_penalty=0.5, seed=7)
    for params in (GREEDY, drawn):
        want = [o.token_ids for o in gathered.generate(prompts, names, params)]
        assert [o.token_ids for o in engine.generate(prompts, names, params)] == want
    engine.check_integrity()


@pytest.mark.parametrize("mode", ["padded-bmm", "merge"])
def test_a_mode_over_a_tensor_parallel_mesh(
    gathered: Engine, tiny_model_dir: Path, adapters: dict[str, Path], mode: str
) -> None:
    engine = make_engine(tiny_model_dir, adapters, lora_mode=mode, tensor_parallel_size=2)
    names = [None, *ADAPTERS]
    want = [o.token_ids for o in gathered.generate(PROMPTS, names, GREEDY)]
    assert [o.token_ids for o in engine.generate(PROMPTS, names, GREEDY)] == want


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_merged_before_leaves_no_trace(
    tiny_model_dir: Path, adapters: dict[str, Path], dtype: str
) -> None:
    """Base and adapters give the same logits to the bit, whatever was merged in between."""
    fields = {"record_logits": True, "enable_prefix_caching": False}
    engine = make_engine(tiny_model_dir, adapters, dtype=dtype, lora_mode="merge", **fields)
    base = [np.asarray(leaf) for leaf in engine._runner.parameters()]

    def logits(name: str | None) -> Any:
        return engine.generate([PROMPTS[1]], name, GREEDY)[0].logits

    first = {name: logits(name) for name in (None, *ADAPTERS)}
    for name in ("mlp_r17", None, "all_r8", "qv_r3", "one_layer_r40", "all_r8", None):
        np.testing.assert_array_equal(logits(name), first[name])
    assert engine._runner.merges == 4 + 7
    for leaf, loaded in zip(engine._runner.parameters(), base, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), loaded)


def test_a_merge_that_breaks_off_is_done_anew(
    gathered: Engine, tiny_model_dir: Path, adapters: dict[str, Path]
) -> None:
    engine = make_engine(tiny_model_dir, adapters, lora_mode="merge")
    merger = engine._runner._merger
    assert merger is not None
    whole, calls = list(merger._merges), itertools.count()

    def interrupted(*args: Any) -> Any:
        if next(calls) == 1:  # one of two layers has the adapter by then
            raise KeyboardInterrupt
        return whole[0](*args)

    merger._merges[0] = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPTS[0]], "qv_r3", GREEDY)
    for name in (None, "qv_r3"):
        want = gathered.generate([PROMPTS[0]], name, GREEDY)[0].token_ids
        assert engine.generate([PROMPTS[0]], name, GREEDY)[0].token_ids == want


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lora_mode must be one of gathered, padded-bmm, .*got 'bmm'"):
        EngineConfig(lora_mode="bmm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"leave cluster out of scheduling_policy 'vtc\+cluster'"):
        EngineConfig(lora_mode="merge", scheduling_policy="vtc+cluster")
