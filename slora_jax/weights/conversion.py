"""`slora-jax convert`: any model this project loads -> an Orbax checkpoint or a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

import jax
import numpy as np
from safetensors.numpy import save_file

from slora_jax.config import Dtype, LoadFormat
from slora_jax.errors import CheckpointError
from slora_jax.sharding.mesh import make_mesh
from slora_jax.weights.gguf import write_tokenizer_gguf
from slora_jax.weights.hf import hf_name
from slora_jax.weights.load import Progress, load_checkpoint, load_model_config
from slora_jax.weights.orbax import orbax_path, save_orbax
from slora_jax.weights.resolve import (
    INDEX_FILE,
    TOKENIZER_GGUF,
    TOKENIZER_PATTERNS,
    ResolvedModel,
    resolve_model,
)
from slora_jax.weights.source import to_stored

ConvertFormat = Literal["orbax", "safetensors"]

_FILE_BYTES = 5_000_000_000  # of one safetensors file; also what writing needs beside the model itself


def convert(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: ConvertFormat,
    dtype: Dtype = "bfloat16",
    load_format: LoadFormat = "auto",
    progress: Progress | None = None,
) -> Path:
    """Writes `model` to the folder `out` and returns it: weights in `dtype`, config.json, tokenizer files.

    "orbax": the canonical arrays, which `load_checkpoint` restores straight into any sharding.
    "safetensors": a Hugging Face folder that transformers loads.
    The tokenizer of a GGUF file is kept as tokenizer.gguf. The folder appears whole or not at all: it is
    written beside `out` and renamed. Needs host memory for the whole model.
    Raises CheckpointError where `out` cannot be made, or exists and is not an empty folder, and where `model`
    cannot be loaded.
    """
    if format not in get_args(ConvertFormat):
        raise CheckpointError(f"format must be one of {', '.join(get_args(ConvertFormat))}, got {format!r}")
    target = Path(os.path.realpath(Path(out).expanduser()))  # no folder can take the place of a link to one
    _check_target(target)
    if format == "orbax":
        orbax_path(target)
    resolved = resolve_model(model, load_format)
    config = load_model_config(resolved)
    mesh = make_mesh(1, jax.devices("cpu"))
    with _whole_folder(target) as folder:
        params = load_checkpoint(resolved, config, mesh, dtype, progress=progress)
        _write_json(folder / "config.json", config.to_hf() | {"dtype": dtype})
        _write_tokenizer(resolved, folder)
        if format == "orbax":
            save_orbax(folder, params)
        else:
            _save_safetensors(folder, params)
    return target


def _check_target(target: Path) -> None:
    try:
        free = not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir()))
    except OSError as error:
        raise _no_folder(target, error) from error
    if not free:
        raise CheckpointError(
            f"{target}: exists and is not an empty folder; choose a new one or remove it first"
        )


def _no_folder(target: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{target}: the result cannot be written there: {error.strerror}; choose another folder for OUT"
    )


@contextmanager
def _whole_folder(target: Path) -> Iterator[Path]:
    """A new folder beside `target` that takes its place on success and is removed on any error."""
    folder = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise _no_folder(target, error) from error
    try:
        yield folder
        _check_target(target)
        folder.replace(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_tokenizer(resolved: ResolvedModel, folder: Path) -> None:
    """What `load_tokenizer(folder)` and generation defaults need, from the GGUF file or the folder."""
    if resolved.path.suffix == ".gguf":
        write_tokenizer_gguf(resolved.path, folder / TOKENIZER_GGUF)
        return
    for pattern in (*TOKENIZER_PATTERNS, "generation_config.json"):
        for file in sorted(resolved.folder.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)


def _save_safetensors(folder: Path, params: Mapping[str, jax.Array]) -> None:
    """model.safetensors, or numbered files and an index where the weights are more than one file's worth."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, array in params.items():
        if groups[-1] and size + array.nbytes > _FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += array.nbytes
    placed: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = (
            "model.safetensors" if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        )
        tensors = {hf_name(name): to_stored(name, np.asarray(params[name])) for name in group}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod((folder / "config.json").stat().st_mode)  # save_file's are private to the user
        placed |= dict.fromkeys(tensors, file)
    if len(groups) > 1:
        total = sum(array.nbytes for array in params.values())
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": placed})


def _write_json(file: Path, value: Mapping[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
