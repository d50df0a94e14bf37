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
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from slora_jax.server.serve import run_server
from tests.server.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = """
import logging, time
from slora_jax.server.config import ServerConfig
from slora_jax.server.serve import run_server
from tests.server.fake_engine import ByteTokenizer, FakeEngine

logging.basicConfig(level="INFO")
class Engine(FakeEngine):
    {method}

factory = lambda: Engine(tokenizer=ByteTokenizer(), step_seconds=0.01)
run_server(factory, port=0, config=ServerConfig(drain_seconds={drain_seconds}))
"""


def start(drain_seconds: float, method: str = "pass") -> tuple[subprocess.Popen[str], str]:
    """The process and its URL; `method` is one of the fake engine's to replace."""
    program = PROGRAM.format(drain_seconds=drain_seconds, method=method)
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving on (http://\S+)", line):
            return process, found[1]
    raise AssertionError("the server did not start")


@pytest.fixture(params=[20, 0.2])
def started(request: pytest.FixtureRequest) -> Iterator[tuple[float, subprocess.Popen[str], str]]:
    process, url = start(request.param)
    yield request.param, process, url
    process.kill()
    process.communicate()


def test_sigterm_drains(started: tuple[float, subprocess.Popen[str], str]) -> None:
    drain_seconds, process, url = started
    body = {"prompt": "x" * 10, "max_tokens": 200, "ignore_eos": True}  # 2 s
    answers: list[httpx.Response | httpx.TransportError] = []

    def ask() -> None:
        try:
            answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=20, trust_env=False))
        except httpx.TransportError as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while "running" not in (page := httpx.get(f"{url}/metrics", trust_env=False).text) or not re.search(
        r"num_requests_running\S* 1", page
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    thread.join(15)
    process.wait(15)
    (answer,) = answers
    if drain_seconds == 20:
        assert isinstance(answer, httpx.Response)
        assert answer.json()["usage"]["completion_tokens"] == 200
    else:  # cut off, and told why
        assert isinstance(answer, httpx.Response)
        assert answer.status_code == 503
        assert "shutting down" in answer.json()["error"]["message"]
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()


def test_an_adapters_folder_that_never_answers_does_not_keep_the_process() -> None:
    process, url = start(0, "def prepare_adapter(self, path): time.sleep(600)")
    body = {"lora_name": "slow", "lora_path": "/net/slow"}
    answers: list[httpx.Response] = []

    def load() -> None:
        answers.append(httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=30, trust_env=False))

    threads = [threading.Thread(target=load) for _ in range(3)]  # one more than are read at a time
    for thread in threads:
        thread.start()
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, errors = process.communicate(timeout=30)
    for thread in threads:
        thread.join()
    assert (process.returncode, [a.status_code for a in answers]) == (0, [503] * 3)
    assert time.monotonic() - started < 8, "it waited for the folder"
    assert "the process ends without the read of adapter 'slow' from /net/slow, which has" in errors


def test_ctrl_c_ends_without_a_traceback() -> None:
    process, url = start(1)
    httpx.get(f"{url}/health", timeout=20, trust_env=False)  # uvicorn handles signals from here on
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=15)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_a_second_ctrl_c_ends_the_drain() -> None:
    process, url = start(60, "def step(self): time.sleep(0.1); return super().step()")
    body = {"prompt": "x" * 10, "max_tokens": 200, "ignore_eos": True}  # 20 s

    def ask() -> None:
        with contextlib.suppress(httpx.TransportError):
            httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)

    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(200):
        if re.search(r"num_requests_running\S* 1", httpx.get(f"{url}/metrics", trust_env=False).text):
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None, "it does not drain"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=15)
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
