"""Orbax checkpoints of the canonical arrays, restored straight into their shardings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from slora_jax.errors import CheckpointError
from slora_jax.models.params import ParamSpec
from slora_jax.weights.resolve import ORBAX_FOLDER
from slora_jax.weights.source import raise_problems


def orbax_path(folder: Path) -> Path:
    """Where a model folder's checkpoint lies; raises CheckpointError for a path that Orbax cannot take."""
    path = Path(os.path.realpath(folder)) / ORBAX_FOLDER
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{path}: Orbax takes paths in UTF-8 only; name the folder otherwise") from None
    return path


def save_orbax(folder: Path, params: Mapping[str, jax.Array]) -> None:
    """Writes `params` under `folder`; returns when they are on disk."""
    with _checkpointer() as checkpointer:
        checkpointer.save(orbax_path(folder), dict(params))
        checkpointer.wait_until_finished()


def load_orbax(
    folder: Path, specs: Mapping[str, ParamSpec], targets: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """The arrays in the dtypes and shardings of `targets`; every device reads its own shard.

    Raises CheckpointError where names or shapes are not those of `specs`, or the files cannot be read.
    """
    path = orbax_path(folder)
    with _checkpointer() as checkpointer:
        try:
            stored = checkpointer.metadata(path).item_metadata
            if stored is None:
                raise ValueError("its metadata is missing")
            found = {str(name): tuple(array.shape) for name, array in stored.tree.items()}
        except (ValueError, OSError) as error:
            raise CheckpointError(
                f"{path}: not a readable Orbax checkpoint ({error}); convert it again"
            ) from error
        problems = [f"{path}: array '{n}' {list(specs[n].shape)} is missing" for n in specs if n not in found]
        problems += [f"{path}: array '{n}' is no part of this model" for n in found if n not in specs]
        problems += [
            f"{path}: array '{n}' has shape {list(found[n])}, the config wants {list(spec.shape)}"
            for n, spec in specs.items()
            if n in found and found[n] != spec.shape
        ]
        raise_problems(problems)
        try:
            restored: dict[str, jax.Array] = checkpointer.restore(path, dict(targets))
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path}: cannot be restored ({error}); convert it again") from error
    return restored


def _checkpointer() -> Any:
    """Orbax's. Imported where it is used only: it gives the root logger a handler, after which a program's
    own logging.basicConfig does nothing.
    """
    import orbax.checkpoint as ocp

    return ocp.StandardCheckpointer()
