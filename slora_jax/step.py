"""One step on the device, as three pure functions: `begin`, `layer` (once for each), `finish`.

`begin` unpacks the host's input, embeds the tokens and lays out what layers need; `layer` runs one
transformer layer over the page pool; `finish` projects the rows that sample, and samples. On a GPU
`whole_step` makes one executable of them, with the layers unrolled, which XLA captures as one CUDA graph. On
a CPU they are compiled apart and the layer's executable is called for every layer: XLA would compile each
unrolled layer anew there, and a call costs little beside a layer's work.

Everything runs in `shard_map` over the mesh, so that every collective is written where it happens. The pool
and the state are donated: updated in place for the life of the engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import export
from jax.sharding import PartitionSpec

from slora_jax.batch import unpack
from slora_jax.memory.layout import GROUPS, MODULES, PageLayout
from slora_jax.models.llama import LlamaEnds, LlamaLayer
from slora_jax.models.rope import Rope
from slora_jax.pallas_kernels.backend import Backend
from slora_jax.sampling import SampleResult, SamplingRows, finite_rows, sample, update_token_counts
from slora_jax.step_shape import StepShape

REPEATED = PartitionSpec()
POOL_SPEC = PartitionSpec(None, None, "tp")


@dataclasses.dataclass(frozen=True, eq=False)  # static in StepOps: compared by identity, one an engine
class StepConfig:
    """Static facts of an engine that every executable is built from."""

    layout: PageLayout
    rope: Rope
    backend: Backend
    max_logprobs: int
    record_logits: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
    """What the device remembers of each slot from step to step; the same on every shard."""

    last_tokens: jax.Array  # i32[max_batch_size] the token each slot sampled last
    token_counts: jax.Array  # i32[max_batch_size, vocab], see sampling.update_token_counts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What a step tells the host; only `tokens` is fetched unless a row asked for more."""

    tokens: jax.Array  # i32[R]; -1 where the logits were not finite
    sample: SampleResult
    logits: jax.Array | None  # f32[R, vocab] with record_logits


