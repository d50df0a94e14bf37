"""Kinds of values: what callers may give for a field, and what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from slora_jax import EngineConfig, SamplingParams


@pytest.mark.parametrize(
    ("cls", "field", "value", "want"),
    [
        (SamplingParams, "n", 1.5, "an integer"),
        (SamplingParams, "n", True, "an integer"),
        (SamplingParams, "n", None, "an integer"),
        (SamplingParams, "max_tokens", 2.5, "an integer or None"),
        (SamplingParams, "max_tokens", "3", "an integer or None"),
        (SamplingParams, "min_tokens", 1.0, "an integer"),
        (SamplingParams, "temperature", "hot", "a number"),
        (SamplingParams, "temperature", None, "a number"),
        (SamplingParams, "top_k", 1.5, "an integer"),
        (SamplingParams, "seed", 1.5, "an integer or None"),
        (SamplingParams, "logprobs", 1.5, "an integer or None"),
        (SamplingParams, "ignore_eos", "no", "True or False"),
        (SamplingParams, "stop", [1], "a string"),
        (SamplingParams, "stop", b"x", "strings"),
        (SamplingParams, "stop_token_ids", 5, "a list of token ids"),
        (SamplingParams, "stop_token_ids", [1.9], "an integer"),
        (EngineConfig, "max_batch_size", 1.5, "an integer"),
        (EngineConfig, "page_tokens", True, "an integer"),
        (EngineConfig, "num_pages", 40.0, "an integer or None"),
        (EngineConfig, "seed", None, "an integer"),
        (EngineConfig, "memory_fraction", "half", "a number"),
        (EngineConfig, "record_logits", "no", "True or False"),
        (EngineConfig, "compile_cache_dir", 5, "a string or None"),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(cls: type, field: str, value: Any, want: str) -> None:
    with pytest.raises(ValueError, match=rf"{field} must be {want}, got "):
        cls(**{field: value})


@pytest.mark.parametrize("bias", [5, [1], {1.7: 1}, {"1": 1}, {1: "x"}, {1: None}])
def test_logit_bias_maps_integers_to_numbers(bias: Any) -> None:
    with pytest.raises(ValueError, match="logit_bias"):
        SamplingParams(logit_bias=bias)


def test_a_number_that_no_float_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature is too large"):
        SamplingParams(temperature=10**400)


def test_the_scalars_of_numpy_become_python_s() -> None:
    params = SamplingParams(
        n=np.int64(2),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        ignore_eos=np.True_,  # type: ignore[arg-type]
        stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
        logit_bias={np.int32(5): np.float32(1)},  # type: ignore[dict-item]
    )
    assert params == SamplingParams(
        n=2, temperature=0.5, ignore_eos=True, stop_token_ids=(3, 4), logit_bias={5: 1.0}
    )
    assert [type(v) for v in (params.n, params.temperature, params.ignore_eos)] == [int, float, bool]


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_the_engine_s_seed_has_bounds(seed: int) -> None:
    with pytest.raises(ValueError, match=r"seed must be in \[0, 2\^63\)"):
        EngineConfig(seed=seed)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e300},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"logit_bias": {1: 1e300}},
        {"logit_bias": {1: -1e39}},
    ],
)
def test_what_the_device_s_float32_cannot_hold_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(fields))}.*float32"):
        SamplingParams(**fields)
    SamplingParams(temperature=3e38, logit_bias={1: -math.inf, 2: 3e38})
