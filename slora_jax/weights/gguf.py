"""GGUF files of the llama architecture: metadata to ModelConfig, quantised blocks to floats."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

from slora_jax.config import ModelConfig
from slora_jax.errors import CheckpointError
from slora_jax.models.params import ParamSpec
from slora_jax.weights.source import Array, Index, MatrixSource, StoredTensor

_NAMES = {
    "input_layernorm": "attn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
    "o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down",
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
}  # fmt: skip
_ROPE_FREQS = "rope_freqs.weight"
_LONG_ARRAY = 4096  # entries; only a tokenizer's lists are longer
_KNOWN_KEYS = {  # of "llama."; any other could change the result, so it is refused
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.sliding_window",
    "attention.causal", "block_count", "context_length", "embedding_length", "feed_forward_length",
    "vocab_size", "expert_count", "expert_used_count", "rope.dimension_count", "rope.freq_base",
    "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "tensor_data_layout",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """`layers.3.q_proj` -> `blk.3.attn_q.weight`."""
    prefix, _, last = name.rpartition(".")
    return f"{prefix.replace('layers', 'blk')}.{_NAMES[last]}.weight".lstrip(".")


class _WholeReader(GGUFReader):
    """GGUFReader over a plain array: it slices `data` for every value, and np.memmap slices slowly."""

    @property  # type: ignore[override]
    def data(self) -> Array:
        return self._data

    @data.setter
    def data(self, value: Array) -> None:
        self._data = np.asarray(value)


class _HeaderReader(_WholeReader):
    """GGUFReader that passes over the tokenizer's lists: some 100,000 NumPy views that weights never need."""

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type == GGUFValueType.ARRAY and self.byte_order == "I":
            item = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
            count = int(self._get(orig_offs + 4, np.uint64)[0])
            if count > _LONG_ARRAY and item != GGUFValueType.ARRAY:
                return (
                    self._array_bytes(orig_offs + 12, item, count) + 12,
                    [],
                    [],
                    [GGUFValueType.ARRAY, item],
                )
        return super()._get_field_parts(orig_offs, raw_type)

    def _array_bytes(self, offset: int, item: GGUFValueType, count: int) -> int:
        if item != GGUFValueType.STRING:
            return count * np.dtype(self.gguf_scalar_to_np[item]).itemsize
        data, end = memoryview(self.data), offset
        for _ in range(count):
            end += 8 + int.from_bytes(data[end : end + 8], sys.byteorder)
        return end - offset


def read_gguf(path: Path, *, whole: bool = False) -> GGUFReader:
    """The file's metadata and (memory-mapped) tensors; without the tokenizer's lists unless `whole`.

    Raises CheckpointError for what cannot be read: not GGUF, cut short, byte order, one part of several.
    """
    try:
        reader = (_WholeReader if whole else _HeaderReader)(path)
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file ({error}); download it again") from error
    if (reader.endianess == GGUFEndian.LITTLE) != (sys.byteorder == "little"):
        raise CheckpointError(
            f"{path}: its byte order is not this machine's; convert it with gguf-convert-endian"
        )
    if int(_value(reader, "split.count") or 0) > 1:
        raise CheckpointError(f"{path}: one part of a split file; join it with `llama-gguf-split --merge`")
    return reader


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


