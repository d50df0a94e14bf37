"""LoRA as a padded batched matmul: the baseline that S-LoRA's and Punica's kernels are compared with.

Every token gathers A and B of its own adapter from the pool, both padded with zeros to the largest rank of
the batch, and two batched matmuls (`torch.bmm` in S-LoRA's ablation) apply them. Tokens without an adapter
gather zeros. It is plain JAX, for any device and dtype, and for measurements only: it reads, writes and reads
again a copy of the weights for every token. Letters: `t` token, `n` adapter, `r` rank row, `i` input, `o`
output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slora_jax.pallas_kernels.backend import AdapterBlocks, Backend, LoraShape, Sizes
from slora_jax.pallas_kernels.xla_lora import N_MODULES, RANK_BLOCK

GATHER_BYTES = 256 << 20  # at most, of the A and B of the tokens that are computed together


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PaddedAdapters:
    """A batch's adapters, built by `PaddedPlanner`; all int32. The last one is none: it has no blocks."""

    token_adapter: jax.Array  # [t] of each token; n - 1: base model
    page_base: jax.Array  # [n] where in `pages` its pages begin
    blocks: jax.Array  # [n, 7] rank blocks; 0: module not targeted
    a_start: jax.Array  # [n, 7] first chunk of A, counted from the adapter's first
    b_start: jax.Array  # [n, 7] the same of B
    pages: jax.Array  # [lp] page lists, one after another
    block: jax.Array  # [nb] 0, 1, ...: as many as the largest rank of the batch has


