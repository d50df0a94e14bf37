"""What leaves the pool when pages are wanted: one budget for KV, cached prefixes and idle adapters.

Without unified memory (an ablation) there are two budgets: only prefixes give way to KV, only adapters to
adapters.

Whatever nobody runs on stays in the pool until its pages are wanted, and then the least valuable goes first.
The value of a page is (seconds to bring it back) x (uses expected a unit of time). Seconds are measured:
tokens a page over prefill speed, an adapter's page over copy speed. Uses are counted with exponential decay
(LRFU, Lee et al. 2001): a use weighs half after `HALF_LIFE` admissions. All weights decay alike, so the order
of two things changes only when one is used, and a heap holds it: O(log n) an eviction.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any, Literal, Protocol

from slora_jax.memory.page_pool import PageKind, PagePool

HolderKind = Literal["adapter", "prefix"]
HALF_LIFE = 1024  # admissions
_SAMPLES = 31  # of a cost; their median is not moved by a step that compiled
_SLACK_SHARE, _MAX_SLACK = 64, 64


class Used(Protocol):
    """Something whose uses are counted: `usage` is the log2 of its decayed count, -inf before the first."""

    usage: float


class PageHolder(Protocol):
    """Who keeps idle things in the pool. `idle_pages`: pages that evicting all of them would free."""

    kind: HolderKind

    @property
    def idle_pages(self) -> int: ...
    def least_usage(self) -> float:
        """`usage` of what it would evict next; there is something."""
        ...

    def evict(self, pages: int, limit: float) -> int:
        """Evict the first, and others until `pages` are freed, none is left, or the next one's usage is above
        `limit`; how many things went.
        """
        ...


class IdleHeap[T: Used]:
    """Idle things, the least used first, of equals the first that came; O(log n) an operation.

    A thing's `usage` must not change while it is in the heap.
    """

    def __init__(self) -> None:
        self._heap: list[list[Any]] = []  # [usage, arrival, thing]; None: it was discarded
        self._entries: dict[T, list[Any]] = {}
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, thing: T) -> bool:
        return thing in self._entries

    def __iter__(self) -> Iterator[T]:
        return iter(self._entries)

    def push(self, thing: T) -> None:
        assert thing not in self._entries
        entry = self._entries[thing] = [thing.usage, next(self._arrivals), thing]
        heapq.heappush(self._heap, entry)

    def discard(self, thing: T) -> None:
        """Take out what may be in it."""
        entry = self._entries.pop(thing, None)
        if entry is not None:
            entry[2] = None
            if len(self._heap) > 2 * len(self._entries) + 64:  # mostly discarded ones
                self._heap = list(self._entries.values())
                heapq.heapify(self._heap)

    def least(self) -> T:
        while self._heap[0][2] is None:
            heapq.heappop(self._heap)
        thing: T = self._heap[0][2]
        return thing

    def pop(self) -> T:
        thing = self.least()
        del self._entries[thing]
        heapq.heappop(self._heap)
        return thing


class PageCosts:
    """Seconds that bring back one page of each kind: medians of what was measured.

    Until both kinds have been measured a page costs the same either way, and usage alone decides.
    """

    def __init__(self) -> None:
        self._samples: dict[HolderKind, collections.deque[float]] = {
            "adapter": collections.deque(maxlen=_SAMPLES),
            "prefix": collections.deque(maxlen=_SAMPLES),
        }
        self._log2 = {"adapter": 0.0, "prefix": 0.0}

    def measured(self, kind: HolderKind, pages: float, seconds: float) -> None:
        """So many pages (a fraction counts) were computed or copied in so many seconds."""
        if not pages > 0 or not seconds > 0:
            return
        self._samples[kind].append(seconds / pages)
        if all(self._samples.values()):
            self._log2 = {k: math.log2(statistics.median(s)) for k, s in self._samples.items()}

    def seconds(self, kind: HolderKind) -> float | None:
        """Median seconds a page; None before it was measured."""
        samples = self._samples[kind]
        return statistics.median(samples) if samples else None

    def log2(self, kind: HolderKind) -> float:
        """log2 of the seconds a page, up to a constant that both kinds share."""
        return self._log2[kind]


class Reclaimer:
    """Makes room in the pool by evicting what its holders keep idle. Holders add themselves."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.costs = PageCosts()
        self.evictions: collections.Counter[HolderKind] = collections.Counter()  # adapters, pages of prefixes
        # Whose idle pages may become pages of a kind: everybody's, with unified memory.
        self._givers: dict[PageKind, list[PageHolder]] = {"kv": [], "adapter": []}
        self._now = 0  # admissions so far
        # Evicting a little more than is wanted, once in a while, instead of page by page in every step.
        self._slack = min(pool.usable_for("kv") // _SLACK_SHARE, _MAX_SLACK)

    def add(self, holder: PageHolder) -> None:
        for kind, givers in self._givers.items():
            if self.pool.unified or (kind == "adapter") == (holder.kind == "adapter"):
                givers.append(holder)

    def idle_pages(self, kind: PageKind) -> int:
        """Pages that can be freed now, and may become pages of a kind."""
        return sum(holder.idle_pages for holder in self._givers[kind])

    def admitted(self) -> None:
        """Time passes: one more sequence was let in."""
        self._now += 1

    def used(self, thing: Used) -> None:
        """Count a use now: usage = log2(2^usage + 2^now), now in half-lives."""
        now = self._now / HALF_LIFE
        larger, smaller = max(thing.usage, now), min(thing.usage, now)
        thing.usage = larger + math.log2(1 + 2.0 ** (smaller - larger))

    def kept(self, thing: Used) -> None:
        """It was in use until now: as recent as a single use now, at least."""
        thing.usage = max(thing.usage, self._now / HALF_LIFE)

    def fetched(self, thing: Used) -> None:
        """It is here for a use that is yet to come: worth half a use now, at least."""
        thing.usage = max(thing.usage, self._now / HALF_LIFE - 1)

    def fits(self, *, kv: int, adapter: int) -> bool:
        """Whether pages for both uses are free or idle; O(1)."""
        if self.pool.unified:
            return self.can_make_room(kv + adapter)
        return self.can_make_room(kv) and self.can_make_room(adapter, "adapter")

    def can_make_room(self, pages: int, kind: PageKind = "kv") -> bool:
        """Whether `pages` for a use are free or idle; O(1)."""
        return self.pool.free_for(kind) + self.idle_pages(kind) >= pages

    def make_room(self, pages: int, kind: PageKind = "kv") -> bool:
        """Evict the least valuable idle things until `pages` are free for a use; all or nothing."""
        free_for = self.pool.free_for
        if free_for(kind) >= pages:
            return True
        if not self.can_make_room(pages, kind):
            return False
        slack = self._slack if self.pool.unified or kind == "kv" else 0  # a slot more is an adapter less
        enough = min(pages + slack, free_for(kind) + self.idle_pages(kind))
        while (missing := enough - free_for(kind)) > 0:
            givers = [h for h in self._givers[kind] if h.idle_pages]
            values = [(h.least_usage() + self.costs.log2(h.kind), h) for h in givers]
            (_, least), *others = sorted(values, key=lambda value: value[0])
            limit = others[0][0] - self.costs.log2(least.kind) if others else math.inf
            self.evictions[least.kind] += least.evict(missing, limit)
        return True
