"""Brings adapters into the pool while steps run: read in worker threads, staged to the device, written.

`seek` (the scheduler's, in the order of the queue) takes an adapter one stage further and never waits;
`transfer` begins the copies of a step's seeks together; `settle` takes what has come: host copies of reads,
and copies to the device, after which the adapter is resident (where they are arrays of their own, a write
into the pool is enqueued then). What fails is handed out once, by `take_failures`; the next seek tries again.
All but the reading itself happens in the engine's thread.

What nobody needs any more, neither a request nor a guess, is cancelled: a read stops before its next
tensor (one that has come to its end is kept in host memory), and pages whose copy has not begun are given
back (`AdapterStore.release`). A copy under way is let go on, as its bytes are on the link already.

A reservation that the store took back, or an adapter that it freed, is noticed here when its read or copy
comes in: entries hold the list of pages that they were begun for.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slora_jax.errors import AdapterError, printable, reason_without_path
from slora_jax.lora.packing import AdapterShape, PackedAdapter
from slora_jax.lora.peft_folder import FolderStamp
from slora_jax.lora.store import Adapter, AdapterStore
from slora_jax.lora.transfer import HostCopy, StagedCopy
from slora_jax.outputs import LoadStats
from slora_jax.workers import DaemonWorkers

logger = logging.getLogger(__name__)

_READERS = 4  # threads
_STEP_SHARE = 0.8  # of the time of a step, for which copies may keep the link to the device
_PACED_STEPS = 8  # latest steps, whose median is that time
_FIRST_STEP = 0.01  # seconds, as long as none was timed
_LONG_COPY = 30.0  # seconds of a copy that the log is told of


@dataclasses.dataclass(frozen=True)
class PreparedAdapter:
    """An adapter that is read, validated and packed, ready to be registered without delay.

    One that was read from a folder has its `stamp`, and its `host` copy in the form that is copied to the
    device. Made by hand it has neither: it is kept in host memory for as long as it is registered.
    """

    path: str
    packed: PackedAdapter
    stamp: FolderStamp | None = None
    host: HostCopy | None = None


type ReadAdapter = Callable[[str, Callable[[], None]], PreparedAdapter]


class AdapterDevice(Protocol):
    """The part of a ModelRunner that loads adapters."""

    @property
    def stages_adapters(self) -> bool: ...
    @property
    def copy_bytes_per_s(self) -> float | None: ...
    def stage_adapters(
        self, copies: Sequence[HostCopy], pages: Sequence[Sequence[int]]
    ) -> Sequence[StagedCopy]: ...
    def write_adapter(self, staged: StagedCopy) -> None: ...


class Readers(Protocol):
    """Who reads: threads, or a simulation of them."""

    def submit[T](
        self, what: str, function: Callable[..., T], *args: Any
    ) -> concurrent.futures.Future[T]: ...


@dataclasses.dataclass(frozen=True)
class _Read:
    """A read under way in a thread, begun at this monotonic time."""

    adapter: Adapter
    future: concurrent.futures.Future[PreparedAdapter]
    since: float


@dataclasses.dataclass(eq=False)
class _Transfer:
    """A copy under way (None: not begun) into these pages of an adapter."""

    adapter: Adapter
    pages: list[int]
    host: HostCopy
    copy: StagedCopy | None = None
    since: float = 0.0  # monotonic time of its copy's begin
    told: bool = False  # that it takes long
    together: int = 0  # pages that were copied with it, its own included

    @property
    def valid(self) -> bool:
        return self.adapter.pages is self.pages


class AdapterLoader:
    """Owns the reads and copies under way. `read(path, checkpoint)` reads, validates and packs; it runs in
    threads, and calls `checkpoint()` between two tensors, whose CancelledError ends it.

    `staging_bytes` bounds what is on its way; a larger adapter goes alone. While steps run (`stepped`
    tells), no more is copied at a time than is done before the next one's input comes, which would wait
    behind it for the link; what was sought since waits for the next `transfer`.
    `measured(pages, seconds)` is told what each copy took, from its begin to the `settle` that
    found it done, and the pages of all that were begun together.
    """

    def __init__(
        self,
        store: AdapterStore,
        device: AdapterDevice,
        read: ReadAdapter,
        *,
        staging_bytes: int,
        measured: Callable[[float, float], None],
        readers: Readers | None = None,
    ) -> None:
        self._measured = measured
        self._store, self._device, self._read = store, device, read
        self._staging_bytes = staging_bytes
        self._step_end = time.perf_counter()
        self._step_seconds: collections.deque[float] = collections.deque(maxlen=_PACED_STEPS)
        self._most_bytes: float = staging_bytes  # that may be copied at a time
        self._bytes_on_way = self._bytes_to_begin = 0  # host bytes of _transfers; of those not begun
        self._readers = readers or DaemonWorkers(_READERS, "adapter-reader")
        self._reading: dict[int, _Read] = {}  # by generation
        self._transfers: list[_Transfer] = []  # in the order of their copies
        # Is read though no request asks for it, until one asks for another.
        self._guess: Adapter | None = None
        # The scheduler's pass in which one found no room: those after it take none, or it might never get it.
        self._host_full_in = self._staging_full_in = -1
        self._failed: dict[int, tuple[Adapter, str]] = {}
        self._hits = self._misses = self._bytes_staged = self._failures = self.loads = 0
        self._reads_cancelled = 0
        self._wait_seconds = self._read_seconds = self._copy_seconds = 0.0

    # -- asked for by the scheduler --

    def seek(self, adapter: Adapter, *, room: bool, waits: bool) -> bool:
        """Take an adapter one stage further towards the pool; True where it is resident.

        Only with `room` may it take pages. `waits`: its request would run now, if it were resident; else
        this is a prefetch.
        """
        if adapter.state == "resident":
            return True
        if adapter.generation in self._failed:
            return False
        adapter.last_sought = self._store.host.turn
        if waits and adapter.waited_since is None:
            adapter.waited_since = time.monotonic()
        if adapter.state == "registered":
            adapter.ahead = not waits
            if adapter.host is None:
                self._begin_read(adapter)
            elif room and self._may_stage(adapter.host_bytes):
                self._begin_transfer(adapter, adapter.host)
        return adapter.resident

    def transfer(self) -> None:
        """Begin the copies of adapters that were given pages since, all together: as many as may be under
        way with those that are not done.

        No step may be under way that was planned when these pages were another's.
        """
        begun = [t for t in self._transfers if t.copy is not None]
        to_begin = [t for t in self._transfers if t.copy is None and t.valid]
        waiting = self._first_of(to_begin, beside=begun) if to_begin else []
        later = to_begin[len(waiting) :]
        self._set_transfers(begun + later)
        if not waiting:
            return
        since, together = time.monotonic(), sum(len(t.pages) for t in waiting)
        try:
            copies = self._device.stage_adapters(
                [t.host for t in waiting], [t.adapter.weight_pages for t in waiting]
            )
        except Exception as error:  # whatever the device refuses, only these adapters are lost
            for t in waiting:
                self._fail(t.adapter, error)
            return
        self._bytes_staged += sum(t.adapter.host_bytes for t in waiting)
        for t, copy in zip(waiting, copies, strict=True):
            t.copy, t.since, t.together = copy, since, together
            t.adapter.copy = copy
        self._set_transfers(begun + waiting + later)

    # -- between steps --

    def stepped(self, *, runs: bool, timed: bool) -> None:
        """A step has been waited for, or there was none. `runs`: one is under way now. `timed`: the time
        since the last call is a step's.
        """
        before, self._step_end = self._step_end, time.perf_counter()
        if timed:
            self._step_seconds.append(self._step_end - before)
        self.idle()
        link = self._device.copy_bytes_per_s
        if runs and link is not None:
            step = statistics.median(self._step_seconds or [_FIRST_STEP])
            self._most_bytes = min(self._most_bytes, _STEP_SHARE * step * link)

    def idle(self) -> None:
        """No step is under way: copies delay nobody."""
        self._most_bytes = self._staging_bytes

    def settle(self) -> None:
        """Take reads and copies that are done; never waits for one that is not."""
        self._store.host.turn += 1
        for read in list(self._reading.values()):
            if read.future.done():
                self._end_read(read)
        self._settle_copies()

    def wait(self, timeout: float) -> bool:
        """Wait until a read or copy under way has ended, for `timeout` seconds of a read at most.

        False where none is under way.
        """
        copy = next((t.copy for t in self._transfers if t.valid and t.copy is not None), None)
        if copy is not None:
            with contextlib.suppress(Exception):  # settle meets it, too, and knows whose it is
                copy.wait()
            return True
        futures = [read.future for read in self._reading.values()]
        if futures:
            concurrent.futures.wait(futures, timeout, concurrent.futures.FIRST_COMPLETED)
        return bool(futures)

    def rewind(self) -> None:
        """After a step that broke off, perhaps in here (Ctrl-C), and with nothing under way on the device:
        adapters that were on their way to it are sought anew, and so are those whose read was lost.
        """
        self._set_transfers([])
        for adapter in self._store:
            if adapter.state == "staged":
                self._store.withdraw(adapter)
            elif adapter.state == "reading" and adapter.generation not in self._reading:
                adapter.state = "registered"
                self._store.lose_guess(adapter)
        self._store.host.promised = sum(read.adapter.host_bytes for read in self._reading.values())

    def take_failures(self) -> list[tuple[Adapter, str]]:
        """Adapters whose loads failed since the last call, and why; the log has the paths."""
        failed, self._failed = list(self._failed.values()), {}
        return failed

    def guess(self, free_pages: int) -> Adapter | None:
        """Where nothing is under way, and nobody lacks host memory, bring back the likeliest of recently
        evicted adapters, into at most `free_pages` pages: nothing gives way for a guess, in the pool or in
        host memory; nor is one made again that gave way unused. Returns it.
        """
        host = self._store.host
        if self._reading or self._transfers or self._host_full_in == host.turn:
            return None
        candidates = [
            a
            for a in self._store.recently_evicted
            if not a.unloaded and a.state == "registered" and a.num_pages <= free_pages
        ]
        guess = max(candidates, key=lambda a: a.usage, default=None)
        if guess is None or (guess.host is None and host.free < guess.host_bytes):
            return None
        self._guess = guess
        self.seek(guess, room=True, waits=False)
        if guess.state != "reading":
            self._guess = None
        return guess

    def stats(self) -> LoadStats:
        """A snapshot for metrics."""
        host = self._store.host
        return LoadStats(
            reading=len(self._reading),
            staged=sum(t.valid for t in self._transfers),
            host_bytes=host.held + host.fixed,
            host_hits=self._hits,
            host_misses=self._misses,
            prefetches_useful=self._store.prefetches_useful,
            prefetches_wasted=self._store.prefetches_wasted,
            guesses=self._store.guesses,
            guesses_useful=self._store.guesses_useful,
            guesses_wasted=self._store.guesses_wasted,
            bytes_staged=self._bytes_staged,
            wait_seconds=self._wait_seconds,
            failures=self._failures,
            cancelled=self._reads_cancelled + self._store.reservations_cancelled,
            read_seconds=self._read_seconds,
            copy_seconds=self._copy_seconds,
        )

    def under_way(self) -> list[str]:
        """Adapters that are read or copied, and for how long. Safe in any thread."""
        now = time.monotonic()
        reads = [f"'{r.adapter.name}' (read for {now - r.since:.1f} s)" for r in list(self._reading.values())]
        copies = [t for t in list(self._transfers) if t.valid]
        return reads + [
            f"'{t.adapter.name}' ("
            + ("waits for its copy" if t.copy is None else f"copied for {now - t.since:.1f} s")
            + ")"
            for t in copies
        ]

    def check_integrity(self) -> None:
        """States and what is under way agree; raises AssertionError saying what does not."""
        valid = {t.adapter.generation for t in self._transfers if t.valid}
        for adapter in self._store:
            reading = adapter.generation in self._reading
            assert reading == (adapter.state == "reading"), f"adapter '{adapter.name}' is {adapter.state}"
            staged = adapter.generation in valid
            assert staged == (adapter.state == "staged"), f"adapter '{adapter.name}' is {adapter.state}"
        for counted, of in (
            (self._bytes_on_way, self._transfers),
            (self._bytes_to_begin, [t for t in self._transfers if t.copy is None]),
        ):
            assert counted == sum(t.adapter.host_bytes for t in of), "bytes on their way are miscounted"
        promised = sum(read.adapter.host_bytes for read in self._reading.values())
        assert self._store.host.promised == promised, "bytes are promised to reads that are not under way"

    # -- inside --

    def _begin_read(self, adapter: Adapter) -> None:
        """Read it, where a thread and room in host memory can be had; one alone may exceed the budget."""
        host, stamp = self._store.host, adapter.stamp
        assert stamp is not None
        if adapter is not self._guess:
            self._guess = None  # whose read stops: it was for a time in which nobody lacks anything
        if len(self._reading) >= _READERS or self._host_full_in == host.turn:
            return
        if not host.make_room(adapter.host_bytes) and (host.held or host.promised):
            self._host_full_in = host.turn
            return
        what = f"the read of adapter '{adapter.name}' from {printable(stamp.folder)}"

        def checkpoint() -> None:
            if adapter.freed or not (adapter.users or adapter is self._guess):
                raise concurrent.futures.CancelledError

        future = self._readers.submit(
            what, _read_again, self._read, checkpoint, adapter.name, stamp, adapter.shape
        )
        adapter.state = "reading"
        if adapter is self._guess:
            self._store.begin_guess(adapter)
        self._misses += 1
        host.promised += adapter.host_bytes
        self._reading[adapter.generation] = _Read(adapter, future, time.monotonic())

    def _end_read(self, read: _Read) -> None:
        adapter, future = read.adapter, read.future
        del self._reading[adapter.generation]
        if adapter is self._guess:
            self._guess = None
        self._store.host.promised -= adapter.host_bytes
        adapter.state = "registered"
        self._read_seconds += time.monotonic() - read.since
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or isinstance(error, concurrent.futures.CancelledError):
            self._reads_cancelled += 1
            self._store.lose_guess(adapter)
        elif adapter.freed:
            return
        elif error is None:
            prepared = future.result()
            assert prepared.host is not None
            self._store.host.put(adapter, prepared.host)
            adapter.stamp, adapter.fresh = prepared.stamp, True
        else:
            self._fail(adapter, error)

    def _settle_copies(self) -> None:
        under_way, now = [], time.monotonic()
        for entry in self._transfers:
            if entry.valid and (entry.copy is None or not entry.copy.is_ready()):
                under_way.append(entry)
                if entry.copy is not None and not entry.told and now - entry.since > _LONG_COPY:
                    entry.told = True
                    logger.warning(
                        "the copy of adapter '%s' to the device has not ended in %.0f s; others wait for it",
                        entry.adapter.name,
                        now - entry.since,
                    )
            elif entry.valid and entry.copy is not None:
                self._write(entry.adapter, entry.copy)
                if entry.adapter.resident:
                    seconds = time.monotonic() - entry.since  # a write included
                    self._copy_seconds += seconds
                    self._measured(entry.together, seconds)
        self._set_transfers(under_way)

    def _set_transfers(self, transfers: list[_Transfer]) -> None:
        self._transfers = transfers
        self._bytes_on_way = sum(t.adapter.host_bytes for t in transfers)
        self._bytes_to_begin = sum(t.adapter.host_bytes for t in transfers if t.copy is None)

    def _first_of(self, to_begin: Sequence[_Transfer], *, beside: Sequence[_Transfer]) -> list[_Transfer]:
        """Those that may be copied now, beside copies that were begun earlier; one at least beside none."""
        nbytes = sum(t.adapter.host_bytes for t in beside if t.copy is not None and not t.copy.is_ready())
        first: list[_Transfer] = []
        for t in to_begin:
            if nbytes and nbytes + t.adapter.host_bytes > self._most_bytes:
                break
            nbytes += t.adapter.host_bytes
            first.append(t)
        return first

    def _may_stage(self, nbytes: int) -> bool:
        """Whether so much may be sought beside what is on its way: as much as one `transfer` begins."""
        room: float = self._staging_bytes - self._bytes_on_way if self._transfers else nbytes
        if self._bytes_to_begin:
            room = min(room, self._most_bytes - self._bytes_to_begin)
        if nbytes > room:
            self._staging_full_in = self._store.host.turn
        return self._staging_full_in != self._store.host.turn

    def _begin_transfer(self, adapter: Adapter, host: HostCopy) -> None:
        if not self._store.reserve(adapter):
            return
        assert adapter.pages is not None
        if adapter is self._guess:
            self._store.begin_guess(adapter)
        self._hits += not adapter.fresh
        adapter.fresh = False
        self._transfers.append(_Transfer(adapter, adapter.pages, host))
        self._bytes_on_way += adapter.host_bytes
        self._bytes_to_begin += adapter.host_bytes
        if not self._device.stages_adapters:  # nothing is copied before the write: no reason to wait
            self.transfer()
            self._settle_copies()

    def _write(self, adapter: Adapter, copy: StagedCopy) -> None:
        try:
            copy.wait()  # done already; raises where it failed
            self._device.write_adapter(copy)
        except Exception as error:  # whatever it is, the other requests go on
            adapter.copy = None  # over: its pages are left
            self._fail(adapter, error)
            return
        self._store.settle(adapter)
        self.loads += 1
        if adapter.waited_since is not None:
            self._wait_seconds += time.monotonic() - adapter.waited_since
            adapter.waited_since = None

    def _fail(self, adapter: Adapter, error: BaseException) -> None:
        if adapter.state == "staged":
            self._store.withdraw(adapter)
        known = isinstance(error, ValueError | OSError)
        logger.warning(
            "adapter '%s' could not be loaded: %s",
            adapter.name,
            printable(error if known else f"{type(error).__name__}: {error}"),
            exc_info=None if known else error,
        )
        adapter.waited_since = None
        adapter.ahead = False
        self._store.lose_guess(adapter)
        self._failures += 1
        self._store.forget_eviction(adapter)
        reason = f"adapter '{adapter.name}' could not be loaded: {reason_without_path(error)}"
        self._failed[adapter.generation] = adapter, reason


def _read_again(
    read: ReadAdapter, checkpoint: Callable[[], None], name: str, stamp: FolderStamp, shape: AdapterShape
) -> PreparedAdapter:
    """In a reader's thread: the adapter that was registered, or an error."""
    checkpoint()
    prepared = read(stamp.folder, checkpoint)
    if prepared.stamp is None or not prepared.stamp.fits(stamp) or prepared.packed.shape != shape:
        raise AdapterError(
            f"its files have changed since adapter '{name}' was registered; load it in place "
            "to serve the new ones",
            folder=stamp.folder,
        )
    return prepared
