"""Jobs in daemon threads: as many as allowed at a time, their ends told, none waited for at exit."""

from __future__ import annotations

import concurrent.futures
import logging
import subprocess
import sys
import threading
import time

import pytest

from slora_jax.workers import DaemonWorkers

ALL_AT_ONCE = 20


def test_so_many_run_at_a_time_in_the_order_they_came_and_threads_end() -> None:
    workers, lock = DaemonWorkers(3, "test-worker"), threading.Lock()
    together = threading.Barrier(3, timeout=60)
    running, most, begun = 0, 0, []

    def job(i: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            begun.append(i)
        assert threading.current_thread().daemon
        if i < 3:  # each is begun before one of them ends
            together.wait()
        time.sleep(0.005)
        with lock:
            running -= 1
        return i

    for _ in range(2):  # again after all threads have ended
        futures = [workers.submit(f"job {i}", job, i) for i in range(ALL_AT_ONCE)]
        assert [f.result(60) for f in futures] == list(range(ALL_AT_ONCE))
        assert most == 3
        for thread in threading.enumerate():
            if thread.name == "test-worker":
                thread.join(60)
        assert "test-worker" not in {thread.name for thread in threading.enumerate()}
    assert [sorted(begun[i : i + ALL_AT_ONCE]) for i in (0, ALL_AT_ONCE)] == [list(range(ALL_AT_ONCE))] * 2


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_an_error_is_its_futures_and_the_next_job_runs(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("told to")

    workers = DaemonWorkers(1, "test-worker")
    failed, fine = workers.submit("a failure", fail), workers.submit("a sum", sum, [1, 2])
    with pytest.raises(error, match="told to"):
        failed.result(60)
    assert fine.result(60) == 3


def test_what_has_not_begun_can_be_cancelled_alone_or_together() -> None:
    workers, begun, gate = DaemonWorkers(1, "test-worker"), threading.Event(), threading.Event()

    def wait() -> bool:
        begun.set()
        return gate.wait(60)

    first = workers.submit("a wait", wait)
    assert begun.wait(60)
    others = [workers.submit("a wait", gate.wait, 60) for _ in range(3)]
    assert others[0].cancel()
    workers.cancel()
    gate.set()
    assert first.result(60)
    assert all(future.cancelled() for future in others)
    assert workers.submit("a sum", sum, [1]).result(60) == 1
    assert not concurrent.futures.wait(others, 60).not_done


PROGRAM = """
import logging, sys, threading, time
from slora_jax.workers import DaemonWorkers

logging.basicConfig()
workers = DaemonWorkers(2, "reader")
begun = threading.Event()
workers.submit(
    "a short job",  # it ends after the main thread has
    lambda: (begun.set(), threading.main_thread().join(), print("short job done", flush=True)),
)
begun.wait()
if sys.argv[1] == "hangs":
    workers.submit("the read that hangs", time.sleep, 600)
    workers.submit("a job that waits", print, "it was begun")
    while len(workers._running) < 2:
        time.sleep(0.01)
"""


@pytest.mark.parametrize("how", ["ends", "hangs"])
def test_a_process_waits_for_jobs_under_way_but_not_for_ever(how: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=60, check=True
    )
    assert process.stdout == "short job done\n"
    told = [line for line in process.stderr.splitlines() if logging.getLevelName(logging.WARNING) in line]
    assert len(told) == (how == "hangs")
    if how == "hangs":
        assert "the process ends without the read that hangs, which has not returned for " in told[0]
