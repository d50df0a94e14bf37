"""Registered adapters, their host copies, and which of them are resident in the page pool.

An adapter is *registered* (host copy only), *resident* (pages in the pool) or *draining* (unloaded by name
while requests still use it). `users` counts requests that may yet need it and keep its host copy alive;
`pins` counts running sequences that need its pages where they are. A resident adapter without pins is
evictable, least recently used first. Every load gets a new generation: requests hold the `Adapter` itself,
never its name, so a reload under the same name never meets its predecessor's requests.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Literal

from slora_jax.errors import AdapterExistsError, UnknownAdapterError
from slora_jax.lora.packing import PackedAdapter
from slora_jax.memory.page_pool import PagePool
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
    unloaded: bool = False

    @property
    def num_pages(self) -> int:
        assert self.packed is not None
        return self.packed.layout.num_pages


class AdapterStore:
    """Adapters by name, and the pages of those that are resident. Host state only."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._by_name: dict[str, Adapter] = {}
        self._draining: list[Adapter] = []
        self._resident: dict[int, Adapter] = {}  # by generation, least recently used first
        self._generations = itertools.count(1)
        self.loads = 0
        self.evictions = 0

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

    def register(self, name: str, path: str, packed: PackedAdapter, *, replace: bool = False) -> Adapter:
        """Register under a name; with `replace`, requests under way finish on the generation they hold."""
        if name in self._by_name:
            if not replace:
                raise AdapterExistsError(
                    f"adapter '{name}' is already loaded; unload it first or load in place"
                )
            self.unregister(name)
        adapter = Adapter(name, path, next(self._generations), packed)
        self._by_name[name] = adapter
        return adapter

    def unregister(self, name: str) -> None:
        """Take the name away at once; pages and host copy go when the last request that uses it ends."""
        adapter = self.get(name)
        del self._by_name[name]
        adapter.unloaded = True
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
        self._resident[adapter.generation] = self._resident.pop(adapter.generation)

    def unpin(self, adapter: Adapter) -> None:
        assert adapter.pins > 0
        adapter.pins -= 1
        self._free_if_drained(adapter)

    @property
    def resident(self) -> list[Adapter]:
        """Adapters with pages in the pool, least recently used first."""
        return list(self._resident.values())

    def make_resident(self, adapter: Adapter, write: Callable[[Adapter], None]) -> None:
        """Give it pages (`can_make_room` must hold), evicting idle adapters where needed, and `write` them.

        `write` copies `adapter.packed.pages` to `adapter.pages`, before any step that reads them; where it
        fails the adapter is as absent as before.
        """
        assert adapter.pages is None
        self.make_room(adapter.num_pages)
        adapter.pages = self._pool.allocate(adapter.num_pages, "adapter")
        assert adapter.pages is not None
        self._resident[adapter.generation] = adapter
        try:
            write(adapter)
        except BaseException:
            self._evict(adapter)
            raise
        self.loads += 1

    def can_make_room(self, pages: int, keep: Adapter | None = None) -> bool:
        """Whether `pages` are free or held by idle adapters other than `keep`."""
        missing = pages - self._pool.num_free
        for adapter in self._resident.values():
            if missing <= 0:
                break
            if not adapter.pins and adapter is not keep:
                missing -= adapter.num_pages
        return missing <= 0

    def make_room(self, pages: int) -> bool:
        """Evict idle adapters, least recently used first, until `pages` are free; all or nothing."""
        if not self.can_make_room(pages):
            return False
        while self._pool.num_free < pages:
            self._evict(next(a for a in self._resident.values() if not a.pins))
            self.evictions += 1
        return True

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
        )

    def _evict(self, adapter: Adapter) -> None:
        assert adapter.pages is not None and not adapter.pins
        self._pool.release(adapter.pages)
        adapter.pages = None
        del self._resident[adapter.generation]

    def _free_if_drained(self, adapter: Adapter) -> None:
        if adapter.unloaded and not adapter.users and not adapter.pins and adapter.packed is not None:
            if adapter.pages is not None:
                self._evict(adapter)
            adapter.packed = None
            self._draining.remove(adapter)
