"""How many pages the pool has, and how long a sequence may be."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
from pathlib import Path

import jax
import numpy as np

from slora_jax.config import EngineConfig, ModelConfig
from slora_jax.memory.layout import PageLayout

logger = logging.getLogger(__name__)
CPU_POOL_BYTES = 1 << 30  # at most, of a pool whose size nobody chose, where devices do not report memory


@dataclasses.dataclass(frozen=True)
class PoolSize:
    """Pages of the pool, and tokens of the longest sequence."""

    num_pages: int  # the reserved page 0 included
    max_model_len: int
    adapter_pages: int | None = None  # of num_pages, for adapters alone; None: unified memory
    slot_pages: int | None = None  # of these, for each adapter

    @property
    def usable_by_kv(self) -> int:
        """All but the reserved page and those of adapters alone; `PagePool.usable_for` says the same."""
        return self.num_pages - 1 - (self.adapter_pages or 0)


def size_pool(
    model: ModelConfig, config: EngineConfig, layout: PageLayout, mesh: jax.sharding.Mesh
) -> PoolSize:
    """Pages from `num_pages`, `pool_bytes`, or what `memory_fraction` of the device leaves beside the
    weights.

    Raises ValueError where the pool is larger than a device's memory, where not even one sequence of
    `max_model_len` fits, and says how many tokens do, or where adapters' slots leave no page for KV.
    """
    page_bytes, wanted_len = _page_bytes(config, layout), _wanted_len(model, config)
    if config.max_model_len is not None and config.max_model_len > _longest(model):
        raise ValueError(
            f"max_model_len {config.max_model_len} is above the model's max_position_embeddings "
            f"{_longest(model)}"
        )
    num_pages = config.num_pages
    if num_pages is None:
        budget = config.pool_bytes or _free_bytes(config, layout, mesh)
        if budget is None:  # as much again as a full batch needs, for adapters
            full = config.max_batch_size * math.ceil(wanted_len / config.page_tokens)
            budget = min(CPU_POOL_BYTES, (2 * full + 1) * page_bytes)
        num_pages = budget // page_bytes
        if num_pages < 2:
            raise ValueError(
                f"{max(0, budget)} bytes hold {max(0, num_pages)} pages of {page_bytes} bytes; a pool needs "
                "2: raise pool_bytes or memory_fraction, or shard the model over more devices"
            )
    _check_memory(num_pages, page_bytes, config, mesh)
    slot_pages = adapter_pages = None
    if config.adapter_slots is not None:
        slot_pages = layout.adapter(dict.fromkeys(layout.in_dims, config.max_lora_rank)).num_pages
        adapter_pages = config.adapter_slots * slot_pages
        if adapter_pages >= num_pages - 1:
            raise ValueError(
                f"adapter_slots {config.adapter_slots} of {slot_pages} pages (rank {config.max_lora_rank} on "
                f"every module) leave none for KV, the pool has {num_pages - 1}: lower adapter_slots or "
                "max_lora_rank, or raise num_pages or pool_bytes"
            )
    kv_pages = num_pages - 1 - (adapter_pages or 0)
    fits = kv_pages * config.page_tokens
    if config.max_model_len is not None and wanted_len > fits:
        raise ValueError(
            f"a sequence of max_model_len {wanted_len} does not fit: the pool has {kv_pages} pages "
            f"of {config.page_tokens} tokens ({fits} tokens); raise num_pages or pool_bytes, or lower "
            "max_model_len"
        )
    return PoolSize(num_pages, min(wanted_len, fits), adapter_pages, slot_pages)


def log_pool(size: PoolSize, model: ModelConfig, config: EngineConfig, layout: PageLayout) -> None:
    """Say in the log what a pool of this size holds."""
    num_pages = size.num_pages
    fits = (num_pages - 1 - (size.adapter_pages or 0)) * config.page_tokens
    if config.adapter_slots is not None:
        logger.info("%d slots of %d pages are adapters' only", config.adapter_slots, size.slot_pages)
    logger.info(
        "pool: %d pages of %d tokens, %.2f GiB a shard: %d tokens of KV, or %d rank-16 adapters (all "
        "modules)",
        num_pages - 1,
        config.page_tokens,
        num_pages * _page_bytes(config, layout) / 2**30,
        fits,
        (num_pages - 1) // layout.adapter(dict.fromkeys(layout.in_dims, 16)).num_pages,
    )
    wanted_len = _wanted_len(model, config)
    if fits < wanted_len:
        logger.warning("sequences are limited to the %d tokens that the pool holds, not %d", fits, wanted_len)


def _page_bytes(config: EngineConfig, layout: PageLayout) -> int:
    """On one shard."""
    return layout.n_layers * layout.page_elems * (4 if config.dtype == "float32" else 2)


def _wanted_len(model: ModelConfig, config: EngineConfig) -> int:
    """Tokens of the longest sequence, if the pool holds it."""
    return min(config.max_model_len or model.max_position_embeddings, _longest(model))


def _longest(model: ModelConfig) -> int:
    """The model's own limit; "dynamic" RoPE stretches it by its factor."""
    scaling = model.rope_scaling or {}
    factor = (
        float(scaling.get("factor", 1.0))
        if scaling.get("rope_type", scaling.get("type")) == "dynamic"
        else 1.0
    )
    return int(model.max_position_embeddings * factor)


def _check_memory(num_pages: int, page_bytes: int, config: EngineConfig, mesh: jax.sharding.Mesh) -> None:
    """Refuse a pool that can never be allocated before its book is made, which may itself be too large."""
    devices = np.asarray(mesh.devices).flat
    limits = [int(stats["bytes_limit"]) for d in devices if (stats := d.memory_stats())]
    whose, memory = ("a device", min(limits)) if limits else ("this machine", machine_bytes())
    need = num_pages * page_bytes * (1 if limits else len(devices))
    if need > memory:
        field = "pool_bytes" if config.num_pages is None else "num_pages"
        raise ValueError(
            f"a pool of {num_pages} pages of {config.page_tokens} tokens takes {need} bytes, {whose} has "
            f"{memory}: lower {field} or page_tokens, or leave {field} None"
        )


def machine_bytes() -> int:
    """Memory of this machine, or of the cgroup that the process is in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def _free_bytes(config: EngineConfig, layout: PageLayout, mesh: jax.sharding.Mesh) -> int | None:
    """What the fullest device has left of its share, beside the projections that merges write; None where
    devices do not report their memory (CPUs).
    """
    stats = [d.memory_stats() for d in np.asarray(mesh.devices).flat]
    if not all(stats):
        return None
    free = min(int(s["bytes_limit"] * config.memory_fraction) - int(s["bytes_in_use"]) for s in stats if s)
    return free - (merged_bytes(config, layout) if config.lora_mode == "merge" else 0)


def merged_bytes(config: EngineConfig, layout: PageLayout) -> int:
    """Of a shard's projections, which an adapter that targets all of them doubles when it is merged."""
    elements = sum(layout.in_dims[m] * layout.out_dims[m] for m in layout.in_dims)
    return layout.n_layers * elements * (4 if config.dtype == "float32" else 2)
