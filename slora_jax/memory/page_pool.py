"""The host's book of pages: every page is free, KV (with a reference count) or part of an adapter.

One free list for both uses: that is unified paging (S-LoRA, section 4). Its ablation keeps two: the last
pages are adapters' only, the others KV's only. Page 0 is reserved: it stays zero for ever, and padding in
work lists points to it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Literal

PageKind = Literal["kv", "adapter"]


class PagePool:
    """Allocator of page ids `1 .. num_pages - 1`; O(pages asked for) an operation, no device state.

    An adapter's pages have one holder, so nothing is noted for each of them: a step may move a thousand.

    With `adapter_pages`, the last so many are for adapters alone and the others for KV alone; None: each page
    serves whoever wants it.
    """

    def __init__(self, num_pages: int, adapter_pages: int | None = None) -> None:
        if num_pages < 2:
            raise ValueError(f"a page pool needs at least 2 pages (page 0 is reserved), got {num_pages}")
        if adapter_pages is not None and not 0 < adapter_pages < num_pages - 1:
            raise ValueError(
                f"{adapter_pages} pages of {num_pages - 1} for adapters alone leave none for KV, or are none"
            )
        self.num_pages = num_pages
        self.unified = adapter_pages is None
        self._border = num_pages - (adapter_pages or 0)  # the first page that is adapters' alone
        # Lists, not arrays: most operations are of a page or two, and NumPy costs by the call.
        self._references = [0] * num_pages  # to KV pages; 0: free, or an adapter's
        self._adapter_pages = 0
        # Stacks: recently freed pages are used again first. Unified paging: both are one and the same.
        self._free = list(range(self._border - 1, 0, -1))
        self._free_adapter = self._free if self.unified else list(range(num_pages - 1, self._border - 1, -1))

    @property
    def num_free(self) -> int:
        """Free pages of any use."""
        return len(self._free) + (0 if self.unified else len(self._free_adapter))

    def free_for(self, kind: PageKind) -> int:
        """Free pages that may become pages of a kind."""
        return len(self._free if kind == "kv" else self._free_adapter)

    def usable_for(self, kind: PageKind) -> int:
        """Pages that can ever be of a kind."""
        if self.unified:
            return self.num_usable
        return self._border - 1 if kind == "kv" else self.num_pages - self._border

    @property
    def num_usable(self) -> int:
        """Pages that can ever be allocated."""
        return self.num_pages - 1

    def count(self, kind: PageKind) -> int:
        """Pages of a kind."""
        adapter = self._adapter_pages
        return adapter if kind == "adapter" else self.num_usable - self.num_free - adapter

    def allocate(self, n: int, kind: PageKind) -> list[int] | None:
        """`n` pages of a kind, KV's with one reference each; None (and no change) where fewer are free."""
        free = self._free if kind == "kv" else self._free_adapter
        first = len(free) - n
        if first < 0:
            return None
        pages = free[first:]
        del free[first:]
        pages.reverse()
        if kind == "adapter":
            self._adapter_pages += n
        else:
            for page in pages:
                self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more reference to each of these KV pages."""
        references = self._references
        for page in pages:
            assert references[page], "only KV pages are shared"
            references[page] += 1

    def release(self, pages: Sequence[int], kind: PageKind = "kv") -> None:
        """An adapter's pages are free again; KV pages have one reference fewer, without any they are free."""
        if kind == "adapter":
            assert len(pages) <= self._adapter_pages, "adapters' pages are released more often than allocated"
            self._adapter_pages -= len(pages)
            self._free_adapter += pages
            return
        references, free = self._references, self._free  # thousands of pages, where many end
        for page in pages:
            left = references[page] - 1
            assert left >= 0, f"page {page} released more often than allocated"
            references[page] = left
            if not left:
                free.append(page)

    def check_integrity(
        self, kv_holders: Iterable[Sequence[int]], adapter_holders: Iterable[Sequence[int]]
    ) -> None:
        """Prove that the book and its holders agree; raises AssertionError saying which page does not.

        `kv_holders` are the page lists of all sequences (and caches), `adapter_holders` those of adapters.
        """
        kv = collections.Counter(page for pages in kv_holders for page in pages)
        adapter = collections.Counter(page for pages in adapter_holders for page in pages)
        free = collections.Counter(self._free if self.unified else self._free + self._free_adapter)
        for page in range(1, self.num_pages):
            references, held = self._references[page], (free[page], kv[page], adapter[page])
            right = [(0, references, 0)] if references else [(1, 0, 0), (0, 0, 1)]
            assert held in right, (
                f"page {page}: its references are {references}, its holders {held} (free, kv, adapter)"
            )
            if not self.unified:
                other = kv[page] if page >= self._border else adapter[page]
                assert not other, f"page {page} is on the wrong side"
        assert self._adapter_pages == adapter.total(), f"{self._adapter_pages} adapter pages are counted"
        if not self.unified:
            assert max(self._free, default=0) < self._border <= min(self._free_adapter, default=self._border)
        assert self._references[0] == kv[0] == adapter[0] == free[0] == 0, "page 0 (reserved) is held"
