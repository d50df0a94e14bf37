"""Pack a validated adapter into pages of the pool, ready to be written to the device, and back.

The layout is `memory/layout.py`'s. Letters: l layer, p page, r rank, W columns of a chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from slora_jax.errors import AdapterError
from slora_jax.lora.numerics import all_finite
from slora_jax.lora.peft import LoraAdapter, LoraWeights
from slora_jax.memory.layout import RANK_BLOCK, ROW_PARALLEL, AdapterLayout, PageLayout

_KV_MODULES = frozenset({"k_proj", "v_proj"})


@dataclasses.dataclass(frozen=True)
class AdapterShape:
    """What an adapter targets and the room it takes: known from its config, before its weights are read."""

    layout: AdapterLayout
    rank: int  # the largest true rank
    target_modules: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter as pages of the pool, in its dtype, zero where unused.

    `features[m]` is module m's unsharded (in, out), which `unpack_delta` needs where shards repeat KV heads.
    """

    pages: npt.NDArray[Any]  # [l, p, tp * page_elems]
    layout: AdapterLayout
    rank: int  # the largest true rank
    target_modules: tuple[str, ...]
    features: Mapping[str, tuple[int, int]]

    @property
    def nbytes(self) -> int:
        """Bytes of the pages, over all shards."""
        return self.pages.nbytes

    @property
    def shape(self) -> AdapterShape:
        return AdapterShape(self.layout, self.rank, self.target_modules)


def pack_adapter(
    adapter: LoraAdapter,
    layout: PageLayout,
    dtype: npt.DTypeLike,
    *,
    checkpoint: Callable[[], None] = lambda: None,
) -> PackedAdapter:
    """Lay out A and scaling * B^T as zero-padded rank blocks of 8 rows, cut into chunks, by layer and shard.

    `dtype` is the pool's, float32 or bfloat16. scaling * B is computed in float32 and rounded once.
    `checkpoint()` is called before each module of a layer. Raises what that raises, and AdapterError where
    the adapter does not fit the layout's model or a scaled weight overflows the dtype.
    """
    pool_dtype = np.dtype(dtype)
    if pool_dtype not in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        raise ValueError(f"the pool's dtype must be float32 or bfloat16, got {pool_dtype}")
    features = _features(adapter, layout)
    placed = layout.adapter(adapter.ranks)
    num_chunks = placed.num_pages * layout.chunks_per_page
    chunks = np.zeros(  # [tp, l, chunk, 8, W]
        (layout.tp, layout.n_layers, num_chunks, RANK_BLOCK, layout.chunk_width), pool_dtype
    )
    for (layer, module), weights in adapter.weights.items():
        checkpoint()
        a, b = _rows(weights, pool_dtype, adapter.path, f"layer {layer} {module}")
        for shard in range(layout.tp):
            start, stop = _shard_range(layout, module, shard, features[module])
            a_shard, b_shard = (a[:, start:stop], b) if module in ROW_PARALLEL else (a, b[:, start:stop])
            _write_blocks(chunks[shard, layer], placed.a_start[module], a_shard)
            _write_blocks(chunks[shard, layer], placed.b_start[module], b_shard)
    by_shard = chunks.reshape(layout.tp, layout.n_layers, placed.num_pages, layout.page_elems)
    pages = by_shard.transpose(1, 2, 0, 3).reshape(layout.n_layers, placed.num_pages, -1)  # tp 1: no copy
    return PackedAdapter(pages, placed, adapter.rank, adapter.target_modules, features)


def unpack_adapter(
    packed: PackedAdapter, layout: PageLayout
) -> dict[tuple[int, str], npt.NDArray[np.float32]]:
    """The dense delta [in, out] of every layer and target module (`unpack_delta`), for small models."""
    return {
        (layer, module): unpack_delta(packed, layout, layer, module)
        for layer in range(layout.n_layers)
        for module in packed.target_modules
    }


