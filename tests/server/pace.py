"""Steps that a test lets through, each a fixed time of a clock that stands still between them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from slora_jax.engine import Engine
from slora_jax.outputs import StreamEvent

_MODULES = (  # that read the time of an engine's requests and steps; asyncio keeps the real one
    "slora_jax.engine",
    "slora_jax.step_loop",
    "slora_jax.intake",
    "slora_jax.completion",
    "slora_jax.step_times",
    "slora_jax.lora.loader",
    "slora_jax.server.async_engine",
)


class VirtualClock:
    """In place of the module `time` where engine and bridge use it; `now`, in seconds, is the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, modules: Sequence[str] = _MODULES) -> None:
        self.now = 0.0
        for module in modules:
            monkeypatch.setattr(f"{module}.time", self)

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


class PacedSteps:
    """Lets the engines that it `drive`s take as many steps as were allowed, `step_seconds` of `clock` each.

    Without one left, a step launches nothing and has no events, as where all wait for an adapter: the bridge
    goes on with its inbox. So what happens in which step does not depend on how fast any thread is. Make it
    before the engine, which keeps the clock that it finds.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_seconds: float) -> None:
        self.clock = VirtualClock(monkeypatch)
        self._step_seconds = step_seconds
        self._allowed = threading.Semaphore(0)

    def allow(self, steps: int) -> None:
        """Let so many more steps through; any thread."""
        self._allowed.release(steps)

    def drive(self, engine: Engine) -> Engine:
        """The same engine, whose steps wait to be allowed from here on."""
        step = engine.step

        def paced() -> list[StreamEvent]:
            if not self._allowed.acquire(timeout=0.001):
                return []
            self.clock.now += self._step_seconds
            return step()

        engine.step = paced  # type: ignore[method-assign]
        return engine
