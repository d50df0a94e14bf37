"""Ctrl-C at any moment of a load: no request, token, page or adapter is lost."""

from __future__ import annotations

import itertools
import random
import sys
import types
from typing import Any

import pytest

from slora_jax import SamplingParams
from slora_jax.outputs import StreamEvent
from tests.engine.simulated_runner import (
    DirectCopy,
    SimulatedInFlight,
    StagingRunner,
)
from tests.engine.slow_loading import busy_bench, finish

GREEDY = SamplingParams(max_tokens=6)


@pytest.mark.parametrize("nth", [1, 2, 3, 5])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(
    ("owner", "place"),
    [
        *((StagingRunner, name) for name in ("launch", "stage_adapters", "write_adapter")),
        *((DirectCopy, name) for name in ("is_ready", "wait", "leave_pages")),
        (SimulatedInFlight, "fetch"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_ctrl_c_before_or_behind_what_the_device_does_costs_nothing(
    owner: type, place: str, behind: bool, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, wanted = busy_bench()
    whole, calls = getattr(owner, place), itertools.count(1)

    def interrupted(*args: Any) -> Any:
        now = next(calls) == nth
        if now and not behind:
            raise KeyboardInterrupt
        result = whole(*args)
        if now:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, place, interrupted)
    assert finish(bench) == wanted
    assert next(calls) > nth


def test_a_second_ctrl_c_while_the_first_waits_for_the_device_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, wanted = busy_bench()
    fetch, wait, calls = SimulatedInFlight.fetch, StagingRunner.wait, itertools.count(1)

    def interrupted_fetch(step: SimulatedInFlight) -> Any:
        fetched = fetch(step)
        if next(calls) == 5:
            raise KeyboardInterrupt
        return fetched

    def interrupted_wait(runner: StagingRunner) -> None:
        wait(runner)
        raise KeyboardInterrupt

    monkeypatch.setattr(SimulatedInFlight, "fetch", interrupted_fetch)
    monkeypatch.setattr(StagingRunner, "wait", interrupted_wait)
    assert finish(bench) == wanted


@pytest.mark.parametrize("part", range(8))
def test_a_ctrl_c_at_any_line_of_the_loader_costs_nothing(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises it wherever it is; a line that is met once a load is one of two thousand."""

    def interrupted(at: int) -> int:
        """Break off at line number `at` that the loader meets; how many it met."""
        clock = itertools.count()  # what gives way depends on measured times
        for name in ("monotonic", "perf_counter"):
            monkeypatch.setattr(f"slora_jax.step_loop.time.{name}", lambda: next(clock) / 1000)
        bench, wanted = busy_bench()
        step, before, lines, met = bench.engine.step, sys.gettrace(), itertools.count(1), 0

        def trace(frame: types.FrameType, event: str, _: Any) -> Any:
            nonlocal met
            if not frame.f_code.co_filename.endswith("lora/loader.py"):
                return None
            if event in ("line", "return"):
                met = next(lines)
                if met == at:
                    raise KeyboardInterrupt
            return trace

        def traced() -> list[StreamEvent]:
            sys.settrace(trace)
            try:
                return step()
            finally:
                sys.settrace(before)

        bench.engine.step = traced  # type: ignore[method-assign]
        assert finish(bench) == wanted
        return met

    most = interrupted(0)
    for at in random.Random(part).sample(range(1, most + 1), 25):
        assert interrupted(at) >= at
