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
FREE, KV, ADAPTER, NULL = 0, 1, 2, 3
_KINDS = {"kv": KV, "adapter": ADAPTER}


class PagePool:
    """Allocator of page ids `1 .. num_pages - 1`; O(pages asked for) an operation, no device state.

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
        # Lists and bytes, not arrays: most operations are of a page or two, and NumPy costs by the call.
        self._kind = bytearray(num_pages)
        self._kind[0] = NULL
        self._references = [0] * num_pages
        self._counts = [num_pages - 1, 0, 0]  # pages by kind
        # Stacks: recently freed pages are used again first. Unified paging: both are one and the same.
        self._free = list(range(self._border - 1, 0, -1))
        self._free_adapter = self._free if self.unified else list(range(num_pages - 1, self._border - 1, -1))

    @property
    def num_free(self) -> int:
        """Free pages of any use."""
        return self._counts[FREE]

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
        return self._counts[_KINDS[kind]]

    def allocate(self, n: int, kind: PageKind) -> list[int] | None:
        """`n` pages of a kind with one reference each, or None (and no change) where fewer are free."""
        free = self._free if kind == "kv" else self._free_adapter
        if n > len(free):
            return None
        pages = [free.pop() for _ in range(n)]
        kinds, references, new = self._kind, self._references, _KINDS[kind]
        for page in pages:
            kinds[page] = new
            references[page] = 1
        self._counts[FREE] -= n
        self._counts[new] += n
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more reference to each of these KV pages."""
        for page in pages:
            assert self._kind[page] == KV, "only KV pages are shared"
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference fewer to each page; a page without references is free again."""
        kinds, references, counts = self._kind, self._references, self._counts  # thousands, where many end
        for page in pages:
            left = references[page] - 1
            assert left >= 0, f"page {page} released more often than allocated"
            references[page] = left
            if not left:
                kind = kinds[page]
                kinds[page] = FREE
                counts[kind] -= 1
                counts[FREE] += 1
                (self._free if kind == KV else self._free_adapter).append(page)

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
            held = {FREE: free[page], KV: kv[page], ADAPTER: adapter[page]}
            kind, references = self._kind[page], self._references[page]
            want = {k: 0 for k in held} | {kind: 1 if kind == FREE else references}
            assert held == want, (
                f"page {page}: the book says {want} (free, kv, adapter), its holders say {held}"
            )
            assert kind != ADAPTER or references == 1, f"adapter page {page} is shared {references} times"
            assert kind == FREE or references > 0, f"page {page} is in use without a reference"
            if not self.unified:
                assert kind != (KV if page >= self._border else ADAPTER), f"page {page} is on the wrong side"
        assert self._counts == [self._kind.count(kind) for kind in (FREE, KV, ADAPTER)], "counts are wrong"
        if not self.unified:
            assert max(self._free, default=0) < self._border <= min(self._free_adapter, default=self._border)
        assert self._kind[0] == NULL and kv[0] == adapter[0] == free[0] == 0, "page 0 (reserved) is held"
