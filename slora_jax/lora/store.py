"""Registered adapters by name and generation, and which of them hold pages of the pool.

An adapter is *registered* (a path, perhaps a host copy), *reading* (into host memory), *staged* (it has
pages, and its copy is on the way to the device) or *resident* (its pages are written). Unloaded by name
while requests still use it, it is *draining* whatever its state. `users` counts requests that may yet need
it; `in_use` counts running sequences that read its pages. A resident adapter that is not in use is *idle*,
and the Reclaimer may evict it, unless its name is `pinned`. Those that the next waiting sequences need
(`touch`) give way after all that is idle, and staged ones last. Every load gets a new generation: requests
hold the `Adapter` itself, never its name, so a reload under the same name never meets its predecessor's
requests. The states reading and staged are `lora/loader.py`'s to enter.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Literal

from slora_jax.errors import AdapterExistsError, UnknownAdapterError
from slora_jax.lora.host_cache import HostCache
from slora_jax.lora.packing import AdapterShape
from slora_jax.lora.peft_folder import FolderStamp
from slora_jax.lora.transfer import HostCopy, StagedCopy
from slora_jax.memory.page_pool import PageKind
from slora_jax.memory.reclaim import HolderKind, IdleHeap, Reclaimer
from slora_jax.outputs import AdapterInfo

_RECENT = 64  # evicted adapters among which the next is guessed


@dataclasses.dataclass(slots=True, eq=False)
class Adapter:
    """One generation of a named adapter."""

    name: str
    path: str
    generation: int
    shape: AdapterShape
    host_bytes: int  # of a host copy, whether it is there or not
    stamp: FolderStamp | None  # None: given from memory, so its host copy cannot be read again
    host: HostCopy | None = None
    copy: StagedCopy | None = None  # under way into its pages
    state: Literal["registered", "reading", "staged", "resident"] = "registered"
    pages: list[int] | None = None  # in the pool, while staged or resident
    users: int = 0
    in_use: int = 0
    pinned: bool = False  # by name: stays resident, once it is, until unpinned or unloaded
    unloaded: bool = False
    freed: bool = False  # unloaded and drained
    fresh: bool = False  # the host copy was read for a load that has no pages yet
    ahead: bool = False  # the load under way, or done and not used yet, is a prefetch
    guessed: bool = False  # and one that no request had asked for as it began
    last_sought: int = -1  # the host cache's turn
    waited_since: float | None = None  # monotonic time since when a request waits for nothing else
    usage: float = -math.inf  # of Reclaimer
    slot_pages: int | None = None  # of its slot, without unified memory

    @property
    def resident(self) -> bool:
        return self.state == "resident"

    @property
    def coming(self) -> bool:
        """Whether a load is under way: it is read, was read and waits for pages, or is copied."""
        return self.state in ("reading", "staged") or (self.fresh and self.host is not None)

    @property
    def near(self) -> bool:
        """Whether it is resident, or on its way."""
        return self.resident or self.coming

    @property
    def num_pages(self) -> int:
        """Pages that it takes of the pool: what its weights need, or a whole slot."""
        return self.slot_pages or self.shape.layout.num_pages

    @property
    def weight_pages(self) -> list[int]:
        """Those of its pages that its weights lie in; it has some."""
        assert self.pages is not None
        return self.pages if self.slot_pages is None else self.pages[: self.shape.layout.num_pages]


class AdapterStore:
    """Adapters by name, their host copies, and the pages of those that have some. Host state only.

    `on_freed(generation)` is told of each generation that nobody can use again. With `slot_pages` every
    adapter takes so many pages, whatever it needs.
    """

    kind: HolderKind = "adapter"

    def __init__(
        self,
        reclaim: Reclaimer,
        host: HostCache,
        on_freed: Callable[[int], None],
        slot_pages: int | None = None,
    ) -> None:
        self.host = host
        host.on_gone = self.lose_guess
        self.slot_pages = slot_pages
        self._pool, self._reclaim, self._on_freed = reclaim.pool, reclaim, on_freed
        self._by_name: dict[str, Adapter] = {}
        self._pinned: set[Adapter] = set()  # by name
        self._draining: dict[int, Adapter] = {}  # by generation, as the dicts below
        self._resident: dict[int, Adapter] = {}
        self._sought: dict[int, Adapter] = {}  # resident, in the order of the queue
        self._staged: dict[int, Adapter] = {}  # oldest first
        self._evicted: dict[int, Adapter] = {}  # the most recent, oldest first
        self._idle: IdleHeap[Adapter] = IdleHeap()
        self._idle_pages = 0
        self._generations = itertools.count(1)
        self.prefetches_useful = 0
        self.prefetches_wasted = 0
        self.guesses = self.guesses_useful = self.guesses_wasted = 0
        self.reservations_cancelled = 0
        reclaim.add(self)

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

    def find(self, name: str) -> Adapter | None:
        """The current generation of a name, if there is one."""
        return self._by_name.get(name)

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
        """Register under a name; with `replace`, requests under way finish on the generation they hold, and a
        pinned name stays pinned.
        """
        assert stamp is not None or host is not None, "nothing to load it from"
        old = self.find(name)
        pinned = old is not None and old.pinned
        if old is not None:
            if not replace:
                raise AdapterExistsError(
                    f"adapter '{name}' is already loaded; unload it first or load in place"
                )
            self.unregister(name)
        adapter = Adapter(name, path, next(self._generations), shape, host_bytes, stamp)
        adapter.slot_pages = self.slot_pages
        self._by_name[name] = adapter
        self.set_pinned(adapter, pinned)
        if host is not None:
            self.host.put(adapter, host)
        return adapter

    def unregister(self, name: str) -> None:
        """Take the name away at once; pages and host copy go when the last request that uses it ends."""
        adapter = self.get(name)
        del self._by_name[name]
        adapter.unloaded = True
        self.set_pinned(adapter, False)
        self._draining[adapter.generation] = adapter
        self._free_if_drained(adapter)

    def acquire(self, adapter: Adapter) -> None:
        """A request will use this generation; raises UnknownAdapterError if it is freed."""
        if adapter.freed:
            raise UnknownAdapterError(f"adapter '{adapter.name}' was unloaded before the request began")
        adapter.users += 1
        self.host.touch(adapter)

    def release(self, adapter: Adapter) -> None:
        """A request that acquired it has ended. Pages that it waited for, and whose copy has not begun, are
        given back.
        """
        assert adapter.users > 0
        adapter.users -= 1
        if not adapter.users:
            adapter.waited_since = None
            self.host.touch(adapter)
            if adapter.state == "staged" and adapter.copy is None:
                self.withdraw(adapter)
                self.reservations_cancelled += 1
        self._free_if_drained(adapter)

    def begin_use(self, adapter: Adapter) -> None:
        """A sequence starts to run on its pages (it must be resident)."""
        assert adapter.resident
        adapter.in_use += 1
        self._sought.pop(adapter.generation, None)
        self._set_idle(adapter)
        self._reclaim.used(adapter)
        self.prefetches_useful += adapter.ahead
        self.guesses_useful += adapter.guessed
        adapter.ahead = adapter.guessed = False

    def end_use(self, adapter: Adapter) -> None:
        """A sequence runs on its pages no longer."""
        assert adapter.in_use > 0
        adapter.in_use -= 1
        self._reclaim.kept(adapter)
        self._set_idle(adapter)
        self._free_if_drained(adapter)

    def touch(self, adapter: Adapter) -> None:
        """A sequence that is next needs it: until `touch_anew` it gives way only after all that is idle."""
        if adapter in self._idle:
            self._sought[adapter.generation] = adapter
            self._set_idle(adapter)

    def touch_anew(self) -> None:
        """The queue is looked at again: forget what was touched."""
        sought, self._sought = self._sought, {}
        for adapter in sought.values():
            self._set_idle(adapter)

    def set_pinned(self, adapter: Adapter, pinned: bool) -> None:
        """Whether it stays resident, once it is, while nobody uses it."""
        adapter.pinned = pinned
        (self._pinned.add if pinned else self._pinned.discard)(adapter)
        self._sought.pop(adapter.generation, None)  # those give way
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
        """Adapters whose pages are written."""
        return list(self._resident.values())

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

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

    @property
    def recently_evicted(self) -> list[Adapter]:
        """Adapters that gave way lately and are still registered, oldest first."""
        return list(self._evicted.values())

    def forget_eviction(self, adapter: Adapter) -> None:
        """Do not count it among the recently evicted ones any more."""
        self._evicted.pop(adapter.generation, None)

    def begin_guess(self, adapter: Adapter) -> None:
        """It is read or staged though no request asks for it: a guess, until it is used or lost."""
        self.guesses += not adapter.guessed
        adapter.guessed = True

    def lose_guess(self, adapter: Adapter) -> None:
        """What was loaded of it, if that was a guess, is gone, and no sequence has run on it."""
        self.guesses_wasted += adapter.guessed
        adapter.guessed = False

    def reserve(self, adapter: Adapter) -> bool:
        """Give an absent adapter pages, evicting others where needed: it is *staged*. False: no room."""
        assert adapter.pages is None
        if not self.make_room(adapter.num_pages, "adapter"):
            return False
        adapter.pages = self._pool.allocate(adapter.num_pages, "adapter")
        adapter.state = "staged"
        self._staged[adapter.generation] = adapter
        return True

    def settle(self, adapter: Adapter) -> None:
        """The pages of a staged adapter are written: it is resident, and idle until it is used."""
        adapter.copy = None
        del self._staged[adapter.generation]
        self._evicted.pop(adapter.generation, None)
        adapter.state = "resident"
        self._resident[adapter.generation] = adapter
        self._reclaim.fetched(adapter)
        self._set_idle(adapter)

    def withdraw(self, adapter: Adapter) -> None:
        """Take a staged adapter's pages back: its copy is not wanted, or has failed.

        Waits for a copy that still writes into them, some milliseconds.
        """
        if adapter.copy is not None:
            adapter.copy.leave_pages()
            adapter.copy = None
        if adapter.guessed:
            self.forget_eviction(adapter)  # as in _evict
        self._staged.pop(adapter.generation, None)
        self._give_back(adapter)

    def make_room(self, pages: int, kind: PageKind) -> bool:
        """Until `pages` are free for a use, evict what is idle, then adapters that waiting sequences need,
        then withdraw staged ones, the latest first; all or nothing.
        """
        if self._reclaim.make_room(pages, kind):
            return True
        if kind == "kv" and not self._pool.unified:
            return False  # no adapter has pages that could be KV's
        idle, free_for = self._reclaim.idle_pages(kind), self._pool.free_for
        others = sum(a.num_pages for held in (self._sought, self._staged) for a in held.values())
        if pages > free_for(kind) + idle + others:
            return False
        self._reclaim.make_room(free_for(kind) + idle, kind)
        while free_for(kind) < pages:
            if self._sought:
                self._evict(next(reversed(self._sought.values())))
                self._reclaim.evictions["adapter"] += 1
            else:
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
            pinned=adapter.pinned,
        )

    def check_integrity(self) -> None:
        """States, pages and host copies add up; raises AssertionError saying what does not."""
        places = {"staged": self._staged, "resident": self._resident}
        for adapter in self:
            name, generation = f"adapter '{adapter.name}'", adapter.generation
            assert not adapter.freed, f"{name} is freed and kept"
            found = [place for place, held in places.items() if generation in held]
            want = [adapter.state] if adapter.state in places else []
            assert found == want, f"{name} is {adapter.state} and among {found}"
            assert (adapter.pages is not None) == bool(found), f"{name} is {adapter.state}: {adapter.pages}"
            assert not adapter.in_use or adapter.resident, f"{name} runs and is {adapter.state}"
            assert (adapter in self._idle) == self._is_spare(adapter), f"{name} is misplaced"
            assert adapter.pinned == (adapter in self._pinned), f"{name}: pinned {adapter.pinned}"
            assert adapter.stamp is not None or adapter.host is not None, f"{name} has lost its only copy"
            there = found or adapter.host is not None or adapter.state == "reading"
            assert there or not adapter.guessed, f"{name} is counted as a guess, and nothing of it is there"
        known = {adapter.generation for adapter in self}
        for held in (*places.values(), self._sought, self._evicted):
            assert held.keys() <= known, "an adapter that is not registered is kept"
        pages = sum(a.num_pages for a in self._idle)
        assert self._idle_pages == pages, f"{self._idle_pages} idle pages are counted, not {pages}"
        open_guesses = self.guesses - self.guesses_useful - self.guesses_wasted
        assert open_guesses == sum(a.guessed for a in self), f"{open_guesses} guesses are counted as open"
        self.host.check_integrity(self)

    def _is_spare(self, adapter: Adapter) -> bool:
        wanted = adapter.in_use or adapter.pinned or adapter.generation in self._sought
        return adapter.resident and not wanted

    def _set_idle(self, adapter: Adapter) -> None:
        """Make `_idle` agree with the adapter's state."""
        idle = self._is_spare(adapter)
        if idle == (adapter in self._idle):
            return
        if idle:
            self._idle.push(adapter)
        else:
            self._idle.discard(adapter)
        self._idle_pages += adapter.num_pages if idle else -adapter.num_pages

    def _evict(self, adapter: Adapter) -> None:
        unused_guess = adapter.guessed
        del self._resident[adapter.generation]
        self._sought.pop(adapter.generation, None)
        self._give_back(adapter)
        self._set_idle(adapter)
        if unused_guess:
            return  # it is no likelier than it was: copied again and again, it would keep the link busy
        self._evicted[adapter.generation] = adapter
        if len(self._evicted) > _RECENT:
            del self._evicted[next(iter(self._evicted))]

    def _give_back(self, adapter: Adapter) -> None:
        assert adapter.pages is not None and not adapter.in_use
        self._pool.release(adapter.pages, "adapter")
        adapter.pages, adapter.state = None, "registered"
        self.prefetches_wasted += adapter.ahead
        adapter.ahead = False
        self.lose_guess(adapter)

    def _free_if_drained(self, adapter: Adapter) -> None:
        if not adapter.unloaded or adapter.users or adapter.in_use or adapter.freed:
            return
        if adapter.state == "staged":
            self.withdraw(adapter)
        elif adapter.state == "resident":
            self._evict(adapter)
        self._evicted.pop(adapter.generation, None)
        self.lose_guess(adapter)
        self.host.drop(adapter)
        adapter.freed = True
        del self._draining[adapter.generation]
        self._on_freed(adapter.generation)
