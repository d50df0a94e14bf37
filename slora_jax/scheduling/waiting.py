"""The waiting queue: limits first, then an order (`policies.py`), and what is given up meanwhile."""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable, Generator, Iterable, Iterator

from slora_jax.config import EngineConfig
from slora_jax.lora.store import Adapter
from slora_jax.request import Request, Sequence
from slora_jax.scheduling.early_abort import EarlyAbort, Overdue
from slora_jax.scheduling.limits import Limits, configured_limits
from slora_jax.scheduling.merge_order import MergeOrder, Turn
from slora_jax.scheduling.policies import (
    ClusterOrder,
    FcfsOrder,
    Order,
    RankHeap,
    Seekers,
    TenantOrder,
    VtcOrder,
)

_FORGET_AT = 1024  # deadlines


class WaitingQueue:
    """Every sequence that waits, and which is next. O(log waiting) an operation.

    Sequences that were preempted go first, whatever the policy: their tokens were paid for. `config` says
    the policy and its numbers; `clock` gives the seconds that `RequestMetrics` are in.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._priority_s = config.priority_s
        self._seekers: Seekers = {}
        self._turn = Turn()
        self._order = _order(config, self._seekers, self._turn)
        self._vtc = self._order if isinstance(self._order, VtcOrder) else None
        self._limits = _limits(config, clock)
        self._early: EarlyAbort | None = None
        if "early-abort" in config.policies:
            self._early = EarlyAbort(config.ttft_target_s, config.max_batch_size)
        self._preempted = RankHeap()
        self._waiting: dict[Sequence, bool] = {}  # -> whether it is preempted
        self._adapters: collections.Counter[str] = collections.Counter()  # of those that wait
        self._deadlines: list[tuple[float, int, Request]] = []
        self._forget_at = _FORGET_AT
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    @property
    def adapter_names(self) -> Iterable[str]:
        """Names of the adapters that waiting sequences need, each once."""
        return self._adapters.keys()

    def check(self, requests: Iterable[Request], *, queue: bool = True) -> None:
        """Charge requests to their tenants and adapters before they are added; see `Limits.check`."""
        if self._limits is not None:
            self._limits.check(requests, queue=queue)

    def add(self, sequence: Sequence) -> None:
        """A new sequence."""
        request = sequence.request
        sequence.rank = self._clock() + request.priority * self._priority_s, self._numbers
        self._numbers += 1
        self._enter(sequence, preempted=False)
        if request.deadline_s is not None and sequence.index == 0:
            deadline = request.metrics.arrival_time + request.deadline_s
            heapq.heappush(self._deadlines, (deadline, self._numbers, request))
            if len(self._deadlines) >= self._forget_at:  # requests that ended in time
                self._deadlines = [entry for entry in self._deadlines if not entry[2].finished]
                heapq.heapify(self._deadlines)
                self._forget_at = max(_FORGET_AT, 2 * len(self._deadlines))
        if self._limits is None or self._limits.add(sequence):
            self._let_through(sequence)

    def preempted(self, sequence: Sequence) -> None:
        """One that ran waits again."""
        self._enter(sequence, preempted=True)
        self._preempted.push(sequence)

    def head(self) -> Sequence | None:
        """The one to admit next; None where nobody waits who may run now."""
        return self._preempted.head() or self._order.head()

    def candidates(self) -> Generator[Sequence]:
        """Who is next, then who is next if that one is passed over or was admitted meanwhile, and so on.

        Closing it makes those passed over as good as before, at their old ranks. Costs O(log waiting) for
        each one that was seen.
        """
        passed: list[Sequence] = []
        try:
            while (sequence := self.head()) is not None:
                yield sequence
                if sequence in self._waiting:
                    self._hold(sequence)
                    passed.append(sequence)
        finally:
            for sequence in passed:
                if sequence in self._waiting:
                    self._release(sequence)

    def admitted(self, sequence: Sequence) -> None:
        """It runs from now on, its adapter in use."""
        had_run = self._leave(sequence)
        if had_run:
            self._preempted.discard(sequence)
        else:
            self._order.remove(sequence, admitted=True)
        self._turn.adapter = sequence.adapter
        adapter = sequence.adapter
        if adapter is not None and adapter.in_use == 1:  # the first of the batch
            self.came_near(adapter)
        if had_run:
            return
        if self._limits is not None:
            self._limits.admitted(sequence)
        if self._early is not None:
            self._early.started(sequence.request)

    def came_near(self, adapter: Adapter) -> None:
        """An adapter was brought into the batch or the pool, or is on its way, whoever asked for it."""
        for order in self._seekers.get(adapter, ()):
            order.came_near(adapter)

    def ended(self, sequence: Sequence) -> None:
        """It has ended, while it waited or while it ran."""
        waited = sequence in self._waiting
        had_run = not waited or self._leave(sequence)
        parked = False
        followers: list[Sequence] = []
        if self._limits is not None:
            parked = self._limits.parks(sequence)
            followers = self._limits.ended(sequence, waiting=not had_run)
        if waited and had_run:
            self._preempted.discard(sequence)
        elif waited and not parked:
            self._order.remove(sequence, admitted=False)
        if had_run and self._vtc is not None:
            self._vtc.ended(sequence)
        if self._early is not None:
            self._early.forget(sequence.request)
        for follower in followers:
            self._let_through(follower)

    def sampled(self, sequence: Sequence) -> None:
        """It gave a token (its first one, where the request's `first_token_time` has just been set)."""
        if self._vtc is not None:
            self._vtc.sampled(sequence)
        if self._limits is not None:
            self._limits.sampled(sequence)
        if self._early is not None and sequence.request.metrics.num_output_tokens == 1:
            self._early.first_token(sequence.request)

    def compiled(self) -> None:
        """The step that was just launched was compiled before: nobody's wait for it is typical."""
        if self._early is not None:
            self._early.compiled(self._clock())

    def overdue(self, *, running: int) -> list[Overdue]:
        """Requests, waiting or running, that are to be ended now; `running`: how many sequences run."""
        now, found = self._clock(), []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if not request.finished:
                reason = f"not finished within its deadline_s of {request.deadline_s:g} s"
                found.append(Overdue(request, reason))
        if self._early is not None:
            found += self._early.late(now, running=running)
        return found

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Counts add up; raises AssertionError saying what does not."""
        names = collections.Counter(s.adapter.name for s in self._waiting if s.adapter is not None)
        assert names == self._adapters, f"adapters that wait: {self._adapters}, not {names}"
        if self._limits is not None:
            preempted = [s for s, had_run in self._waiting.items() if had_run]
            new = [s for s, had_run in self._waiting.items() if not had_run]
            self._limits.check_integrity(new, [*running, *preempted])

    def _let_through(self, sequence: Sequence) -> None:
        """No limit holds it back (any more)."""
        self._order.add(sequence)
        if self._early is not None:
            self._early.add(sequence.request)

    def _hold(self, sequence: Sequence) -> None:
        if self._waiting[sequence]:
            self._preempted.discard(sequence)
        else:
            self._order.hold(sequence)

    def _release(self, sequence: Sequence) -> None:
        if self._waiting[sequence]:
            self._preempted.push(sequence)
        else:
            self._order.release(sequence)

    def _enter(self, sequence: Sequence, preempted: bool) -> None:
        self._waiting[sequence] = preempted
        if sequence.adapter is not None:
            self._adapters[sequence.adapter.name] += 1

    def _leave(self, sequence: Sequence) -> bool:
        """Whether it had been preempted."""
        adapter = sequence.adapter
        if adapter is not None:
            self._adapters[adapter.name] -= 1
            if not self._adapters[adapter.name]:
                del self._adapters[adapter.name]
        return self._waiting.pop(sequence)


def _order(config: EngineConfig, seekers: Seekers, turn: Turn) -> Order:
    def within() -> TenantOrder:
        if config.lora_mode == "merge":
            return MergeOrder(config.cluster_max_passes, turn)
        if "cluster" in config.policies:
            return ClusterOrder(config.cluster_max_passes, seekers)
        return FcfsOrder()

    if "vtc" not in config.policies:
        return within()
    return VtcOrder(
        within,
        input_price=config.vtc_input_price,
        output_price=config.vtc_output_price,
        weights=config.tenant_weights,
    )


def _limits(config: EngineConfig, clock: Callable[[], float]) -> Limits | None:
    limits = configured_limits(config)
    return Limits(limits, clock) if any(limits) else None
