"""What the commands show on a terminal, or print as plain lines where there is none."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from slora_jax.outputs import FinishReason, StreamEvent

_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
_STACKED_BELOW = 60  # columns; narrower terminals get the answer under its adapter's name


class LoadProgress:
    """Shows `progress(phase, done, total)` of `Engine.from_pretrained`: bars, or a line a finished phase."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started: dict[str, float] = {}
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}  # by phase
        if console.is_terminal:
            columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), BarColumn(20))
            self._bars = Progress(*columns, MofNCompleteColumn(), TimeElapsedColumn(), console=console)

    def __enter__(self) -> Self:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        started = self._started.setdefault(phase, time.monotonic())
        if self._bars is not None:
            if phase not in self._tasks:
                self._tasks[phase] = self._bars.add_task(phase, total=total)
            self._bars.update(self._tasks[phase], completed=done, total=total)
        elif done >= total:
            self._console.print(f"{phase}: {total} in {time.monotonic() - started:.1f} s", markup=False)


@dataclasses.dataclass
class Row:
    """One sequence on the screen; `prompt` is what the reader should see of it."""

    adapter: str | None
    prompt: str
    rank: int | None = None
    text: str = ""
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def label(self) -> str:
        name = self.adapter or "base"
        return name if self.rank is None else f"{name} r{self.rank}"

    def add(self, event: StreamEvent) -> None:
        """Append what the event brings."""
        self.text += event.text
        self.num_tokens += len(event.token_ids)
        self.finish_reason = event.finish_reason or self.finish_reason
        self.error = event.error or self.error


class BatchScreen:
    """Answers as they grow: a table that fits the terminal, whole at the end; or a line a finished answer.

    Rows with the same prompt stand together under it. `footer` is shown below the growing table.
    """

    def __init__(self, console: Console, rows: Sequence[Row]) -> None:
        self._console = console
        self._rows = rows
        self.footer = ""
        adapters = sorted({row.adapter for row in rows if row.adapter})
        self._colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(adapters)}
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                console=console, transient=True, refresh_per_second=12, get_renderable=self._growing
            )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
            self._console.print(self._table(None))

    def add(self, row: Row, event: StreamEvent) -> None:
        """Append the event to its row, which must be one of the rows given."""
        row.add(event)
        if not self._live and event.finish_reason:
            self._console.print(
                f"[{row.label}] {row.prompt!r} -> {_answer(row)!r}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    def _growing(self) -> RenderableType:
        prompts = len({row.prompt for row in self._rows})
        lines = (self._console.height - 2 - prompts) // max(1, len(self._rows)) - self._stacked
        return Group(
            self._table(max(1, lines)), Text(self.footer, style="dim", no_wrap=True, overflow="ellipsis")
        )

    @property
    def _stacked(self) -> bool:
        return self._console.width < _STACKED_BELOW

    def _table(self, max_lines: int | None) -> RenderableType:
        """All rows; with `max_lines`, the last so many lines of each answer."""
        stacked = self._stacked
        labels = max((len(row.label) for row in self._rows), default=0)
        width = max(10, self._console.width - (0 if stacked else labels + 2))
        blocks: list[RenderableType] = []
        for prompt in dict.fromkeys(row.prompt for row in self._rows):
            blocks.append(Rule(Text(prompt, style="bold"), align="left", style="dim"))
            table = Table.grid(padding=(0, 2, 0, 0) if not stacked else 0)
            if not stacked:
                table.add_column(no_wrap=True, width=labels)
            table.add_column(overflow="fold")
            for row in (r for r in self._rows if r.prompt == prompt):
                label = Text(row.label, style=self._colours.get(row.adapter or "", "dim"))
                lines = list(Text(_answer(row)).wrap(self._console, width))
                answer = Text("\n").join(lines[-max_lines:] if max_lines else lines)
                if stacked:
                    table.add_row(label)
                    table.add_row(answer)
                else:
                    table.add_row(label, answer)
            blocks.append(table)
        return Group(*blocks)


def _answer(row: Row) -> str:
    if row.error:
        return f"{row.text} (error: {row.error})"
    cut = row.finish_reason == "length"
    return row.text.strip() + (" …" if cut else "")
