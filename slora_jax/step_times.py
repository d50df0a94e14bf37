"""Where the time of a step went that took far longer than others: a line in the log."""

from __future__ import annotations

import collections
import logging
import statistics
import time
from collections.abc import Callable, Hashable

logger = logging.getLogger(__name__)

_LATEST = 64  # steps whose median is the usual time
_FEW = 16  # steps of a kind before which nothing is usual
_TIMES, _SECONDS = 10.0, 0.25  # a step is long from so many times the usual time, and from so many seconds
_PAUSE = 10.0  # seconds between two lines


class StepTimes:
    """Times steps part by part: `begin`, `part` after each, `end`."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, collections.deque[float]] = {}  # by kind of step
        self._parts: list[tuple[str, float]] = []
        self._mark, self._told = time.monotonic(), -float("inf")

    def begin(self) -> None:
        """A step begins."""
        self._parts = []
        self._mark = time.monotonic()

    def part(self, name: str) -> None:
        """What was done since the last mark."""
        now = time.monotonic()
        self._parts.append((name, now - self._mark))
        self._mark = now

    def end(self, kind: Hashable, *, compiled: bool, doing: Callable[[], str]) -> None:
        """A step of this kind is over, of which there are few. `compiled`: it waited for that, which the log
        has; `doing`: what it was at.
        """
        seconds = sum(part for _, part in self._parts)
        if compiled:
            return
        latest = self._seconds.setdefault(kind, collections.deque(maxlen=_LATEST))
        before = list(latest) if seconds >= _SECONDS else []
        latest.append(seconds)
        if len(before) < _FEW or self._mark - self._told < _PAUSE:
            return
        usual = statistics.median(before)
        if seconds >= _TIMES * usual:
            self._told = self._mark
            parts = ", ".join(f"{name} {part:.3f} s" for name, part in self._parts)
            logger.warning(
                "a step took %.2f s, where %.3f s is usual: %s; %s", seconds, usual, parts, doing()
            )
