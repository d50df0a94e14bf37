"""An engine that has work and completes no step: the log says at what, once, and /health is 503 meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from slora_jax.outputs import StreamEvent
from slora_jax.server.config import ServerConfig
from slora_jax.server.protocols import EngineLike
from tests.engine.simulated_engine import simulated_engine
from tests.engine.slow_loading import Bench
from tests.server.fake_engine import ByteTokenizer, FakeEngine
from tests.server.live import LiveServer, serve, wait_for
from tests.server.pace import VirtualClock

CONFIG = ServerConfig(watchdog_seconds=0.2, drain_seconds=0)


class Hanging(FakeEngine):
    """Its steps wait for `gate`."""

    def __init__(self) -> None:
        super().__init__(tokenizer=ByteTokenizer())
        self.gate = threading.Event()

    def step(self) -> list[StreamEvent]:
        assert self.gate.wait(120)
        return super().step()


def stalls(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r for r in caplog.records if r.getMessage().startswith("no step has completed for ")]
    assert all(r.levelno == logging.ERROR for r in found)
    return [r.getMessage() for r in found]


def health(live: LiveServer) -> int:
    return live.get("/health").status_code


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """Of what the bridge calls a stall; it looks as often as in real time."""
    return VirtualClock(monkeypatch, ["slora_jax.server.async_engine"])


def stall(live: LiveServer, clock: VirtualClock) -> None:
    """Let time pass until /health is 503."""

    def later() -> bool:
        clock.now += 1
        return health(live) == 503

    wait_for(later)


def ask(live: LiveServer, statuses: list[int], **body: object) -> threading.Thread:
    body = {"prompt": [1], "max_tokens": 3, **body}
    thread = threading.Thread(target=lambda: statuses.append(live.post("/v1/completions", body).status_code))
    thread.start()
    return thread


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    engine = Hanging()
    yield engine
    engine.gate.set()


def test_a_step_that_hangs_is_told_once_and_again_when_it_hangs_again(
    hanging: Hanging, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    statuses: list[int] = []
    with serve(hanging, CONFIG) as live:
        for times in (1, 2):
            clock.now += 1
            time.sleep(0.4)  # idle is not stalled
            assert (health(live), len(stalls(caplog))) == (200, times - 1)
            thread = ask(live, statuses)
            stall(live, clock)
            assert "no step has completed" in live.get("/health").json()["error"]["message"]
            wait_for(lambda times=times: len(stalls(caplog)) == times)  # type: ignore[misc]
            time.sleep(0.4)
            assert len(stalls(caplog)) == times
            assert "cmpl-" in stalls(caplog)[-1]
            assert "slora:engine_stalled_seconds" in live.get("/metrics").text
            hanging.gate.set()
            thread.join()
            wait_for(lambda: health(live) == 200)
            wait_for(lambda times=times: caplog.text.count("the engine moves again") == times)  # type: ignore[misc]
            hanging.gate.clear()
    assert statuses == [200, 200]


def test_slow_steps_that_complete_are_no_stall(clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    class Slow(FakeEngine):
        def step(self) -> list[StreamEvent]:
            clock.now += 0.15
            return super().step()

    with serve(Slow(step_seconds=0.05), CONFIG) as live:
        thread = ask(live, [], max_tokens=8)
        while thread.is_alive():
            assert health(live) == 200
        assert stalls(caplog) == []


def test_without_a_watchdog_nothing_is_said(hanging: Hanging, caplog: pytest.LogCaptureFixture) -> None:
    with serve(hanging, ServerConfig(watchdog_seconds=0, drain_seconds=0)) as live:
        thread = ask(live, [])
        time.sleep(0.5)
        assert (health(live), stalls(caplog)) == (200, [])
        hanging.gate.set()
        thread.join()


def test_a_folder_that_never_answers_is_a_stall_though_steps_return(
    clock: VirtualClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(num_pages=60, max_batch_size=2, max_step_tokens=16)
    bench.register("slow", 7)
    engine: EngineLike = bench.engine
    statuses: list[int] = []
    with serve(engine, CONFIG) as live:
        thread = ask(live, statuses, model="slow")
        stall(live, clock)
        wait_for(lambda: len(stalls(caplog)) == 1)
        (told,) = stalls(caplog)
        assert "1 requests have not ended: cmpl-" in told
        assert "adapters in transfer: 'slow' (read for " in told
        assert bench.executor.run()
        thread.join()
        assert (statuses, health(live)) == ([200], 200)


def test_of_a_step_that_hangs_its_size_and_requests_are_told(
    monkeypatch: pytest.MonkeyPatch, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=2, max_step_tokens=16)
    launch, gate = engine._runner.launch, threading.Event()
    monkeypatch.setattr(engine._runner, "launch", lambda plan: gate.wait(120) and launch(plan))
    statuses: list[int] = []
    with serve(engine, CONFIG) as live:
        thread = ask(live, statuses, prompt=[[1, 2, 3]] * 9)
        stall(live, clock)
        wait_for(lambda: len(stalls(caplog)) == 1)
        (told,) = stalls(caplog)
        gate.set()
        thread.join()
    assert "has 0 decodes and 1 chunks of prompts, 3 tokens, of requests cmpl-" in told
    assert "9 requests have not ended: cmpl-" in told
    assert "and 1 more; adapters in transfer: none" in told
    assert statuses == [200]
