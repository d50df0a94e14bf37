"""A tiny model that has a tokenizer, and adapters for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from slora_jax.config import ModelConfig
from tests.conftest import TINY_CONFIG
from tests.lora.peft_files import write_peft_adapter
from tests.text.builders import byte_level_backend, write_folder


@pytest.fixture(scope="module")
def talking_model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer of bytes and a chat template."""
    folder = tmp_path_factory.mktemp("talking") / "model"
    shutil.copytree(tiny_model_dir, folder)
    template = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    return write_folder(folder, {"tokenizer_config.json": {"chat_template": template}}, byte_level_backend())


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two adapters of different ranks and modules."""
    folder, config = tmp_path_factory.mktemp("adapters"), ModelConfig.from_hf(TINY_CONFIG)
    write_peft_adapter(folder / "attention", config, {"q_proj": 4, "v_proj": 4}, seed=1, std=0.5)
    write_peft_adapter(folder / "mlp", config, {"up_proj": 9, "down_proj": 9}, seed=2, std=0.5)
    return folder
