"""One declaration for every parameter: shape, logical axes and initialiser.

Checkpoints, initialisation, shardings and the model all read these, so that they cannot disagree.
Axes: d hidden, h query heads, k KV heads, e head dim, f mlp, v vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from slora_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """An array of the model: `axes` are the logical names that `sharding.rules` maps to the mesh."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Literal["normal", "ones"] = "normal"

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)


def checkpoint_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    """The parameters as a checkpoint holds them, by canonical name (`layers.3.q_proj`), one entry an array.

    Projections are stored input axis first, `y[t, out] = x[t, in] @ w`; embeddings and head as [v, d].
    """
    d, f, v, e = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim
    h, k = config.num_attention_heads, config.num_key_value_heads
    vocab = ParamSpec((v, d), ("vocab", "embed"))
    norm = ParamSpec((d,), (None,), "ones")
    layer = {
        "input_layernorm": norm,
        "q_proj": ParamSpec((d, h, e), ("embed", "heads", "head_dim")),
        "k_proj": ParamSpec((d, k, e), ("embed", "kv_heads", "head_dim")),
        "v_proj": ParamSpec((d, k, e), ("embed", "kv_heads", "head_dim")),
        "o_proj": ParamSpec((h, e, d), ("heads", "head_dim", "embed")),
        "post_attention_layernorm": norm,
        "gate_proj": ParamSpec((d, f), ("embed", "mlp")),
        "up_proj": ParamSpec((d, f), ("embed", "mlp")),
        "down_proj": ParamSpec((f, d), ("mlp", "embed")),
    }
    specs = {"embed_tokens": vocab}
    for i in range(config.num_hidden_layers):
        specs |= {f"layers.{i}.{name}": spec for name, spec in layer.items()}
    specs["norm"] = norm
    if not config.tie_word_embeddings:
        specs["lm_head"] = vocab
    return specs
