"""The host's book of pages: every page is free, KV (with a reference count) or part of an adapter.

One free list for both uses: that is unified paging (S-LoRA, section 4). Page 0 is reserved: it stays
zero for ever, and padding in work lists points to it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Literal

PageKind = Literal["kv", "adapter"]
FREE, KV, ADAPTER, NULL = 0, 1, 2, 3
_KINDS = {"kv": KV, "adapter": ADAPTER}


class PagePool:
    """Allocator of page ids `1 .. num_pages - 1`; O(pages asked for) an operation, no device state."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a page pool needs at least 2 pages (page 0 is reserved), got {num_pages}")
        self.num_pages = num_pages
        # Lists and bytes, not arrays: most operations are of a page or two, and NumPy costs by the call.
        self._kind = bytearray(num_pages)
        self._kind[0] = NULL
        self._references = [0] * num_pages
        self._counts = [num_pages - 1, 0, 0]  # pages by kind
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: recently freed pages are used again first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Pages that can ever be allocated."""
        return self.num_pages - 1

    def count(self, kind: PageKind) -> int:
        """Pages of a kind."""
        return self._counts[_KINDS[kind]]

    def allocate(self, n: int, kind: PageKind) -> list[int] | None:
        """`n` pages of a kind with one reference each, or None (and no change) where fewer are free."""
        if n > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._kind[page] = _KINDS[kind]
            self._references[page] = 1
        self._counts[FREE] -= n
        self._counts[_KINDS[kind]] += n
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more reference to each of these KV pages."""
        for page in pages:
            assert self._kind[page] == KV, "only KV pages are shared"
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference fewer to each page; a page without references is free again."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} released more often than allocated"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._counts[self._kind[page]] -= 1
                self._counts[FREE] += 1
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
            kind, references = self._kind[page], self._references[page]
            want = {k: 0 for k in held} | {kind: 1 if kind == FREE else references}
            assert held == want, (
                f"page {page}: the book says {want} (free, kv, adapter), its holders say {held}"
            )
            assert kind != ADAPTER or references == 1, f"adapter page {page} is shared {references} times"
            assert kind == FREE or references > 0, f"page {page} is in use without a reference"
        assert self._counts == [self._kind.count(kind) for kind in (FREE, KV, ADAPTER)], "counts are wrong"
        assert self._kind[0] == NULL and kv[0] == adapter[0] == free[0] == 0, "page 0 (reserved) is held"