class _Metadata:
    """The "llama." keys of one file, with the checks that every use needs."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path, self.reader = path, reader
        architecture = _value(reader, "general.architecture")
        if architecture != "llama":
            raise CheckpointError(
                f"{path}: general.architecture '{architecture}' is not supported; supported: 'llama'"
            )
        names = [key.removeprefix("llama.") for key in reader.fields if key.startswith("llama.")]
        if unknown := sorted(set(names) - _KNOWN_KEYS):
            raise CheckpointError(
                f"{path}: metadata {', '.join('llama.' + n for n in unknown)} is not supported"
            )

    def get(self, name: str) -> Any:
        """The value of llama.`name`, or None; a per-layer list whose entries agree counts as one value."""
        value = _value(self.reader, f"llama.{name}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise CheckpointError(
                    f"{self.path}: llama.{name} differs between layers, which is not supported"
                )
            return value[0]
        return value

    def need(self, name: str) -> Any:
        if (value := self.get(name)) is None:
            raise CheckpointError(f"{self.path}: metadata llama.{name} is missing")
        return value

    def demand(self, name: str, *allowed: Any) -> None:
        """Refuses a value that this model does not compute; an absent one is fine."""
        if (value := self.get(name)) is not None and value not in allowed:
            wanted = " or ".join(str(a) for a in allowed)
            raise CheckpointError(f"{self.path}: llama.{name} is {value}, only {wanted} is supported")


def load_gguf_config(path: Path) -> ModelConfig:
    """The ModelConfig that a llama GGUF file describes.

    The head is tied where there is no `output.weight`; eos ids are the tokenizer's eos, eot and eom.
    Raises CheckpointError for other architectures and for anything that this model does not compute.
    """
    reader = read_gguf(path)
    meta = _Metadata(path, reader)
    tensors = {t.name: t for t in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{path}: tensor 'token_embd.weight' is missing")
    heads, hidden = int(meta.need("attention.head_count")), int(meta.need("embedding_length"))
    head_dim = int(meta.get("attention.key_length") or hidden // max(heads, 1))
    context = int(meta.need("context_length"))
    meta.demand("attention.value_length", head_dim)
    meta.demand("rope.dimension_count", head_dim)
    meta.demand("expert_count", 0)
    meta.demand("expert_used_count", 0)
    meta.demand("attention.causal", True)
    if (window := int(meta.get("attention.sliding_window") or 0)) and window < context:
        raise CheckpointError(f"{path}: llama.attention.sliding_window {window} is not supported")
    theta = _shortest(meta.get("rope.freq_base") or 10000.0)
    eos = [_value(reader, f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    try:
        return ModelConfig(
            vocab_size=int(tensors["token_embd.weight"].shape[1]),
            hidden_size=hidden,
            num_hidden_layers=int(meta.need("block_count")),
            num_attention_heads=heads,
            num_key_value_heads=int(meta.get("attention.head_count_kv") or heads),
            head_dim=head_dim,
            intermediate_size=int(meta.need("feed_forward_length")),
            max_position_embeddings=context,
            rms_norm_eps=_shortest(meta.need("attention.layer_norm_rms_epsilon")),
            rope_theta=theta,
            rope_scaling=_rope_scaling(meta, tensors, theta, head_dim),
            tie_word_embeddings="output.weight" not in tensors,
            bos_token_id=_value(reader, "tokenizer.ggml.bos_token_id"),
            eos_token_ids=tuple(dict.fromkeys(int(e) for e in eos if e is not None)),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _shortest(value: float) -> float:
    """A float32 as the decimal that was meant: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def _rope_scaling(
    meta: _Metadata, tensors: Mapping[str, Any], theta: float, head_dim: int
) -> dict[str, Any] | None:
    """HF's rope_scaling: from llama.rope.scaling.* (linear, yarn), or llama3 from its tensor of factors."""
    kind = meta.get("rope.scaling.type") or "none"
    factor = float(meta.get("rope.scaling.factor") or meta.get("rope.scale_linear") or 1.0)
    original = meta.get("rope.scaling.original_context_length")
    if _ROPE_FREQS in tensors:
        if kind != "none" or factor != 1.0:
            raise CheckpointError(
                f"{meta.path}: has both '{_ROPE_FREQS}' and llama.rope.scaling '{kind}' {factor}"
            )
        tensor = tensors[_ROPE_FREQS]
        factors = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float64).ravel()
        return _llama3_scaling(meta.path, factors, theta, head_dim, int(original or 8192))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        if factor != 1.0 and meta.get("rope.scaling.type") is None:
            return {"rope_type": "linear", "factor": factor}  # files older than rope.scaling.type
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise CheckpointError(
            f"{meta.path}: llama.rope.scaling.type '{kind}' is not supported; linear and yarn are"
        )
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if original is not None:
        scaling["original_max_position_embeddings"] = int(original)
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if (beta := meta.get(f"rope.scaling.{theirs}")) is not None:
            scaling[ours] = _shortest(beta)
    if (attention := meta.get("rope.scaling.attn_factor")) is not None and attention != 1.0:
        # llama.cpp multiplies this into YaRN's own 0.1 ln(factor) + 1; HF's attention_factor replaces it
        scaling["attention_factor"] = _shortest(attention) * (0.1 * math.log(factor) + 1.0)
    return scaling