def unpack_delta(
    packed: PackedAdapter, layout: PageLayout, layer: int, module: str
) -> npt.NDArray[np.float32]:
    """A^T (scaling B)^T in float32 [in, out], read from the pages element by element, joined over shards.

    Zero in a layer that lacks the module. The adapter adds `x @ delta` to y; merge it with `W += delta`.
    """
    features_in, features_out = packed.features[module]
    rank = packed.layout.rank_blocks[module] * RANK_BLOCK
    delta = np.zeros((features_in, features_out), np.float32)
    for shard in range(layout.tp):
        pages = packed.pages[layer].reshape(-1, layout.tp, layout.page_elems)[:, shard]
        elements = pages.astype(np.float32).ravel()
        a = elements[_element_index(layout, packed.layout.a_start[module], rank, layout.in_dims[module])]
        b = elements[_element_index(layout, packed.layout.b_start[module], rank, layout.out_dims[module])]
        start, stop = _shard_range(layout, module, shard, (features_in, features_out))
        if module in ROW_PARALLEL:
            delta[start:stop] = a.T @ b
        else:
            delta[:, start:stop] = a.T @ b
    return delta


def _features(adapter: LoraAdapter, layout: PageLayout) -> dict[str, tuple[int, int]]:
    """Unsharded (in, out) of each module, checked against the layout."""
    features: dict[str, tuple[int, int]] = {}
    for (layer, module), weights in adapter.weights.items():
        found = features.setdefault(module, (weights.a.shape[1], weights.b.shape[0]))
        n_in, n_out = layout.in_dims[module], layout.out_dims[module]
        if module in ROW_PARALLEL:
            fits = found == (n_in * layout.tp, n_out)
        else:
            heads, rest = divmod(found[1], layout.head_dim)
            repeats = module in _KV_MODULES and 0 < heads < layout.tp  # a shard holds one head then
            fits = found[0] == n_in and (rest == 0 if repeats else found[1] == n_out * layout.tp)
        if not fits or layer >= layout.n_layers:
            raise AdapterError(
                f"layer {layer} {module} with (in, out) {found} does not fit a layout of "
                f"{layout.n_layers} layers and ({n_in}, {n_out}) on each of {layout.tp} shards; read the "
                "adapter with this model's config",
                folder=adapter.path,
            )
    return features


def _shard_range(layout: PageLayout, module: str, shard: int, features: tuple[int, int]) -> tuple[int, int]:
    """The slice of the split axis (out, or in of row-parallel modules) that a shard holds."""
    if module in _KV_MODULES:  # by heads; with fewer heads than shards, neighbours hold the same one
        start = shard * (features[1] // layout.head_dim) // layout.tp * layout.head_dim
        return start, start + layout.out_dims[module]
    width = layout.in_dims[module] if module in ROW_PARALLEL else layout.out_dims[module]
    return shard * width, (shard + 1) * width


def _rows(
    weights: LoraWeights, dtype: np.dtype[Any], folder: Path, where: str
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """A [r, in] and scaling * B^T [r, out] in `dtype`."""
    with np.errstate(over="ignore", invalid="ignore"):  # looked for below, where it can be named
        a = weights.a.astype(dtype, copy=False)
        b = (weights.b.astype(np.float32) * np.float32(weights.scaling)).astype(dtype, copy=False)
    if not (all_finite(a) and all_finite(b)):
        raise AdapterError(
            f"{where}: overflows {dtype} with its scaling {weights.scaling:g}; lower lora_alpha",
            folder=folder,
        )
    return a, b.T


def _write_blocks(chunks: npt.NDArray[Any], start: int, rows: npt.NDArray[Any]) -> None:
    """Write rows [r, n] as rank blocks of n / W chunks into chunks [chunk, 8, W] from chunk `start` on."""
    (rank, n), width = rows.shape, chunks.shape[-1]
    full, rest, across = rank // RANK_BLOCK, rank % RANK_BLOCK, n // width
    blocks = chunks[start : start + (full + (rest > 0)) * across].reshape(-1, across, RANK_BLOCK, width)
    blocks[:full] = rows[: full * RANK_BLOCK].reshape(full, RANK_BLOCK, across, width).swapaxes(1, 2)
    if rest:
        blocks[full, :, :rest] = rows[full * RANK_BLOCK :].reshape(rest, across, width).swapaxes(0, 1)


def _element_index(layout: PageLayout, start: int, rank: int, columns: int) -> npt.NDArray[np.intp]:
    """Where in a shard's pages each element of a [rank, columns] matrix lies that begins at chunk `start`."""
    row, column = np.arange(rank)[:, None], np.arange(columns)[None, :]
    width = layout.chunk_width
    chunk = start + row // RANK_BLOCK * (columns // width) + column // width
    page, slot = chunk // layout.chunks_per_page, chunk % layout.chunks_per_page
    return page * layout.page_elems + (slot * RANK_BLOCK + row % RANK_BLOCK) * width + column % width
