"""The engine's clocks in a test's hands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import slora_jax.completion
import slora_jax.engine
import slora_jax.intake
import slora_jax.lora.loader
import slora_jax.step_loop

_CLOCKED = (
    slora_jax.engine,
    slora_jax.step_loop,
    slora_jax.intake,
    slora_jax.completion,
    slora_jax.lora.loader,
)


class VirtualClock:
    """Seconds that pass when it is told so, and a little at each look, so that who waits comes to an end."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1e-7
        return self.now


@contextlib.contextmanager
def virtual_time(clock: VirtualClock) -> Iterator[None]:
    """Meanwhile engines that are made, and all that run, have their seconds from `clock`."""
    with contextlib.ExitStack() as patched:
        for module in _CLOCKED:
            seconds = SimpleNamespace(monotonic=clock, perf_counter=clock)
            patched.enter_context(mock.patch.object(module, "time", seconds))
        yield
