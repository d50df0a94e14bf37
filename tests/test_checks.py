"""Kinds of values: what callers may give for a field, and what is refused by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from slora_jax import EngineConfig, SamplingParams
from slora_jax.checks import Interval, check_fields


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


def test_a_tenant_whose_name_no_metric_could_show_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a tenant's name \(tenant_weights\) must be UTF-8"):
        EngineConfig(tenant_weights={"caf\udce9": 2.0})


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


@pytest.mark.parametrize(
    ("within", "beyond", "words"),
    [
        ({"stop": ["x"] * 128}, {"stop": ["x"] * 129}, "stop may have at most 128 entries, got 129"),
        (
            {"stop": "x" * 1024},
            {"stop": ["y", "x" * 1025]},
            "stop may have strings of at most 1024 characters, got one of 1025",
        ),
        (
            {"stop_token_ids": range(128)},
            {"stop_token_ids": range(129)},
            "stop_token_ids may have at most 128 entries, got 129",
        ),
        (
            {"logit_bias": dict.fromkeys(range(1024), 1.0)},
            {"logit_bias": dict.fromkeys(range(1025), 1.0)},
            "logit_bias may have at most 1024 entries, got 1025",
        ),
    ],
)
def test_what_costs_the_engine_time_at_every_token_is_limited(
    within: dict[str, Any], beyond: dict[str, Any], words: str
) -> None:
    SamplingParams(**within)
    with pytest.raises(ValueError, match=words):
        SamplingParams(**beyond)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_the_engine_s_seed_has_bounds(seed: int) -> None:
    with pytest.raises(ValueError, match=rf"seed must be in \[0, {2**63 - 1}\], got "):
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


@pytest.mark.parametrize(
    ("limits", "words", "within", "beyond"),
    [
        (Interval(1), "at least 1", (1, 1e30), (0, -1, math.nan)),
        (Interval(0, above_low=True), "above 0", (5e-324,), (0, -1, math.nan)),
        (Interval(0, 1), r"in \[0, 1\]", (0, 0.5, 1), (-0.1, 1.1, math.nan)),
        (
            Interval(0, 1e9, above_low=True),
            r"above 0 and at most 1e\+09",
            (0.1, 1e9),
            (0, 2e9, math.nan, math.inf),
        ),
    ],
)
def test_a_number_beyond_its_fields_limits_is_refused_with_them(
    limits: Interval, words: str, within: tuple[float, ...], beyond: tuple[float, ...]
) -> None:
    @dataclasses.dataclass(frozen=True)
    class Config:
        x: float | None = dataclasses.field(default=None, metadata={"limits": limits})

    check_fields(Config())
    for value in within:
        check_fields(Config(value))
    for value in beyond:
        with pytest.raises(ValueError, match=rf"x must be {words} or None, got {value}"):
            check_fields(Config(value))


def test_every_number_and_choice_of_the_engines_config_has_limits() -> None:
    for field in dataclasses.fields(EngineConfig):
        if isinstance(field.default, str) and field.name != "compile_cache_dir":
            wrong: list[Any] = ["none such"]
        elif isinstance(field.default, bool) or not {"int", "float"} & set(str(field.type).split(" | ")):
            continue
        else:
            wrong = [-1, math.inf] if "float" in str(field.type) else [-1, 2**63]
        for value in wrong:
            with pytest.raises(ValueError, match=rf"EngineConfig: {field.name} must be .*got "):
                EngineConfig(**{field.name: value})
