"""A real Ctrl-C (SIGINT) at any moment of the engine's work: nothing is lost, and it is raised."""

from __future__ import annotations

import itertools
import random
import signal
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

import slora_jax
from slora_jax import SamplingParams, interrupts
from slora_jax.engine import Engine
from slora_jax.outputs import StreamEvent
from tests.engine.slow_loading import busy_bench, finish

ROOT = slora_jax.__path__[0]


@pytest.fixture(autouse=True)
def python_s_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted_at(at: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, bool]:
    """Send SIGINT where CPython looks for signals, as a function begins and behind each call of one in C, at
    place number `at` of the package. How many places there were, which it was, whether it was raised.
    """
    clock = itertools.count()  # what gives way depends on measured times
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(f"slora_jax.engine.time.{name}", lambda: next(clock) / 1000)
    bench, wanted = busy_bench()
    step, places, met, where, raised = bench.engine.step, itertools.count(1), 0, "", False

    def profile(frame: types.FrameType, event: str, arg: Any) -> None:
        nonlocal met, where
        if event in ("call", "c_return") and "slora_jax" in frame.f_globals.get("__name__", ""):
            met = next(places)
            assert met < 200_000, "a step does not end"
            if met == at:
                where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)

    def profiled() -> list[StreamEvent]:
        nonlocal raised
        sys.setprofile(profile)
        try:
            return step()
        except KeyboardInterrupt:
            raised = True
            raise
        finally:
            sys.setprofile(None)

    bench.engine.step = profiled  # type: ignore[method-assign]
    assert finish(bench) == wanted, where
    return met, where, raised


@pytest.mark.parametrize("part", range(4))
def test_a_ctrl_c_anywhere_in_a_step_costs_nothing_and_is_raised(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, _, _ = interrupted_at(0, monkeypatch)
    for at in random.Random(part).sample(range(1, most + 1), 20):
        _, where, raised = interrupted_at(at, monkeypatch)
        assert raised, where


def test_it_waits_for_the_end_of_what_is_held() -> None:
    done = []

    @interrupts.held()
    def work() -> None:
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            done.append("inner")
        done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inner", "outer"]
    with interrupts.held():
        done.append("later")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("before", [False, True])
def test_it_is_let_in_where_work_takes_long(before: bool) -> None:
    done = []

    @interrupts.held()
    def work() -> None:
        if before:
            signal.raise_signal(signal.SIGINT)
        done.append("held")
        with interrupts.let_in():
            if not before:
                signal.raise_signal(signal.SIGINT)
            done.append("let in")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["held"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_follows_one_that_was_let_in_is_held_again() -> None:
    done = []

    @interrupts.held()
    def work() -> None:
        try:
            with interrupts.let_in():
                signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)  # a second one, while the first is dealt with
            done.append("mended")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["mended"]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_that_is_not_python_s_is_left_alone(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    with interrupts.held(), interrupts.let_in():
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_hold_nothing() -> None:
    seen = []

    def work() -> None:
        with interrupts.held(), interrupts.let_in():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_ctrl_c_in_generate_ends_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, wanted = busy_bench()
    engine: Engine = bench.engine
    schedule, calls = engine._schedule, itertools.count(1)

    def interrupted() -> Any:
        if next(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return schedule()

    monkeypatch.setattr(engine, "_schedule", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[7, 7, 7]], None, SamplingParams(max_tokens=9))
    engine.check_integrity()
    assert finish(bench) == wanted
