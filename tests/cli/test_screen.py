"""Screens of every width show all answers, and plain lines replace them where there is no terminal."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from slora_jax.cli.screen import BatchScreen, LoadProgress, Row
from slora_jax.outputs import FinishReason, StreamEvent


def _event(text: str, finish: FinishReason | None = None, error: str | None = None) -> StreamEvent:
    return StreamEvent("r", 0, 0, None, text, (1,), finish_reason=finish, error=error)


def _console(width: int, *, terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=width, height=24, force_terminal=terminal, no_color=True)


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


@pytest.mark.parametrize("width", [24, 59, 80, 200])
def test_the_final_table_holds_every_answer_whole(width: int) -> None:
    console = _console(width, terminal=True)
    rows = [Row("pirate", "Hello?", 8), Row(None, "Hello?")]
    with BatchScreen(console, rows) as screen:
        for word in ["Arr "] * 40:
            screen.add(rows[0], _event(word))
        screen.add(rows[0], _event("END", "stop"))
        screen.add(rows[1], _event("Good day", "length"))
    final = _text(console)
    assert final.count("Arr") >= 40
    for part in ("pirate r8", "base", "Hello?", "END", "Good day …"):
        assert part in final
    assert max(map(len, final.splitlines())) <= width


@pytest.mark.parametrize("width", [24, 100])
def test_the_growing_table_fits_the_terminal(width: int) -> None:
    console = _console(width, terminal=True)
    rows = [Row(name, prompt, 8) for prompt in ("a?", "b?") for name in ("x", "y", "z")]
    screen = BatchScreen(console, rows)
    for row in rows:
        row.add(_event("word " * 500))
    with console.capture() as capture:
        console.print(screen._growing())
    assert len(capture.get().splitlines()) <= console.height


def test_without_a_terminal_each_finished_answer_is_a_line() -> None:
    console = _console(80, terminal=False)
    rows = [Row("pirate", "Hello?", 8), Row(None, "[b]?")]
    with BatchScreen(console, rows) as screen:
        screen.add(rows[1], _event("one\n"))
        screen.add(rows[1], _event("two", "stop"))
        screen.add(rows[0], _event("half", "error", "out of pages"))
    assert _text(console).splitlines() == [
        r"[base] '[b]?' -> 'one\ntwo'",
        "[pirate r8] 'Hello?' -> 'half (error: out of pages)'",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_loading_names_each_phase(terminal: bool) -> None:
    console = _console(80, terminal=terminal)
    with LoadProgress(console) as progress:
        for phase, total in (("weights", 3), ("compiling", 2)):
            for done in range(total + 1):
                progress(phase, done, total)
    shown = _text(console)
    assert "weights" in shown
    assert "compiling" in shown
    if not terminal:
        assert [line.split(" in ")[0] for line in shown.splitlines()] == ["weights: 3", "compiling: 2"]
