"""KV that outlives its sequence: full pages by the tokens they hold and all tokens before them.

A tree of pages. Its roots are adapter generations (0: the base model), which share nothing; a page is the
child of the page before it, under the bytes of its own tokens, so two prefixes are one only where every token
is: no hash decides. A sequence holds a path from a root: the full pages it has computed or found. What no
sequence holds is idle. Leaves go first, since a page is of no use without those before it.

Pages enter once the step that writes them has been launched (`record`, before the next is planned). The
device runs steps in order, so whoever finds them reads what was written.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from slora_jax.memory.reclaim import HolderKind, IdleHeap, Reclaimer

if TYPE_CHECKING:
    from slora_jax.request import Sequence

_NO_PAGE = -1


@dataclasses.dataclass(eq=False, slots=True)
class CachedPage:
    """A full page of KV in the tree. `users`: sequences that hold it; they hold all pages above it, too."""

    parent: CachedPage | None  # None: a root, which has no page
    tokens: bytes  # int32 ids
    page: int
    usage: float = -float("inf")
    users: int = 0
    children: dict[bytes, CachedPage] = dataclasses.field(default_factory=dict)


class PrefixCache:
    """Cached pages, each with one reference of its own in the pool beside those of sequences.

    `max_prompt_tokens`: longer prompts are not shared (their keys are rotated by the prompt's own length, as
    "dynamic" RoPE does beyond the model's first length); None: no limit. With `enabled` False nothing is
    kept.
    """

    kind: HolderKind = "prefix"

    def __init__(
        self,
        reclaim: Reclaimer,
        page_tokens: int,
        *,
        enabled: bool = True,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self._pool, self._reclaim, self._page_tokens = reclaim.pool, reclaim, page_tokens
        self._enabled, self._max_prompt_tokens = enabled, max_prompt_tokens
        self._roots: dict[int, CachedPage] = {}  # by generation
        self._idle_leaves: IdleHeap[CachedPage] = IdleHeap()
        self._idle_pages = 0
        self.num_pages = 0
        self.lookups = 0  # sequences let in that looked for a prefix
        self.query_tokens = 0  # tokens that these had
        self.hit_tokens = 0  # tokens that they found
        reclaim.add(self)

    @property
    def idle_pages(self) -> int:
        """Cached pages that no sequence holds."""
        return self._idle_pages

    def match(self, sequence: Sequence) -> list[CachedPage]:
        """The longest cached prefix of a sequence that holds no pages; leaves it a token to compute."""
        found: list[CachedPage] = []
        node = self._roots.get(sequence.generation) if self._shares(sequence) else None
        if node is None:
            return found
        for key in self._keys(sequence, (len(sequence.tokens) - 1) // self._page_tokens):
            node = node.children.get(key)
            if node is None:
                break
            found.append(node)
        return found

    def take(self, sequence: Sequence, prefix: list[CachedPage]) -> None:
        """Let a sequence begin with what `match` found for it."""
        assert not sequence.pages
        sequence.cached, sequence.pages = prefix, [node.page for node in prefix]
        sequence.num_computed = sequence.num_cached = len(prefix) * self._page_tokens
        for node in prefix:
            self._hold(node)
            self._reclaim.used(node)
        self._pool.share(sequence.pages)
        if self._shares(sequence):
            self.lookups += 1
            self.query_tokens += len(sequence.tokens)
            self.hit_tokens += sequence.num_cached

    def record_all(self, sequences: Iterable[Sequence]) -> None:
        """`record` those that have filled a page; the rest cost next to nothing."""
        if self._enabled:
            for sequence in sequences:
                if sequence.num_computed >= (len(sequence.cached) + 1) * self._page_tokens:
                    self.record(sequence)

    def record(self, sequence: Sequence) -> None:
        """Enter the full pages that a sequence has computed; every step that writes them is launched.

        A page that another sequence entered meanwhile takes the place of this one's own in `sequence.pages`.
        """
        done = len(sequence.cached)
        # The newest token may still be on the device.
        full = min(sequence.num_computed, len(sequence.tokens)) // self._page_tokens
        if full <= done or not self._shares(sequence):
            return
        parent = sequence.cached[-1] if done else self._root(sequence.generation)
        for index, key in enumerate(self._keys(sequence, full)[done:], done):
            node = parent.children.get(key)
            if node is None:
                node = parent.children[key] = CachedPage(parent, key, sequence.pages[index])
                self._pool.share([node.page])
                self.num_pages += 1
                node.users = 1
                self._reclaim.used(node)
            else:
                self._hold(node)
                self._reclaim.kept(node)
                self._pool.share([node.page])
                self._pool.release([sequence.pages[index]])
                sequence.pages[index] = node.page
                sequence.moved += 1
            sequence.cached.append(node)
            parent = node

    def release(self, sequence: Sequence) -> None:
        """Take all pages from a sequence; those of its path stay, as cache."""
        for node in reversed(sequence.cached):
            assert node.users > 0
            node.users -= 1
            self._reclaim.kept(node)
            if not node.users:
                self._idle_pages += 1
                if not node.children:
                    self._idle_leaves.push(node)
        self._pool.release(sequence.pages)
        sequence.cached, sequence.pages = [], []
        sequence.moved += 1

    def drop(self, generation: int) -> None:
        """Free what is cached for a generation that no sequence will use again."""
        root = self._roots.pop(generation, None)
        nodes = list(_below(root))
        for node in nodes:
            assert not node.users
            self._idle_leaves.discard(node)
        self._forget([node.page for node in nodes])

    def clear(self) -> None:
        """Free every page that no sequence holds."""
        if self._idle_pages:
            self.evict(self._idle_pages, math.inf)

    def least_usage(self) -> float:
        return self._idle_leaves.least().usage

    def evict(self, pages: int, limit: float) -> int:
        freed: list[int] = []
        leaves = self._idle_leaves
        while len(freed) < pages and leaves and (not freed or leaves.least().usage <= limit):
            node = leaves.pop()
            parent = node.parent
            assert parent is not None and not node.users and not node.children
            del parent.children[node.tokens]
            freed.append(node.page)
            if parent.page != _NO_PAGE and not parent.users and not parent.children:
                leaves.push(parent)
        self._forget(freed)
        return len(freed)

    def pages(self) -> list[int]:
        """Every cached page."""
        return [node.page for root in self._roots.values() for node in _below(root)]

    def check_integrity(self, holders: list[Sequence]) -> None:
        """Tree, users and idle pages agree with the sequences that run; raises AssertionError."""
        users = collections.Counter(node for s in holders for node in s.cached)
        nodes = [node for root in self._roots.values() for node in _below(root)]
        assert len(nodes) == self.num_pages and users.keys() <= set(nodes), "a held page left the cache"
        for node in nodes:
            assert node.users == users[node], (
                f"cached page {node.page} has {node.users} users, not {users[node]}"
            )
            assert node.parent is not None and node.parent.children[node.tokens] is node
            leaf = not node.users and not node.children
            assert (node in self._idle_leaves) == leaf, f"cached page {node.page} is misplaced"
        assert self._idle_pages == sum(not n.users for n in nodes), f"{self._idle_pages} idle pages"
        assert len(self._idle_leaves) == sum(not n.users and not n.children for n in nodes)
        size = self._page_tokens
        for s in holders:
            path: CachedPage = self._root(s.generation) if s.cached else CachedPage(None, b"", _NO_PAGE)
            for i, node in enumerate(s.cached):
                assert node.parent is path and node.page == s.pages[i], "a sequence left its path"
                assert node.tokens == np.asarray(s.tokens[i * size : (i + 1) * size], np.int32).tobytes()
                path = node

    def _shares(self, sequence: Sequence) -> bool:
        limit = self._max_prompt_tokens
        return self._enabled and (limit is None or sequence.prompt_len <= limit)

    def _root(self, generation: int) -> CachedPage:
        root = self._roots.get(generation)
        if root is None:
            root = self._roots[generation] = CachedPage(None, b"", _NO_PAGE)
        return root

    def _keys(self, sequence: Sequence, n: int) -> list[bytes]:
        """The tokens of a sequence's first `n` pages; made once."""
        keys, size = sequence.page_keys, self._page_tokens
        if len(keys) < n:
            new = np.asarray(sequence.tokens[len(keys) * size : n * size], np.int32).tobytes()
            step = 4 * size
            keys += [new[i : i + step] for i in range(0, len(new), step)]
        return keys if len(keys) == n else keys[:n]

    def _hold(self, node: CachedPage) -> None:
        if not node.users:
            self._idle_pages -= 1
            self._idle_leaves.discard(node)
        node.users += 1

    def _forget(self, idle: list[int]) -> None:
        """Free idle pages that have left the tree."""
        self._pool.release(idle)
        self._idle_pages -= len(idle)
        self.num_pages -= len(idle)


def _below(root: CachedPage | None) -> Iterator[CachedPage]:
    """Every page of a tree, in no order."""
    todo = [] if root is None else list(root.children.values())
    while todo:
        node = todo.pop()
        todo += node.children.values()
        yield node
