"""Standard output and error of a command: whatever they are and can show, no traceback comes of it."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

from slora_jax.errors import printable


class OutputError(Exception):
    """Standard output cannot be written; the OSError is its cause."""


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Raise OutputError, within or at the end, where stdout cannot be written: an OSError of anything else
    keeps its type. What stderr cannot take is lost: a batch goes on without its progress.

    What stdout's encoding lacks is escaped with backslashes, as on stderr: an answer that was computed is
    shown.
    """
    stdout = sys.stdout
    if isinstance(stdout, io.TextIOWrapper) and stdout.errors == "strict":
        stdout.reconfigure(errors="backslashreplace")
    try:
        with (
            contextlib.redirect_stdout(_checked(stdout, _output_errors)),
            contextlib.redirect_stderr(_checked(sys.stderr, lambda: contextlib.suppress(OSError))),
        ):
            try:
                yield
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
    except OutputError:
        _abandon(stdout)
        raise


_Guard = Callable[[], contextlib.AbstractContextManager[None]]


def _checked(stream: TextIO | None, guard: _Guard) -> TextIO | None:
    """None stays None: it was closed before we began."""
    return None if stream is None else cast(TextIO, _Checked(stream, guard))


class _Checked:
    """A text stream that is written within `guard()`."""

    def __init__(self, stream: TextIO, guard: _Guard) -> None:
        self._stream, self._guard = stream, guard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._guard():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._guard():
            self._stream.flush()


@contextlib.contextmanager
def _output_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"standard output cannot be written: {error.strerror or error}") from error


def _abandon(stream: TextIO) -> None:
    """Let what `stream` still holds go nowhere: Python would fail to write it once more as it exits."""
    with contextlib.suppress(io.UnsupportedOperation):  # no file, so nothing is held
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def print_json(values: dict[str, Any]) -> None:
    """Print one line of JSON, in ASCII where stdout's encoding lacks what JSON may hold."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    print(json.dumps(values, ensure_ascii=codecs.lookup(encoding).name != "utf-8"), flush=True)


def tell(error: object) -> None:
    """Print an error on stderr, if that can be written, with what a terminal might obey escaped."""
    if sys.stderr is not None:  # closed; `print` would take stdout
        with contextlib.suppress(OSError):
            print(f"slora-jax: error: {printable(error)}", file=sys.stderr, flush=True)
