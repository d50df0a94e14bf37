"""Who is taken next from the sequences that wait: fcfs, cluster and vtc, all in O(log waiting) an operation.

An order ranks its sequences by `Sequence.rank`: the time of arrival, later by so many seconds a step of
priority. So a sequence overtakes only those that came at most that much earlier, and none starves.
`cluster` takes sequences first whose adapter is in the batch, resident or on its way, but nobody is overtaken
by it more than `max_passes` times (while an adapter is being loaded, its sequences are passed over beside
that).
`vtc` chooses the tenant first, and leaves the order within a tenant to one of the other two.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Callable, Mapping
from typing import Protocol

from slora_jax.lora.store import Adapter
from slora_jax.request import Sequence


class Order(Protocol):
    """Waiting sequences, and which one is next. A sequence's rank must not change while it is known here."""

    def add(self, sequence: Sequence) -> None:
        """It has arrived."""

    def head(self) -> Sequence | None:
        """The one to take next; None where there is none, but for those on hold."""

    def hold(self, sequence: Sequence) -> None:
        """Pass it over until `release`."""

    def release(self, sequence: Sequence) -> None:
        """It may be taken again, at its old rank."""

    def remove(self, sequence: Sequence, admitted: bool) -> None:
        """It runs (`admitted`), or it has ended. Also for those on hold."""


class TenantOrder(Order, Protocol):
    """An order within a tenant, as vtc keeps: it often asks whether anybody waits, which is O(1)."""

    def __len__(self) -> int:
        """Sequences that `head` chooses from: all but those on hold."""


