"""The host's work list for the Mosaic LoRA kernels: which blocks of rank rows meet which tokens.

An *item* is what one thread block computes: up to 8 rank blocks (64 rank rows) of one adapter, of the modules
that share an input (a *group* of modules: q,k,v; o; gate,up; down), for some tokens of one window of rows:

- a decode item has a window of 8 rows and any set of its tokens;
- a run has a window of 16 rows and tokens of it side by side: for decodes of few adapters, on modules that
  share their input with others, so that weights are read half as often;
- a tile has a window of 64 rows and tokens of it side by side: for prompts.

Windows begin at multiples of 8 rows, because that is how TMA addresses swizzled tiles, and end with the batch
at the latest; tokens of a run or tile need not begin with its window. Sort a batch's
decode rows by adapter where possible: an adapter's weights are then read by the fewest items. Ranks are
never padded to another adapter's; what an adapter lacks and tokens without adapter get no item.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from slora_jax.pallas_kernels.xla_lora import AdapterBlocks

MODULE_GROUPS = ((0, 1, 2), (3,), (4, 5), (6,))  # q k v; o; gate up; down: those that share an input
SLOTS = 8  # rank blocks of an item: 64 rows, one wgmma tile
WINDOW, RUN, TILE = 8, 16, 64  # rows of a decode item, of a run and of a tile
MIN_TILE = 24  # tokens of one adapter side by side from which tiles are faster than decode items
FIELDS = 15

# Of an item: its window's first row; a decode item's tokens, counted from it and 4 bits each, and how many
# they are, or a run's or tile's first token and end, counted from it; where each module's blocks end among
# the item's (3); where the adapter's page list begins; by module, the chunk where block 0 would begin if the
# item's blocks were all of that module, of A (3), of B (3); bit m: no other item has blocks of module m for
# these tokens; how many items of the group's list are no padding, even where the item itself is.
ROW, FIRST, END, ENDS, PAGES, A, B, ALONE, REAL = 0, 1, 2, 3, 6, 7, 10, 13, 14

_Tables = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # rank blocks, a_start, b_start by module


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraWork:
    """A batch's items, built by `build_lora_work`; all int32. Items of no blocks are padding."""

    decode: jax.Array  # [4, nd, FIELDS] decode items of each group of modules
    runs: jax.Array  # [4, nr, FIELDS]
    tiles: jax.Array  # [4, nt, FIELDS]
    pages: jax.Array  # [lp] page lists of the batch's adapters, one after another


@dataclasses.dataclass(frozen=True)
class _Windows:
    """Which adapter's tokens lie in which windows: one row each, before rank blocks are dealt out."""

    adapter: np.ndarray  # [n]
    row: np.ndarray  # [n]
    first: np.ndarray  # [n]
    end: np.ndarray  # [n]


def lora_work_needed(
    token_adapter: np.ndarray,
    adapters: Sequence[AdapterBlocks],
    decode_rows: int | None = None,
    most_tiles: int | None = None,
    *,
    as_runs: bool = False,
) -> tuple[int, int, int, int]:
    """The smallest (nd, nr, nt, lp) that hold this batch, with nt at most `most_tiles`; see build_lora_work.

    `as_runs`: with nt 0, and with runs in the groups that have them.
    """
    counts = _counts(*_kinds(adapters))
    by_group = _windows(np.asarray(token_adapter, np.int32), counts, decode_rows, most_tiles, as_runs)
    nd, nr, nt = (
        max(int(counts[windows.adapter, group].sum()) for group, windows in enumerate(kind))
        for kind in zip(*by_group, strict=True)
    )
    return nd, nr, nt, sum(len(a[0]) for a in adapters)


def has_runs(group: int) -> bool:
    """Whether a group of modules has runs instead of decode items, where a batch has runs."""
    return len(MODULE_GROUPS[group]) > 1


