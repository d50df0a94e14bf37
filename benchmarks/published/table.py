"""A published table: which measurement fills each cell.

A row names a benchmark and a case, a column the fields of that case's line, and what its own case has besides
(so that a row may stand for several lines). `benchmarks.tables` looks them up and writes the tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

type Case = Mapping[str, Any]

MIXED = "64/32/16/8"  # of a case: the ranks that adapters take turns with


@dataclasses.dataclass(frozen=True)
class Row:
    """Its labels, and the lines that its cells are of."""

    labels: tuple[str, ...]
    bench: str
    case: Case


@dataclasses.dataclass(frozen=True)
class Column:
    """One cell of each row: `show` is str.format's pattern for the values of `fields`.

    A field is "value" or another one of the line; "ttft_s.1" is an item of a list; "vllm.value" is of vLLM's
    line of the same case; "earlier.xla_us" of the latest line that has it, for what a later run left out.
    `case` and `bench` are added to the row's case, and replace its benchmark.
    """

    head: str
    show: str = "{:.1f}"
    fields: str = "value"
    case: Case = dataclasses.field(default_factory=dict)
    bench: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """`name` is that of its block in README.md; `title` and `text` (what was run) go on the page."""

    name: str
    title: str
    text: str
    labels: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def first(self, rows: int, *, labels: int | None = None, columns: int | None = None) -> Table:
        """Its first rows, labels and columns, for README.md."""
        short = tuple(dataclasses.replace(row, labels=row.labels[:labels]) for row in self.rows[:rows])
        return dataclasses.replace(
            self, labels=self.labels[:labels], columns=self.columns[:columns], rows=short
        )


def rows(bench: str, keys: str, values: Iterable[tuple[Any, ...]], case: Case) -> tuple[Row, ...]:
    """A row for each of `values`: its labels, and what `keys` are in its case. None: not in the case."""
    return tuple(
        Row(
            tuple("" if x is None else str(x) for x in some),
            bench,
            {**case, **{k: x for k, x in zip(keys.split(), some, strict=True) if x is not None}},
        )
        for some in values
    )
