"""Configs: what a config.json may say, and how a wrong field of any of them is refused."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from slora_jax.config import EngineConfig, ModelConfig
from slora_jax.server.config import ServerConfig
from tests.conftest import TINY_CONFIG


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab_size", None, "missing vocab_size"),
        ("vocab_size", "x", "vocab_size must be an integer, got 'x'"),
        ("hidden_size", 2.5, "hidden_size must be an integer, got 2.5"),
        ("num_hidden_layers", True, "num_hidden_layers must be an integer, got True"),
        ("num_attention_heads", 0, "num_attention_heads must be at least 1, got 0"),
        ("num_attention_heads", -8, "num_attention_heads must be at least 1, got -8"),
        ("num_key_value_heads", "x", "num_key_value_heads must be an integer"),
        ("head_dim", [1], r"head_dim must be an integer, got \[1\]"),
        ("max_position_embeddings", -1, "max_position_embeddings must be at least 1"),
        ("rms_norm_eps", "x", "rms_norm_eps must be a number"),
        ("rms_norm_eps", -1, "rms_norm_eps must be in"),
        ("rope_theta", "x", "rope_theta must be a number"),
        ("rope_theta", -1, "rope_theta must be above 0"),
        ("rope_scaling", 5, "rope_scaling must be an object or null, got 5"),
        ("rope_scaling", {"type": "linear", "factor": "x"}, "rope_scaling.factor must be a number"),
        ("rope_scaling", {"type": "linear", "factor": 0}, "rope_scaling.factor must be above 0"),
        ("eos_token_id", ["a"], "eos_token_id must be an integer, got 'a'"),
        ("eos_token_id", [None], "eos_token_id must be an integer, got None"),
        ("bos_token_id", "x", "bos_token_id must be an integer, got 'x'"),
        ("tie_word_embeddings", "no", "tie_word_embeddings must be True or False, got 'no'"),
    ],
)
def test_a_wrong_field_is_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**TINY_CONFIG, field: value})


def test_null_is_as_good_as_absent() -> None:
    names = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "eos_token_id", "bos_token_id")
    absent = {name: value for name, value in TINY_CONFIG.items() if name not in names}
    assert ModelConfig.from_hf({**absent, **dict.fromkeys(names)}) == ModelConfig.from_hf(absent)
    assert ModelConfig.from_hf(absent).num_key_value_heads == TINY_CONFIG["num_attention_heads"]


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_no_number_may_be_nan(config: type[EngineConfig | ServerConfig]) -> None:
    numbers = [name for name, kind in typing.get_type_hints(config).items() if kind is float]
    assert len(numbers) >= 3
    for name in numbers:
        nan: dict[str, Any] = {name: float("nan")}
        with pytest.raises(
            ValueError, match=f"{config.__name__}: {name} must be (in|above|at least) .*, got nan"
        ):
            config(**nan)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_model_len", 1, "max_model_len must be at least 2 or None, got 1"),
        ("max_batch_size", 2**40, r"max_batch_size must be in \[1, 1048576\]"),
        ("max_logprobs", 2**40, r"max_logprobs must be in \[0, 2147483647\]"),
    ],
)
def test_sizes_that_no_request_or_device_could_have(field: str, value: int, message: str) -> None:
    sizes: dict[str, Any] = {"max_step_tokens": 2**40, field: value}
    with pytest.raises(ValueError, match=message):
        EngineConfig(**sizes)
