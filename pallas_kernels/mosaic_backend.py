"""The `mosaic` backend: Pallas Mosaic GPU kernels for Hopper, in bfloat16. docs/kernels.md explains them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from jax.experimental import pallas as pl

from slora_jax.pallas_kernels import mosaic_attention_operands
from slora_jax.pallas_kernels.backend import AdapterBlocks, Backend, KernelShape, LoraShape, Sizes
from slora_jax.pallas_kernels.lora_work import (
    FIELDS,
    MODULE_GROUPS,
    RUN,
    SLOTS,
    TILE,
    LoraWork,
    build_lora_work,
    lora_work_needed,
)
from slora_jax.pallas_kernels.mosaic_decode import decode_attention
from slora_jax.pallas_kernels.mosaic_lora import CHUNK_WIDTHS, apply_lora
from slora_jax.pallas_kernels.mosaic_prefill import ROW_ALIGNMENT, prefill_attention
from slora_jax.pallas_kernels.mosaic_rope import rope_write_kv

USUAL_ITEMS = 3  # of an adapter and a token or tile: rank 64 on q, k and v
FIRST_ITEMS = 64
RUNS = 64  # of a step without prompts: each is divided over 4 thread blocks


def unsupported(shape: KernelShape) -> str | None:
    """Why these kernels cannot serve a model, or None where they can."""
    if shape.dtype != "bfloat16":
        return f"they compute in bfloat16, not {shape.dtype}: set dtype"
    if shape.chunk_width not in CHUNK_WIDTHS:
        return (
            "every dimension of the model, divided by tensor_parallel_size where it is split, must be a "
            f"multiple of {min(CHUNK_WIDTHS)}; the widest columns that divide all are {shape.chunk_width}"
        )
    return mosaic_attention_operands.unsupported(
        n_q=shape.n_q, n_kv=shape.n_kv, head_dim=shape.head_dim, page_tokens=shape.page_tokens
    )


class MosaicPlanner:
    """Work lists of `mosaic_lora`: sizes are decode items, runs and tiles of a group of modules; pages."""

    def needs(self, token_adapter: np.ndarray, adapters: Sequence[AdapterBlocks], shape: LoraShape) -> Sizes:
        """Those of fewer tiles, where the first rung then has room: another rung costs seconds to compile.

        Many decodes of few adapters become runs, which read an adapter's weights half as often.
        """
        needs = lora_work_needed(token_adapter, adapters, shape.decode_rows)
        items, _, tiles, _ = self.sizes(1, shape)
        if needs[0] > FIRST_ITEMS and len(adapters) <= RUNS and _may_have_runs(shape):
            instead = lora_work_needed(token_adapter, adapters, as_runs=True)
            return instead if instead[0] <= FIRST_ITEMS and instead[1] <= RUNS else needs
        if needs[2] > tiles:
            fewer = lora_work_needed(token_adapter, adapters, shape.decode_rows, tiles)
            return fewer if fewer[0] <= items else needs
        return needs

    def sizes(self, rung: int, shape: LoraShape) -> Sizes:
        """With prompts four times the rung below. Without: 64 items; these and 64 runs; 128, 256, 1024, ...

        Up to 64 and 128 items are divided over 4 and 2 thread blocks each. Steps with prompts begin with
        room for usual ranks, because each rung costs seconds to compile and LoRA is a small part of their
        time.
        """
        if rung == 0:
            return 0, 0, 0, 0
        items, runs, tiles, prompts = FIRST_ITEMS, 0, 0, shape.tokens - shape.decode_rows
        if prompts:
            while items < 2 * (shape.decode_rows + shape.prefill_seqs):
                items *= 4
            windows = -(-prompts // TILE) + prompts // (4 * TILE) + 1
            items, tiles = (n * 4 ** (rung - 1) for n in (items, pl.next_power_of_2(USUAL_ITEMS * windows)))
        else:
            ladder = [(items, 0), *[(items, RUNS)] * _may_have_runs(shape), (2 * items, 0)]
            items, runs = ladder[rung - 1] if rung <= len(ladder) else (items * 4 ** (rung - len(ladder)), 0)
        chunks = [a + b for a, b in zip(shape.a_chunks, shape.b_chunks, strict=True)]
        widest = sum(max(chunks[m] for m in group) for group in MODULE_GROUPS)
        pages = -(-(items + tiles) * SLOTS * widest // shape.chunks_per_page)
        return items, runs, tiles, pages + shape.decode_rows + shape.prefill_seqs

    def usual_rung(self, shape: LoraShape) -> int:
        """Where decodes have room for another adapter of rank 64 in each row; with prompts the first."""
        if shape.tokens > shape.decode_rows:
            return 1
        enough = (r for r in itertools.count(1) if self.sizes(r, shape)[0] >= USUAL_ITEMS * shape.decode_rows)
        return next(enough)

    def fields(self, sizes: Sizes, shape: LoraShape) -> Mapping[str, tuple[int, ...]]:
        *items, pages = sizes
        names = "decode", "runs", "tiles"
        of_items = {name: (len(MODULE_GROUPS), n, FIELDS) for name, n in zip(names, items, strict=True)}
        return of_items | {"pages": (pages,)}

    def build(
        self, token_adapter: np.ndarray, adapters: Sequence[AdapterBlocks], sizes: Sizes, shape: LoraShape
    ) -> Mapping[str, np.ndarray]:
        return build_lora_work(
            token_adapter,
            adapters,
            *sizes,
            a_chunks=shape.a_chunks,
            b_chunks=shape.b_chunks,
            decode_rows=shape.decode_rows,
        )


def _may_have_runs(shape: LoraShape) -> bool:
    """Whether a step has a rung of runs: one without prompts, of rows of which one adapter of rank 64 alone
    needs as many items as the first rung has, or nearly (48 of 128 rows).
    """
    return shape.tokens == shape.decode_rows >= 8 * RUN


MOSAIC = Backend(
    name="mosaic",
    rope_write_kv=rope_write_kv,
    decode_attention=decode_attention,
    prefill_attention=prefill_attention,
    apply_lora=apply_lora,
    prefill_tile=128,
    row_alignment=ROW_ALIGNMENT,
    context_rungs=(),
    lora_work=LoraWork,
    planner=MosaicPlanner(),
)