def _llama3_scaling(
    path: Path, factors: Array, theta: float, head_dim: int, original: int
) -> dict[str, Any] | None:
    """The llama3 rope_scaling that divides frequencies by `factors` [head_dim / 2]; None where all are 1.

    llama.cpp stores the divisors instead of the four numbers; every Llama 3 has low 1, high 4, so those are
    tried and the result compared. Raises CheckpointError where the tensor is something else.
    """
    factor = float(np.round(factors.max(), 4))
    if np.all(factors == 1.0):
        return None
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    wanted = 1.0 / ((1.0 - smooth) / factor + smooth)
    if factors.shape != wanted.shape or not np.allclose(factors, wanted, rtol=1e-4, atol=0):
        raise CheckpointError(
            f"{path}: '{_ROPE_FREQS}' is not Llama 3's scaling (low_freq_factor 1, high_freq_factor 4, "
            f"original context {original}); load the Hugging Face folder of this model instead"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }


class GgufSource(MatrixSource):
    """The tensors of a GGUF file, dequantised block by block, in Hugging Face's row order.

    llama.cpp interleaves the two halves of every q and k head (its RoPE rotates neighbours, HF's rotates
    halves); reading undoes that. Reference: `permute` in llama.cpp's convert_hf_to_gguf.py.
    """

    def __init__(self, path: Path, specs: Mapping[str, ParamSpec]) -> None:
        self._path = path
        self._tensors = {t.name: t for t in read_gguf(path).tensors}
        stored = {
            name: StoredTensor(path, tuple(int(s) for s in reversed(t.shape)), t.tensor_type.name)
            for name, t in self._tensors.items()
        }
        self._head_dims = {
            gguf_name(name): spec.shape[2]
            for name, spec in specs.items()
            if name.endswith((".q_proj", ".k_proj"))
        }
        extra = re.compile(rf"{re.escape(_ROPE_FREQS)}|blk\.\d+\.attn_rot_embd\.weight")
        super().__init__(specs, stored, gguf_name, path, extra)

    def read_stored(self, name: str, index: Index) -> Array:
        tensor = self._tensors[name]
        block, size = GGML_QUANT_SIZES[tensor.tensor_type]
        raw = tensor.data.view(np.uint8).reshape(*tensor.data.shape[:-1], -1)
        start, stop, _ = index[-1].indices(int(tensor.shape[0]))
        first, last = start // block, -(-stop // block)  # whole quantisation blocks that cover the columns
        raw = np.ascontiguousarray(raw[(*index[:-1], slice(first * size, last * size))])
        try:
            values: Array = dequantize(raw, tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self._path}: tensor '{name}' has type {tensor.tensor_type.name}, which the gguf package "
                "cannot dequantise: upgrade it, or give a file in another quantisation"
            ) from error
        values = values[..., start - first * block : stop - first * block]
        if (e := self._head_dims.get(name)) is not None:  # [heads, e/2, 2, d] -> [heads, 2, e/2, d]
            values = values.reshape(-1, e // 2, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        return values


def write_tokenizer_gguf(source: Path, target: Path) -> None:
    """Writes the tokenizer of a GGUF file alone: all its `tokenizer.*` metadata, no tensors."""
    reader = read_gguf(source, whole=True)
    writer = GGUFWriter(target, str(_value(reader, "general.architecture")))
    for key, field in reader.fields.items():
        if key.startswith("tokenizer."):
            kinds = field.types
            writer.add_key_value(key, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
