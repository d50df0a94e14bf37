"""How many pages a pool gets and how long a sequence may be."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from slora_jax import EngineConfig, ModelConfig
from slora_jax.memory.layout import PageLayout
from slora_jax.memory.sizing import PoolSize, size_pool
from slora_jax.sharding.mesh import make_mesh

MODEL = ModelConfig(384, 64, 2, 8, 4, 16, 128, 512)


def size(**fields: Any) -> PoolSize:
    config = EngineConfig(**fields)
    return size_pool(MODEL, config, PageLayout.for_model(MODEL, config.page_tokens, 1), make_mesh(1))


def test_bytes_become_pages() -> None:
    page = 2 * 2 * 16 * 4 * 16 * 4  # layers, K and V, tokens, heads, head dim, bytes
    assert size(dtype="float32", pool_bytes=50 * page).num_pages == 50
    assert size(dtype="bfloat16", pool_bytes=50 * page).num_pages == 100


def test_a_small_pool_shortens_sequences_that_nobody_asked_to_be_long() -> None:
    assert size(num_pages=9).max_model_len == 8 * 16


def test_a_length_that_was_asked_for_must_fit() -> None:
    with pytest.raises(ValueError, match="max_model_len 512 does not fit: the pool has 8 pages"):
        size(num_pages=9, max_model_len=512)


def test_a_length_beyond_the_model_s_is_refused() -> None:
    with pytest.raises(ValueError, match="above the model's max_position_embeddings 512"):
        size(max_model_len=513)


def test_bytes_that_hold_no_page_are_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"100 bytes hold 0 pages of \d+ bytes; .* raise pool_bytes"):
        size(pool_bytes=100)


class Device:
    """An accelerator that reports its memory."""

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 10_000_000, "bytes_in_use": 500_000}


def test_merges_leave_room_for_a_second_copy_of_the_projections() -> None:
    mesh: Any = types.SimpleNamespace(devices=np.array([Device()]))
    layout = PageLayout.for_model(MODEL, 16, 1)
    gathered = size_pool(MODEL, EngineConfig(max_model_len=64), layout, mesh).num_pages
    merging = size_pool(MODEL, EngineConfig(max_model_len=64, lora_mode="merge"), layout, mesh).num_pages
    projections = 2 * 2 * (64 * (128 + 2 * 64) + 128 * 64 + 3 * 64 * 128)  # layers, bytes
    page = 2 * 2 * 16 * 4 * 16 * 2
    assert gathered == 8_000_000 // page
    assert merging == (8_000_000 - projections) // page


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"num_pages": 100_000_000_000}, "lower num_pages"),
        ({"num_pages": 60, "page_tokens": 2**40}, "lower num_pages or page_tokens"),
        ({"pool_bytes": 2**47}, "lower pool_bytes"),
    ],
)
def test_a_pool_beyond_all_memory_is_refused_before_it_is_made(fields: dict[str, Any], fix: str) -> None:
    with pytest.raises(ValueError, match=rf"takes \d+ bytes, this machine has \d+: {fix}"):
        size(**fields)
    mesh: Any = types.SimpleNamespace(devices=np.array([Device()]))
    config = EngineConfig(**fields)
    with pytest.raises(ValueError, match="a device has 10000000"):
        size_pool(MODEL, config, PageLayout.for_model(MODEL, config.page_tokens, 1), mesh)
