"""GGUF files: quantised blocks, llama.cpp's row order, metadata, and every refusal."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from slora_jax.errors import CheckpointError
from slora_jax.models.params import checkpoint_specs
from slora_jax.sharding.mesh import make_mesh
from slora_jax.weights import load_checkpoint, load_model_config, resolve_model
from slora_jax.weights.gguf import GgufSource, read_gguf
from tests.weights import tiny
from tests.weights.tiny import assert_equal, assert_reads_any_block, load


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0])
def test_types_and_shardings(tmp_path: Path, kind: Kind, tp: int) -> None:
    file = tmp_path / "tiny.gguf"
    seen = tiny.write_gguf(file, tiny.hf_tensors(), kind=kind)
    assert_equal(load(file, tp=tp), tiny.canonical(seen))


def test_read_gives_any_block(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    want = tiny.canonical(tiny.write_gguf(file, tiny.hf_tensors(), kind=Kind.Q8_0))
    specs = checkpoint_specs(load_model_config(resolve_model(file)))
    source = GgufSource(file, specs)
    assert_reads_any_block(source, specs, want)


def test_config(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf", tiny.hf_tensors())
    tiny.write_hf(tmp_path / "hf", tiny.hf_tensors())
    from_gguf = load_model_config(resolve_model(tmp_path / "tiny.gguf"))
    assert from_gguf == load_model_config(resolve_model(tmp_path / "hf"))
    tiny.write_gguf(tmp_path / "tied.gguf", tiny.hf_tensors(tied=True))
    assert load_model_config(resolve_model(tmp_path / "tied.gguf")).tie_word_embeddings
    assert "lm_head" not in load(tmp_path / "tied.gguf")


def test_weights_do_not_alias_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    tensors = tiny.hf_tensors()
    tiny.write_gguf(file, tensors)
    params = load(file)
    with file.open("r+b") as handle:
        handle.write(bytes(file.stat().st_size))
    assert_equal(params, tiny.canonical(tensors))


def test_per_layer_lists_that_agree(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    tiny.write_gguf(file, tiny.hf_tensors(), metadata={"attention.head_count_kv": [tiny.K] * tiny.L})
    assert load_model_config(resolve_model(file)).num_key_value_heads == tiny.K


def config_with(tmp_path: Path, extra: dict[str, tiny.Array] | None = None, **metadata: Any) -> Any:
    file = tmp_path / "tiny.gguf"
    tiny.write_gguf(file, tiny.hf_tensors(), metadata=metadata, extra=extra)
    return load_model_config(resolve_model(file))


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({}, None),
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, metadata: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    assert config_with(tmp_path, **metadata).rope_scaling == scaling


def test_yarn_attention_factor_is_absolute_in_hf(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.attn_factor": 0.5,
    }
    scaling = config_with(tmp_path, **metadata).rope_scaling
    assert scaling["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * np.log(4.0)))


def llama3_factors(factor: float, low: float, high: float, original: int) -> tiny.Array:
    """A loop as in llama.cpp's converter (LlamaModel.generate_extra_tensors)."""
    out = []
    for i in range(0, tiny.E, 2):
        wavelength = 2 * np.pi * 10000.0 ** (i / tiny.E)
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_from_its_factors(tmp_path: Path, factor: float) -> None:
    factors = llama3_factors(factor, 1.0, 4.0, 8192)
    assert config_with(tmp_path, {"rope_freqs.weight": factors}).rope_scaling == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_unit_factors_are_no_scaling(tmp_path: Path) -> None:
    assert config_with(tmp_path, {"rope_freqs.weight": np.ones(tiny.E // 2, np.float32)}).rope_scaling is None


@pytest.mark.parametrize(
    "factors",
    [llama3_factors(8.0, 1.0, 2.0, 8192), np.full(tiny.E // 2, 3.0, np.float32), np.full(3, 8.0, np.float32)],
)
def test_other_factors_are_refused(tmp_path: Path, factors: tiny.Array) -> None:
    with pytest.raises(CheckpointError, match="not Llama 3's scaling"):
        config_with(tmp_path, {"rope_freqs.weight": factors})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"rope.dimension_count": 8}, "rope.dimension_count is 8, only 16"),
        ({"attention.value_length": 8}, "value_length is 8"),
        ({"expert_count": 8}, "expert_count is 8, only 0"),
        ({"attention.sliding_window": 64}, "sliding_window 64"),
        ({"attention.head_count_kv": [1, 2]}, "differs between layers"),
        ({"logit_scale": 0.5}, "llama.logit_scale is not supported"),
        ({"context_length": None}, "llama.context_length is missing"),
        ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"attention.head_count_kv": 3}, "must divide"),
    ],
)
def test_metadata_is_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        config_with(tmp_path, **metadata)
    assert str(tmp_path / "tiny.gguf") in str(error.value)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "x.gguf", tiny.hf_tensors(), architecture="qwen2")
    with pytest.raises(CheckpointError, match="architecture 'qwen2' is not supported"):
        load_model_config(resolve_model(tmp_path / "x.gguf"))


