"""How much host memory adapters may take."""

from __future__ import annotations

import os

import pytest

from slora_jax.lora.host_cache import host_budget


def test_the_budget_is_half_of_the_memory_unless_it_is_chosen() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < host_budget(None, None) <= memory // 2
    assert host_budget(123, None) == 123


def test_pinned_memory_has_a_limit_of_its_own() -> None:
    assert host_budget(None, 1000) == 750
    assert host_budget(900, 1000) == 900
    with pytest.raises(ValueError, match="set the environment variable XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):
        host_budget(1001, 1000)
