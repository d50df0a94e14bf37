"""The real scheduler, store and pool on a virtual clock: requests of given lengths, steps of given durations.

No model: what is decided (who runs when, on which pages) is all there is. Used by tests
of policies and by `benchmarks/sim_scheduler.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np

from slora_jax.config import EngineConfig
from slora_jax.lora.host_cache import HostCache
from slora_jax.lora.loader import AdapterLoader, PreparedAdapter
from slora_jax.lora.packing import AdapterShape
from slora_jax.lora.peft_folder import FolderStamp
from slora_jax.lora.store import Adapter, AdapterStore
from slora_jax.lora.transfer import HostCopy, StagedCopy
from slora_jax.memory.layout import MODULES
from slora_jax.memory.page_pool import PagePool
from slora_jax.memory.prefix_cache import PrefixCache
from slora_jax.memory.reclaim import Reclaimer
from slora_jax.outputs import FinishReason, RequestMetrics
from slora_jax.request import DEFAULT_TENANT, Call, Request, Sequence
from slora_jax.sampling_params import SamplingParams
from slora_jax.scheduling.early_abort import Overdue
from slora_jax.scheduling.scheduler import Scheduler, SchedulerLimits, StepPlan
from slora_jax.scheduling.waiting import WaitingQueue


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request to come; times in seconds, lengths in tokens."""

    time: float
    prompt_len: int
    output_len: int
    adapter: Adapter | None = None
    tenant: str = DEFAULT_TENANT
    priority: int = 0
    deadline_s: float | None = None
    n: int = 1


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Seconds of a step: fixed; a decode row, a page of KV that decodes read; a token of a prompt, and any at
    all; a page of an adapter in the batch, and any at all; a page loaded.

    Decodes and tokens of prompts are padded to the next rung, decodes beside prompts to the highest, as
    `ShapeBuckets` pads them; without rungs nothing is.
    """

    step: float = 0.01
    decode: float = 0.0
    kv_page: float = 0.0
    prefill: float = 0.0
    prefill_step: float = 0.0
    adapter_page: float = 0.0
    adapter_step: float = 0.0
    loaded_page: float = 0.0
    decode_rungs: tuple[int, ...] = ()
    prefill_rungs: tuple[int, ...] = ()

    def seconds(
        self, *, decodes: int, kv_pages: int, prompt_tokens: int, adapters: int, loaded: int
    ) -> float:
        """Of a step with so many; `adapters` and `loaded` are pages."""
        rows = _padded(decodes, self.decode_rungs)
        if decodes and prompt_tokens:
            rows = max((rows, *self.decode_rungs))
        return (
            self.step
            + self.decode * rows
            + self.kv_page * kv_pages
            + self.prefill * _padded(prompt_tokens, self.prefill_rungs)
            + self.prefill_step * (prompt_tokens > 0)
            + self.adapter_page * adapters
            + self.adapter_step * (adapters > 0)
            + self.loaded_page * loaded
        )


def _padded(n: int, rungs: tuple[int, ...]) -> int:
    return next((rung for rung in rungs if rung >= n), n) if n else 0


@dataclasses.dataclass(frozen=True)
class LoadCost:
    """Seconds a page of loads beside the steps: reads of folders, each for itself, and copies, one by one.

    `read_page` is None where all adapters lie in host memory from the start. `host_pages` is how many pages
    of those that were read host memory keeps.
    """

    read_page: float | None
    copy_page: float
    host_pages: int = 1 << 60


class VirtualServer:
    """`now` is the time; `step` runs one step of the scheduler and ends the sequences that are whole.

    Adapters are loaded at once, or, with `load_seconds`, by copies that take as long as each call says,
    beside the steps; None: that copy fails. With `loads` they lie in folders, are read and copied, and
    guessed as an engine does; with an `idle_watermark` also while `run` has nothing to step, into pages that
    are free above that share of the pool, which no engine does. With a `prefix_cache` requests leave pages in
    it, as an engine's do; no two prompts are alike. `admitted` has sequences in the order of admission,
    `reasons` why requests were given up, by their ids, `found` in which state each request found its adapter
    as it came.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_pages: int,
        cost: StepCost | None = None,
        load_seconds: Callable[[], float | None] | None = None,
        loads: LoadCost | None = None,
        *,
        idle_watermark: float | None = None,
        prefix_cache: bool = False,
    ) -> None:
        if not config.unified_memory:
            raise ValueError("a simulation's adapters and KV share all pages: leave unified_memory on")
        self.now = 0.0
        self._load_seconds, self._load_cost = load_seconds, loads
        self._idle_watermark = idle_watermark
        self.idle_seconds = 0.0
        self._readers = _VirtualReaders(self)
        self._link_free = 0.0
        self.pool = PagePool(num_pages)
        reclaim = Reclaimer(self.pool)
        prefixes = PrefixCache(reclaim, config.page_tokens, enabled=prefix_cache)
        self.store = AdapterStore(
            reclaim, HostCache(loads.host_pages if loads else 1 << 60), on_freed=prefixes.drop
        )
        self.loader = AdapterLoader(
            self.store,
            self,
            self._read,
            staging_bytes=1 << 60,
            measured=functools.partial(reclaim.costs.measured, "adapter"),
            readers=self._readers,
        )
        self.waiting = WaitingQueue(config, self.clock)
        self.cost = cost or StepCost()
        limits = SchedulerLimits.of(
            config,
            max_mixed_prompt_tokens=config.max_step_tokens - max(self.cost.decode_rungs, default=0),
            max_prefill_seqs=config.max_batch_size,
        )
        self.scheduler = Scheduler(
            limits, reclaim, self.store, self.loader, prefixes, self.waiting, self.clock
        )
        self.requests: list[Request] = []
        self.live: dict[Request, None] = {}
        self.admitted: list[Sequence] = []
        self.found: list[str | None] = []
        self.reasons: dict[str, str] = {}
        self.given_up: list[Overdue] = []
        self.loads = self._loaded_pages = 0

    def clock(self) -> float:
        return self.now

    def register(self, name: str, num_pages: int) -> Adapter:
        """An adapter of so many pages."""
        shape = AdapterShape(_Sized(num_pages), 8, MODULES[:4])  # type: ignore[arg-type]
        path = f"/virtual/{name}"
        if self._load_cost is None or self._load_cost.read_page is None:
            return self.store.register(name, path, shape, num_pages, None, HostCopy(np.empty(0)))
        return self.store.register(name, path, shape, num_pages, FolderStamp(path, ()), None)

    def add(self, arrival: Arrival) -> Request:
        """Queue a request that arrived at `arrival.time`; raises LimitExceededError as an engine does."""
        return self.add_call([arrival])[0]

    def add_call(self, arrivals: Iterable[Arrival]) -> list[Request]:
        """Queue all requests of one call, or none."""
        requests = [self._request(arrival, str(len(self.requests) + i)) for i, arrival in enumerate(arrivals)]
        Call.of(requests)
        self.waiting.check(requests)
        for request in requests:
            if request.adapter is not None:
                self.store.acquire(request.adapter)
            self.found.append(None if request.adapter is None else request.adapter.state)
            self.requests.append(request)
            self.live[request] = None
            for sequence in request.sequences:
                self.waiting.add(sequence)
        return requests

    def abort(self, request: Request, reason: str) -> None:
        """End what is left of a request."""
        self.reasons[request.request_id] = reason
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._end(sequence, "abort")

    def give_up_overdue(self) -> None:
        """What an engine does before it schedules."""
        for overdue in self.waiting.overdue(running=len(self.scheduler.running)):
            self.given_up.append(overdue)
            self.abort(overdue.request, overdue.reason)

    def step(self, schedule: Callable[[], StepPlan] | None = None) -> StepPlan:
        """Give up, schedule (with `schedule` if it is given), let the step's time pass, end what is whole."""
        self.give_up_overdue()
        self._loaded_pages = 0
        if self.stages_adapters:
            self._settle_loads()
        before = len(self.scheduler.running)
        plan = (schedule or self.scheduler.schedule)()
        if self._load_cost is not None:
            self.scheduler.guess()
        new = len(self.scheduler.running) - before
        if new > 0:
            self.admitted += list(self.scheduler.running)[-new:]
        self.now += self._seconds(plan)
        self._collect(plan)
        if self.stages_adapters:
            self.loader.transfer()
        return plan

    def run(self, arrivals: Iterable[Arrival], until: float = float("inf")) -> None:
        """Serve arrivals (in order of time) and drain, or stop at `until`."""
        coming = sorted(arrivals, key=lambda a: a.time)
        coming.reverse()
        while (coming or self.live) and self.now < until:
            if not self.live and coming and coming[-1].time > self.now:
                self._idle_until(coming[-1].time)
            while coming and coming[-1].time <= self.now:
                self.add(coming.pop())
            self.step()

    def _idle_until(self, time: float) -> None:
        """Nothing is there to step; what is under way goes on, and one guess follows another."""
        self.idle_seconds += time - self.now
        while self._idle_watermark is not None and self.now < time:
            self._settle_loads()
            floor = int(self._idle_watermark * self.pool.usable_for("adapter"))
            self.loader.guess(self.pool.free_for("adapter") - floor)
            self.loader.transfer()
            ends = [end for end in (self._readers.next_end(), self._link_free) if end > self.now]
            self.now = min([time, *ends])
        self.now = time

    def check_integrity(self) -> None:
        """Of the scheduler, and that live requests are those that it holds."""
        self.scheduler.check_integrity()
        held = [*self.scheduler.running, *self.waiting]
        live = {s for r in self.live for s in r.sequences if s.finish_reason is None}
        assert len(held) == len(set(held))
        assert set(held) == live

    copy_bytes_per_s: float | None = None

    @property
    def stages_adapters(self) -> bool:
        return self._load_seconds is not None or self._load_cost is not None

    def stage_adapters(self, copies: Seq[HostCopy], pages: Seq[Seq[int]]) -> Seq[StagedCopy]:
        return [_VirtualCopy(self, len(ids), self._copied_at(len(ids))) for ids in pages]

    def write_adapter(self, staged: StagedCopy) -> None:
        assert isinstance(staged, _VirtualCopy)
        self.loads += 1
        self._loaded_pages += staged.pages

    def read_seconds(self, adapter: str) -> float:
        """What a read of an adapter's folder takes."""
        cost = self._load_cost
        assert cost is not None, f"{adapter} has its host copy"
        assert cost.read_page is not None, f"{adapter} has its host copy"
        return cost.read_page * self.store.get(adapter).num_pages

    def _read(self, path: str, checkpoint: Callable[[], None]) -> PreparedAdapter:
        adapter = self.store.get(path.removeprefix("/virtual/"))
        return PreparedAdapter(path, _Packed(adapter.shape), adapter.stamp, HostCopy(np.empty(0)))  # type: ignore[arg-type]

    def _copied_at(self, pages: int) -> float | None:
        """When a copy that begins now is done; None: it fails."""
        if self._load_cost is not None:
            self._link_free = max(self._link_free, self.now) + self._load_cost.copy_page * pages
            return self._link_free
        seconds = self._load_seconds() if self._load_seconds is not None else 0.0
        return None if seconds is None else self.now + seconds

    def _settle_loads(self) -> None:
        """What an engine does between two steps."""
        self._readers.run()
        self.loader.settle()
        for adapter, reason in self.loader.take_failures():
            for request in [r for r in self.live if r.adapter is adapter]:
                self.abort(request, reason)

    @staticmethod
    def _request(arrival: Arrival, request_id: str) -> Request:
        request = Request(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=[int(request_id)] * arrival.prompt_len,
            prompt_index=0,
            adapter=arrival.adapter,
            params=SamplingParams(max_tokens=arrival.output_len),
            metrics=RequestMetrics(arrival.time, num_prompt_tokens=arrival.prompt_len),
            tenant=arrival.tenant,
            priority=arrival.priority,
            deadline_s=arrival.deadline_s,
        )
        request.sequences = [
            Sequence(
                request=request,
                index=i,
                seed=i,
                tokens=[int(request_id)] * arrival.prompt_len,
                prompt_len=arrival.prompt_len,
                max_len=arrival.prompt_len + arrival.output_len,
                stop_ids=frozenset(),
                detokenizer=None,
            )
            for i in range(arrival.n)
        ]
        return request

    def _seconds(self, plan: StepPlan) -> float:
        pages = {a: a.num_pages for c in plan if (a := c.sequence.adapter) is not None}
        return self.cost.seconds(
            decodes=len(plan.decodes),
            kv_pages=sum(len(c.sequence.pages) for c in plan.decodes),
            prompt_tokens=sum(c.count for c in plan.prefills),
            adapters=sum(pages.values()),
            loaded=self._loaded_pages,
        )

    def _collect(self, plan: StepPlan) -> None:
        for chunk in plan:
            sequence = chunk.sequence
            if not chunk.samples:
                continue
            sequence.pending -= 1
            sequence.tokens.append(0)
            metrics = sequence.request.metrics
            metrics.num_output_tokens += 1
            if metrics.first_token_time is None:
                metrics.first_token_time = self.now
            self.waiting.sampled(sequence)
            if len(sequence.tokens) >= sequence.max_len:
                self._end(sequence, "length")

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        sequence.pending = 0
        self.scheduler.finish(sequence)
        request = sequence.request
        if request.finished:
            request.metrics.finished_time = self.now
            del self.live[request]
            if request.adapter is not None:
                self.store.release(request.adapter)


