"""The host's book of pages: every page is free, KV (with a reference count) or part of an adapter.

One free list for both uses: that is unified paging (S-LoRA, section 4). Page 0 is reserved: it stays
zero for ever, and padding in work lists points to it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

PageKind = Literal["kv", "adapter"]
FREE, KV, ADAPTER, NULL = 0, 1, 2, 3
_KINDS = {"kv": KV, "adapter": ADAPTER}


class PagePool:
    """Allocator of page ids `1 .. num_pages - 1`; O(pages asked for) an operation, no device state."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a page pool needs at least 2 pages (page 0 is reserved), got {num_pages}")
        self.num_pages = num_pages
        self._kind = np.full(num_pages, FREE, np.int8)
        self._kind[0] = NULL
        self._references = np.zeros(num_pages, np.int32)
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: recently freed pages are used again first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Pages that can ever be allocated."""
        return self.num_pages - 1

    def count(self, kind: PageKind) -> int:
        """Pages of a kind; O(num_pages)."""
        return int(np.count_nonzero(self._kind == _KINDS[kind]))

    def allocate(self, n: int, kind: PageKind) -> list[int] | None:
        """`n` pages of a kind with one reference each, or None (and no change) where fewer are free."""
        if n > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(n)]
        self._kind[pages] = _KINDS[kind]
        self._references[pages] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more reference to each of these KV pages."""
        index = np.asarray(pages, np.int64)
        assert np.all(self._kind[index] == KV), "only KV pages are shared"
        np.add.at(self._references, index, 1)

    def release(self, pages: Sequence[int]) -> None:
        """One reference fewer to each page; a page without references is free again."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} released more often than allocated"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._kind[page] = FREE
                self._free.append(page)

    def check_integrity(
        self, kv_holders: Iterable[Sequence[int]], adapter_holders: Iterable[Sequence[int]]
    ) -> None:
        """Prove that the book and its holders agree; raises AssertionError saying which page does not.

        `kv_holders` are the page lists of all sequences (and caches), `adapter_holders` those of adapters.
        """
        kv = collections.Counter(page for pages in kv_holders for page in pages)
        adapter = collections.Counter(page for pages in adapter_holders for page in pages)
        free = collections.Counter(self._free)
        for page in range(1, self.num_pages):
            held = {FREE: free[page], KV: kv[page], ADAPTER: adapter[page]}
            kind, references = int(self._kind[page]), int(self._references[page])
            want = {k: 0 for k in held} | {kind: 1 if kind == FREE else references}
            assert held == want, (
                f"page {page}: the book says {want} (free, kv, adapter), its holders say {held}"
            )
            assert kind != ADAPTER or references == 1, f"adapter page {page} is shared {references} times"
            assert kind == FREE or references > 0, f"page {page} is in use without a reference"
        assert self._kind[0] == NULL and kv[0] == adapter[0] == free[0] == 0, "page 0 (reserved) is held"
