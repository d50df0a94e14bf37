"""Threads that read adapters, and that a process ends without where a read does not return."""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 2.0


@dataclasses.dataclass(eq=False)
class _Job:
    what: str
    call: Callable[[], Any]
    since: float  # monotonic time of its submission, then of its begin
    future: concurrent.futures.Future[Any] = dataclasses.field(default_factory=concurrent.futures.Future)


class DaemonWorkers:
    """Runs jobs in at most `max_workers` threads, which end when no job waits. Safe in any thread.

    `concurrent.futures.ThreadPoolExecutor` joins its threads when the process ends: a network folder that
    never answers would keep it alive. Here the process waits 2 s for jobs under way (they may be in native
    code) and then ends; the log says which jobs it left behind.
    """

    def __init__(self, max_workers: int, name: str) -> None:
        self._max_workers, self._name = max_workers, name
        self._lock = threading.Lock()  # guards the rest
        self._waiting: collections.deque[_Job] = collections.deque()
        self._running: set[_Job] = set()
        self._workers = 0

    def submit[T](self, what: str, function: Callable[..., T], *args: Any) -> concurrent.futures.Future[T]:
        """Call `function(*args)` when a thread is free; `what` names the job in the log."""
        job = _Job(what, functools.partial(function, *args), time.monotonic())
        with self._lock:
            if self._workers < self._max_workers:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._workers += 1
                if self._workers == 1:
                    atexit.register(self._leave)  # later than JAX's own, so it runs before the devices go
            self._waiting.append(job)
        return job.future

    def cancel(self) -> None:
        """Cancel the jobs that have not begun."""
        with self._lock:
            jobs = list(self._waiting)
            self._waiting.clear()
        for job in jobs:
            job.future.cancel()
            job.future.set_running_or_notify_cancel()  # whoever waits for it learns

    def _work(self) -> None:
        job: _Job | None = None
        while (job := self._next(job)) is not None:
            try:
                job.future.set_result(job.call())
            except BaseException as error:  # whoever waits for the future is told
                job.future.set_exception(error)

    def _next(self, done: _Job | None) -> _Job | None:
        """The job to run after `done`; None where this thread is to end."""
        with self._lock:
            if done is not None:
                self._running.remove(done)
            while self._waiting:
                job = self._waiting.popleft()
                if job.future.set_running_or_notify_cancel():
                    job.since = time.monotonic()
                    self._running.add(job)
                    return job
            self._workers -= 1
            if not self._workers:
                atexit.unregister(self._leave)
            return None

    def _leave(self) -> None:
        self.cancel()
        with self._lock:
            jobs = list(self._running)
        concurrent.futures.wait([job.future for job in jobs], _EXIT_SECONDS)
        for job in jobs:
            if not job.future.done():
                seconds = time.monotonic() - job.since
                logger.warning(
                    "the process ends without %s, which has not returned for %.1f s", job.what, seconds
                )