def build_lora_work(
    token_adapter: np.ndarray,
    adapters: Sequence[AdapterBlocks],
    nd: int,
    nr: int,
    nt: int,
    lp: int,
    *,
    a_chunks: Sequence[int],
    b_chunks: Sequence[int],
    decode_rows: int | None = None,
) -> dict[str, np.ndarray]:
    """The fields of LoraWork as int32 arrays, padded to nd decode items, nr runs and nt tiles a group
    and lp pages.

    `token_adapter` [t]: index into `adapters` of each token's, or -1. `a_chunks`, `b_chunks` [7]:
    chunks in one block of A and of B by module. Where nr is not 0, groups that have runs have nothing else,
    and the others decode items. Otherwise at least MIN_TILE tokens of one adapter side by side become tiles,
    but for the first `decode_rows` tokens (default: all); where nt has no room for all of them, the fewest
    are decode items. Raises ValueError where nd, nr or lp is too small, or an index has no adapter.
    """
    token_adapter = np.asarray(token_adapter, np.int32)
    if token_adapter.max(initial=-1) >= len(adapters):
        raise ValueError(f"token_adapter names adapter {token_adapter.max()} of {len(adapters)}")
    out = {
        "decode": np.zeros((len(MODULE_GROUPS), nd, FIELDS), np.int32),
        "runs": np.zeros((len(MODULE_GROUPS), nr, FIELDS), np.int32),
        "tiles": np.zeros((len(MODULE_GROUPS), nt, FIELDS), np.int32),
        "pages": np.zeros(lp, np.int32),
    }
    lengths = np.array([len(a[0]) for a in adapters], np.int64)
    if lengths.sum() > lp:
        raise ValueError(f"lp={lp} is too small: the adapters of this batch have {lengths.sum()} pages")
    if not adapters:
        return out
    out["pages"][: lengths.sum()] = np.concatenate([a[0] for a in adapters])
    page_base = np.cumsum(lengths) - lengths
    kind, kinds = _kinds(adapters)
    plans = [_adapter_items(*tables, tuple(a_chunks), tuple(b_chunks)) for tables in kinds]
    by_group = _windows(token_adapter, _counts(kind, kinds), decode_rows, nt, nr > 0)
    for group, windows in enumerate(by_group):
        tables = [plan[group] for plan in plans]
        counts = np.array([len(table) for table in tables])
        table, start = np.concatenate(tables), np.cumsum(counts) - counts
        for name, window in zip(("decode", "runs", "tiles"), windows, strict=True):
            times = counts[kind[window.adapter]]
            if times.sum() > out[name].shape[1]:
                raise ValueError(f"{name}: {out[name].shape[1]} items are too few: need {times.sum()}")
            which = np.repeat(np.arange(len(times)), times)
            nth = np.arange(len(which)) - np.repeat(np.cumsum(times) - times, times)
            adapter = window.adapter[which]
            rows = table[start[kind[adapter]] + nth]
            place = np.argsort(-rows[:, 2], kind="stable")  # the largest first: the last to finish are small
            items = out[name][group, : len(which)]
            items[:, ROW], items[:, FIRST] = window.row[which][place], window.first[which][place]
            items[:, END], items[:, PAGES] = window.end[which][place], page_base[adapter][place]
            items[:, ENDS : ENDS + 3], items[:, A : ALONE + 1] = rows[place, :3], rows[place, 3:]
            out[name][group, :, REAL] = len(which)
    return out


def _kinds(adapters: Sequence[AdapterBlocks]) -> tuple[np.ndarray, list[_Tables]]:
    """Which of a few kinds each adapter is: all of the same blocks have the same items, on other pages."""
    numbers: dict[_Tables, int] = {}
    kind = [numbers.setdefault((tuple(b), tuple(a0), tuple(b0)), len(numbers)) for _, b, a0, b0 in adapters]
    return np.array(kind, np.int64), list(numbers)


def _counts(kind: np.ndarray, kinds: list[_Tables]) -> np.ndarray:
    """Items of a window of each adapter's tokens by group of modules: int64 [n + 1, 4]; the last: of none."""
    counts = np.array(
        [*(_item_counts(blocks) for blocks, _, _ in kinds), (0,) * len(MODULE_GROUPS)], np.int64
    )
    of_adapters: np.ndarray = counts[np.append(kind, -1)]
    return of_adapters


