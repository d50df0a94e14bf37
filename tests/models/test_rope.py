"""RoPE frequencies of every `rope_scaling` type against what transformers computes (recorded)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from slora_jax import ModelConfig
from slora_jax.models.rope import Rope

RECORD = json.loads((Path(__file__).parent.parent / "parity" / "rope.json").read_text())
RESULTS = [
    pytest.param(case["config"], result, id=f"{case['name']}-{result['seq_len']}")
    for case in RECORD["cases"]
    for result in case["results"]
]


@pytest.mark.parametrize(("config", "result"), RESULTS)
def test_the_last_position_of_a_sequence_is_rotated_as_transformers_does(
    config: dict[str, Any], result: dict[str, Any]
) -> None:
    rope = Rope.from_config(ModelConfig.from_hf(config))
    length = result["seq_len"]
    cos, sin = rope.cos_sin(jnp.array([length - 1]), jnp.array([length]))
    half = cos.shape[1]
    # angles reach length * 1 radians, of which float32 keeps length * 6e-8
    np.testing.assert_allclose(cos[0], np.asarray(result["cos_last"])[:half], atol=2e-6 * length)
    np.testing.assert_allclose(sin[0], np.asarray(result["sin_last"])[:half], atol=2e-6 * length)
    assert rope.attention_factor == pytest.approx(result.get("attention_factor", 1.0), rel=1e-6)


def test_every_supported_type_is_recorded() -> None:
    assert {c["rope_type"] for c in RECORD["cases"]} >= {"default", "linear", "dynamic", "llama3", "yarn"}


def test_a_token_is_rotated_by_its_own_sequence_s_length() -> None:
    """In one batch, a short sequence keeps the short frequencies beside one beyond the switch length."""
    config = next(c["config"] for c in RECORD["cases"] if c["rope_type"] == "dynamic")
    rope = Rope.from_config(ModelConfig.from_hf(config))
    limit = config["max_position_embeddings"]
    cos, _ = rope.cos_sin(jnp.array([5, 5]), jnp.array([6, 2 * limit]))
    alone, _ = rope.cos_sin(jnp.array([5]), jnp.array([6]))
    np.testing.assert_array_equal(cos[0], alone[0])
    assert not np.allclose(cos[0], cos[1])


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "spiral"}, "'spiral' is not supported"),
        ({"rope_type": "linear"}, "needs the field 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs the field 'low_freq_factor'"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0], "factor": 2.0},
            "need head_dim / 2",
        ),
    ],
)
def test_what_is_not_computed_is_refused(scaling: dict[str, Any], message: str) -> None:
    config = ModelConfig(64, 64, 1, 4, 2, 16, 64, 128, rope_scaling=scaling)
    with pytest.raises(ValueError, match=message):
        Rope.from_config(config)
