"""Kinds of values that callers give: wrong ones are ValueErrors that name them, before anything runs."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import reprlib
import types
import typing
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

MAX_TENANT_CHARACTERS = 256
_ADAPTER_NAME_CHARACTERS = 256


@dataclasses.dataclass(frozen=True)
class Interval:
    """[low, high], or (low, high] with `above_low`; the "limits" of a dataclass field's metadata."""

    low: float
    high: float = math.inf
    above_low: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        low, high = (f"{v:g}" if isinstance(v, float) else str(v) for v in (self.low, self.high))
        if self.above_low:
            return f"above {low}" + (f" and at most {high}" if self.high < math.inf else "")
        return f"at least {low}" if self.high == math.inf else f"in [{low}, {high}]"


def check_fields(config: Any) -> None:
    """Hold a frozen dataclass to its annotations (int, float, bool, str, Literal, and these or None),
    and numbers to the `Interval` that their metadata have as "limits".

    NumPy's scalars become Python's; nothing else is converted, least of all 2.5 to 2 or True to 1. Fields of
    other kinds are their owner's to check.
    """
    for field in _scalar_fields(type(config)):  # type: ignore[arg-type]  # a type is hashable
        value, also = getattr(config, field.name), " or None" * field.optional
        if field.optional and value is None:
            continue
        value = as_kind(field.name, value, field.kind, also)
        if field.choices and value not in field.choices:
            raise ValueError(f"{field.name} must be one of {', '.join(field.choices)}{also}, got {value!r}")
        if field.limits is not None and value not in field.limits:
            raise ValueError(f"{field.name} must be {field.limits}{also}, got {value}")
        object.__setattr__(config, field.name, value)


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


def as_text(name: str, value: object) -> str:
    """`value` as a string that metrics and answers can hold.

    Raises ValueError, which does not show it (it may be a key), where it is none, or UTF-8 does not have its
    characters: Python reads the bytes of a command line that are not UTF-8 as lone surrogates.
    """
    text = str(as_kind(name, value, str))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be UTF-8; write its character {error.start + 1} in UTF-8") from None
    return text


def as_tenant(name: str, value: object) -> str:
    """`value` as the name of a tenant; raises ValueError for what no request can have."""
    text = as_text(name, value)
    if not 0 < len(text) <= MAX_TENANT_CHARACTERS:
        raise ValueError(f"{name} must have 1 to {MAX_TENANT_CHARACTERS} characters, got {len(text)}")
    return text


def as_adapter_name(name: str, value: object) -> str:
    """`value` as the name of an adapter; raises ValueError for what is none, wherever it comes from.

    Metrics join names by commas, and a line of a log has whole ones.
    """
    text, most = str(as_kind(name, value, str)), _ADAPTER_NAME_CHARACTERS
    if not 0 < len(text) <= most or text != text.strip() or "," in text or not text.isprintable():
        raise ValueError(
            f"{name} must have 1 to {most} printable characters, no comma among them, and no space at either "
            f"end, got {text[:most]!r}"
        )
    return text


def as_list(name: str, value: object, want: str) -> list[Any]:
    """Items of a list, array or iterator; raises ValueError for text, bytes, a set, a mapping or a scalar."""
    if not isinstance(value, str | bytes | bytearray | Mapping | Set):
        try:
            return list(value)  # type: ignore[call-overload, no-any-return]
        except TypeError:
            pass
    raise ValueError(f"{name} must be {want}, got {reprlib.repr(value)}")


_NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a string"}


@dataclasses.dataclass(frozen=True)
class _ScalarField:
    name: str
    kind: type
    optional: bool
    choices: tuple[str, ...]  # of a Literal
    limits: Interval | None


@functools.cache
def _scalar_fields(cls: type) -> list[_ScalarField]:
    found = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if len(set(kinds) - {type(None)}) > 1:
            continue
        for kind in kinds:
            choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
            if choices or kind in _NAMES:
                limits = field.metadata.get("limits")
                own = str if choices else kind
                found.append(_ScalarField(field.name, own, type(None) in kinds, choices, limits))
    return found
