"""A process that used an engine ends as it should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from slora_jax import EngineConfig, SamplingParams
from slora_jax.engine import Engine

ROOT = Path(__file__).resolve().parent.parent.parent
ENGINE = """
import sys
from slora_jax import EngineConfig, SamplingParams
from slora_jax.engine import Engine

config = EngineConfig(dtype="float32", load_format="dummy", max_batch_size=2, num_pages=64)
engine = Engine.from_pretrained(sys.argv[1], config=config)
greedy = SamplingParams(max_tokens=4, temperature=0)
"""
PROGRAM = ENGINE + "print(engine.generate([[1, 2, 3]], None, greedy)[0].token_ids)"
UNDER_WAY = {
    "an unread stream": "stream = engine.stream([[1, 2, 3]], None, greedy); next(stream)",
    "two streams that take turns": """
streams = [engine.stream([[1, 2, 3]], None, greedy) for _ in range(2)]
[next(stream) for stream in streams]
""",
    "requests that are stepped": "engine.add_request([1, 2, 3], None, greedy); engine.step(); engine.step()",
    "an exception beside a stream": """
for _ in engine.stream([[1, 2, 3]], None, greedy):
    sys.exit(0)
""",
    "a stream that a thread stepped last": """
import asyncio
stream = engine.stream([[1, 2, 3]], None, greedy)
asyncio.run(asyncio.to_thread(next, stream))
""",
    "a stream beside a thread that generated": """
import threading
stream = engine.stream([[1, 2, 3]], None, greedy)
next(stream)
thread = threading.Thread(target=engine.generate, args=([[4]], None, greedy))
thread.start()
thread.join()
""",
    "a daemon thread that goes on": """
import threading
begun, greedy = threading.Event(), SamplingParams(max_tokens=100, temperature=0)
def work():
    while True:
        for _ in engine.stream([[1, 2, 3]], None, greedy):
            begun.set()
threading.Thread(target=work, daemon=True).start()
begun.wait()
""",
}


def test_no_step_is_left_in_flight_once_all_requests_have_ended(tiny_model_dir: Path) -> None:
    config = EngineConfig(dtype="float32", load_format="dummy", max_batch_size=2, num_pages=64)
    engine = Engine.from_pretrained(tiny_model_dir, config=config)
    stream = engine.stream([[1, 2, 3]], None, SamplingParams(max_tokens=40, temperature=0))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not engine.has_unfinished()


@pytest.mark.parametrize("attempt", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 5))])
def test_exit_right_after_generate_is_clean(tiny_model_dir: Path, attempt: int) -> None:
    """Two at a time, for the race that this is about: a step ahead, or its copy, still under way at exit."""
    command = [sys.executable, "-c", PROGRAM, str(tiny_model_dir)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for process in processes:
        out, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        assert out.startswith("[")


@pytest.mark.parametrize("under_way", UNDER_WAY)
def test_exit_with_requests_under_way_is_clean(tiny_model_dir: Path, under_way: str) -> None:
    command = [sys.executable, "-c", ENGINE + UNDER_WAY[under_way], str(tiny_model_dir)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert not re.search("Exception ignored|Traceback", process.stderr), process.stderr


STUCK = """
import logging, threading, time
from slora_jax import SamplingParams
from tests.engine.slow_loading import Bench
from slora_jax.workers import DaemonWorkers

logging.basicConfig()
bench = Bench(num_pages=60, max_batch_size=2, max_step_tokens=16)
path = bench.register("slow", 7)
bench.engine._loader._readers = DaemonWorkers(4, "adapter-reader")
begun = threading.Event()
bench.engine._loader._read = lambda path, checkpoint: begun.set() or time.sleep(600)
bench.engine.add_request([1], "slow")
bench.engine.step()
assert begun.wait(30)
"""


def test_a_read_that_never_returns_does_not_keep_the_process() -> None:
    process = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert "the process ends without the read of adapter 'slow' from /disk/7, which has" in process.stderr
