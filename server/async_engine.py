"""The bridge between asyncio and the single-threaded engine.

Who owns what, and which thread may touch it:

- The *engine thread* (one daemon thread an `AsyncEngine`) owns the `Engine` from `start()` until it ends, and
  `_routes`, the table request id -> who listens. No other thread calls the engine, but for `prepare_adapter`
  (no engine state), `under_way` and the tokenizer (immutable).
- The *inbox* (`queue.SimpleQueue`) is the only way in: a command is a function to run on the engine thread
  and a future for its result. Commands run in the order they were posted, between two steps; a blocked `get`
  is the idle state, so posting wakes the engine. `_lock` guards only "is it closed, else put": once `_closed`
  is set nothing can enter, and the thread fails whatever is left inside, so no caller waits for ever.
- The *event loop* that submitted requests owns their `EventStream` and its asyncio queue. The engine thread
  hands over the events of a step with one `loop.call_soon_threadsafe` a loop, whatever the number of tokens
  and requests.
- `latest_stats` is an immutable snapshot; the engine thread replaces the reference, anybody reads. So it is
  with the time that `stalled_seconds` counts from. The table of known adapters changes one entry at a time,
  so a load costs the same however many are registered; others look up a name or copy it, each in one
  operation. `under_way` reads the engine's own state in a way that any thread may.

Request ids are chosen by the submitter, hence an abort may be posted while its add is still in the inbox:
order makes it right. A stream that is closed early (client gone, task cancelled) posts that abort; the engine
frees its pages. If `Engine.step` raises, its device state cannot be trusted (donated buffers may be gone):
every open request gets an "error" event, the engine is *dead*, its last snapshot shows no load, and later
submissions raise `EngineDeadError` at once. A queue needs no bound: a request makes at most `n * max_tokens`
tokens, which the engine has admitted already.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from slora_jax.errors import LimitExceededError, encodable
from slora_jax.outputs import AdapterInfo, EngineStats, RequestMetrics, StreamEvent
from slora_jax.request import GenerateRequest
from slora_jax.server.errors import EngineDeadError, ShuttingDownError
from slora_jax.server.protocols import EngineLike, NullObserver, Observer
from slora_jax.workers import DaemonWorkers

logger = logging.getLogger(__name__)

_STATS_PERIOD = 0.1  # seconds between two snapshots while the engine is busy


class EventStream:
    """Events of a group of requests in the order they happened; read and closed on the loop that submitted
    it.

    Ends after the last event of every sequence. `close()` before that aborts what still runs.
    """

    def __init__(self, owner: AsyncEngine, requests: Sequence[GenerateRequest]) -> None:
        self.loop = asyncio.get_running_loop()
        self._owner = owner
        self._started = time.monotonic()
        self._requests = {r.request_id: r for r in requests}
        self._running = {r.request_id: r.params.n for r in requests}  # sequences that the engine has
        self._last_time = {(r.request_id, i): self._started for r in requests for i in range(r.params.n)}
        self._first = set(self._last_time)  # sequences without a token so far
        self._queue: asyncio.Queue[StreamEvent] = asyncio.Queue()
        self._unread = len(self._last_time)  # sequences whose last event was not read
        self._peeked: StreamEvent | None = None

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> StreamEvent:
        if not self._unread:
            raise StopAsyncIteration
        event = await self.peek()
        self._peeked = None
        self._unread -= event.finish_reason is not None
        return event

    async def peek(self) -> StreamEvent:
        """The event that comes next, and stays the next; not to be called after the last one."""
        if self._peeked is None:
            self._peeked = await self._queue.get()
        return self._peeked

    def close(self) -> None:
        """Abort every request of the group that has not finished. Idempotent, never blocks or raises."""
        unfinished, self._last_time = self._last_time, {}
        self._unread = 0
        for request_id in dict.fromkeys(request_id for request_id, _ in unfinished):
            self._owner._abandon(self, request_id)
        for _ in unfinished:
            self._owner.observer.finished("abort", time.monotonic() - self._started)

    def _receive(self, now: float, events: Sequence[StreamEvent]) -> None:
        observer = self._owner.observer
        for event in events:
            if event.metrics is not None:
                self._observe_end(event, event.metrics)
            key = (event.request_id, event.index)
            if key not in self._last_time:
                continue  # closed meanwhile
            if event.token_ids:
                observer.tokens(len(event.token_ids), now - self._last_time[key], key in self._first)
                self._first.discard(key)
                self._last_time[key] = now
            if event.finish_reason is not None:
                del self._last_time[key]
                observer.finished(event.finish_reason, now - self._started)
                if event.retry_after_s is not None and event.index == 0:
                    observer.refused(self._requests[event.request_id].tenant, "early-abort")
            self._queue.put_nowait(event)

    def _observe_end(self, event: StreamEvent, metrics: RequestMetrics) -> None:
        observer, request_id = self._owner.observer, event.request_id
        observer.ended(metrics.sequences[event.index], self._started)
        self._running[request_id] -= 1
        if not self._running[request_id]:
            longest = max(sequence.num_output_tokens for sequence in metrics.sequences.values())
            observer.answered(self._requests[request_id].params, longest)


@dataclasses.dataclass
class _Route:
    """Who listens to a request, and which of its sequences are open. Owned by the engine thread."""

    stream: EventStream
    adapter_id: str | None
    open: set[int]


class AsyncEngine:
    """An `Engine` that coroutines of any loop may use; see the module's ownership rules.

    `start()` hands the engine to its thread; `shutdown()` drains and ends it.
    """

    def __init__(self, engine: EngineLike, observer: Observer | None = None) -> None:
        self._engine = engine
        self.observer: Observer = observer or NullObserver()
        self.tokenizer = engine.tokenizer
        self.model_name = encodable(engine.model_name)  # a folder's, which may be no UTF-8
        self.max_model_len = engine.max_model_len
        self.config = engine.config
        self.latest_stats = engine.stats()
        self._known = {info.name: info for info in engine.adapters() if info.state != "draining"}
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._closed: EngineDeadError | ShuttingDownError | None = (
            None  # why nothing may be posted any more; guarded by _lock
        )
        self._accepting = True
        self._stopping = False  # engine thread: end when idle
        self._routes: dict[str, _Route] = {}
        self._stats_time = 0.0
        self._moved_at: float | None = None  # when a step last completed, or work began; None: idle
        self._loaders = DaemonWorkers(2, "adapter-loader")
        self._reads: set[asyncio.Future[Any]] = set()  # of loads that callers wait for
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to serve; from here on the engine belongs to its thread."""
        self._thread.start()

    # --- for coroutines ---

    @property
    def death(self) -> str | None:
        """Why the engine is dead, None while it is well (an orderly shutdown is no death)."""
        return str(self._closed) if isinstance(self._closed, EngineDeadError) else None

    @property
    def accepting(self) -> bool:
        """Whether new requests are taken."""
        return self._accepting and self._closed is None

    @property
    def stalled_seconds(self) -> float:
        """For how long no step has completed though work is queued; 0 while idle."""
        since = self._moved_at
        return 0.0 if since is None else time.monotonic() - since

    def under_way(self) -> str:
        """What the engine is at, in words; also while it hangs."""
        return self._engine.under_way()

    async def submit(self, requests: Sequence[GenerateRequest]) -> EventStream:
        """Add all requests, or none; returns once the engine has accepted them.

        Raises ValueError, UnknownAdapterError and LimitExceededError of `Engine.add_requests`,
        EngineDeadError, ShuttingDownError.
        """
        self._check_accepting()
        stream = EventStream(self, requests)
        try:
            await self._call(lambda: self._add(stream, requests))
        except asyncio.CancelledError:
            stream.close()  # the add may have happened, or may be about to
            raise
        except LimitExceededError as error:
            for request in requests:
                self.observer.refused(request.tenant, error.limit)
            raise
        return stream

    async def load_adapter(
        self, name: str, path: str | os.PathLike[str], *, replace: bool = False
    ) -> AdapterInfo:
        """Read, check and pack in a worker thread while decoding goes on, then register on the engine thread.

        Raises AdapterError, AdapterExistsError, FileNotFoundError of the engine; nothing is registered then.
        """
        self._check_accepting()
        what = f"the read of adapter '{name}' from {os.fspath(path)}"
        prepared = await self._read(what, path)

        def register() -> AdapterInfo:
            info = self._engine.load_adapter(name, prepared, replace=replace)
            self._known[name] = info
            self._publish()
            return info

        return await self._call(register)

    async def _read(self, what: str, path: str | os.PathLike[str]) -> Any:
        """What `prepare_adapter` makes of a folder; ShuttingDownError where a shutdown comes before it."""
        reading = asyncio.wrap_future(self._loaders.submit(what, self._engine.prepare_adapter, path))
        self._reads.add(reading)
        try:
            return await reading
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._accepting or task is None or task.cancelling():
                raise  # its caller has gone
            raise ShuttingDownError("the server shut down before the adapter was read") from None
        finally:
            self._reads.discard(reading)

    async def unload_adapter(self, name: str) -> None:
        """Unregister; requests in flight finish on it. Raises UnknownAdapterError."""

        def unregister() -> None:
            self._engine.unload_adapter(name)
            self._known.pop(name, None)
            self._publish()

        await self._call(unregister)

    async def pin_adapter(self, name: str, pinned: bool) -> None:
        """Keep an adapter in the pool from its next use on, or no longer. Raises UnknownAdapterError, or
        ValueError where that leaves requests no room.
        """

        def pin() -> None:
            change = self._engine.pin_adapter if pinned else self._engine.unpin_adapter
            self._known[name] = change(name)
            self._publish()

        await self._call(pin)

    @property
    def known_adapters(self) -> tuple[AdapterInfo, ...]:
        """Those that new requests may name, as they were when they were loaded, pinned or unpinned last."""
        return tuple(self._known.values())

    def known_adapter(self, name: str) -> AdapterInfo | None:
        """One of them."""
        return self._known.get(name)

    async def shutdown(self, drain_seconds: float, abort_seconds: float = 10.0) -> None:
        """Take no more requests, let running ones finish for `drain_seconds`, abort the rest, end the thread.

        Loads that are being read raise ShuttingDownError at once. Listeners of aborted requests get their
        last events. A step that outlasts `abort_seconds` more (a compilation) is left to the daemon thread.
        """
        self._accepting = False
        self._loaders.cancel()
        for reading in list(self._reads):
            with contextlib.suppress(RuntimeError):  # its loop is closed
                reading.get_loop().call_soon_threadsafe(reading.cancel)
        if not self._thread.is_alive():
            with self._lock:
                self._closed = self._closed or ShuttingDownError("the server has shut down")
            return
        with contextlib.suppress(EngineDeadError, ShuttingDownError):
            self._post(self._stop)
            await asyncio.to_thread(self._thread.join, drain_seconds)
            self._post(self._abort_all)
            await asyncio.to_thread(self._thread.join, abort_seconds)
            if self._thread.is_alive():
                logger.error(
                    "the engine did not finish its step within %g s of the abort; leaving it", abort_seconds
                )

    def abort_all(self) -> None:
        """End a drain: abort whatever still runs."""
        with contextlib.suppress(EngineDeadError, ShuttingDownError):
            self._post(self._abort_all)

    def _check_accepting(self) -> None:
        if not self._accepting:
            raise ShuttingDownError("the server is shutting down; send the request to another replica")

    async def _call[T](self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._post(function))

    def _post[T](self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            if self._closed is not None:
                raise type(self._closed)(*self._closed.args)  # a fresh one: tracebacks grow on a shared one
            self._inbox.put((function, future))
        return future

    def _abandon(self, stream: EventStream, request_id: str) -> None:
        """Abort a request of a stream that nobody reads any more. Any thread; returns at once."""

        def drop() -> None:
            route = self._routes.get(request_id)
            if route is not None and route.stream is stream:
                self._deliver(self._engine.abort(request_id))

        with contextlib.suppress(EngineDeadError, ShuttingDownError):
            self._post(drop)

    # --- on the engine thread ---

    def _main(self) -> None:
        try:
            while self._turn():
                pass
            closed: EngineDeadError | ShuttingDownError = ShuttingDownError("the server has shut down")
        except BaseException as error:  # whatever it is, nobody may be left waiting
            logger.exception("the engine died")
            closed = EngineDeadError(f"the engine died: {type(error).__name__}: {error}")
            self._publish_death()
        self._moved_at = None
        with self._lock:
            self._closed = closed
        self._fail_open_requests(str(closed))
        while not self._inbox.empty():
            _, future = self._inbox.get()
            if future.set_running_or_notify_cancel():
                future.set_exception(type(closed)(*closed.args))

    def _turn(self) -> bool:
        """Commands that wait (or, when idle, the next one), then a step. False: stopped and drained."""
        idle = not self._engine.has_unfinished()
        if idle:
            self._moved_at = None
            self._publish()
            if self._stopping:
                return False
        self._run_commands(wait=idle)
        if self._engine.has_unfinished():
            started, steps = time.monotonic(), self._engine.num_steps
            if self._moved_at is None:
                self._moved_at = started
            events = self._engine.step()
            self._deliver(events)
            now = time.monotonic()
            launched = self._engine.num_steps > steps
            if events or launched:
                self._moved_at = now
            if launched:
                self.observer.step(now - started, self._engine.last_step_tokens)
            if now - self._stats_time > _STATS_PERIOD:
                self._publish()
        return True

    def _run_commands(self, wait: bool) -> None:
        for _ in range(max(self._inbox.qsize(), wait)):  # those posted meanwhile come after the next step
            function, future = self._inbox.get()
            if not future.set_running_or_notify_cancel():
                continue  # its caller was cancelled before it began
            try:
                result = function()
            except BaseException as error:
                future.set_exception(
                    error
                )  # the caller's to handle: a refused request is no harm to the engine
                if not isinstance(error, Exception):
                    raise
            else:
                future.set_result(result)

    def _add(self, stream: EventStream, requests: Sequence[GenerateRequest]) -> None:
        self._engine.add_requests(requests)
        for request in requests:
            self._routes[request.request_id] = _Route(
                stream, request.adapter_id, set(range(request.params.n))
            )

    def _deliver(self, events: Iterable[StreamEvent]) -> None:
        """Hand events to their listeners with one wake-up a loop; events without a listener are dropped."""
        now = time.monotonic()
        batches: defaultdict[asyncio.AbstractEventLoop, defaultdict[EventStream, list[StreamEvent]]]
        batches = defaultdict(lambda: defaultdict(list))
        for event in events:
            route = self._routes.get(event.request_id)
            if route is None:
                continue
            if event.finish_reason is not None:
                route.open.discard(event.index)
                if not route.open:
                    del self._routes[event.request_id]
            batches[route.stream.loop][route.stream].append(event)
        for loop, streams in batches.items():
            try:
                loop.call_soon_threadsafe(_receive_all, now, list(streams.items()))
            except RuntimeError:  # that loop is closed: nobody will ever read these
                for stream in streams:
                    self._drop_stream(stream)

    def _drop_stream(self, stream: EventStream) -> None:
        for request_id in [r for r, route in self._routes.items() if route.stream is stream]:
            del self._routes[request_id]
            self._engine.abort(request_id)

    def _fail_open_requests(self, message: str) -> None:
        self._deliver(
            [
                StreamEvent(
                    request_id, 0, index, route.adapter_id, "", (), finish_reason="error", error=message
                )
                for request_id, route in self._routes.items()
                for index in sorted(route.open)
            ]
        )
        self._routes.clear()

    def _stop(self) -> None:
        self._stopping = True

    def _abort_all(self) -> None:
        for request_id in list(self._routes):
            self._deliver(self._engine.abort(request_id))

    def _publish_death(self) -> None:
        """The last counts, without the load: its requests are failed next, and the last snapshot stays."""
        try:
            stats = self._engine.stats()
        except BaseException:  # its books may be broken, too
            logger.exception("the counts of metrics are those of the last snapshot before the engine's death")
            stats = self.latest_stats
        self._publish(stats.without_load())

    def _publish(self, stats: EngineStats | None = None) -> None:
        self.latest_stats = stats or self._engine.stats()
        self.observer.published(self.latest_stats)
        self._stats_time = time.monotonic()


def _receive_all(now: float, batch: list[tuple[EventStream, list[StreamEvent]]]) -> None:
    """On the event loop: put a step's events into their streams."""
    for stream, events in batch:
        stream._receive(now, events)
