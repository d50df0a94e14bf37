"""Registered adapters, their host copies, and which of them are resident in the page pool.

An adapter is *registered* (host copy only), *resident* (pages in the pool) or *draining* (unloaded by name
while requests still use it). `users` counts requests that may yet need it and keep its host copy alive;
`pins` counts running sequences that need its pages where they are. A resident adapter without pins is idle,
and the Reclaimer may evict it unless its name is `pinned`. Every load gets a new generation: requests hold
the `Adapter` itself, never its name, so a reload under the same name never meets its predecessor's requests.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Literal

from slora_jax.errors import AdapterExistsError, UnknownAdapterError
from slora_jax.lora.packing import PackedAdapter
from slora_jax.memory.reclaim import HolderKind, IdleHeap, Reclaimer
from slora_jax.outputs import AdapterInfo


@dataclasses.dataclass(eq=False)
class Adapter:
    """One generation of a named adapter."""

    name: str
    path: str
    generation: int
    packed: PackedAdapter | None  # None once unloaded and drained
    pages: list[int] | None = None  # in the pool, while resident
    users: int = 0
    pins: int = 0
    pinned: bool = False  # by name: stays resident, once it is, until unpinned or unloaded
    unloaded: bool = False
    usage: float = -math.inf  # of Reclaimer

    @property
    def num_pages(self) -> int:
        assert self.packed is not None
        return self.packed.layout.num_pages


class AdapterStore:
    """Adapters by name, and the pages of those that are resident. Host state only.

    `on_freed(generation)` is told of each generation that nobody can use again.
    """

    kind: HolderKind = "adapter"

    def __init__(self, reclaim: Reclaimer, on_freed: Callable[[int], None]) -> None:
        self._pool, self._reclaim, self._on_freed = reclaim.pool, reclaim, on_freed
        self._by_name: dict[str, Adapter] = {}
        self._draining: list[Adapter] = []
        self._resident: dict[int, Adapter] = {}  # by generation
        self._pinned: set[Adapter] = set()
        self._idle: IdleHeap[Adapter] = IdleHeap()
        self._idle_pages = 0
        self._generations = itertools.count(1)
        self.loads = 0
        reclaim.add(self)

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Adapter]:
        """Every adapter that is registered or draining."""
        yield from self._by_name.values()
        yield from self._draining

    def get(self, name: str) -> Adapter:
        """The current generation of a name; raises UnknownAdapterError."""
        try:
            return self._by_name[name]
        except KeyError:
            known = ", ".join(sorted(self._by_name)[:8]) or "none"
            raise UnknownAdapterError(f"adapter '{name}' is not registered (registered: {known})") from None

    def find(self, name: str) -> Adapter | None:
        """The current generation of a name, if there is one."""
        return self._by_name.get(name)

    def register(self, name: str, path: str, packed: PackedAdapter, *, replace: bool = False) -> Adapter:
        """Register under a name; with `replace`, requests under way finish on the generation they hold, and a
        pinned name stays pinned.
        """
        old = self.find(name)
        pinned = old is not None and old.pinned
        if old is not None:
            if not replace:
                raise AdapterExistsError(
                    f"adapter '{name}' is already loaded; unload it first or load in place"
                )
            self.unregister(name)
        adapter = Adapter(name, path, next(self._generations), packed)
        self._by_name[name] = adapter
        self.set_pinned(adapter, pinned)
        return adapter

    def unregister(self, name: str) -> None:
        """Take the name away at once; pages and host copy go when the last request that uses it ends."""
        adapter = self.get(name)
        del self._by_name[name]
        adapter.unloaded = True
        self.set_pinned(adapter, False)
        self._draining.append(adapter)
        self._free_if_drained(adapter)

    def acquire(self, adapter: Adapter) -> None:
        """A request will use this generation; raises UnknownAdapterError if it is freed."""
        if adapter.packed is None:
            raise UnknownAdapterError(f"adapter '{adapter.name}' was unloaded before the request began")
        adapter.users += 1

    def release(self, adapter: Adapter) -> None:
        """A request that acquired it has ended."""
        assert adapter.users > 0
        adapter.users -= 1
        self._free_if_drained(adapter)

    def pin(self, adapter: Adapter) -> None:
        """A sequence starts to run on its pages (it must be resident)."""
        assert adapter.pages is not None
        adapter.pins += 1
        self._set_idle(adapter)
        self._reclaim.used(adapter)

    def unpin(self, adapter: Adapter) -> None:
        assert adapter.pins > 0
        adapter.pins -= 1
        self._reclaim.kept(adapter)
        self._set_idle(adapter)
        self._free_if_drained(adapter)

    def set_pinned(self, adapter: Adapter, pinned: bool) -> None:
        """Whether it stays resident, once it is, while nobody uses it."""
        adapter.pinned = pinned
        (self._pinned.add if pinned else self._pinned.discard)(adapter)
        self._set_idle(adapter)

    @property
    def pinned(self) -> frozenset[Adapter]:
        """Adapters of pinned names."""
        return frozenset(self._pinned)

    def pinned_pages(self, beside: Adapter | None = None) -> int:
        """Pages that pinned names may keep for ever, those of `beside` left out."""
        return sum(a.num_pages for a in self._pinned if a is not beside)

    @property
    def resident(self) -> list[Adapter]:
        """Adapters with pages in the pool."""
        return list(self._resident.values())

    @property
    def idle_pages(self) -> int:
        """Pages of resident adapters that may be evicted."""
        return self._idle_pages

    def is_idle(self, adapter: Adapter) -> bool:
        """Whether it is resident and may be evicted."""
        return adapter in self._idle

    def least_usage(self) -> float:
        return self._idle.least().usage

    def evict(self, pages: int, limit: float) -> int:
        freed = gone = 0
        while freed < pages and self._idle and (not gone or self._idle.least().usage <= limit):
            adapter = self._idle.least()
            freed += adapter.num_pages
            self._evict(adapter)
            gone += 1
        return gone

    def make_resident(self, adapter: Adapter, write: Callable[[Adapter], None]) -> None:
        """Give it pages (there must be room, free or idle) and `write` them.

        `write` copies `adapter.packed.pages` to `adapter.pages`, before any step that reads them; where it
        fails the adapter is as absent as before.
        """
        assert adapter.pages is None
        self._reclaim.make_room(adapter.num_pages)
        adapter.pages = self._pool.allocate(adapter.num_pages, "adapter")
        assert adapter.pages is not None
        self._resident[adapter.generation] = adapter
        self._reclaim.fetched(adapter)
        self._set_idle(adapter)
        try:
            write(adapter)
        except BaseException:
            self._evict(adapter)
            raise
        self.loads += 1

    def info(self, adapter: Adapter) -> AdapterInfo:
        """What a caller may know of an adapter that is registered or draining."""
        packed = adapter.packed
        assert packed is not None
        state: Literal["registered", "resident", "draining"] = "registered"
        if adapter.unloaded:
            state = "draining"
        elif adapter.pages is not None:
            state = "resident"
        return AdapterInfo(
            name=adapter.name,
            path=adapter.path,
            generation=adapter.generation,
            state=state,
            rank=packed.rank,
            target_modules=tuple(packed.target_modules),
            pages=adapter.num_pages,
            host_bytes=packed.nbytes,
            running=adapter.users,
            pinned=adapter.pinned,
        )

    def _set_idle(self, adapter: Adapter) -> None:
        """Make `_idle` agree with the adapter's state."""
        idle = adapter.pages is not None and not adapter.pins and not adapter.pinned
        if idle == (adapter in self._idle):
            return
        if idle:
            self._idle.push(adapter)
        else:
            self._idle.discard(adapter)
        self._idle_pages += adapter.num_pages if idle else -adapter.num_pages

    def _evict(self, adapter: Adapter) -> None:
        assert adapter.pages is not None and not adapter.pins
        self._pool.release(adapter.pages)
        adapter.pages = None
        self._set_idle(adapter)
        del self._resident[adapter.generation]

    def _free_if_drained(self, adapter: Adapter) -> None:
        if adapter.unloaded and not adapter.users and not adapter.pins and adapter.packed is not None:
            if adapter.pages is not None:
                self._evict(adapter)
            adapter.packed = None
            self._draining.remove(adapter)
            self._on_freed(adapter.generation)
