"""Kinds of values that callers give: wrong ones are ValueErrors that name them, before anything runs."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import reprlib
import types
import typing
from collections.abc import Mapping, Set
from typing import Any

import numpy as np


def check_fields(config: Any) -> None:
    """Hold a frozen dataclass to its annotations: fields of int, float, bool, str, and these or None.

    NumPy's scalars become Python's; nothing else is converted, least of all 2.5 to 2 or True to 1. Fields of
    other kinds are their owner's to check.
    """
    for name, (kind, optional) in _scalar_fields(type(config)).items():  # type: ignore[arg-type]  # a type is hashable
        value = getattr(config, name)
        if not (optional and value is None):
            object.__setattr__(config, name, as_kind(name, value, kind, " or None" * optional))


def as_kind(name: str, value: object, kind: type, also: str = "") -> Any:
    """`value` as a Python int, float, bool or str; raises ValueError where it is of another kind."""
    if kind is bool and isinstance(value, bool | np.bool_):
        return bool(value)
    if kind is str and isinstance(value, str):
        return value
    truth = isinstance(value, bool)  # an int to Python, hardly to whoever wrote it
    if kind is int and isinstance(value, numbers.Integral) and not truth:
        return int(value)
    if kind is float and isinstance(value, numbers.Real) and not truth:
        try:
            return float(value)
        except OverflowError as error:
            raise ValueError(f"{name} is too large for a float") from error
    raise ValueError(f"{name} must be {_NAMES[kind]}{also}, got {reprlib.repr(value)}")


def as_list(name: str, value: object, want: str) -> list[Any]:
    """Items of a list, array or iterator; raises ValueError for text, bytes, a set, a mapping or a scalar."""
    if not isinstance(value, str | bytes | bytearray | Mapping | Set):
        try:
            return list(value)  # type: ignore[call-overload, no-any-return]
        except TypeError:
            pass
    raise ValueError(f"{name} must be {want}, got {reprlib.repr(value)}")


_NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a string"}


@functools.cache
def _scalar_fields(cls: type) -> dict[str, tuple[type, bool]]:
    """Fields of a scalar kind, and whether None is allowed."""
    found = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        kinds = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
        for kind in kinds & _NAMES.keys():
            found[field.name] = kind, type(None) in kinds
    return found
