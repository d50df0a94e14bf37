"""A tiny Llama with random weights in Hugging Face's names and [out, in] layout, and writers and
a reader of its files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

from slora_jax.models.params import ParamSpec
from slora_jax.sharding.mesh import make_mesh
from slora_jax.weights import load_checkpoint, load_model_config, resolve_model
from slora_jax.weights.source import CheckpointSource

Array = npt.NDArray[Any]

D, H, K, E, F, V, L = 32, 4, 2, 16, 96, 64, 2  # h * e != d and k != h, so that swapped axes show
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "head_dim": E,
    "intermediate_size": F,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def hf_tensors(*, tied: bool = False, seed: int = 0) -> dict[str, Array]:
    """Random float32 weights; values are exact in bf16 and fp16, so that no file format rounds them."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for i in range(L):
        shapes |= {
            f"model.layers.{i}.input_layernorm.weight": (D,),
            f"model.layers.{i}.self_attn.q_proj.weight": (H * E, D),
            f"model.layers.{i}.self_attn.k_proj.weight": (K * E, D),
            f"model.layers.{i}.self_attn.v_proj.weight": (K * E, D),
            f"model.layers.{i}.self_attn.o_proj.weight": (D, H * E),
            f"model.layers.{i}.post_attention_layernorm.weight": (D,),
            f"model.layers.{i}.mlp.gate_proj.weight": (F, D),
            f"model.layers.{i}.mlp.up_proj.weight": (F, D),
            f"model.layers.{i}.mlp.down_proj.weight": (D, F),
        }
    shapes["model.norm.weight"] = (D,)
    if not tied:
        shapes["lm_head.weight"] = (V, D)
    rng = np.random.default_rng(seed)
    return {name: rng.integers(-128, 128, shape).astype(np.float32) / 64 for name, shape in shapes.items()}


def canonical(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """What loading must give, spelled out a projection at a time."""
    out = {"embed_tokens": tensors["model.embed_tokens.weight"], "norm": tensors["model.norm.weight"]}
    if "lm_head.weight" in tensors:
        out["lm_head"] = tensors["lm_head.weight"]
    for i in range(L):
        hf, ours = f"model.layers.{i}.", f"layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[ours + norm] = tensors[f"{hf}{norm}.weight"]
        for name, heads in (("q_proj", H), ("k_proj", K), ("v_proj", K)):
            out[ours + name] = tensors[f"{hf}self_attn.{name}.weight"].T.reshape(D, heads, E)
        out[ours + "o_proj"] = tensors[hf + "self_attn.o_proj.weight"].T.reshape(H, E, D)
        for name in ("gate_proj", "up_proj", "down_proj"):
            out[ours + name] = tensors[f"{hf}mlp.{name}.weight"].T
    return out


def write_hf(
    folder: Path, tensors: Mapping[str, Array], *, files: int = 0, dtype: Any = np.float32, **config: Any
) -> Path:
    """An HF folder: one model.safetensors, or `files` numbered files and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    tensors = {name: np.ascontiguousarray(array.astype(dtype)) for name, array in tensors.items()}
    if not files:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(tensors)
    placed = {name: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(placed.values())):
        save_file({n: tensors[n] for n in names if placed[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


def permute(weights: Array, heads: int) -> Array:
    """llama.cpp's reordering of q and k rows (`permute` in convert_hf_to_gguf.py)."""
    rows = weights.shape[0] // heads
    return weights.reshape(heads, 2, rows // 2, -1).swapaxes(1, 2).reshape(weights.shape)


def gguf_name(hf: str) -> str:
    top = {
        "model.embed_tokens.weight": "token_embd",
        "model.norm.weight": "output_norm",
        "lm_head.weight": "output",
    }
    if hf in top:
        return top[hf] + ".weight"
    _, _, layer, part = hf.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_GGUF_PARTS[part]}.weight"


def write_gguf(
    path: Path,
    tensors: Mapping[str, Array],
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, Array] | None = None,
    tokens: Sequence[str] = (),
) -> dict[str, Array]:
    """A GGUF file whose matrices have type `kind`; gives back the HF weights that its blocks stand for.

    `metadata` replaces or (None) drops keys after "llama."; `tokens` adds a tokenizer.
    """
    keys = {
        "block_count": L, "context_length": 128, "embedding_length": D, "feed_forward_length": F,
        "attention.head_count": H, "attention.head_count_kv": K, "attention.key_length": E,
        "attention.value_length": E, "rope.dimension_count": E, "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": V,
    } | dict(metadata or {})  # fmt: skip
    writer = GGUFWriter(path, architecture)
    add: dict[type, Callable[..., None]] = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in keys.items():
        if value is not None:
            add[type(value)](f"llama.{key}", value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(list(tokens))
        writer.add_token_types([1] * len(tokens))
    seen: dict[str, Array] = {}
    for name, array in tensors.items():
        heads = H if ".q_proj." in name else K if ".k_proj." in name else 0
        stored = permute(array, heads) if heads else array
        of = kind if array.ndim == 2 else GGMLQuantizationType.F32
        blocks = quantize(np.ascontiguousarray(stored), of)
        writer.add_tensor(gguf_name(name), blocks, raw_dtype=of)
        seen[name] = dequantize(quantize(np.ascontiguousarray(array), of), of)  # blocks lie along rows
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return seen


def load(path: Path, *, tp: int = 1, dtype: Any = "float32", **kwargs: Any) -> dict[str, jax.Array]:
    resolved = resolve_model(path)
    return load_checkpoint(resolved, load_model_config(resolved), make_mesh(tp), dtype, **kwargs)


def assert_equal(got: dict[str, jax.Array], want: dict[str, Array]) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(np.asarray(got[name], np.float32), array, err_msg=name)


def assert_reads_any_block(
    source: CheckpointSource, specs: Mapping[str, ParamSpec], want: Mapping[str, Array]
) -> None:
    rng = np.random.default_rng(1)
    for name, spec in specs.items():
        for _ in range(5):
            ends = [sorted(rng.choice(n + 1, 2, replace=False)) for n in spec.shape]
            index = tuple(slice(int(a), int(b)) for a, b in ends)
            np.testing.assert_array_equal(source.read(name, index), want[name][index], err_msg=name)
