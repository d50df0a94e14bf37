"""The Llama family in Flax NNX, as one shard of a tensor-parallel mesh computes it.

The module runs inside `jax.shard_map`: its arrays are a shard's own part, `psum` over "tp" is where Megatron
puts it (after o_proj and down_proj), and attention, KV pages and LoRA come from a `LayerOps` that the engine
makes, so that a model knows neither pages nor kernels. Axes: t tokens, d hidden, h query heads, k KV heads, e
head dim, f mlp, v vocabulary. Mistral, Qwen or Gemma change `LlamaLayer.attention`, `LlamaLayer.mlp` or a
norm; the step stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from slora_jax.config import ModelConfig
from slora_jax.models.params import ParamSpec, checkpoint_specs
from slora_jax.sharding.mesh import TP


class LayerOps(Protocol):
    """What a step gives a layer: LoRA beside each projection, and attention over the page pool.

    `layer` is its number in the pool: data, not a constant, so that all layers are one program.
    """

    def lora(self, group: int, layer: jax.Array, pool: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        """y[t, out] += (x A^T) B of each token's adapter, for the modules of `layout.GROUPS[group]`."""

    def attend(self, layer: jax.Array, pool: jax.Array, qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rotate q and k by the tokens' positions, write k and v into the pool and attend with q: (pool, out
        [t, h, e]) of qkv [t, h + 2 k, e], the heads of q, of k, of v.
        """


def model_specs(config: ModelConfig, tp: int) -> dict[str, ParamSpec]:
    """The arrays the model computes with: q,k,v and gate,up fused, `[d, tp, columns of a shard]`."""
    d, e = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads // tp * e, max(1, config.num_key_value_heads // tp) * e
    specs = {}
    for name, spec in checkpoint_specs(config).items():
        prefix, _, leaf = name.rpartition(".")
        if leaf == "q_proj":
            specs[f"{prefix}.qkv_proj"] = ParamSpec((d, tp, q + 2 * kv), ("embed", "shard", None))
        elif leaf == "gate_proj":
            specs[f"{prefix}.gate_up_proj"] = ParamSpec(
                (d, tp, 2 * config.intermediate_size // tp), ("embed", "shard", None)
            )
        elif leaf == "o_proj":
            specs[name] = ParamSpec((config.num_attention_heads * e, d), ("heads", "embed"))
        elif leaf not in ("k_proj", "v_proj", "up_proj"):
            specs[name] = spec
    return specs


def fuse_layer(config: ModelConfig, tp: int, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """A shard's arrays of one layer, as a checkpoint has them -> as the model has them; runs in shard_map.

    Names are without their `layers.{i}.` prefix. Where there are fewer KV heads than shards, k_proj and
    v_proj come whole and the shard takes its head.
    """
    d = config.hidden_size
    k, v = params["k_proj"], params["v_proj"]
    if config.num_key_value_heads < tp:
        head = lax.axis_index(TP) * config.num_key_value_heads // tp
        k, v = (lax.dynamic_slice_in_dim(w, head, 1, axis=1) for w in (k, v))
    qkv = jnp.concatenate([w.reshape(d, -1) for w in (params["q_proj"], k, v)], axis=1)
    gate_up = jnp.concatenate([params["gate_proj"], params["up_proj"]], axis=1)
    fused = {
        "qkv_proj": qkv[:, None],
        "gate_up_proj": gate_up[:, None],
        "o_proj": params["o_proj"].reshape(-1, d),
    }
    return fused | {n: params[n] for n in ("input_layernorm", "post_attention_layernorm", "down_proj")}


def layer_params[T](params: Mapping[str, T], layer: int) -> dict[str, T]:
    """The entries of one layer, without their `layers.{i}.` prefix."""
    prefix = f"layers.{layer}."
    return {name.removeprefix(prefix): p for name, p in params.items() if name.startswith(prefix)}


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32."""

    def __init__(self, weight: jax.Array, eps: float) -> None:
        self.weight = nnx.Param(weight)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * scale).astype(x.dtype) * self.weight[...]


class LlamaLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x [t, d]."""

    def __init__(self, config: ModelConfig, params: Mapping[str, jax.Array]) -> None:
        self.head_dim = config.head_dim
        self.input_layernorm = RMSNorm(params["input_layernorm"], config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(params["post_attention_layernorm"], config.rms_norm_eps)
        self.qkv_proj = nnx.Param(params["qkv_proj"])
        self.o_proj = nnx.Param(params["o_proj"])
        self.gate_up_proj = nnx.Param(params["gate_up_proj"])
        self.down_proj = nnx.Param(params["down_proj"])

    def attention(
        self, x: jax.Array, layer: jax.Array, pool: jax.Array, ops: LayerOps
    ) -> tuple[jax.Array, jax.Array]:
        """(this shard's part of the attention output [t, d], pool)."""
        t, e = x.shape[0], self.head_dim
        qkv = ops.lora(0, layer, pool, x, x @ self.qkv_proj[...][:, 0])
        pool, out = ops.attend(layer, pool, qkv.reshape(t, -1, e))
        out = out.reshape(t, -1)
        return ops.lora(1, layer, pool, out, out @ self.o_proj[...]), pool

    def mlp(self, x: jax.Array, layer: jax.Array, pool: jax.Array, ops: LayerOps) -> jax.Array:
        """This shard's part of down(silu(gate(x)) * up(x)) [t, d]."""
        gate_up = ops.lora(2, layer, pool, x, x @ self.gate_up_proj[...][:, 0])
        gate, up = jnp.split(gate_up, 2, axis=1)
        hidden = jax.nn.silu(gate) * up
        return ops.lora(3, layer, pool, hidden, hidden @ self.down_proj[...])

    def __call__(
        self, x: jax.Array, layer: jax.Array, pool: jax.Array, ops: LayerOps
    ) -> tuple[jax.Array, jax.Array]:
        """(x after this layer [t, d], pool with its KV)."""
        out, pool = self.attention(self.input_layernorm(x), layer, pool, ops)
        x = x + lax.psum(out, TP)
        return x + lax.psum(self.mlp(self.post_attention_layernorm(x), layer, pool, ops), TP), pool


class LlamaEnds(nnx.Module):
    """What comes before and after the layers: tokens to hidden states, hidden states to logits."""

    def __init__(self, config: ModelConfig, params: Mapping[str, jax.Array]) -> None:
        self.embed_tokens = nnx.Param(params["embed_tokens"])
        self.norm = RMSNorm(params["norm"], config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else nnx.Param(params["lm_head"])

    def embed(self, tokens: jax.Array) -> jax.Array:
        """tokens i32[t] -> [t, d]: each shard looks up the rows it has, their sum is the whole."""
        table = self.embed_tokens[...]
        local = tokens - lax.axis_index(TP) * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        rows = jnp.where(mine[:, None], table[jnp.where(mine, local, 0)], 0)
        whole: jax.Array = lax.psum(rows, TP)
        return whole

    def logits(self, x: jax.Array) -> jax.Array:
        """x [r, d] -> float32[r, v], the same on every shard."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        part = jnp.einsum("rd,vd->rv", self.norm(x), head[...], preferred_element_type=jnp.float32)
        whole: jax.Array = lax.all_gather(part, TP, axis=1, tiled=True)
        return whole


class Llama(nnx.Module):
    """A decoder as one shard has it: its two ends, and layers that are alike."""

    def __init__(self, config: ModelConfig, params: Mapping[str, jax.Array]) -> None:
        self.ends = LlamaEnds(config, params)
        layers = [LlamaLayer(config, layer_params(params, i)) for i in range(config.num_hidden_layers)]
        self.layers = nnx.List(layers)
