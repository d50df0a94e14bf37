"""Configs and weights of resolved models: one loader over every format."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from slora_jax.config import ModelConfig
from slora_jax.errors import CheckpointError
from slora_jax.models.params import ParamSpec, checkpoint_specs
from slora_jax.sharding.rules import named_sharding
from slora_jax.weights.dummy import dummy_array
from slora_jax.weights.gguf import GgufSource, load_gguf_config
from slora_jax.weights.hf import SafetensorsSource, load_hf_config
from slora_jax.weights.orbax import load_orbax
from slora_jax.weights.resolve import ResolvedModel
from slora_jax.weights.source import Array, CheckpointSource, Index

Progress = Callable[[str, int, int], None]

PHASE = "loading weights"
_READERS = min(4, os.cpu_count() or 1)  # arrays read at once; each holds one array's shard on the host


def load_model_config(resolved: ResolvedModel) -> ModelConfig:
    """The model's shape, from config.json or GGUF metadata.

    Raises CheckpointError naming the file and the field where this project would compute something else.
    """
    if resolved.path.suffix == ".gguf":
        return load_gguf_config(resolved.path)
    return load_hf_config(resolved.path)


def load_checkpoint(
    resolved: ResolvedModel,
    config: ModelConfig,
    mesh: Mesh,
    dtype: DTypeLike,
    *,
    progress: Progress | None = None,
    seed: int = 0,
) -> dict[str, jax.Array]:
    """Every array of `checkpoint_specs(config)`, by canonical name, in `dtype` and sharded over `mesh`.

    Only the shards of a few arrays are on the host at any time. `progress("loading weights", done, total)`
    counts arrays; `seed` is that of dummy weights.
    Raises CheckpointError naming file, tensor, wanted and found shape where the files do not fit `config`.
    """
    specs = checkpoint_specs(config)
    shardings = {name: named_sharding(mesh, spec.axes, spec.shape) for name, spec in specs.items()}
    report = progress or (lambda phase, done, total: None)
    report(PHASE, 0, len(specs))
    if resolved.format == "orbax":
        targets = {
            name: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=shardings[name])
            for name, spec in specs.items()
        }
        params = load_orbax(resolved.path, specs, targets)
        report(PHASE, len(specs), len(specs))
        return params
    if resolved.format == "dummy":
        params = {}
        for name, spec in specs.items():
            params[name] = dummy_array(name, spec, shardings[name], dtype, seed)
            report(PHASE, len(params), len(specs))
        return params
    return _read_all(open_source(resolved, specs), specs, shardings, np.dtype(dtype), report)


def open_source(resolved: ResolvedModel, specs: Mapping[str, ParamSpec]) -> CheckpointSource:
    """The reader of a safetensors folder or a GGUF file, its tensors checked against `specs`."""
    if resolved.format == "safetensors":
        return SafetensorsSource(resolved.path, specs)
    if resolved.format == "gguf":
        return GgufSource(resolved.path, specs)
    raise CheckpointError(f"{resolved.path}: format '{resolved.format}' has no reader of single arrays")


def _read_all(
    source: CheckpointSource,
    specs: Mapping[str, ParamSpec],
    shardings: Mapping[str, NamedSharding],
    dtype: np.dtype[np.generic],
    report: Progress,
) -> dict[str, jax.Array]:
    def read(name: str) -> jax.Array:
        def shard(index: Index | None) -> Array:
            assert index is not None, "every array has axes"
            return np.array(
                source.read(name, index), dtype=dtype, order="C"
            )  # a copy: never a view of the file

        return jax.make_array_from_callback(specs[name].shape, shardings[name], shard)

    params: dict[str, jax.Array] = {}
    with ThreadPoolExecutor(_READERS, thread_name_prefix="weights") as pool:
        for name, array in zip(specs, pool.map(read, specs), strict=True):
            params[name] = array
            report(PHASE, len(params), len(specs))
    return params