class PaddedPlanner:
    """Sizes are (rank blocks of the largest rank, adapter pages); rung k is rank 8 k, for a full batch."""

    def needs(self, token_adapter: np.ndarray, adapters: Sequence[AdapterBlocks], shape: LoraShape) -> Sizes:
        most = max((max(blocks) for _, blocks, _, _ in adapters), default=0)
        return most, sum(len(pages) for pages, _, _, _ in adapters)

    def sizes(self, rung: int, shape: LoraShape) -> Sizes:
        chunks = rung * (sum(shape.a_chunks) + sum(shape.b_chunks))
        return rung, -(-chunks // shape.chunks_per_page) * _most_adapters(shape)

    def usual_rung(self, shape: LoraShape) -> int:
        return 1  # ranks are not known before

    def fields(self, sizes: Sizes, shape: LoraShape) -> Mapping[str, tuple[int, ...]]:
        n = _most_adapters(shape) + 1
        tables = dict.fromkeys(("blocks", "a_start", "b_start"), (n, N_MODULES))
        return {
            "token_adapter": (shape.tokens,),
            "page_base": (n,),
            **tables,
            "pages": (sizes[1],),
            "block": (sizes[0],),
        }

    def build(
        self, token_adapter: np.ndarray, adapters: Sequence[AdapterBlocks], sizes: Sizes, shape: LoraShape
    ) -> Mapping[str, np.ndarray]:
        out = {name: np.zeros(dims, np.int32) for name, dims in self.fields(sizes, shape).items()}
        out["block"][:] = np.arange(sizes[0])
        out["token_adapter"][:] = np.where(token_adapter < 0, len(out["page_base"]) - 1, token_adapter)
        at = 0
        for i, (pages, *tables) in enumerate(adapters):
            out["page_base"][i] = at
            out["pages"][at : at + len(pages)] = pages
            at += len(pages)
            for name, table in zip(("blocks", "a_start", "b_start"), tables, strict=True):
                out[name][i] = table
        return out


def apply_padded_bmm(
    x: jax.Array,
    y: jax.Array,
    pool: jax.Array,
    layer: int | jax.Array,
    adapters: PaddedAdapters,
    *,
    modules: tuple[int, ...],
    in_dim: int,
    out_dims: tuple[int, ...],
    chunk_width: int,
) -> jax.Array:
    """y[t] += (x[t] A_m^T) B_m of token t's own adapter, as `xla_lora.apply_lora` has it.

    Tokens are taken so many at a time that their copies of A and B stay within GATHER_BYTES whatever the
    batch and the rank (XLA holds them twice: as chunks and as matrices).
    """
    t, rank = x.shape[0], adapters.block.shape[0] * RANK_BLOCK
    if t == 0 or rank == 0:
        return y
    most = GATHER_BYTES // (rank * (len(modules) * in_dim + sum(out_dims)) * pool.dtype.itemsize)
    turns = -(-t // max(1, most))
    size = -(-t // turns)
    none = adapters.page_base.shape[0] - 1

    def some(turn: jax.Array, y: jax.Array) -> jax.Array:
        first = jnp.minimum(turn * size, t - size)  # the last turn may overlap the one before
        adapter = lax.dynamic_slice_in_dim(adapters.token_adapter, first, size)
        adapter = jnp.where(first + jnp.arange(size) >= turn * size, adapter, none)
        x_some = lax.dynamic_slice_in_dim(x, first, size)
        parts = []
        for m, width in zip(modules, out_dims, strict=True):
            a = _gather(pool, layer, adapters, adapter, m, adapters.a_start, in_dim, chunk_width)
            h = jnp.einsum("tri,ti->tr", a, x_some, preferred_element_type=jnp.float32)
            b = _gather(pool, layer, adapters, adapter, m, adapters.b_start, width, chunk_width)
            h = h.astype(b.dtype)  # or XLA would copy b once more, as float32
            parts.append(jnp.einsum("tro,tr->to", b, h, preferred_element_type=jnp.float32))
        delta = jnp.concatenate(parts, axis=1)
        new = lax.dynamic_slice_in_dim(y, first, size).astype(jnp.float32) + delta
        return lax.dynamic_update_slice_in_dim(y, new.astype(y.dtype), first, 0)

    out: jax.Array = lax.fori_loop(0, turns, some, y)
    return out


def with_padded_bmm(backend: Backend) -> Backend:
    """A backend whose LoRA is this one's, its attention and KV its own."""
    return dataclasses.replace(
        backend, apply_lora=apply_padded_bmm, lora_work=PaddedAdapters, planner=PaddedPlanner()
    )


def _gather(
    pool: jax.Array,
    layer: int | jax.Array,
    adapters: PaddedAdapters,
    adapter: jax.Array,
    module: int,
    starts: jax.Array,
    width: int,
    chunk_width: int,
) -> jax.Array:
    """A (or B) [t, r, width] of each token's adapter i32[t] in one layer; zero where it has no such rows."""
    chunk_elems = RANK_BLOCK * chunk_width
    per_page, n_chunks = pool.shape[2] // chunk_elems, width // chunk_width
    inside = adapters.block[:, None] * n_chunks + jnp.arange(n_chunks)  # [nb, c]
    chunk = starts[adapter, module][:, None, None] + inside  # [t, nb, c]
    page = adapters.pages.at[adapters.page_base[adapter][:, None, None] + chunk // per_page].get(mode="clip")
    real = adapters.block[:, None] < adapters.blocks[adapter, module][:, None, None]
    row = jnp.where(real, page * per_page + chunk % per_page, 0)  # page 0 is all zero
    row += layer * pool.shape[1] * per_page
    got = pool.reshape(-1, chunk_elems).at[row].get(mode="promise_in_bounds")
    got = got.reshape(*row.shape, RANK_BLOCK, chunk_width).swapaxes(2, 3)
    # The barrier makes it the copy that a batched matmul of a library needs, never fused into the product.
    weights: jax.Array = lax.optimization_barrier(got.reshape(row.shape[0], -1, width))
    return weights


def _most_adapters(shape: LoraShape) -> int:
    """Every row of a step is of one sequence, so of one adapter."""
    return shape.decode_rows + shape.prefill_seqs
