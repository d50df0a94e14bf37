"""The one protocol that file formats are read through, and the layout shared by HF and GGUF files.

Both store a projection as a matrix [out, in]; the canonical array (`models.params.checkpoint_specs`) has the
input axes first and heads split. `MatrixSource` translates a canonical index into a block of the stored
matrix, so that only the rows and columns of a shard are read.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slora_jax.errors import CheckpointError
from slora_jax.models.params import ParamSpec

Array = npt.NDArray[Any]
Index = tuple[slice, ...]

_INPUT_AXES = {  # canonical name, last part -> how many of its leading axes are the stored matrix's columns
    "q_proj": 1, "k_proj": 1, "v_proj": 1, "o_proj": 2, "gate_proj": 1, "up_proj": 1, "down_proj": 1,
}  # fmt: skip


class CheckpointSource(Protocol):
    """Reads parts of canonical arrays."""

    def read(self, name: str, index: Index) -> Array:
        """`canonical[name][index]`, in whatever float dtype is at hand; may be a view of a file."""
        ...


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file declares it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class MatrixSource(abc.ABC):
    """A CheckpointSource over tensors stored as [out, in] matrices; checks the inventory at once.

    Raises CheckpointError naming file, tensor, wanted and found shape for any missing, extra or misshapen.
    """

    def __init__(
        self,
        specs: Mapping[str, ParamSpec],
        stored: Mapping[str, StoredTensor],
        stored_name: Callable[[str], str],
        where: Path,
        allowed_extra: re.Pattern[str],
    ) -> None:
        self.specs = specs
        self.stored_names = {name: stored_name(name) for name in specs}
        wanted = {self.stored_names[name]: stored_shape(name, spec.shape) for name, spec in specs.items()}
        problems = [f"{where}: tensor '{n}' {list(wanted[n])} is missing" for n in wanted if n not in stored]
        for name, tensor in stored.items():
            if name in wanted and tensor.shape != wanted[name]:
                problems.append(
                    f"{tensor.file}: tensor '{name}' has shape {list(tensor.shape)}, the config wants "
                    f"{list(wanted[name])}"
                )
            elif name not in wanted and not allowed_extra.fullmatch(name):
                problems.append(
                    f"{tensor.file}: tensor '{name}' {list(tensor.shape)} is no part of this model"
                )
        raise_problems(problems)

    @abc.abstractmethod
    def read_stored(self, name: str, index: Index) -> Array:
        """A block of the stored tensor `name` (a stored name), `index` one slice per stored axis."""

    def read(self, name: str, index: Index) -> Array:
        """`canonical[name][index]` as a view over one freshly read block."""
        shape = self.specs[name].shape
        n_in = input_axes(name)
        if not n_in:
            return self.read_stored(self.stored_names[name], index)
        cols, inner_in = _flatten(shape[:n_in], index[:n_in])
        rows, inner_out = _flatten(shape[n_in:], index[n_in:])
        block = self.read_stored(self.stored_names[name], (rows, cols))
        n_first_out = block.shape[0] // math.prod(shape[n_in + 1 :])
        split = block.T.reshape(-1, *shape[1:n_in], n_first_out, *shape[n_in + 1 :])
        return split[(slice(None), *inner_in, slice(None), *inner_out)]


def _flatten(shape: Sequence[int], index: Index) -> tuple[slice, Index]:
    """The flat range of the first axis's slice over all inner axes, and the slices left to apply to those."""
    start, stop, step = index[0].indices(shape[0])
    assert step == 1, "shards are contiguous"
    inner = math.prod(shape[1:])
    return slice(start * inner, stop * inner), index[1:]


def input_axes(name: str) -> int:
    """How many leading axes of a canonical array are its stored matrix's columns (0: stored as it is)."""
    return _INPUT_AXES.get(name.rpartition(".")[2], 0)


def stored_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape that HF and GGUF files store the canonical array `name` in."""
    n_in = input_axes(name)
    return (math.prod(shape[n_in:]), math.prod(shape[:n_in])) if n_in else tuple(shape)


def to_stored(name: str, array: Array) -> Array:
    """The stored [out, in] matrix of a canonical array (contiguous): the inverse of a whole `read`."""
    n_in = input_axes(name)
    if not n_in:
        return np.ascontiguousarray(array)
    return np.ascontiguousarray(array.reshape(math.prod(array.shape[:n_in]), -1).T)


def raise_problems(problems: Iterable[str], limit: int = 5) -> None:
    """Raises one CheckpointError of all problems, the first few spelled out; nothing where there are none."""
    problems = list(problems)
    if problems:
        more = f"\n... and {len(problems) - limit} more" if len(problems) > limit else ""
        raise CheckpointError("\n".join(problems[:limit]) + more)