for _node in (SlotState, StepOutput, SampleResult):  # what whole steps take and give, in `exported_steps`
    export.register_pytree_node_serialization(
        _node,
        serialized_name=f"{_node.__module__}.{_node.__name__}",
        serialize_auxdata=lambda _: b"",  # all their fields are arrays
        deserialize_auxdata=lambda _: (),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepRows:
    """What `finish` needs of a batch: which rows sample, how, and the tokens computed in this step."""

    tokens: jax.Array  # i32[t]
    token_slot: jax.Array  # i32[t]
    is_prompt: jax.Array  # bool[t]
    sample_token: jax.Array  # i32[R]
    sample_slot: jax.Array  # i32[R]
    reset_slot: jax.Array  # i32[R]
    sampling: SamplingRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillTiles:
    """A batch's prefill chunks, cut into tiles of one sequence each: what prefill_attention takes."""

    page_table: jax.Array  # i32[b, m]
    positions: jax.Array  # i32[t - D]
    seq: jax.Array  # i32[n]
    start: jax.Array  # i32[n]
    len: jax.Array  # i32[n]
    row: jax.Array  # i32[t - D]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOps:
    """The `models.llama.LayerOps` of a batch: LoRA, KV and attention over the page pool.

    The D decode rows come first among the tokens; a part that the step's shape has no room for is None.
    """

    cos: jax.Array  # f32[t, e/2]
    sin: jax.Array  # f32[t, e/2]
    token_page: jax.Array  # i32[t]
    token_offset: jax.Array  # i32[t] in its page
    decode_pages: jax.Array | None  # i32[D, m]
    decode_len: jax.Array | None  # i32[D] tokens of KV, the row's own included; 0: padding
    prefill: PrefillTiles | None
    lora_work: Any | None  # the backend's work list
    lora_groups: tuple[int, ...] = dataclasses.field(metadata={"static": True})  # that the work list has
    config: StepConfig = dataclasses.field(metadata={"static": True})

    def lora(self, group: int, layer: jax.Array, pool: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        if self.lora_work is None or group not in self.lora_groups:
            return y
        layout, modules = self.config.layout, GROUPS[group]
        out: jax.Array = self.config.backend.apply_lora(
            x,
            y,
            pool,
            layer,
            self.lora_work,
            modules=tuple(MODULES.index(m) for m in modules),
            in_dim=layout.in_dims[modules[0]],
            out_dims=tuple(layout.out_dims[m] for m in modules),
            chunk_width=layout.chunk_width,
        )
        return out

    def attend(self, layer: jax.Array, pool: jax.Array, qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
        layout, backend = self.config.layout, self.config.backend
        sizes: Any = {"n_kv": layout.n_kv, "page_tokens": layout.page_tokens}
        pool, q = backend.rope_write_kv(
            pool, layer, qkv, self.cos, self.sin, self.token_page, self.token_offset, **sizes
        )
        sizes["scale"] = layout.head_dim**-0.5
        decodes, parts = 0, []
        if self.decode_pages is not None and self.decode_len is not None:
            decodes = self.decode_pages.shape[0]
            parts.append(
                backend.decode_attention(
                    q[:decodes], pool, layer, self.decode_pages, self.decode_len, **sizes
                )
            )
        if self.prefill is not None:
            tiles = self.prefill
            parts.append(
                backend.prefill_attention(
                    q[decodes:],
                    pool,
                    layer,
                    tiles.page_table,
                    tiles.positions,
                    tiles.seq,
                    tiles.start,
                    tiles.len,
                    tiles.row,
                    tile=backend.prefill_tile,
                    **sizes,
                )
            )
        return pool, parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def begin(
    config: StepConfig, shape: StepShape, ends: LlamaEnds, slots: SlotState, packed: jax.Array
) -> tuple[jax.Array, StepOps, StepRows]:
    """The host's packed input i32[packed_size] -> hidden states [t, d] before the first layer, the batch."""
    batch = unpack(packed, shape, config.backend.lora_work)
    last = slots.last_tokens.at[batch.token_slot].get(mode="clip")
    tokens = jnp.where(batch.token_ids >= 0, batch.token_ids, last)
    lengths = jnp.maximum(batch.positions + 1, batch.prompt_len)
    cos, sin = config.rope.cos_sin(batch.positions, lengths)
    decodes = shape.decode_rows
    real = batch.token_page[:decodes] >= 0
    prefill = PrefillTiles(
        page_table=batch.prefill_pages,
        positions=batch.positions[decodes:],
        seq=batch.tile_seq,
        start=batch.tile_start,
        len=batch.tile_len,
        row=batch.tile_row,
    )
    ops = StepOps(
        cos=cos,
        sin=sin,
        token_page=batch.token_page,
        token_offset=batch.positions % config.layout.page_tokens,
        decode_pages=batch.decode_pages if decodes else None,
        decode_len=jnp.where(real, batch.positions[:decodes] + 1, 0) if decodes else None,
        prefill=prefill if shape.prefill_tokens else None,
        lora_work=batch.lora,
        lora_groups=shape.lora_groups,
        config=config,
    )
    rows = StepRows(
        tokens=tokens,
        token_slot=batch.token_slot,
        is_prompt=batch.positions < batch.prompt_len,
        sample_token=batch.sample_token,
        sample_slot=batch.sample_slot,
        reset_slot=batch.reset_slot,
        sampling=batch.sampling,
    )
    return ends.embed(tokens), ops, rows


def layer(
    module: LlamaLayer, index: jax.Array, x: jax.Array, pool: jax.Array, ops: StepOps
) -> tuple[jax.Array, jax.Array]:
    """(hidden states [t, d] after layer `index` (i32 scalar), pool with its KV)."""
    return module(x, index, pool, ops)


def finish(
    config: StepConfig, ends: LlamaEnds, slots: SlotState, x: jax.Array, rows: StepRows
) -> tuple[SlotState, StepOutput]:
    """Hidden states [t, d] after the last layer -> the sampled tokens, and slots that remember them."""
    logits = ends.logits(x[rows.sample_token])
    counts = update_token_counts(
        slots.token_counts, rows.token_slot, rows.tokens, rows.is_prompt, rows.reset_slot
    )
    result = sample(logits, rows.sampling, counts, rows.sample_slot, max_logprobs=config.max_logprobs)
    last_tokens = slots.last_tokens.at[rows.sample_slot].set(result.tokens, mode="drop")
    output = StepOutput(
        tokens=jnp.where(finite_rows(logits), result.tokens, -1),
        sample=result,
        logits=logits if config.record_logits else None,
    )
    return SlotState(last_tokens, counts), output


def whole_step(
    config: StepConfig,
    shape: StepShape,
    ends: LlamaEnds,
    layers: Sequence[LlamaLayer],
    pool: jax.Array,
    slots: SlotState,
    packed: jax.Array,
) -> tuple[jax.Array, SlotState, StepOutput]:
    """begin, every layer, finish: (pool, slots, output)."""
    x, ops, rows = begin(config, shape, ends, slots, packed)
    one_layer = jax.jit(layer)  # traced and lowered once; XLA unrolls it
    for index, module in enumerate(layers):
        x, pool = one_layer(module, jnp.int32(index), x, pool, ops)
    return pool, *finish(config, ends, slots, x, rows)


@dataclasses.dataclass(frozen=True)
class ModuleLeaves:
    """An NNX module split once: `leaves` are what executables take, `merge` rebuilds it inside a trace."""

    graph: nnx.GraphDef[Any]
    tree: Any
    leaves: list[jax.Array]

    @classmethod
    def split(cls, module: nnx.Module) -> ModuleLeaves:
        graph, state = nnx.split(module)
        leaves, tree = jax.tree.flatten(state)
        return cls(graph, tree, leaves)

    @property
    def specs(self) -> list[PartitionSpec]:
        """How each leaf is split over the mesh."""
        return [leaf.sharding.spec for leaf in self.leaves]  # type: ignore[attr-defined]

    def merge(self, leaves: Sequence[jax.Array]) -> Any:
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))
