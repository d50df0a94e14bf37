"""Ctrl-C waits until the engine's books agree.

Python raises KeyboardInterrupt between any two calls of the main thread: a page that was taken and not noted
yet would be nobody's. Whoever works on the books does it `held()`; a Ctrl-C that comes meanwhile is raised
when that is over, or where the work says `let_in()`, around what takes long and leaves the books alone.

Only SIGINT's handler is held back, and only in the main thread, where Python calls it. A process has one, so
what is known of it is this module's, not an engine's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class _Interrupts:
    """The process's SIGINT handler while it is held back. All of it runs in the main thread."""

    def __init__(self) -> None:
        self.depth = 0  # of `held`
        self._open = 0  # the depth in which it is let in
        self._handler: Any = None  # the one held back; None: none, or one that is not Python's
        self._installed = self._came = False

    def hold(self) -> None:
        if self.depth == 0:
            self._came, self._handler = False, None
            handler = signal.getsignal(signal.SIGINT)
            self._handler = handler if callable(handler) else None
        if not self._installed and self._handler is not None:
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        self.depth += 1

    def release(self) -> None:
        self.depth -= 1
        if self.depth in (0, self._open):
            self._restore()

    @contextlib.contextmanager
    def let_in(self) -> Iterator[None]:
        if not self._installed:
            yield
            return
        outer, self._open = self._open, self.depth
        try:
            self._restore()
            yield
        finally:
            self._open = outer
            if not self._installed:
                signal.signal(signal.SIGINT, self._note)
                self._installed = True

    def _restore(self) -> None:
        """The handler is in force again; called now, where a Ctrl-C came."""
        if not self._installed:
            return
        if signal.getsignal(signal.SIGINT) == self._note:  # else somebody has set another one meanwhile
            signal.signal(signal.SIGINT, self._handler)
        self._installed = False
        if self._came:
            self._came = False
            self._handler(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def forked(self) -> None:
        """In a child, whose main thread holds nothing."""
        self._came = False
        with contextlib.suppress(ValueError):  # of a fork that is not the main interpreter's
            self._restore()
        self.depth = self._open = 0


_interrupts = _Interrupts()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_interrupts.forked)


class held(contextlib.ContextDecorator):
    """Inside, or in the decorated function, no KeyboardInterrupt is raised; one that is due, behind it."""

    def __enter__(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            _interrupts.hold()

    def __exit__(self, *exc: object) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            _interrupts.release()


def are_held() -> bool:
    """Whether the calling thread is inside what is `held`."""
    return threading.get_ident() == threading.main_thread().ident and _interrupts.depth > 0


def let_in() -> contextlib.AbstractContextManager[None]:
    """Inside what is `held`: here it may be raised after all."""
    if threading.get_ident() == threading.main_thread().ident:
        return _interrupts.let_in()
    return contextlib.nullcontext()
