"""The operations a step needs over the page pool, by backend.

- `xla`: plain JAX; any device and dtype, and what other backends are compared with.
- `mosaic`: Pallas Mosaic GPU kernels; Hopper, bfloat16.

A backend also has the host's half of LoRA: the work list that its kernels read. Work lists have static sizes,
from small rungs to large ones; rung 0 is a batch without adapters.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from slora_jax.pallas_kernels import xla_attention, xla_lora

logger = logging.getLogger(__name__)

Sizes = tuple[int, ...]
AdapterBlocks = xla_lora.AdapterBlocks


@dataclasses.dataclass(frozen=True)
class LoraShape:
    """What bounds a step's LoRA work: `decode_rows` of `tokens` come first; chunks of a page; chunks in one
    block of A and B by module.
    """

    tokens: int
    decode_rows: int
    prefill_seqs: int
    chunks_per_page: int
    a_chunks: Sizes
    b_chunks: Sizes


class LoraPlanner(Protocol):
    """The host's half of LoRA. `adapters[i]` is (pages, rank_blocks [7], a_start [7], b_start [7])."""

    def needs(self, token_adapter: np.ndarray, adapters: Sequence[AdapterBlocks], shape: LoraShape) -> Sizes:
        """The smallest sizes that hold a batch; token_adapter int32 [tokens] indexes adapters, -1: base."""

    def sizes(self, rung: int, shape: LoraShape) -> Sizes:
        """The sizes of a rung, from 1 on: some rung holds every batch, and the lowest that does serves it."""

    def usual_rung(self, shape: LoraShape) -> int:
        """The highest rung that usual batches need: what is compiled before the first request."""

    def fields(self, sizes: Sizes, shape: LoraShape) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of the int32 arrays of the work list."""

    def build(
        self, token_adapter: np.ndarray, adapters: Sequence[AdapterBlocks], sizes: Sizes, shape: LoraShape
    ) -> Mapping[str, np.ndarray]:
        """The arrays of the work list."""


def lowest_rung(planner: LoraPlanner, needs: Sequence[int], shape: LoraShape) -> Sizes:
    """The sizes of the first rung, from 1 on, that hold `needs` of this planner; (): of rung 1."""
    rungs = (planner.sizes(rung, shape) for rung in itertools.count(1))  # they grow without end
    return next(r for r in rungs if all(size >= need for size, need in zip(r, needs, strict=False)))


@dataclasses.dataclass(frozen=True)
class Backend:
    """Functions of one backend; the signatures are those of xla_attention and xla_lora."""

    name: str
    rope_write_kv: Callable[..., Any]
    decode_attention: Callable[..., Any]
    prefill_attention: Callable[..., Any]
    apply_lora: Callable[..., Any]
    # Tokens of one prompt that prefill attention takes together, from a multiple of row_alignment on.
    prefill_tile: int
    row_alignment: int
    # Tokens; up to the last rung attention costs what the page table's width does, beyond it true lengths.
    context_rungs: tuple[int, ...]
    lora_work: type[Any]  # the registered dataclass that apply_lora reads
    planner: LoraPlanner


class XlaPlanner:
    """Work lists of `xla_lora`: sizes are (rank blocks of a module, adapter pages)."""

    def needs(self, token_adapter: np.ndarray, adapters: Sequence[AdapterBlocks], shape: LoraShape) -> Sizes:
        return xla_lora.lora_blocks_needed(adapters)

    def sizes(self, rung: int, shape: LoraShape) -> Sizes:
        """8, 32, 128, ... blocks; pages for as many of every module, and a started page for each adapter."""
        if rung == 0:
            return 0, 0
        blocks = 8 * 4 ** (rung - 1)
        chunks = blocks * (sum(shape.a_chunks) + sum(shape.b_chunks))
        adapters = min(len(shape.a_chunks) * blocks, shape.decode_rows + shape.prefill_seqs)
        return blocks, -(-chunks // shape.chunks_per_page) + adapters

    def usual_rung(self, shape: LoraShape) -> int:
        return 1

    def fields(self, sizes: Sizes, shape: LoraShape) -> Mapping[str, tuple[int, ...]]:
        blocks = (xla_lora.N_MODULES, sizes[0])
        tables = dict.fromkeys(("adapter", "page_base", "a_start", "b_start"), blocks)
        return {"token_adapter": (shape.tokens,), **tables, "pages": (sizes[1],)}

    def build(
        self, token_adapter: np.ndarray, adapters: Sequence[AdapterBlocks], sizes: Sizes, shape: LoraShape
    ) -> Mapping[str, np.ndarray]:
        return xla_lora.build_lora_blocks(
            token_adapter, adapters, *sizes, a_chunks=shape.a_chunks, b_chunks=shape.b_chunks
        )


XLA = Backend(
    name="xla",
    rope_write_kv=xla_attention.rope_write_kv,
    decode_attention=xla_attention.decode_attention,
    prefill_attention=xla_attention.prefill_attention,
    apply_lora=xla_lora.apply_lora,
    prefill_tile=64,
    row_alignment=1,
    context_rungs=tuple(xla_attention.BLOCK_TOKENS * n // 2 for n in (1, 2, 8)),
    lora_work=xla_lora.LoraBlocks,
    planner=XlaPlanner(),
)


@dataclasses.dataclass(frozen=True)
class KernelShape:
    """What kernels are made for: sizes of the model on one shard, and of the pool."""

    dtype: str
    n_q: int
    n_kv: int
    head_dim: int
    page_tokens: int
    chunk_width: int


def select_backend(name: str, platform: str, compute_capability: str | None, shape: KernelShape) -> Backend:
    """The backend that `name` asks for; "auto" is mosaic where its kernels can do `shape`, else xla.

    `compute_capability` is a GPU's ("9.0"), else None. On a GPU "auto" says in the log why it does not take
    mosaic. Raises ValueError where mosaic was named and cannot be.
    """
    if name == "xla":
        return XLA
    hopper = platform in ("gpu", "cuda") and (compute_capability or "").split(".")[0] == "9"
    if not hopper:  # wgmma: only 9.x has it
        if name == "auto":
            if compute_capability is not None:
                logger.warning(
                    "the Mosaic kernels need a Hopper GPU (compute capability 9.x), this one has %s: plain "
                    "JAX serves, far slower",
                    compute_capability,
                )
            return XLA
        found = platform if compute_capability is None else f"compute capability {compute_capability}"
        raise ValueError(
            f"kernel_backend 'mosaic' needs a Hopper GPU (compute capability 9.x), found {found}"
        )
    # Pallas' Mosaic API changes often: only those who use it import it.
    from slora_jax.pallas_kernels.mosaic_backend import MOSAIC, unsupported

    limit = unsupported(shape)
    if limit is None:
        return MOSAIC
    if name == "mosaic":
        raise ValueError(f"kernel_backend 'mosaic': {limit}; use 'xla' (slower)")
    logger.warning("the Mosaic kernels cannot serve this model, plain JAX does, far slower: %s", limit)
    return XLA
