"""Adapter folders that the tests of real engines share."""

from __future__ import annotations

from pathlib import Path

import pytest

from slora_jax.weights import load_model_config, resolve_model
from tests.engine.tiny_engine import ADAPTERS
from tests.lora.peft_files import write_peft_adapter


@pytest.fixture(scope="session")
def adapters(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shape = load_model_config(resolve_model(tiny_model_dir, "dummy"))
    folder = tmp_path_factory.mktemp("peft")
    for seed, (name, fields) in enumerate(ADAPTERS.items()):
        write_peft_adapter(folder / name, shape, seed=seed, std=0.3, **fields)
    return {name: folder / name for name in ADAPTERS}
