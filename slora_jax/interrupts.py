"""Ctrl-C waits until the engine's books agree.

Python raises KeyboardInterrupt between any two calls of the main thread: a page that was taken and not noted
yet would be nobody's. Whoever works on the books does it `held()`; a Ctrl-C that comes meanwhile is raised
when that is over, or where the work says `let_in()`, around what takes long and leaves the books alone.

Only SIGINT's handler is held back, and only in the main thread, where Python calls it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class _Interrupts:
    """The process's SIGINT handler while it is held back. All of it runs in the main thread."""

    def __init__(self) -> None:
        self._depth = 0
        self._handler: Any = None  # the one held back; None: none, or one that is not Python's
        self._came = False

    def hold(self) -> None:
        if self._depth == 0:
            self._came, self._handler = False, None
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._note)
        self._depth += 1

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0 and self._handler is not None:
            self._restore()

    @contextlib.contextmanager
    def let_in(self) -> Iterator[None]:
        if self._handler is None or self._depth == 0:
            yield
            return
        try:
            self._restore()
            yield
        finally:
            signal.signal(signal.SIGINT, self._note)

    def _restore(self) -> None:
        """The handler is in force again; called now, where a Ctrl-C came."""
        signal.signal(signal.SIGINT, self._handler)
        if self._came:
            self._came = False
            self._handler(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True


_interrupts = _Interrupts()


class held(contextlib.ContextDecorator):
    """Inside, or in the decorated function, no KeyboardInterrupt is raised; one that is due, behind it."""

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            _interrupts.hold()

    def __exit__(self, *exc: object) -> None:
        if threading.current_thread() is threading.main_thread():
            _interrupts.release()


def let_in() -> contextlib.AbstractContextManager[None]:
    """Inside what is `held`: here it may be raised after all."""
    if threading.current_thread() is threading.main_thread():
        return _interrupts.let_in()
    return contextlib.nullcontext()
