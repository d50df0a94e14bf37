"""Hugging Face folders: config.json, and safetensors read slice by slice."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from slora_jax.config import ModelConfig
from slora_jax.errors import CheckpointError
from slora_jax.models.params import ParamSpec
from slora_jax.weights.resolve import INDEX_FILE, safetensors_files
from slora_jax.weights.source import Array, Index, MatrixSource, StoredTensor

_FLOATS = ("F32", "F16", "BF16")
_MODULES = {
    "q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn",
    "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp",
}  # fmt: skip


def hf_name(name: str) -> str:
    """`layers.3.q_proj` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name == "lm_head":
        return "lm_head.weight"
    prefix, _, last = name.rpartition(".")
    parts = ["model", *([prefix] if prefix else []), *([_MODULES[last]] if last in _MODULES else []), last]
    return ".".join([*parts, "weight"])


def load_hf_config(path: Path) -> ModelConfig:
    """The ModelConfig of a folder's config.json (or of such a file itself).

    End-of-sequence ids come from generation_config.json beside it where that names any.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _read_json(file)
    generation = file.parent / "generation_config.json"
    if generation.is_file() and (eos := _read_json(generation).get("eos_token_id")) is not None:
        config["eos_token_id"] = eos
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown method")
        raise CheckpointError(
            f"{file}: quantised weights ({method}) are not supported; use the bf16/fp16 model or a GGUF file"
        )
    try:
        return ModelConfig.from_hf(config)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds a JSON {type(value).__name__}, not an object")
    return value


class SafetensorsSource(MatrixSource):
    """The safetensors of an HF folder, in one file or many, F32, F16 or BF16.

    Allowed without a use: `rotary_emb.inv_freq` buffers, and `lm_head.weight` where embeddings are tied.
    """

    def __init__(self, folder: Path, specs: Mapping[str, ParamSpec]) -> None:
        files, placed = _weight_files(folder)
        self._files: dict[Path, Any] = {}
        stored: dict[str, StoredTensor] = {}
        for file in files:
            self._files[file] = _open(file)
            for name in self._files[file].keys():  # noqa: SIM118 - a safe_open handle is no mapping
                if name in stored:
                    raise CheckpointError(f"{file}: tensor '{name}' is also in {stored[name].file.name}")
                part = self._files[file].get_slice(name)
                stored[name] = StoredTensor(file, tuple(part.get_shape()), part.get_dtype())
        self._stored = stored
        for name, file in placed.items():
            if name not in stored:
                raise CheckpointError(
                    f"{file}: tensor '{name}' is missing, though {INDEX_FILE} places it there"
                )
        extra = r".*rotary_emb\.inv_freq" + ("" if "lm_head" in specs else r"|lm_head\.weight")
        super().__init__(specs, stored, hf_name, folder, re.compile(extra))
        for name in self.stored_names.values():
            if stored[name].dtype not in _FLOATS:
                raise CheckpointError(
                    f"{stored[name].file}: tensor '{name}' is {stored[name].dtype}; "
                    f"supported: {', '.join(_FLOATS)}"
                )

    def read_stored(self, name: str, index: Index) -> Array:
        tensor = self._stored[name]
        try:
            block: Array = self._files[tensor.file].get_slice(name)[index]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{tensor.file}: tensor '{name}' cannot be read ({error})") from error
        return block


def _open(file: Path) -> Any:
    try:
        with file.open("rb"):
            pass  # safe_open says of every file that it cannot open that there is none
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise CheckpointError(
            f"{file}: not a readable safetensors file ({error}); download it again"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files to open, and where the index (if there is one) says that each tensor is."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return safetensors_files(folder), {}
    placed = _read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{index}: has no weight_map")
    names = sorted({str(name) for name in placed.values()})
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index}: weight file '{name}' is not a plain file name")
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder / name}: is named by {INDEX_FILE} but missing; finish the download"
            )
    return [folder / name for name in names], {tensor: folder / str(name) for tensor, name in placed.items()}
