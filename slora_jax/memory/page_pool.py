"""The host's book of pages: every page is free, KV (with a reference count) or part of an adapter.

One free list for both uses: that is unified paging (S-LoRA, section 4). Its ablation keeps two: the last
pages are adapters' only, the others KV's only. Page 0 is reserved: it stays zero for ever, and padding in
work lists points to it.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

PageKind = Literal["kv", "adapter"]


class _FreePages:
    """Ids of free pages: as *runs* of neighbours, and single ones that KV gave back, which are sorted into
    the runs only when an adapter would be scattered without them.

    KV takes single pages and the shortest runs, adapters the shortest run that holds them, from its end: so
    long runs last, and an adapter is copied in few pieces (lora/transfer.py).
    """

    def __init__(self, first: int, end: int) -> None:
        self._ends: dict[int, int] = {}  # first page of a run -> behind its last
        self._firsts: dict[int, int] = {}  # the other way round
        self._by_length: dict[int, dict[int, None]] = {}  # first pages, the oldest run first
        self._single: list[int] = []
        self._in_runs = 0
        if first < end:
            self._add(first, end)

    def __len__(self) -> int:
        return self._in_runs + len(self._single)

    def __iter__(self) -> Iterator[int]:
        yield from self._single
        for first, end in self._ends.items():
            yield from range(first, end)

    def take(self, n: int) -> list[int]:
        """Any `n` pages, those of the shortest runs at last; there must be as many."""
        split = max(0, len(self._single) - n)
        pages = self._single[split:]
        del self._single[split:]
        while len(pages) < n:
            length = min(self._by_length)
            first = next(iter(self._by_length[length]))
            self._remove(first, first + length)
            used = min(length, n - len(pages))
            pages += range(first, first + used)
            if used < length:
                self._add(first + used, first + length)
        return pages

    def take_together(self, n: int) -> list[int]:
        """`n` pages in ascending order, in as few runs as can be; there must be as many."""
        if self._single and max(self._by_length, default=0) < n:
            single, self._single = self._single, []
            self.give(sorted(single))
        pages: list[int] = []
        while len(pages) < n:
            missing = n - len(pages)
            enough = [length for length in self._by_length if length >= missing]
            length = min(enough) if enough else max(self._by_length)
            first = next(iter(self._by_length[length]))
            self._remove(first, first + length)
            used = min(length, missing)
            pages += range(first + length - used, first + length)
            if used < length:
                self._add(first, first + length - used)
        pages.sort()
        return pages

    def give_single(self, page: int) -> None:
        self._single.append(page)

    def give(self, pages: Sequence[int]) -> None:
        """Pages in ascending order."""
        for first, length in runs(pages):
            self._add(first, first + length)

    def check_integrity(self) -> None:
        """Each run is known by its ends and by its length, and none touches another."""
        assert self._firsts == {end: first for first, end in self._ends.items()}, "runs have lost their ends"
        assert not self._firsts.keys() & self._ends.keys(), "runs that touch are not one"
        lengths = {first: length for length, alike in self._by_length.items() for first in alike}
        assert lengths == {first: end - first for first, end in self._ends.items()}, "runs' lengths are wrong"
        assert self._in_runs == sum(lengths.values()), f"{self._in_runs} pages in runs are counted"

    def _add(self, first: int, end: int) -> None:
        if first in self._firsts:
            before = self._firsts[first]
            self._remove(before, first)
            first = before
        if end in self._ends:
            behind = self._ends[end]
            self._remove(end, behind)
            end = behind
        self._ends[first], self._firsts[end] = end, first
        self._by_length.setdefault(end - first, {})[first] = None
        self._in_runs += end - first

    def _remove(self, first: int, end: int) -> None:
        del self._ends[first], self._firsts[end]
        alike = self._by_length[end - first]
        del alike[first]
        if not alike:
            del self._by_length[end - first]
        self._in_runs -= end - first


def runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Of pages in ascending order, those that follow each other: the first one, and their number."""
    for _, run in itertools.groupby(enumerate(pages), lambda place: place[1] - place[0]):
        places = list(run)
        yield places[0][1], len(places)


class PagePool:
    """Allocator of page ids `1 .. num_pages - 1`; O(pages asked for) an operation, no device state.

    An adapter gets pages that lie side by side, as far as there are such. They have one holder, so nothing is
    noted for each of them: a step may move a thousand.

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
        self._free = _FreePages(1, self._border)  # unified paging: both are one and the same
        self._free_adapter = self._free if self.unified else _FreePages(self._border, num_pages)

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
        """`n` pages of a kind, KV's with one reference each, an adapter's in ascending order; None (and no
        change) where fewer are free.
        """
        if n > self.free_for(kind):
            return None
        if kind == "adapter":
            self._adapter_pages += n
            return self._free_adapter.take_together(n)
        pages = self._free.take(n)
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
            self._free_adapter.give(pages)
            return
        references, free = self._references, self._free
        for page in pages:
            left = references[page] - 1
            assert left >= 0, f"page {page} released more often than allocated"
            references[page] = left
            if not left:
                free.give_single(page)

    def check_integrity(
        self, kv_holders: Iterable[Sequence[int]], adapter_holders: Iterable[Sequence[int]]
    ) -> None:
        """Prove that the book and its holders agree; raises AssertionError saying which page does not.

        `kv_holders` are the page lists of all sequences (and caches), `adapter_holders` those of adapters.
        """
        kv = collections.Counter(page for pages in kv_holders for page in pages)
        adapter = collections.Counter(page for pages in adapter_holders for page in pages)
        sides = [self._free] if self.unified else [self._free, self._free_adapter]
        free = collections.Counter(page for side in sides for page in side)
        for side in sides:
            side.check_integrity()
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
