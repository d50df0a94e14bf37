"""Host copies of adapters, within a budget of bytes.

A copy that can be read again from its folder is dropped when others need its room: first those of adapters
that no request needs, least recently used first; then those of queued or running ones, the latest first,
since the earlier ones' turn comes sooner. A copy on its way to the pool is never dropped, nor is one that was
given from memory, which no folder holds; the budget does not count those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from slora_jax.lora.transfer import PINNED_HOST_LIMIT_VARIABLE, HostCopy
from slora_jax.memory.sizing import machine_bytes

if TYPE_CHECKING:
    from slora_jax.lora.store import Adapter


class HostCache:
    """Owns `Adapter.host`. `held` counts bytes that may be dropped, `promised` those about to be read.

    `turn` counts the scheduler's passes over the queue: an adapter that was sought in this one is on its way
    to the pool, and its request comes before all that are still to be sought.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.on_gone: Callable[[Adapter], None] = lambda _: None  # an adapter without pages has no copy now
        self.held = 0
        self.promised = 0
        self.turn = 0
        self.fixed = 0  # bytes of copies that are never dropped
        self._unneeded: dict[int, Adapter] = {}  # by generation, least recently used first
        self._needed: dict[int, Adapter] = {}  # by generation, in the order of their requests

    @property
    def free(self) -> int:
        """Bytes that fit without dropping a copy."""
        return self.budget - self.held - self.promised

    def put(self, adapter: Adapter, copy: HostCopy) -> None:
        """Keep a copy, and drop others where they no longer fit beside it."""
        assert adapter.host is None and not adapter.freed
        adapter.host = copy
        if adapter.stamp is None:
            self.fixed += adapter.host_bytes
            return
        self.held += adapter.host_bytes
        (self._needed if adapter.users else self._unneeded)[adapter.generation] = adapter
        self.make_room(0, keep=adapter)

    def touch(self, adapter: Adapter) -> None:
        """A request that needs it began, or its last one ended."""
        generation = adapter.generation
        if self._unneeded.pop(generation, None) or (not adapter.users and self._needed.pop(generation, None)):
            (self._needed if adapter.users else self._unneeded)[generation] = adapter

    def drop(self, adapter: Adapter) -> None:
        """Forget an adapter's copy, if it has one."""
        if adapter.host is None:
            return
        adapter.host, adapter.fresh = None, False
        if adapter.pages is None:
            self.on_gone(adapter)
        if adapter.stamp is None:
            self.fixed -= adapter.host_bytes
            return
        self.held -= adapter.host_bytes
        if self._unneeded.pop(adapter.generation, None) is None:
            del self._needed[adapter.generation]

    def make_room(self, nbytes: int, keep: Adapter | None = None) -> bool:
        """Drop copies other than `keep`'s until `nbytes` more fit; False where they do not fit even then."""
        target = self.budget - self.promised - nbytes
        for group in (self._unneeded.values(), reversed(self._needed.values())):
            victims, held = [], self.held
            for adapter in group:
                if held <= target:
                    break
                if adapter is not keep and not self._on_its_way(adapter):
                    victims.append(adapter)
                    held -= adapter.host_bytes
            for adapter in victims:
                self.drop(adapter)
        return self.held <= target

    def check_integrity(self, adapters: Iterable[Adapter]) -> None:
        """Bytes and groups add up; raises AssertionError saying what does not."""
        held = fixed = 0
        for adapter in adapters:
            groups = [adapter.generation in self._unneeded, adapter.generation in self._needed]
            cached = adapter.host is not None and adapter.stamp is not None
            want = [cached and not adapter.users, cached and bool(adapter.users)]
            assert groups == want, f"the host copy of '{adapter.name}' is among {groups}, not {want}"
            held += adapter.host_bytes if cached else 0
            fixed += adapter.host_bytes if adapter.host is not None and adapter.stamp is None else 0
        assert (self.held, self.fixed) == (held, fixed), (
            f"host copies of {self.held} and {self.fixed} bytes are counted, not {held} and {fixed}"
        )

    def _on_its_way(self, adapter: Adapter) -> bool:
        sought = adapter.state == "registered" and bool(adapter.users) and adapter.last_sought == self.turn
        return sought or adapter.state == "staged"  # whose copy is read


def host_budget(wanted: int | None, pinned_host_limit: int | None) -> int:
    """Bytes for a HostCache: `wanted`, else half of the machine's (or the cgroup's) memory, but at most
    three quarters of the pinned host memory: adapters given from memory and other transfers need some.

    Raises ValueError where more is wanted than there is pinned host memory.
    """
    if wanted is not None and pinned_host_limit is not None and wanted > pinned_host_limit:
        raise ValueError(
            f"adapter_host_bytes {wanted} is above the {pinned_host_limit} bytes of pinned host memory that "
            f"XLA gives: lower it, or set the environment variable {PINNED_HOST_LIMIT_VARIABLE} (in GiB) "
            "before the start"
        )
    if wanted is not None:
        return wanted
    half = machine_bytes() // 2
    return half if pinned_host_limit is None else min(half, pinned_host_limit * 3 // 4)