class RankHeap:
    """A set of sequences that knows the one of least rank.

    What is discarded is dropped when it is met, or with many others, or with the last member.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Sequence]] = []
        self._present: dict[Sequence, bool] = {}  # those in _heap -> whether they are members
        self._dropped = 0  # in _heap, but no members

    def __len__(self) -> int:
        return len(self._heap) - self._dropped

    def push(self, sequence: Sequence) -> None:
        """Make it a member, if it is none."""
        present = self._present.get(sequence)
        if present is None:
            heapq.heappush(self._heap, (sequence.rank, sequence))
        elif not present:
            self._dropped -= 1
        self._present[sequence] = True

    def discard(self, sequence: Sequence) -> None:
        """Make it no member, if it is one."""
        if not self._present.get(sequence):
            return
        self._present[sequence] = False
        self._dropped += 1
        if self._dropped > 64 + len(self._heap) // 2 or self._dropped == len(self._heap):
            self._heap = [entry for entry in self._heap if self._present[entry[1]]]
            heapq.heapify(self._heap)
            self._present = {entry[1]: True for entry in self._heap}
            self._dropped = 0

    def head(self) -> Sequence | None:
        """The member of least rank."""
        while self._heap:
            sequence = self._heap[0][1]
            if self._present[sequence]:
                return sequence
            heapq.heappop(self._heap)
            del self._present[sequence]
            self._dropped -= 1
        return None


class FcfsOrder:
    """First come, first served, by rank."""

    def __init__(self) -> None:
        self._waiting = RankHeap()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.push(sequence)

    def head(self) -> Sequence | None:
        return self._waiting.head()

    def hold(self, sequence: Sequence) -> None:
        self._waiting.discard(sequence)

    def release(self, sequence: Sequence) -> None:
        self._waiting.push(sequence)

    def remove(self, sequence: Sequence, admitted: bool) -> None:
        self._waiting.discard(sequence)


class Passes:
    """How often the oldest of some waiting sequences was overtaken."""

    def __init__(self) -> None:
        self._arrivals: collections.OrderedDict[Sequence, int] = collections.OrderedDict()  # oldest first
        self._arrived = self._gone = 0

    def arrived(self, sequence: Sequence) -> None:
        self._arrivals[sequence] = self._arrived
        self._arrived += 1

    def left(self, sequence: Sequence) -> None:
        del self._arrivals[sequence]
        self._gone += 1

    def count(self) -> int:
        """How many that arrived after the oldest one have left: as many as left, but for those before it."""
        return self._gone - next(iter(self._arrivals.values())) if self._arrivals else 0


def _in_batch(adapter: Adapter | None) -> bool:
    return adapter is None or adapter.in_use > 0


def _on_hand(adapter: Adapter | None) -> bool:
    return adapter is None or adapter.near


Seekers = dict[Adapter, "dict[ClusterOrder, None]"]  # adapter -> orders where a sequence waits for it


class ClusterOrder:
    """Adapter clustering (S-LoRA): sequences first whose adapter runs, then those whose adapter is resident
    or on its way.

    When `max_passes` sequences that came later have gone before the oldest, the order is by rank until it is
    taken: whoever waits is overtaken by at most so many. Those of the base need no adapter: they are near.
    `seekers` is shared by the orders of a queue: its owner calls their `came_near`.
    """

    def __init__(self, max_passes: int, seekers: Seekers) -> None:
        self._max_passes = max_passes
        self._all = RankHeap()
        self._of: dict[Adapter, RankHeap] = {}
        self._seekers = seekers
        # For every adapter that is near its first sequence, and maybe others. Adapters go away untold, so
        # entries are checked when they are met.
        self._near = ((RankHeap(), _in_batch), (RankHeap(), _on_hand))
        self._passes = Passes()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, sequence: Sequence) -> None:
        self._passes.arrived(sequence)
        self.release(sequence)

    def head(self) -> Sequence | None:
        if self._passes.count() < self._max_passes:
            for heap, is_near in self._near:
                while (sequence := heap.head()) is not None:
                    if is_near(sequence.adapter):
                        return sequence
                    heap.discard(sequence)
        return self._all.head()

    def hold(self, sequence: Sequence) -> None:
        self._all.discard(sequence)
        for heap, _ in self._near:
            heap.discard(sequence)
        adapter = sequence.adapter
        others = None if adapter is None else self._of.get(adapter)
        if adapter is None or others is None:
            return
        others.discard(sequence)
        if others:
            self.came_near(adapter)
        else:
            del self._of[adapter]
            del self._seekers[adapter][self]
            if not self._seekers[adapter]:
                del self._seekers[adapter]

    def release(self, sequence: Sequence) -> None:
        self._all.push(sequence)
        adapter = sequence.adapter
        if adapter is not None:
            if adapter not in self._of:
                self._of[adapter] = RankHeap()
                self._seekers.setdefault(adapter, {})[self] = None
            self._of[adapter].push(sequence)
        self._put_near(sequence)

    def remove(self, sequence: Sequence, admitted: bool) -> None:
        self.hold(sequence)
        self._passes.left(sequence)

    def came_near(self, adapter: Adapter) -> None:
        """An adapter of `seekers` was brought into the batch or the pool, or is on its way."""
        first = self._of[adapter].head()
        assert first is not None
        self._put_near(first)

    def _put_near(self, sequence: Sequence) -> None:
        for heap, is_near in self._near:
            if is_near(sequence.adapter):
                heap.push(sequence)


@dataclasses.dataclass(eq=False)
class _Tenant:
    """`counter`: the price of what it got, over its weight. `ahead`: what its sequences on hold will cost.

    `listed`: it is in the heap of tenants that wait, under `key`.
    """

    number: int
    weight: float
    waiting: TenantOrder
    counter: float = 0.0
    ahead: float = 0.0
    held: int = 0
    running: int = 0
    listed: bool = False
    key: float = 0.0


class VtcOrder:
    """The Virtual Token Counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024).

    The tenant whose counter is least is served next. A counter grows by `input_price` for each prompt token
    when a sequence is admitted and by `output_price` for each token that it gives, both over the tenant's
    weight. A tenant that comes back from idleness is lifted to the least counter of those that wait: it saved
    nothing up. While two tenants wait all the time, what they get (price over weight) differs by at most 2 *
    max(input_price * longest prompt, output_price * M), the paper's bound, where M is the tokens of
    max_batch_size sequences of full length (output_price must not be below input_price).

    While adapters are loaded, a sequence that lacks its own is passed over, and counts as charged meanwhile.
    One tenant then gets beyond another at most half of that bound, the price of the prompts that one pass
    over the queue passes over (at most max_batch_size + adapter_prefetch of them), and what its sequences
    cost that were admitted while none of the other's had its adapter: nobody could have run in their place.
    Who is behind for that is next as soon as an adapter of its own has come.
    """

    def __init__(
        self,
        within: Callable[[], TenantOrder],
        *,
        input_price: float,
        output_price: float,
        weights: Mapping[str, float],
    ) -> None:
        self._within, self._weights = within, weights
        self._input_price, self._output_price = input_price, output_price
        self._tenants: dict[str, _Tenant] = {}
        self._heap: list[tuple[float, int, _Tenant]] = []  # counters may have grown since; others are stale
        self._held: dict[Sequence, float] = {}  # on hold -> its price
        self._created = 0
        self._forget_at = 1024  # tenants
        self._left_last: _Tenant | None = None  # whose queue became empty last

    def add(self, sequence: Sequence) -> None:
        tenant = self._tenant(sequence)
        if not tenant.waiting:
            floor = self._first() or self._left_last
            if floor is not None:
                tenant.counter = max(tenant.counter, floor.counter)
        tenant.waiting.add(sequence)
        self._list(tenant)

    def head(self) -> Sequence | None:
        tenant = self._first()
        return None if tenant is None else tenant.waiting.head()

    def hold(self, sequence: Sequence) -> None:
        """Meanwhile its tenant counts as charged for it: whoever comes next is who would come after it."""
        tenant = self._tenant(sequence)
        tenant.waiting.hold(sequence)
        self._held[sequence] = self._price(sequence, tenant)
        tenant.ahead += self._held[sequence]
        tenant.held += 1

    def release(self, sequence: Sequence) -> None:
        tenant = self._tenant(sequence)
        tenant.waiting.release(sequence)
        self._end_hold(sequence, tenant)
        self._list(tenant)

    def remove(self, sequence: Sequence, admitted: bool) -> None:
        tenant = self._tenant(sequence)
        tenant.waiting.remove(sequence, admitted)
        self._end_hold(sequence, tenant)
        if admitted:
            tenant.running += 1
            tenant.counter += self._price(sequence, tenant)
        if not tenant.waiting:
            self._left_last = tenant

    def sampled(self, sequence: Sequence) -> None:
        """It gave one token of output."""
        tenant = self._tenant(sequence)
        tenant.counter += self._output_price / tenant.weight

    def ended(self, sequence: Sequence) -> None:
        """One that had been admitted has ended."""
        self._tenant(sequence).running -= 1

    def counters(self) -> dict[str, float]:
        """Price over weight by tenant, lifts included."""
        return {name: tenant.counter for name, tenant in self._tenants.items()}

    def _tenant(self, sequence: Sequence) -> _Tenant:
        name = sequence.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= self._forget_at:
                self._forget()
            tenant = _Tenant(self._created, self._weights.get(name, 1.0), self._within())
            self._tenants[name] = tenant
            self._created += 1
        return tenant

    def _price(self, sequence: Sequence, tenant: _Tenant) -> float:
        return self._input_price * sequence.prompt_len / tenant.weight

    def _end_hold(self, sequence: Sequence, tenant: _Tenant) -> None:
        price = self._held.pop(sequence, None)
        if price is None:
            return
        tenant.held -= 1
        tenant.ahead = tenant.ahead - price if tenant.held else 0.0  # exactly
        if tenant.listed:
            self._list(tenant)

    def _first(self) -> _Tenant | None:
        """The tenant of least counter among those that wait."""
        while self._heap:
            key, number, tenant = self._heap[0]
            current = tenant.counter + tenant.ahead
            if not tenant.listed or key != tenant.key:  # stale
                heapq.heappop(self._heap)
            elif not tenant.waiting:
                heapq.heappop(self._heap)
                tenant.listed = False
            elif key < current:
                tenant.key = current
                heapq.heapreplace(self._heap, (current, number, tenant))
            else:
                return tenant
        return None

    def _list(self, tenant: _Tenant) -> None:
        """Put a tenant into the heap, or forward in it where its counter fell."""
        current = tenant.counter + tenant.ahead
        if not tenant.listed or current < tenant.key:
            tenant.listed, tenant.key = True, current
            heapq.heappush(self._heap, (current, tenant.number, tenant))

    def _forget(self) -> None:
        """Drop idle tenants that would be lifted on their return anyway: names are the clients' to invent."""
        first = self._first() or self._left_last
        floor = 0.0 if first is None else first.counter
        self._tenants = {
            name: t for name, t in self._tenants.items() if t.listed or t.running or t.counter > floor
        }
        self._forget_at = 1024 + 2 * len(self._tenants)