@dataclasses.dataclass(frozen=True, eq=False)
class _VirtualCopy:
    """One of so many pages that is done at a time (None: it fails)."""

    server: VirtualServer
    pages: int
    until: float | None

    def is_ready(self) -> bool:
        return self.until is None or self.server.now >= self.until

    def wait(self) -> None:
        if self.until is None:
            raise RuntimeError("a copy that was told to fail")

    def leave_pages(self) -> None:
        """Nothing is written."""


@dataclasses.dataclass(frozen=True)
class _Sized:
    """Stands in for an AdapterLayout: the scheduler asks for the size only."""

    num_pages: int


@dataclasses.dataclass(frozen=True)
class _Packed:
    """Stands in for a PackedAdapter: the loader asks for the shape only."""

    shape: AdapterShape


@dataclasses.dataclass(frozen=True)
class _ReadUnderWay:
    until: float
    checkpoint: Callable[[], None]
    job: Callable[[], PreparedAdapter]
    future: Future[PreparedAdapter]


class _VirtualReaders:
    """Takes DaemonWorkers' place: a read ends at a time of the server's clock, or stops where it may."""

    def __init__(self, server: VirtualServer) -> None:
        self._server = server
        self._reads: list[_ReadUnderWay] = []

    def submit(self, what: str, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """`args` are those of the loader's reads: how, its checkpoint, the adapter's name, and others."""
        _, checkpoint, name, *_ = args
        until = self._server.now + self._server.read_seconds(name)
        read = _ReadUnderWay(until, checkpoint, functools.partial(function, *args), Future())
        self._reads.append(read)
        return read.future

    def next_end(self) -> float:
        """When the next read is done."""
        return min((read.until for read in self._reads), default=-math.inf)

    def run(self) -> None:
        """End what has come to its end by now, or is to stop."""
        under_way = []
        for read in self._reads:
            try:
                read.checkpoint()
                if read.until > self._server.now:
                    under_way.append(read)
                    continue
                read.future.set_result(read.job())
            except CancelledError as stopped:
                read.future.set_exception(stopped)
        self._reads = under_way
