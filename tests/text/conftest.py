from __future__ import annotations

from pathlib import Path

import pytest

from slora_jax.text import Tokenizer
from tests.text.builders import byte_level_backend, sentencepiece_gguf


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_gguf)


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Llama's kind: a space in front of the text, byte fallback."""
    return Tokenizer.from_gguf(sentencepiece_gguf(tmp_path_factory.mktemp("spm") / "m.gguf"))


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_backend())
