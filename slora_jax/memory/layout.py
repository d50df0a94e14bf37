"""How KV cache and LoRA weights lie in a page, on one shard of the mesh.

The pool is one array `[n_layers, n_pages, tp * page_elems]`, split over `tp` on its last axis; a page id
means the same page in every layer and on every shard. Two views of a shard's page:

- KV: `[2, n_kv, page_tokens, head_dim]`, K first; one head's K of a page is one contiguous block.
- adapter: `[chunks_per_page, 8, W]`; a *chunk* is 8 rank rows by W columns. A (stored `[rank, in]`) and B
  (stored `[rank, out]`, scaling folded in) are cut into *rank blocks* of 8 rows; a rank block is `in / W`
  (or `out / W`) chunks, one after another. Modules follow each other in the order of `MODULES`, each
  its A blocks, then its B blocks; chunk c of an adapter lies in its page `c // chunks_per_page`.

Column-parallel modules (q, k, v, gate, up) split B over shards and repeat A; row-parallel ones (o, down)
split A and repeat B, so that LoRA adds no collective to the base model's (S-LoRA TP is issue-sized work).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from slora_jax.config import ModelConfig

RANK_BLOCK = 8  # rank rows in one block
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
ROW_PARALLEL = frozenset({"o_proj", "down_proj"})


@dataclasses.dataclass(frozen=True)
class AdapterLayout:
    """Where one adapter's rank blocks lie, as chunk numbers relative to its first page.

    `rank_blocks[m]` blocks of module m (absent: not targeted); `a_start[m]`, `b_start[m]` the chunk where its
    first A (B) block begins; `num_chunks` and `num_pages` its size.
    """

    rank_blocks: Mapping[str, int]
    a_start: Mapping[str, int]
    b_start: Mapping[str, int]
    num_chunks: int
    num_pages: int

    @functools.cached_property
    def tables(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """rank_blocks, a_start and b_start by module, in the order of MODULES; 0: not targeted."""
        blocks, a, b = (
            tuple(table.get(m, 0) for m in MODULES)
            for table in (self.rank_blocks, self.a_start, self.b_start)
        )
        return blocks, a, b


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """Sizes of a page and of the modules on one shard; everything that host and kernels must agree on."""

    n_layers: int
    page_tokens: int
    n_kv: int  # KV heads on a shard
    head_dim: int
    tp: int
    chunk_width: int  # W
    in_dims: Mapping[str, int]  # of A on a shard
    out_dims: Mapping[str, int]  # of B on a shard

    @classmethod
    def for_model(cls, config: ModelConfig, page_tokens: int, tp: int) -> PageLayout:
        """The layout for a model; raises ValueError where tp or page_tokens do not fit its shape."""
        n_q, n_kv = config.num_attention_heads, config.num_key_value_heads
        if n_q % tp or config.intermediate_size % tp or config.vocab_size % tp:
            raise ValueError(
                f"tensor_parallel_size {tp} must divide num_attention_heads {n_q}, intermediate_size "
                f"{config.intermediate_size} and vocab_size {config.vocab_size} of this model"
            )
        if n_kv % tp and tp % n_kv:
            raise ValueError(
                f"tensor_parallel_size {tp} must divide num_key_value_heads {n_kv} of this model "
                "or be its multiple"
            )
        q = n_q // tp * config.head_dim
        kv = max(1, n_kv // tp) * config.head_dim
        d, f = config.hidden_size, config.intermediate_size // tp
        in_dims = dict(zip(MODULES, (d, d, d, q, d, d, f), strict=True))
        out_dims = dict(zip(MODULES, (q, kv, kv, d, f, f, d), strict=True))
        page_elems = page_tokens * 2 * kv
        widths = [
            w
            for w in (256, 128, 64, 32, 16, 8)
            if all(n % w == 0 for n in (*in_dims.values(), *out_dims.values()))
            and page_elems % (RANK_BLOCK * w) == 0
        ]
        if not widths:
            raise ValueError(
                f"no width of 8 to 256 columns divides every module dimension of a shard ({in_dims} -> "
                f"{out_dims}) and a page of {page_elems} elements in chunks of {RANK_BLOCK} rows; dimensions "
                "must be multiples of 8 (lower tensor_parallel_size), and page_tokens=16 fits most models"
            )
        return cls(
            n_layers=config.num_hidden_layers,
            page_tokens=page_tokens,
            n_kv=kv // config.head_dim,
            head_dim=config.head_dim,
            tp=tp,
            chunk_width=widths[0],
            in_dims=in_dims,
            out_dims=out_dims,
        )

    @functools.cached_property
    def page_elems(self) -> int:
        """Elements of one layer's page on one shard."""
        return 2 * self.n_kv * self.page_tokens * self.head_dim

    def page_bytes(self, itemsize: int) -> int:
        """Bytes of a page over all layers and shards, of elements of so many bytes."""
        return self.n_layers * self.tp * self.page_elems * itemsize

    @functools.cached_property
    def chunks_per_page(self) -> int:
        return self.page_elems // (RANK_BLOCK * self.chunk_width)

    def a_chunks(self, module: str) -> int:
        """Chunks in one rank block of A."""
        return self.in_dims[module] // self.chunk_width

    def b_chunks(self, module: str) -> int:
        """Chunks in one rank block of B."""
        return self.out_dims[module] // self.chunk_width

    def adapter(self, ranks: Mapping[str, int]) -> AdapterLayout:
        """Place modules of the given true ranks (rounded up to whole blocks); rank 0 takes no room."""
        blocks, a_start, b_start, chunk = {}, {}, {}, 0
        for module in MODULES:
            if not ranks.get(module):
                continue
            blocks[module] = -(-ranks[module] // RANK_BLOCK)
            a_start[module] = chunk
            b_start[module] = chunk + blocks[module] * self.a_chunks(module)
            chunk = b_start[module] + blocks[module] * self.b_chunks(module)
        return AdapterLayout(blocks, a_start, b_start, chunk, -(-chunk // self.chunks_per_page))
