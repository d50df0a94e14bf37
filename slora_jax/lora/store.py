"""Registered adapters by name and generation, and which of them hold pages of the pool.

An adapter is *registered* (a path, perhaps a host copy), *reading* (into host memory), *staged* (it has
pages, and its copy is on the way to the device) or *resident* (its pages are written). Unloaded by name
while requests still use it, it is *draining* whatever its state. `users` counts requests that may yet need
it; `pins` counts running sequences that need its pages where they are. A resident adapter without pins is
*idle*, that is evictable: it gives way, least recently used first; then staged ones do. Every load gets a new
generation: requests hold the `Adapter` itself, never its name, so a reload under the same name never meets
its predecessor's requests. The states reading and staged are `lora/loader.py`'s to enter.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from typing import Literal

from slora_jax.errors import AdapterExistsError, UnknownAdapterError
from slora_jax.lora.host_cache import HostCache
from slora_jax.lora.packing import AdapterShape
from slora_jax.lora.peft_folder import FolderStamp
from slora_jax.lora.transfer import HostCopy
from slora_jax.memory.page_pool import PagePool
from slora_jax.outputs import AdapterInfo

_RECENT = 64  # evicted adapters among which the next is guessed
_HALF_LIFE = 60.0  # seconds after which a use counts half in an adapter's popularity


@dataclasses.dataclass(eq=False)
class Adapter:
    """One generation of a named adapter."""

    name: str
    path: str
    generation: int
    shape: AdapterShape
    host_bytes: int  # of a host copy, whether it is there or not
    stamp: FolderStamp | None  # None: given from memory, so its host copy cannot be read again
    host: HostCopy | None = None
    state: Literal["registered", "reading", "staged", "resident"] = "registered"
    pages: list[int] | None = None  # in the pool, while staged or resident
    users: int = 0
    pins: int = 0
    unloaded: bool = False
    freed: bool = False  # unloaded and drained
    fresh: bool = False  # the host copy was read for a load that has no pages yet
    ahead: bool = False  # the load under way, or done and not used yet, is a prefetch
    last_sought: int = -1  # the host cache's turn
    waited_since: float | None = None  # monotonic time since when a request waits for nothing else
    popularity: float = 0.0  # see popularity_after_use

    @property
    def resident(self) -> bool:
        return self.state == "resident"

    @property
    def num_pages(self) -> int:
        return self.shape.layout.num_pages


class AdapterStore:
    """Adapters by name, their host copies, and the pages of those that have some. Host state only."""

    def __init__(self, pool: PagePool, host: HostCache) -> None:
        self.host = host
        self._pool = pool
        self._by_name: dict[str, Adapter] = {}
        self._draining: dict[int, Adapter] = {}  # by generation, as all below
        self._pinned: dict[int, Adapter] = {}
        self._idle: dict[int, Adapter] = {}  # resident without pins, least recently used first
        self._staged: dict[int, Adapter] = {}  # oldest first
        self._evicted: dict[int, Adapter] = {}  # the most recent, oldest first
        self._idle_pages = 0
        self._generations = itertools.count(1)
        self.evictions = 0
        self.prefetches_useful = 0
        self.prefetches_wasted = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Adapter]:
        """Every adapter that is registered or draining."""
        yield from self._by_name.values()
        yield from self._draining.values()

    def get(self, name: str) -> Adapter:
        """The current generation of a name; raises UnknownAdapterError."""
        try:
            return self._by_name[name]
        except KeyError:
            known = ", ".join(sorted(self._by_name)[:8]) or "none"
            raise UnknownAdapterError(f"adapter '{name}' is not registered (registered: {known})") from None

    def register(
        self,
        name: str,
        path: str,
        shape: AdapterShape,
        host_bytes: int,
        stamp: FolderStamp | None,
        host: HostCopy | None,
        *,
        replace: bool = False,
    ) -> Adapter:
        """Register under a name; with `replace`, requests under way finish on the generation they hold."""
        assert stamp is not None or host is not None, "nothing to load it from"
        if name in self._by_name:
            if not replace:
                raise AdapterExistsError(
                    f"adapter '{name}' is already loaded; unload it first or load in place"
                )
            self.unregister(name)
        adapter = Adapter(name, path, next(self._generations), shape, host_bytes, stamp)
        self._by_name[name] = adapter
        if host is not None:
            self.host.put(adapter, host)
        return adapter

    def unregister(self, name: str) -> None:
        """Take the name away at once; pages and host copy go when the last request that uses it ends."""
        adapter = self.get(name)
        del self._by_name[name]
        adapter.unloaded = True
        self._draining[adapter.generation] = adapter
        self._free_if_drained(adapter)

    def acquire(self, adapter: Adapter) -> None:
        """A request will use this generation; raises UnknownAdapterError if it is freed."""
        if adapter.freed:
            raise UnknownAdapterError(f"adapter '{adapter.name}' was unloaded before the request began")
        adapter.users += 1
        adapter.popularity = popularity_after_use(adapter.popularity, time.monotonic())
        self.host.touch(adapter)

    def release(self, adapter: Adapter) -> None:
        """A request that acquired it has ended."""
        assert adapter.users > 0
        adapter.users -= 1
        if not adapter.users:
            adapter.waited_since = None
            self.host.touch(adapter)
        self._free_if_drained(adapter)

    def pin(self, adapter: Adapter) -> None:
        """A sequence starts to run on its pages (it must be resident)."""
        assert adapter.resident
        adapter.pins += 1
        if adapter.generation in self._idle:
            del self._idle[adapter.generation]
            self._idle_pages -= adapter.num_pages
            self._pinned[adapter.generation] = adapter
        self.prefetches_useful += adapter.ahead
        adapter.ahead = False

    def unpin(self, adapter: Adapter) -> None:
        assert adapter.pins > 0
        adapter.pins -= 1
        if not adapter.pins:
            del self._pinned[adapter.generation]
            self._add_idle(adapter)
        self._free_if_drained(adapter)

    def touch(self, adapter: Adapter) -> None:
        """It will be needed soon: where it is idle, others give way before it."""
        if adapter.generation in self._idle:
            self._idle[adapter.generation] = self._idle.pop(adapter.generation)

    @property
    def resident(self) -> list[Adapter]:
        """Adapters whose pages are written: those in use, then idle ones, least recently used first."""
        return [*self._pinned.values(), *self._idle.values()]

    @property
    def recently_evicted(self) -> list[Adapter]:
        """Adapters that gave way lately and are still registered, oldest first."""
        return list(self._evicted.values())

    def forget_eviction(self, adapter: Adapter) -> None:
        """Do not count it among the recently evicted ones any more."""
        self._evicted.pop(adapter.generation, None)

    def reserve(self, adapter: Adapter) -> bool:
        """Give an absent adapter pages, evicting others where needed: it is *staged*. False: no room."""
        assert adapter.pages is None
        if not self.make_room(adapter.num_pages):
            return False
        adapter.pages = self._pool.allocate(adapter.num_pages, "adapter")
        adapter.state = "staged"
        self._staged[adapter.generation] = adapter
        return True

    def settle(self, adapter: Adapter) -> None:
        """The pages of a staged adapter are written: it is resident, and idle until it is pinned."""
        del self._staged[adapter.generation]
        self._evicted.pop(adapter.generation, None)
        adapter.state = "resident"
        self._add_idle(adapter)

    def withdraw(self, adapter: Adapter) -> None:
        """Take a staged adapter's pages back: its copy is not wanted, or has failed."""
        del self._staged[adapter.generation]
        self._give_back(adapter)

    def can_make_room(self, pages: int, keep: Adapter | None = None) -> bool:
        """Whether `pages` are free or held by idle adapters other than `keep`; O(1)."""
        kept = keep.num_pages if keep is not None and keep.generation in self._idle else 0
        return pages <= self._pool.num_free + self._idle_pages - kept

    def make_room(self, pages: int) -> bool:
        """Evict idle adapters, least recently used first, then withdraw staged ones, the latest first, until
        `pages` are free; all or nothing.
        """
        if pages <= self._pool.num_free:
            return True
        staged = sum(a.num_pages for a in self._staged.values())
        if pages > self._pool.num_free + self._idle_pages + staged:
            return False
        while self._pool.num_free < pages and self._idle:
            self._evict(next(iter(self._idle.values())))
            self.evictions += 1
        while self._pool.num_free < pages:
            self.withdraw(next(reversed(self._staged.values())))
        return True

    def info(self, adapter: Adapter) -> AdapterInfo:
        """What a caller may know of an adapter that is registered or draining."""
        return AdapterInfo(
            name=adapter.name,
            path=adapter.path,
            generation=adapter.generation,
            state="draining" if adapter.unloaded else adapter.state,
            rank=adapter.shape.rank,
            target_modules=adapter.shape.target_modules,
            pages=adapter.num_pages,
            host_bytes=0 if adapter.host is None else adapter.host_bytes,
            running=adapter.users,
        )

    def check_integrity(self) -> None:
        """States, pages and host copies add up; raises AssertionError saying what does not."""
        places = {"staged": self._staged, "pinned": self._pinned, "idle": self._idle}
        for adapter in self:
            name, generation = f"adapter '{adapter.name}'", adapter.generation
            assert not adapter.freed, f"{name} is freed and kept"
            found = [place for place, held in places.items() if generation in held]
            want = {"staged": ["staged"], "resident": ["pinned" if adapter.pins else "idle"]}
            assert found == want.get(adapter.state, []), f"{name} is {adapter.state} and among {found}"
            assert (adapter.pages is not None) == bool(found), f"{name} is {adapter.state}: {adapter.pages}"
            assert adapter.stamp is not None or adapter.host is not None, f"{name} has lost its only copy"
        known = {adapter.generation for adapter in self}
        for held in (*places.values(), self._evicted):
            assert held.keys() <= known, "an adapter that is not registered is kept"
        pages = sum(a.num_pages for a in self._idle.values())
        assert self._idle_pages == pages, f"{self._idle_pages} idle pages are counted, not {pages}"
        self.host.check_integrity(self)

    def _add_idle(self, adapter: Adapter) -> None:
        self._idle[adapter.generation] = adapter
        self._idle_pages += adapter.num_pages

    def _evict(self, adapter: Adapter) -> None:
        del self._idle[adapter.generation]
        self._idle_pages -= adapter.num_pages
        self._give_back(adapter)
        self._evicted[adapter.generation] = adapter
        if len(self._evicted) > _RECENT:
            del self._evicted[next(iter(self._evicted))]

    def _give_back(self, adapter: Adapter) -> None:
        assert adapter.pages is not None and not adapter.pins
        self._pool.release(adapter.pages)
        adapter.pages, adapter.state = None, "registered"
        self.prefetches_wasted += adapter.ahead
        adapter.ahead = False

    def _free_if_drained(self, adapter: Adapter) -> None:
        if not adapter.unloaded or adapter.users or adapter.pins or adapter.freed:
            return
        if adapter.state == "staged":
            self.withdraw(adapter)
        elif adapter.state == "resident":
            self._evict(adapter)
        self._evicted.pop(adapter.generation, None)
        self.host.drop(adapter)
        adapter.freed = True
        del self._draining[adapter.generation]


def popularity_after_use(before: float, now: float) -> float:
    """log2(2^before + 2^(now / half-life)): an adapter's uses so far and one at `now`, in seconds, the older
    ones worth less.

    All uses decay alike, so a score changes only by a use of its own adapter, and scores always compare.
    """
    low, high = sorted((before, now / _HALF_LIFE))
    return high + math.log2(1 + 2.0 ** (low - high))
