"""Write PEFT adapter folders for tests, byte for byte as PEFT names and shapes them, without PEFT."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from slora_jax.config import ModelConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_MODULES = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
TINY = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_position_embeddings=64,
)


@dataclasses.dataclass(frozen=True)
class WrittenAdapter:
    """What was written: `a[l, m]` [r, in] and `b[l, m]` [out, r] in the file's dtype, and PEFT's scales."""

    path: Path
    a: Mapping[tuple[int, str], npt.NDArray[Any]]
    b: Mapping[tuple[int, str], npt.NDArray[Any]]
    scaling: Mapping[tuple[int, str], float]

    def delta(self, layer: int, module: str) -> npt.NDArray[np.float32]:
        """scaling * (B @ A)^T in float32 [in, out]: what merging adds to a weight stored input axis first."""
        a, b = self.a[layer, module].astype(np.float32), self.b[layer, module].astype(np.float32)
        return (np.float32(self.scaling[layer, module]) * (b @ a)).T


def module_path(layer: int, module: str) -> str:
    return f"model.layers.{layer}.{'self_attn' if module in ATTENTION else 'mlp'}.{module}"


def features(config: ModelConfig, module: str) -> tuple[int, int]:
    """(in, out) features of a projection of this model."""
    d, f = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return {
        "q_proj": (d, q),
        "k_proj": (d, kv),
        "v_proj": (d, kv),
        "o_proj": (q, d),
        "down_proj": (f, d),
    }.get(module, (d, f))


def write_peft_adapter(
    folder: Path,
    config: ModelConfig = TINY,
    ranks: Mapping[str, int] | Mapping[tuple[int, str], int] | None = None,
    *,
    layers: Sequence[int] | None = None,
    alpha: float = 16,
    use_rslora: bool = False,
    dtype: npt.DTypeLike = np.float32,
    seed: int = 0,
    std: float = 0.1,
    prefix: str = "base_model.model.",
    adapter_name: str = "",
    tensors: Mapping[str, npt.NDArray[Any] | None] | None = None,
    **fields: Any,
) -> WrittenAdapter:
    """Make `folder` with a random LoRA for a model of shape `config`, which PEFT and slora-jax load alike.

    `ranks` is by module (`{"q_proj": 8}`, then in `layers` or in all) or by (layer, module); the config
    spells it as r, rank_pattern, target_modules and layers_to_transform. `std` is that of A's and B's
    entries; `prefix` and `adapter_name` ("default" gives `lora_A.default.weight`) spell the keys. `tensors`
    adds, replaces or (None) removes tensors by key, and `fields` sets fields of adapter_config.json: with
    them a test breaks a folder.
    """
    by_module, by_place = _split(ranks if ranks is not None else {"q_proj": 8, "v_proj": 8})
    for module, rank in by_module.items():
        for layer in range(config.num_hidden_layers) if layers is None else layers:
            by_place[layer, module] = rank
    rng = np.random.default_rng(seed)
    a, b, scaling, stored = {}, {}, {}, {}
    for (layer, module), rank in by_place.items():
        n_in, n_out = features(config, module)
        place, key = (layer, module), f"{prefix}{module_path(layer, module)}"
        a[place] = (std * rng.standard_normal((rank, n_in))).astype(dtype)
        b[place] = (std * rng.standard_normal((n_out, rank))).astype(dtype)
        scaling[place] = alpha / math.sqrt(rank) if use_rslora else alpha / rank
        for side, value in (("A", a[place]), ("B", b[place])):
            stored[f"{key}.lora_{side}{adapter_name and '.' + adapter_name}.weight"] = value
    stored |= {
        key: np.ascontiguousarray(value) for key, value in (tensors or {}).items() if value is not None
    }
    for key in [key for key, value in (tensors or {}).items() if value is None]:
        del stored[key]
    names = by_module or {module_path(*place): rank for place, rank in by_place.items()}
    peft_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tests/tiny",
        "r": next(iter(names.values()), 8),
        "rank_pattern": names,
        "lora_alpha": alpha,
        "use_rslora": use_rslora,
        "bias": "none",
        "target_modules": list(names),
        "layers_to_transform": None if layers is None else list(layers),
        **fields,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(peft_config, indent=2))
    save_file(stored, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return WrittenAdapter(folder, a, b, scaling)


def _split(
    ranks: Mapping[str, int] | Mapping[tuple[int, str], int],
) -> tuple[dict[str, int], dict[tuple[int, str], int]]:
    by_module: dict[str, int] = {}
    by_place: dict[tuple[int, str], int] = {}
    for place, rank in ranks.items():
        if isinstance(place, str):
            by_module[place] = rank
        else:
            by_place[place] = rank
    return by_module, by_place
