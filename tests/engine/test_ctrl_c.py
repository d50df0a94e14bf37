"""A real Ctrl-C (SIGINT) at any moment of the engine's work: nothing is lost, and it is raised."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

import slora_jax
from slora_jax import SamplingParams, interrupts
from slora_jax.engine import Engine
from slora_jax.outputs import StreamEvent
from slora_jax.runner import ModelRunner
from slora_jax.scheduling.scheduler import StepPlan
from tests.engine.simulated_engine import simulated_engine
from tests.engine.simulated_runner import BASE, SimulatedInFlight
from tests.engine.slow_loading import busy_bench, finish, want

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
        monkeypatch.setattr(f"slora_jax.step_loop.time.{name}", lambda: next(clock) / 1000)
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


def test_it_is_let_in_while_a_step_compiles() -> None:
    """Which takes many seconds."""
    done: list[str] = []

    def build(shape: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("compiled")

    runner: Any = ModelRunner.__new__(ModelRunner)
    runner._programs, runner._builder = {}, mock.Mock(build=build)
    with pytest.raises(KeyboardInterrupt):
        interrupts.held()(runner.program)(mock.Mock())
    assert done == []


def test_it_is_let_in_while_the_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, wanted = busy_bench()
    fetch = SimulatedInFlight.fetch
    done: list[str] = []

    def interrupted(step: Any) -> Any:
        if not done:
            done.append("waiting")
            signal.raise_signal(signal.SIGINT)
            done.append("over")
        return fetch(step)

    monkeypatch.setattr(SimulatedInFlight, "fetch", interrupted)
    assert finish(bench) == wanted
    assert done == ["waiting"]


def test_sequences_that_are_computed_anew_behind_it_are_not_preempted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which would say that pages are lacking."""
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    engine.add_request([1, 2, 3], None, SamplingParams(max_tokens=9))
    for _ in range(4):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedInFlight, "fetch", lambda step: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 1)
    while engine.has_unfinished():
        engine.step()
    assert engine.stats().preemptions == 0


def test_a_held_part_of_what_is_let_in_closes_behind_itself() -> None:
    done = []

    @interrupts.held()
    def work() -> None:
        with interrupts.let_in():
            with interrupts.held():
                done.append("held")
            signal.raise_signal(signal.SIGINT)
            done.append("let in")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["held"]


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    mine = lambda number, frame: None  # noqa: E731
    with interrupts.held():
        signal.signal(signal.SIGINT, mine)
    assert signal.getsignal(signal.SIGINT) is mine


def test_a_child_process_is_not_held() -> None:
    """Forked in the middle of what is held, as by a library's thread."""
    code = (
        "import os, signal, sys\n"
        "from slora_jax import interrupts\n"
        "with interrupts.held():\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        handler = signal.getsignal(signal.SIGINT)\n"
        "        os._exit(handler is not signal.default_int_handler)\n"
        "    status = os.waitpid(child, 0)[1]\n"
        "sys.exit(os.waitstatus_to_exitcode(status))\n"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0


def test_a_ctrl_c_anywhere_in_a_generate_ends_its_requests_and_nothing_else() -> None:
    def interrupted_at(at: int) -> tuple[int, str]:
        engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
        other = engine.add_request([8], None, SamplingParams(max_tokens=4))
        places, met, where = itertools.count(1), 0, ""

        def profile(frame: types.FrameType, event: str, arg: Any) -> None:
            nonlocal met, where
            if event in ("call", "c_return") and "slora_jax" in frame.f_globals.get("__name__", ""):
                met = next(places)
                if met == at:
                    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                    signal.raise_signal(signal.SIGINT)

        sys.setprofile(profile)
        try:
            engine.generate([[1, 2, 3], [4]], None, SamplingParams(max_tokens=3))
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert set(engine.requests) <= {other}, where
        assert not engine._outbox._streamed, where
        engine.check_integrity()
        got: list[int] = []
        while engine.has_unfinished():
            got += [t for e in engine.step() for t in e.token_ids]
        assert got == want([8], BASE, 4), where
        (out,) = engine.generate([[5]], None, SamplingParams(max_tokens=2))
        assert out.token_ids == want([5], BASE, 2), where
        return met, where

    most, _ = interrupted_at(0)
    for at in range(1, most + 1, 7):
        interrupted_at(at)


def test_ctrl_c_in_generate_ends_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, wanted = busy_bench()
    engine: Engine = bench.engine
    schedule, calls = engine._loop.schedule, itertools.count(1)

    def interrupted() -> Any:
        if next(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return schedule()

    monkeypatch.setattr(engine._loop, "schedule", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[7, 7, 7]], None, SamplingParams(max_tokens=9))
    engine.check_integrity()
    assert finish(bench) == wanted


def test_it_is_not_lost_where_python_closes_another_engine_s_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is raised while Python closes a stream that nobody has any more, Python drops."""
    idle, busy = (simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16) for _ in range(2))
    params = SamplingParams(max_tokens=6)
    streams = [idle.stream([[4, 5]], sampling_params=params)]
    next(streams[0])
    schedule = busy._loop.schedule

    def interrupted() -> StepPlan:
        signal.raise_signal(signal.SIGINT)
        streams.clear()
        return schedule()

    with monkeypatch.context() as patched:
        patched.setattr(busy._loop, "schedule", interrupted)
        with pytest.raises(KeyboardInterrupt):
            busy.generate([[1, 2, 3]], sampling_params=params)
    for engine in (idle, busy):
        engine.step()
        assert not engine.requests
        engine.check_integrity()
