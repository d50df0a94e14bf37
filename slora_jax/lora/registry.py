"""Puts adapters under names and takes them away: read or trusted, checked, then entered into the store.

What may be called while requests are under way, and when a name's pages stay. How pages are got and lost
is `store.py`'s, how weights come from disk to the device `loader.py`'s.
"""

from __future__ import annotations

import dataclasses
import os
import reprlib
import weakref
import zlib
from collections.abc import Callable, Mapping, Set

import numpy as np

from slora_jax import interrupts
from slora_jax.checks import as_kind
from slora_jax.config import ModelConfig
from slora_jax.errors import AdapterError
from slora_jax.lora.loader import PreparedAdapter
from slora_jax.lora.packing import AdapterShape, PackedAdapter, pack_adapter
from slora_jax.lora.peft import promised_ranks, read_adapter
from slora_jax.lora.peft_folder import FolderStamp, check_adapter_path, folder_stamp
from slora_jax.lora.store import Adapter, AdapterStore
from slora_jax.lora.transfer import HostCopy
from slora_jax.memory.layout import RANK_BLOCK, PageLayout
from slora_jax.outputs import AdapterInfo
from slora_jax.request import Request

_NAME_CHARACTERS = 256


def check_adapter_name(name: object) -> None:
    """Raise ValueError for what is no adapter's name, wherever it comes from.

    Metrics join names by commas, and a line of a log has whole ones.
    """
    text = str(as_kind("an adapter's name", name, str))
    if not 0 < len(text) <= _NAME_CHARACTERS or text != text.strip() or "," in text or not text.isprintable():
        raise ValueError(
            f"an adapter's name must have 1 to {_NAME_CHARACTERS} printable characters, no comma among them, "
            f"and no space at either end, got {text[:_NAME_CHARACTERS]!r}"
        )


def check_adapters(adapters: object) -> None:
    """Raise ValueError, which says which, where a mapping of names to PEFT folders is none; reads nothing."""
    if not isinstance(adapters, Mapping):
        raise ValueError(f"adapters must map names to PEFT folders, got {type(adapters).__name__}")
    for name, path in adapters.items():
        try:
            check_adapter_name(name)
            check_adapter_path(path)
        except ValueError as error:
            raise ValueError(f"adapters[{reprlib.repr(name)}] = {path!r}: {error}") from None


class AdapterRegistry:
    """What `Engine` offers of adapters; its methods of the same names say effects and errors.

    `dtype` is of the pool, which has `usable_pages` for adapters. `host_copy` makes an
    adapter's pages ready to be copied. `requests` are those under way, the engine's own table. Only `prepare`
    may be called in any thread.
    """

    def __init__(
        self,
        store: AdapterStore,
        model_config: ModelConfig,
        layout: PageLayout,
        *,
        dtype: np.dtype,
        max_rank: int,
        usable_pages: int,
        host_copy: Callable[[np.ndarray], HostCopy],
        requests: Mapping[str, Request],
    ) -> None:
        self._store, self._model_config, self._layout = store, model_config, layout
        self._dtype, self._max_rank = dtype, max_rank
        self._usable_pages = usable_pages
        self._host_copy, self._requests = host_copy, requests
        # Adapters given from memory may be registered under many names, and share one host copy.
        self._copies: weakref.WeakKeyDictionary[PackedAdapter, HostCopy] = weakref.WeakKeyDictionary()

    def prepare(self, path: str | os.PathLike[str]) -> PreparedAdapter:
        """Read, validate and pack a PEFT folder."""
        stamp = folder_stamp(path)
        adapter = read_adapter(path, self._model_config, max_rank=self._max_rank)
        packed = pack_adapter(adapter, self._layout, self._dtype)
        if folder_stamp(path) != stamp:
            raise AdapterError("its files changed while they were read; load it again", folder=stamp.folder)
        content = np.ascontiguousarray(packed.pages).view(np.uint8)
        stamp = dataclasses.replace(stamp, checksum=zlib.crc32(content))
        return PreparedAdapter(os.fspath(path), packed, stamp, self._host_copy(packed.pages))

    def load(
        self, name: str, path: str | os.PathLike[str] | PreparedAdapter, *, replace: bool
    ) -> AdapterInfo:
        """Register an adapter whose weights are in host memory already, or are read now."""
        check_adapter_name(name)
        prepared = path if isinstance(path, PreparedAdapter) else self.prepare(path)
        packed, host = prepared.packed, prepared.host
        self._check_form(name, packed)
        self._check_size(name, packed.shape)
        if host is None:
            host = self._copies.get(packed) or self._host_copy(packed.pages)
            self._copies[packed] = host
        return self.enter(name, prepared.path, packed.shape, prepared.stamp, host, replace=replace)

    def register(self, name: str, path: str | os.PathLike[str], *, replace: bool) -> AdapterInfo:
        """Register an adapter whose weights are read when a request first needs them."""
        check_adapter_name(name)
        ranks = promised_ranks(path, self._model_config, max_rank=self._max_rank)
        shape = AdapterShape(self._layout.adapter(ranks), max(ranks.values()), tuple(ranks))
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
        nbytes = need * self._layout.page_bytes(self._dtype.itemsize)
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

    def _check_form(self, name: str, packed: PackedAdapter) -> None:
        """Raise ValueError for one that was packed for an engine of another kind."""
        layout, pages = self._layout, packed.pages
        own = layout.adapter({m: RANK_BLOCK * n for m, n in packed.layout.rank_blocks.items() if n})
        form = (layout.n_layers, packed.layout.num_pages, layout.tp * layout.page_elems), self._dtype, own
        if (pages.shape, pages.dtype, packed.layout) != form:
            raise ValueError(
                f"adapter '{name}' was prepared for an engine of another model, dtype, page_tokens or "
                "tensor_parallel_size: prepare it with this one"
            )
        if packed.rank > self._max_rank:
            raise ValueError(
                f"adapter '{name}' has rank {packed.rank}, max_lora_rank is {self._max_rank}: raise it"
            )

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