def _windows(
    token_adapter: np.ndarray,
    counts: np.ndarray,
    decode_rows: int | None,
    most_tiles: int | None,
    as_runs: bool,
) -> list[tuple[_Windows, _Windows, _Windows]]:
    """Of each group, those of (decode items, runs, tiles); `counts` as `_counts` gives it."""
    total, n_adapters = len(token_adapter), len(counts) - 1
    border = total if decode_rows is None or as_runs else min(decode_rows, total)
    edge = np.flatnonzero(np.diff(token_adapter, prepend=-2))
    edge = np.unique(np.append(edge, border)) if border < total else edge
    start, end = edge, np.append(edge[1:], total)
    long = (start >= border) & (end - start >= MIN_TILE) & (token_adapter[start] >= 0)
    start, end = start[long], end[long]
    if most_tiles is not None:
        longest = np.argsort(start - end, kind="stable")
        count = -(-(end - start // WINDOW * WINDOW) // TILE)
        tiles_so_far = np.cumsum(count[longest, None] * counts[token_adapter[start[longest]]], axis=0)
        fit = np.sort(longest[(tiles_so_far <= most_tiles).all(axis=1)])
        start, end = start[fit], end[fit]
    tiles = _side_by_side(token_adapter, start, end, TILE)

    left = token_adapter.copy()
    for s, e in zip(start, end, strict=True):
        left[s:e] = -1
    token = np.flatnonzero(left >= 0)
    key, inverse = np.unique(token // WINDOW * n_adapters + left[token], return_inverse=True)
    by_key = np.argsort(inverse, kind="stable")
    count = np.bincount(inverse, minlength=len(key))
    nth = np.arange(len(token)) - np.repeat(np.cumsum(count) - count, count)
    nibbles = np.zeros(len(key), np.int64)
    np.add.at(nibbles, inverse[by_key], token[by_key] % WINDOW << 4 * nth)
    order = np.argsort(key % max(n_adapters, 1), kind="stable")  # items of one adapter side by side: L2
    window, adapter = np.divmod(key[order], max(n_adapters, 1))
    decodes = _Windows(adapter, window * WINDOW, nibbles[order], count[order])
    none = _Windows(*np.zeros((4, 0), np.int64))
    if not as_runs:
        return [(decodes, none, tiles)] * len(MODULE_GROUPS)
    has_adapter = token_adapter[edge] >= 0
    runs = _side_by_side(token_adapter, edge[has_adapter], np.append(edge[1:], total)[has_adapter], RUN)
    return [
        (none, runs, tiles) if has_runs(group) else (decodes, none, tiles)
        for group in range(len(MODULE_GROUPS))
    ]


def _side_by_side(token_adapter: np.ndarray, start: np.ndarray, end: np.ndarray, rows: int) -> _Windows:
    """The tokens from each start to its end, of one adapter each, in windows of `rows` rows that lie within
    the batch, padded to a multiple of 8 rows (or to `rows`).
    """
    first = start // WINDOW * WINDOW
    count = -(-(end - first) // rows)
    which = np.repeat(np.arange(len(start)), count)
    from_row = first[which] + rows * (np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count))
    last = max(-(-len(token_adapter) // WINDOW) * WINDOW - rows, 0)
    row = np.minimum(from_row, last)
    return _Windows(
        token_adapter[start][which],
        row,
        np.maximum(start[which], from_row) - row,
        np.minimum(end[which], from_row + rows) - row,
    )


@functools.lru_cache(maxsize=4096)
def _deal(blocks: tuple[int, ...]) -> tuple[tuple[tuple[tuple[int, int, int], ...], ...], ...]:
    """Of each group, its items; of an item, (module, its first block, end) of each module it has blocks of.

    A module of at most 8 blocks is never split, so that one item alone adds to its outputs.
    """
    groups = []
    for group in MODULE_GROUPS:
        items: list[list[tuple[int, int, int]]] = []
        room = 0
        for module in group:
            for at in range(0, blocks[module], SLOTS):
                size = min(SLOTS, blocks[module] - at)
                if size > room:
                    items.append([])
                    room = SLOTS
                items[-1].append((module, at, at + size))
                room -= size
        groups.append(tuple(tuple(item) for item in items))
    return tuple(groups)


@functools.lru_cache(maxsize=4096)
def _item_counts(blocks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(len(items) for items in _deal(blocks))


@functools.lru_cache(maxsize=4096)
def _adapter_items(
    blocks: tuple[int, ...],
    a_start: tuple[int, ...],
    b_start: tuple[int, ...],
    a_chunks: tuple[int, ...],
    b_chunks: tuple[int, ...],
) -> tuple[np.ndarray, ...]:
    """Of each group of modules, its items' fields that do not depend on the batch: int32 [items, 10].

    Three ends, then by module where its block 0 would begin, of A and of B, then ALONE.
    """
    tables = []
    for group, items in zip(MODULE_GROUPS, _deal(blocks), strict=True):
        table = np.zeros((len(items), 10), np.int32)
        for row, item in zip(table, items, strict=True):
            used = 0
            for module, first, end in item:
                m = group.index(module)
                row[3 + m] = a_start[module] + (first - used) * a_chunks[module]
                row[6 + m] = b_start[module] + (first - used) * b_chunks[module]
                row[9] |= (blocks[module] <= SLOTS) << m
                used += end - first
                row[m:3] = used
        tables.append(table)
    return tuple(tables)
