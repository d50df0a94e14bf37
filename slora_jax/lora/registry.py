"""Puts adapters under names and takes them away: read or trusted, checked, then entered into the store.

What may be called while requests are under way, and when a name's pages stay. How pages are got and lost
is `store.py`'s, how weights come from disk `reader.py`'s, and to the device `loader.py`'s.
"""

from __future__ import annotations

import functools
import os
import reprlib
import weakref
from collections.abc import Callable, Mapping, Set

from slora_jax import interrupts
from slora_jax.checks import as_adapter_name
from slora_jax.lora.loader import PreparedAdapter
from slora_jax.lora.packing import AdapterShape, PackedAdapter
from slora_jax.lora.peft_folder import FolderStamp, check_adapter_path, folder_stamp
from slora_jax.lora.reader import AdapterReader
from slora_jax.lora.store import Adapter, AdapterStore
from slora_jax.lora.transfer import HostCopy
from slora_jax.outputs import AdapterInfo
from slora_jax.request import Request

OnRefused = Callable[[str, Exception], None]  # is told of an adapter, and why it is refused


def check_adapter_name(name: object) -> None:
    """Raise ValueError for what is no adapter's name, wherever it comes from."""
    as_adapter_name("an adapter's name", name)


def check_given(name: object, path: object) -> None:
    """Raise ValueError, which says which, for what is no name of an adapter or no path; reads nothing."""
    try:
        check_adapter_name(name)
        check_adapter_path(path)
    except ValueError as error:
        raise ValueError(f"adapters[{reprlib.repr(name)}] = {path!r}: {error}") from None


def without_refused[Path](
    adapters: Mapping[str, Path], check: Callable[[str, Path], object], on_refused: OnRefused | None
) -> dict[str, Path]:
    """Those that `check(name, path)` lets pass. What it raises for another is raised where `on_refused` is
    None; else that is told, and raises what is not to be left out.
    """
    good = {}
    for name, path in adapters.items():
        try:
            check(name, path)
        except Exception as error:  # whatever it is, the others can be served
            if on_refused is None:
                raise
            on_refused(name, error)
        else:
            good[name] = path
    return good


class AdapterRegistry:
    """What `Engine` offers of adapters; its methods of the same names say effects and errors.

    `usable_pages` are those of the pool that adapters may take, `requests` those under way.
    """

    def __init__(
        self,
        store: AdapterStore,
        reader: AdapterReader,
        *,
        usable_pages: int,
        requests: Mapping[str, Request],
    ) -> None:
        self._store, self._reader, self._layout = store, reader, reader.layout
        self._usable_pages, self._requests = usable_pages, requests
        # Adapters given from memory may be registered under many names, and share one host copy.
        self._copies: weakref.WeakKeyDictionary[PackedAdapter, HostCopy] = weakref.WeakKeyDictionary()

    def load(
        self, name: str, path: str | os.PathLike[str] | PreparedAdapter, *, replace: bool
    ) -> AdapterInfo:
        """Register an adapter whose weights are in host memory already, or are read now."""
        check_adapter_name(name)
        prepared = path if isinstance(path, PreparedAdapter) else self._reader.prepare(path)
        packed, host = prepared.packed, prepared.host
        self._reader.check_form(name, packed)
        self._check_size(name, packed.shape)
        if host is None:
            host = self._copies.get(packed) or self._reader.host_copy(packed.pages)
            self._copies[packed] = host
        return self.enter(name, prepared.path, packed.shape, prepared.stamp, host, replace=replace)

    def begin_with(
        self,
        adapters: Mapping[str, str | os.PathLike[str]],
        *,
        lazy: bool,
        told: Callable[[int, int], None],
        on_refused: OnRefused | None,
    ) -> None:
        """Load or (`lazy`) register all but those that are refused; `told(done, total)` after each."""
        enter = functools.partial(self.register if lazy else self.load, replace=False)
        for done, (name, path) in enumerate(adapters.items(), 1):
            without_refused({name: path}, enter, on_refused)
            told(done, len(adapters))

    def register(self, name: str, path: str | os.PathLike[str], *, replace: bool) -> AdapterInfo:
        """Register an adapter whose weights are read when a request first needs them."""
        check_adapter_name(name)
        shape = self._reader.promised_shape(path)
        self._check_size(name, shape)
        return self.enter(name, os.fspath(path), shape, folder_stamp(path), None, replace=replace)

    @interrupts.held()
    def enter(
        self,
        name: str,
        path: str,
        shape: AdapterShape,
        stamp: FolderStamp | None,
        host: HostCopy | None,
        *,
        replace: bool,
    ) -> AdapterInfo:
        """Put an adapter of this shape, which was checked, under a name; the folder of `stamp` or `host` has
        its weights.
        """
        need = shape.layout.num_pages
        old = self._store.find(name) if replace else None
        if old is not None and old.pinned:
            new = self._store.slot_pages or need
            self._check_pinned(self._store.pinned - {old}, new, f"adapter '{name}' is pinned")
        nbytes = need * self._layout.page_bytes(self._reader.dtype.itemsize)
        return self._store.info(self._store.register(name, path, shape, nbytes, stamp, host, replace=replace))

    @interrupts.held()
    def unload(self, name: str) -> None:
        self._store.unregister(name)

    @interrupts.held()
    def pin(self, name: str) -> AdapterInfo:
        adapter = self._store.get(name)
        self._check_pinned(self._store.pinned | {adapter}, 0, f"adapter '{name}' cannot be pinned")
        self._store.set_pinned(adapter, True)
        return self._store.info(adapter)

    @interrupts.held()
    def unpin(self, name: str) -> AdapterInfo:
        adapter = self._store.get(name)
        self._store.set_pinned(adapter, False)
        return self._store.info(adapter)

    def infos(self) -> list[AdapterInfo]:
        return [self._store.info(a) for a in self._store]

    def target_modules(self) -> set[str]:
        """Modules that some registered adapter targets."""
        return {m for a in self._store for m in a.shape.target_modules}

    def _check_size(self, name: str, shape: AdapterShape) -> None:
        need = shape.layout.num_pages
        if self._store.slot_pages is None and need >= self._usable_pages:  # a slot holds the largest rank
            raise ValueError(
                f"adapter '{name}' needs {need} pages, the pool has {self._usable_pages}: "
                "raise num_pages or pool_bytes"
            )

    def _check_pinned(self, pinned: Set[Adapter], new: int, what: str) -> None:
        """Raise ValueError where a request under way, or any at all, would not fit beside these, and `new`
        pages, pinned.
        """
        usable, pages = self._usable_pages, new + sum(a.num_pages for a in pinned)
        if pages >= usable:
            raise ValueError(
                f"{what}: pinned adapters would take {pages} pages of {usable}, and leave none for requests: "
                f"unpin others or raise {'num_pages' if self._store.slot_pages is None else 'adapter_slots'}"
            )
        if self._store.slot_pages is not None:
            return  # a slot is left for those that are not pinned, and KV has its own pages
        for request in self._requests.values():
            own = request.adapter
            longest = max(s.max_len for s in request.sequences)
            need = pages + -(-longest // self._layout.page_tokens)
            if own is not None and own not in pinned:
                need += own.num_pages
            if need > usable:
                raise ValueError(
                    f"{what}: request '{request.request_id}' needs up to {need} pages with {pages} of pinned "
                    f"adapters, the pool has {usable}: wait for its end, unpin others or raise num_pages"
                )
