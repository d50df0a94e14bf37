"""A step that takes far longer than others is told in the log, with the part that took the time."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest

from slora_jax import SamplingParams
from slora_jax.engine import Engine
from tests.engine.simulated_engine import simulated_engine
from tests.engine.simulated_runner import SimulatedRunner

STEP = 0.02  # seconds
Slow = Callable[[str, int], None]


@pytest.fixture
def engine() -> Engine:
    engine = simulated_engine(SimulatedRunner, num_pages=100, max_batch_size=4, max_step_tokens=64)
    engine.add_request([1, 2, 3], None, SamplingParams(max_tokens=250))
    return engine


@pytest.fixture
def slow(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[str, float]]:
    """Steps that are slow: which part, seconds. All others take STEP, waiting."""
    now, steps, slow = [0.0], itertools.count(), dict[int, tuple[str, float]]()
    monkeypatch.setattr("slora_jax.step_times.time.monotonic", lambda: now[0])

    def taking(owner: Any, name: str, usual: float) -> None:
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            which, seconds = slow.get(step[0], ("", 0.0))
            now[0] += seconds if which == name else usual
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, timed)

    step = [0]
    begin = engine._loop._times.begin

    def count() -> None:
        step[0] = next(steps)
        begin()

    monkeypatch.setattr(engine._loop._times, "begin", count)
    taking(engine._loop, "schedule", 0.0)
    taking(engine._runner, "launch", 0.0)
    taking(engine._loop, "collect", STEP)
    taking(engine._loader, "transfer", 0.0)
    return slow


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "a step took" in r.getMessage()]


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("schedule", "scheduling"),
        ("launch", "launch"),
        ("collect", "waiting for the step before"),
        ("transfer", "beginning copies of adapters"),
    ],
)
def test_the_part_that_took_the_time_is_named(
    engine: Engine,
    slow: dict[int, tuple[str, float]],
    caplog: pytest.LogCaptureFixture,
    method: str,
    part: str,
) -> None:
    slow[40] = method, 0.8
    with caplog.at_level(logging.WARNING):
        for _ in range(60):
            engine.step()
    (line,) = told(caplog)
    assert f"{part} 0.800 s" in line
    assert "where 0.020 s is usual" in line
    assert "1 decodes" in line  # and what it was at


def test_usual_steps_first_steps_and_compilations_are_not_told(
    engine: Engine,
    slow: dict[int, tuple[str, float]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow |= {3: ("launch", 9.0), 30: ("launch", 0.15), 40: ("launch", 9.0)}
    runner: Any = engine._runner
    launch = runner.launch

    def compiles(plan: Any) -> Any:
        runner.compilations += engine.num_steps == 40
        return launch(plan)

    monkeypatch.setattr(runner, "launch", compiles)
    with caplog.at_level(logging.WARNING):
        for _ in range(60):
            engine.step()
    assert told(caplog) == []


def test_a_log_is_not_flooded(
    engine: Engine, slow: dict[int, tuple[str, float]], caplog: pytest.LogCaptureFixture
) -> None:
    slow |= {step: ("launch", 1.0) for step in range(40, 54)}
    with caplog.at_level(logging.WARNING):
        for _ in range(60):
            engine.step()
    assert len(told(caplog)) == 2


def test_who_asks_what_is_under_way_hears_of_a_compilation(engine: Engine) -> None:
    """A restart would begin it anew."""
    engine.step()
    assert "compiles" not in engine.under_way()
    engine._runner.compiling = True
    assert engine.under_way().startswith("a step compiles")
