"""`run_server` in a process of its own: port, signals, draining."""

from __future__ import annotations

import contextlib
import gc
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from slora_jax.server.serve import run_server
from tests.server.fake_engine import FakeEngine
from tests.server.live import wait_for

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = """
import logging, time
from pathlib import Path
from slora_jax.server.config import ServerConfig
from slora_jax.server.serve import run_server
from slora_jax.workers import DaemonWorkers
from tests.server.fake_engine import ByteTokenizer, FakeEngine

logging.basicConfig(level="INFO")
submit = DaemonWorkers.submit
def told(self, what, *job):
    logging.info("to read: %s", what)
    return submit(self, what, *job)
DaemonWorkers.submit = told
class Engine(FakeEngine):
    {method}

factory = lambda: Engine(tokenizer=ByteTokenizer(), step_seconds=0.01, max_model_len=10**6)
run_server(factory, port=0, config=ServerConfig(drain_seconds={drain_seconds}))
"""

ENDLESS = {"prompt": "x" * 10, "max_tokens": None, "ignore_eos": True}  # hours
Starting = Callable[..., tuple[subprocess.Popen[str], str]]


def start(drain_seconds: float, method: str = "pass") -> tuple[subprocess.Popen[str], str]:
    """The process and its URL; `method` is one of the fake engine's to replace."""
    program = PROGRAM.format(drain_seconds=drain_seconds, method=method)
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving on (http://\S+)", line):
            return process, found[1]
    raise AssertionError("the server did not start")


def ask(url: str, body: Mapping[str, object]) -> tuple[threading.Thread, list[httpx.Response]]:
    """A thread that posts a completion, and its answer once there is one; returns when it runs."""
    answers: list[httpx.Response] = []

    def post() -> None:
        with contextlib.suppress(httpx.TransportError):
            answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False))

    def runs() -> bool:
        page = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text
        return re.search(r"num_requests_running\S* 1", page) is not None

    thread = threading.Thread(target=post)
    thread.start()
    wait_for(runs)
    return thread, answers


def wait_for_line(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    assert any(words in line for line in process.stderr), f"it ended without {words!r}"


@pytest.fixture
def started() -> Iterator[Starting]:
    """`start`, whose processes end with the test."""
    processes = []

    def starting(*args: Any) -> tuple[subprocess.Popen[str], str]:
        process, url = start(*args)
        processes.append(process)
        return process, url

    yield starting
    for process in processes:
        process.kill()
        process.communicate()


def test_sigterm_lets_requests_finish(started: Starting, tmp_path: Path) -> None:
    gate = tmp_path / "gate"  # steps begin once it exists
    process, url = started(
        60, f"def step(self): self.paused = not Path({str(gate)!r}).exists(); return super().step()"
    )
    thread, answers = ask(url, {"prompt": "x" * 10, "max_tokens": 200, "ignore_eos": True})
    process.send_signal(signal.SIGTERM)
    wait_for_line(process, "Shutting down")
    gate.touch()
    thread.join()
    _, errors = process.communicate(timeout=60)
    assert [a.json()["usage"]["completion_tokens"] for a in answers] == [200]
    assert "Traceback" not in errors


def test_sigterm_cuts_off_what_outlasts_the_drain_and_tells_why(started: Starting) -> None:
    process, url = started(0.2)
    thread, answers = ask(url, ENDLESS)
    process.send_signal(signal.SIGTERM)
    thread.join()
    _, errors = process.communicate(timeout=60)
    assert [a.status_code for a in answers] == [503]
    assert "shutting down" in answers[0].json()["error"]["message"]
    assert "Traceback" not in errors


def test_an_adapters_folder_that_never_answers_does_not_keep_the_process(started: Starting) -> None:
    process, url = started(0, "def prepare_adapter(self, path): time.sleep(600)")
    body = {"lora_name": "slow", "lora_path": "/net/slow"}
    answers: list[httpx.Response] = []

    def load() -> None:
        answers.append(httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=60, trust_env=False))

    threads = [threading.Thread(target=load) for _ in range(3)]  # one more than are read at a time
    for thread in threads:
        thread.start()
    for _ in threads:
        wait_for_line(process, "to read: ")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)  # the folder takes 600 s
    for thread in threads:
        thread.join()
    assert (process.returncode, [a.status_code for a in answers]) == (0, [503] * 3)
    assert "the process ends without the read of adapter 'slow' from /net/slow, which has" in errors


def test_ctrl_c_ends_without_a_traceback(started: Starting) -> None:
    process, url = started(1)
    httpx.get(f"{url}/health", timeout=60, trust_env=False)  # uvicorn handles signals from here on
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_a_second_ctrl_c_ends_the_drain(started: Starting) -> None:
    process, url = started(600)
    thread, _ = ask(url, ENDLESS)
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "Shutting down")
    time.sleep(0.5)
    assert process.poll() is None, "it does not drain"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    thread.join()
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_python_does_not_collect_over_what_the_engine_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    engine.many = [[] for _ in range(50_000)]  # type: ignore[attr-defined]
    walked: list[int] = []

    def run(server: object, sockets: list[socket.socket]) -> None:
        walked.append(sum(isinstance(o, list) and not o for o in gc.get_objects()))

    monkeypatch.setattr("slora_jax.server.serve._Server.run", run)
    try:
        run_server(lambda: engine, port=0)
    finally:
        gc.unfreeze()
    assert len(walked) == 1
    assert walked[0] < 50_000


def test_a_taken_port_fails_before_the_model_is_loaded() -> None:
    def factory() -> None:
        raise AssertionError("too late")

    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match=r"in use .*; choose another --port"),
    ):
        run_server(factory, port=taken.getsockname()[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_number_that_is_no_port_fails_by_name(port: int) -> None:
    with pytest.raises(ValueError, match=rf"port must be in \[0, 65535\], got {port}"):
        run_server(lambda: pytest.fail("the model was loaded"), port=port)
