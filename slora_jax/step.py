"""One step on the device: `step(params, state, packed) -> (state, outputs)`, a pure function per shape.

It embeds, runs the layers over the page pool, projects the rows that sample, and samples. All of it is one `shard_map` over
the mesh, so that every collective is written where it happens. `state` is donated: the pool is updated in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from slora_jax.batch import StepBatch, StepShape, unpack
from slora_jax.memory.layout import GROUPS, MODULES, PageLayout
from slora_jax.models.rope import Rope
from slora_jax.pallas_kernels.xla_attention import decode_attention, prefill_attention, write_kv
from slora_jax.pallas_kernels.xla_lora import apply_lora
from slora_jax.sampling import SampleResult, sample, update_token_counts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceState:
    """What lives on the device from step to step."""

    pool: jax.Array  # dtype[n_layers, n_pages, tp * page_elems], split over tp
    last_tokens: jax.Array  # i32[max_batch_size] the token each slot sampled last
    token_counts: jax.Array  # i32[max_batch_size, vocab], see sampling.update_token_counts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What a step tells the host; only `tokens` is fetched unless a row asked for more."""

    tokens: jax.Array  # i32[R]; -1 where the logits were not finite
    sample: SampleResult
    logits: jax.Array | None  # f32[R, vocab] with record_logits


STATE_SPEC = DeviceState(
    pool=PartitionSpec(None, None, "tp"), last_tokens=PartitionSpec(), token_counts=PartitionSpec()
)


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Static facts of an engine that every executable is built from."""

    layout: PageLayout
    rope: Rope
    tile: int
    max_logprobs: int
    record_logits: bool


class StepOps:
    """The `models.llama.LayerOps` of one step: KV, attention and LoRA of a batch over the page pool."""

    def __init__(self, config: StepConfig, batch: StepBatch) -> None:
        self._layout = config.layout
        self._tile = config.tile
        self._batch = batch
        lengths = jnp.maximum(batch.positions + 1, batch.prompt_len)
        self.cos, self.sin = config.rope.cos_sin(batch.positions, lengths)

    def lora(self, group: int, layer: int, pool: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        modules = GROUPS[group]
        return apply_lora(
            x,
            y,
            pool,
            layer,
            self._batch.lora,
            modules=tuple(MODULES.index(m) for m in modules),
            in_dim=self._layout.in_dims[modules[0]],
            out_dims=tuple(self._layout.out_dims[m] for m in modules),
            chunk_width=self._layout.chunk_width,
        )

    def attend(
        self, layer: int, pool: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        batch, layout = self._batch, self._layout
        pool = write_kv(
            pool,
            layer,
            k,
            v,
            batch.token_page,
            batch.positions % layout.page_tokens,
            page_tokens=layout.page_tokens,
        )
        decodes = batch.decode_pages.shape[0]
        scale = layout.head_dim**-0.5
        sizes = {"n_kv": layout.n_kv, "page_tokens": layout.page_tokens, "scale": scale}
        parts = []
        if decodes:
            real = batch.token_page[:decodes] >= 0
            kv_len = jnp.where(real, batch.positions[:decodes] + 1, 0)
            parts.append(decode_attention(q[:decodes], pool, layer, batch.decode_pages, kv_len, **sizes))
        if q.shape[0] > decodes:
            parts.append(
                prefill_attention(
                    q[decodes:],
                    pool,
                    layer,
                    batch.prefill_pages,
                    batch.positions[decodes:],
                    batch.tile_seq,
                    batch.tile_start,
                    batch.tile_len,
                    batch.tile_row,
                    tile=self._tile,
                    **sizes,
                )
            )
        return pool, parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def build_step(
    config: StepConfig,
    shape: StepShape,
    mesh: Mesh,
    graph: nnx.GraphDef[nnx.Module],
    tree: jax.tree_util.PyTreeDef,
    param_specs: Sequence[PartitionSpec],
) -> Callable[[list[jax.Array], DeviceState, jax.Array], tuple[DeviceState, StepOutput]]:
    """The step of one shape as a function to jit (donate its second argument).

    `graph`, `tree`: the model split by NNX, whose leaves are the function's first argument, sharded by `param_specs`.
    """

    def step(leaves: list[jax.Array], state: DeviceState, packed: jax.Array) -> tuple[DeviceState, StepOutput]:
        batch = unpack(packed, shape)
        model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        last = state.last_tokens.at[batch.token_slot].get(mode="clip")
        tokens = jnp.where(batch.token_ids >= 0, batch.token_ids, last)
        hidden, pool = model.hidden(tokens, state.pool, StepOps(config, batch))
        logits = model.logits(hidden[batch.sample_token])
        counts = update_token_counts(
            state.token_counts, batch.token_slot, tokens, batch.positions < batch.prompt_len, batch.reset_slot
        )
        result = sample(logits, batch.sampling, counts, batch.sample_slot, max_logprobs=config.max_logprobs)
        last_tokens = state.last_tokens.at[batch.sample_slot].set(result.tokens, mode="drop")
        finite = jnp.isfinite(jnp.max(logits, axis=1))
        output = StepOutput(
            tokens=jnp.where(finite, result.tokens, -1),
            sample=result,
            logits=logits if config.record_logits else None,
        )
        return DeviceState(pool, last_tokens, counts), output

    return jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(list(param_specs), STATE_SPEC, PartitionSpec()),
        out_specs=(STATE_SPEC, PartitionSpec()),
        check_vma=False,
    )
