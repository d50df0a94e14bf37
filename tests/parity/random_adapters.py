"""Random LoRA adapters for SmolLM2-135M, written as PEFT writes them, reproducibly and without torch.

`record_peft.py` loads these files with PEFT and records what the model says; the parity test writes the very
same files again and compares. Needs only numpy, safetensors and ml_dtypes (Python 3.11 and newer). The
weights are uniform draws of the legacy `RandomState`, whose stream NumPy guarantees never to change.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

SEED = 20240705
NUM_LAYERS = 30
PREFIX = "base_model.model."
DTYPES = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}

# Every linear of a SmolLM2-135M layer: path inside the layer -> (in, out) features.
LINEARS: dict[str, tuple[int, int]] = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (576, 192),
    "self_attn.v_proj": (576, 192),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (576, 1536),
    "mlp.up_proj": (576, 1536),
    "mlp.down_proj": (1536, 576),
}
# Typical output RMS of these linears over their input RMS, std(W) * sqrt(in), measured on the model.
BASE_GAIN = 4.7


@dataclass(frozen=True)
class AdapterSpec:
    """One adapter: its PEFT config fields, the dtype of its file, and how strong it is.

    `strength` is the RMS of the delta of each linear over that of the linear's own output.
    """

    r: int
    lora_alpha: int
    target_modules: list[str] | str
    dtype: str
    strength: float = 0.4
    extra: dict[str, Any] = field(default_factory=dict)


SPECS: dict[str, AdapterSpec] = {
    "qv_r4": AdapterSpec(4, 8, ["q_proj", "v_proj"], "fp32", 0.28),
    "attention_r8": AdapterSpec(8, 16, ["q_proj", "k_proj", "v_proj", "o_proj"], "bf16", 0.2),
    "all_r5": AdapterSpec(
        5, 10, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "fp16", 0.25
    ),
    "mlp_r13": AdapterSpec(13, 13, ["gate_proj", "up_proj", "down_proj"], "bf16", 0.3),
    "o_down_r33_rslora": AdapterSpec(33, 16, ["o_proj", "down_proj"], "fp32", extra={"use_rslora": True}),
    "all_linear_r16": AdapterSpec(16, 32, "all-linear", "fp16", 0.15),
    "k_up_r64": AdapterSpec(64, 32, ["k_proj", "up_proj"], "bf16"),
    "patterns_r8": AdapterSpec(
        8, 16, ["q_proj", "v_proj", "down_proj"], "fp32", 0.22,
        extra={
            "rank_pattern": {
                "down_proj": 3, "model.layers.7.self_attn.q_proj": 21, r"layers\.1\d\.self_attn\.v_proj": 12
            },
            "alpha_pattern": {"down_proj": 12, r"model\.layers\.\d\.self_attn\.q_proj": 24},
        },
    ),
    "upper_layers_r6": AdapterSpec(
        6, 12, ["q_proj", "k_proj", "v_proj", "o_proj"], "bf16", 0.5,
        extra={"layers_to_transform": list(range(15, 30))},
    ),
    "regex_r11": AdapterSpec(
        11, 22, r".*layers\.([02468]|1[0-9])\.(self_attn\.[qo]_proj|mlp\.up_proj)", "fp16"
    ),
}  # fmt: skip


def adapter_config(spec: AdapterSpec) -> dict[str, Any]:
    """The fields of adapter_config.json in the order and with the defaults of PEFT 0.21."""
    config: dict[str, Any] = {
        "alora_invocation_tokens": None,
        "alpha_pattern": {},
        "arrow_config": None,
        "auto_mapping": None,
        "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "bias": "none",
        "corda_config": None,
        "ensure_weight_tying": False,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": spec.lora_alpha,
        "lora_bias": False,
        "lora_dropout": 0.0,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "r": spec.r,
        "rank_pattern": {},
        "revision": None,
        "target_modules": spec.target_modules,
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
    }
    assert spec.extra.keys() <= config.keys(), spec.extra
    return config | spec.extra


def _is_target(config: dict[str, Any], path: str, layer: int) -> bool:
    targets, layers = config["target_modules"], config["layers_to_transform"]
    if layers is not None and layer not in layers:
        return False
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, path) is not None
    return path.rpartition(".")[2] in targets


def _from_pattern(pattern: dict[str, int], path: str, default: int) -> int:
    """PEFT's rule: the first key that matches the whole path or a dotted end of it, as a regex."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", path)), default)


def targets(spec: AdapterSpec) -> Iterator[tuple[str, int, int, int, float]]:
    """(module path, in, out, rank, scaling) of every linear that the adapter changes, in model order."""
    config = adapter_config(spec)
    for layer in range(NUM_LAYERS):
        for name, (fan_in, fan_out) in LINEARS.items():
            path = f"model.layers.{layer}.{name}"
            if _is_target(config, path, layer):
                rank = _from_pattern(config["rank_pattern"], path, spec.r)
                alpha = _from_pattern(config["alpha_pattern"], path, spec.lora_alpha)
                scaling = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
                yield path, fan_in, fan_out, rank, scaling


def adapter_tensors(name: str) -> dict[str, np.ndarray]:
    """PEFT's tensors of one adapter: lora_A [rank, in] and lora_B [out, rank] in the dtype of its file.

    var(A) = 1/in and var(B) = (strength * BASE_GAIN / scaling)^2 / rank, so that for an input x of RMS 1
    scaling * B A x has RMS strength * BASE_GAIN.
    """
    spec = SPECS[name]
    random = np.random.RandomState((SEED + list(SPECS).index(name)) % 2**32)
    dtype = DTYPES[spec.dtype]

    def uniform(rows: int, columns: int, std: float) -> np.ndarray:
        draws = (2.0 * random.random_sample((rows, columns)) - 1.0) * (std * math.sqrt(3.0))
        return draws.astype(np.float32).astype(dtype)

    tensors = {}
    for path, fan_in, fan_out, rank, scaling in targets(spec):
        std_b = spec.strength * BASE_GAIN / (scaling * math.sqrt(rank))
        tensors[f"{PREFIX}{path}.lora_A.weight"] = uniform(rank, fan_in, 1 / math.sqrt(fan_in))
        tensors[f"{PREFIX}{path}.lora_B.weight"] = uniform(fan_out, rank, std_b)
    return tensors


def write_adapters(folder: str | Path) -> dict[str, Path]:
    """Writes every adapter of SPECS as <folder>/<name>/ in PEFT format; returns name -> its folder.

    The largest is 13 MB, all together 50 MB.
    """
    paths = {}
    for name, spec in SPECS.items():
        paths[name] = path = Path(folder) / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps(adapter_config(spec), indent=2))
        save_file(adapter_tensors(name), path / "adapter_model.safetensors", metadata={"format": "pt"})
    return paths


def fingerprint(folder: str | Path) -> str:
    """SHA-256 over the names, dtypes, shapes and bytes of an adapter's tensors, in name order."""
    digest = hashlib.sha256()
    for key, tensor in sorted(load_file(Path(folder) / "adapter_model.safetensors").items()):
        digest.update(f"{key} {tensor.dtype.name} {tensor.shape}".encode())
        digest.update(np.ascontiguousarray(tensor).tobytes())
    return digest.hexdigest()