def test_extra_and_misshapen_tensors(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    tensors = tiny.hf_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((tiny.D, tiny.F), np.float32)
    bias = np.zeros(tiny.H * tiny.E, np.float32)
    tiny.write_gguf(file, tensors, extra={"blk.0.attn_q.bias": bias})
    with pytest.raises(CheckpointError) as error:
        load(file)
    assert str(error.value).splitlines() == [
        f"{file}: tensor 'blk.1.ffn_up.weight' has shape [32, 96], the config wants [96, 32]",
        f"{file}: tensor 'blk.0.attn_q.bias' [64] is no part of this model",
    ]


def test_types_that_have_no_dequantiser(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    tensors = tiny.hf_tensors(tied=True)
    norm = tensors.pop("model.norm.weight")
    tiny.write_gguf(file, tensors, extra={"output_norm.weight": norm.astype(np.int32)})
    with pytest.raises(CheckpointError, match=r"'output_norm.weight' has type I32"):
        load(file)


def test_broken_files(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    tiny.write_gguf(file, tiny.hf_tensors())
    whole = file.read_bytes()
    for data in (b"", b"no", b"no GGUF file", whole[:200], whole[:-1000]):
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match="not a readable GGUF file"):
            load(file)


def test_long_token_lists_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    tiny.write_gguf(file, tiny.hf_tensors(), tokens=[f"token {i}" for i in range(5000)])
    header, whole = read_gguf(file), read_gguf(file, whole=True)
    assert [t.name for t in header.tensors] == [t.name for t in whole.tensors]
    assert [t.data_offset for t in header.tensors] == [t.data_offset for t in whole.tensors]
    tokens = whole.get_field("tokenizer.ggml.tokens")
    assert tokens is not None
    assert tokens.contents()[4999] == "token 4999"
    assert_equal(load(file), tiny.canonical(tiny.hf_tensors()))


SMOLLM2_CRC32 = {  # of float32 in canonical layout, made from what transformers 5.24's GGUF loader returns
    "embed_tokens": 964192520,
    "norm": 3330350700,
    "layers.17.input_layernorm": 198010968,
    "layers.0.q_proj": 3507082888,
    "layers.29.k_proj": 3120164220,
    "layers.11.v_proj": 3563106444,
    "layers.5.o_proj": 3072726553,
    "layers.8.gate_proj": 1060368090,
    "layers.20.down_proj": 3387719104,
}


def test_smollm2_is_what_transformers_loads(smollm2_gguf: Path) -> None:
    resolved = resolve_model(smollm2_gguf)
    config = load_model_config(resolved)
    assert (config.hidden_size, config.num_hidden_layers, config.rope_theta) == (576, 30, 100000.0)
    assert config.tie_word_embeddings
    source = GgufSource(smollm2_gguf, checkpoint_specs(config))
    specs = checkpoint_specs(config)
    for name, crc in SMOLLM2_CRC32.items():
        whole = source.read(name, tuple(slice(0, n) for n in specs[name].shape))
        assert zlib.crc32(np.ascontiguousarray(whole, np.float32).tobytes()) == crc, name


def test_smollm2_loads_sharded(smollm2_gguf: Path) -> None:
    resolved = resolve_model(smollm2_gguf)
    config = load_model_config(resolved)
    params = load_checkpoint(resolved, config, make_mesh(3, jax.devices()[:3]), "bfloat16")
    assert {s.data.shape for s in params["layers.29.q_proj"].addressable_shards} == {(576, 3, 64)}
    assert sum(a.size for a in params.values()) == 134_515_008
