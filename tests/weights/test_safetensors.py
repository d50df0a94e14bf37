"""HF folders: layouts, dtypes, shardings, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from slora_jax.errors import CheckpointError
from slora_jax.models.params import checkpoint_specs
from slora_jax.sharding.mesh import make_mesh
from slora_jax.sharding.rules import named_sharding
from slora_jax.weights import load_model_config, resolve_model
from slora_jax.weights.hf import SafetensorsSource
from slora_jax.weights.source import to_stored
from tests.weights import tiny
from tests.weights.tiny import assert_equal, assert_reads_any_block, load


@pytest.mark.parametrize("files", [0, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_files_and_dtypes(tmp_path: Path, files: int, dtype: Any) -> None:
    tensors = tiny.hf_tensors()
    assert_equal(load(tiny.write_hf(tmp_path, tensors, files=files, dtype=dtype)), tiny.canonical(tensors))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_hold_their_part_only(tmp_path: Path, tp: int) -> None:
    tensors = tiny.hf_tensors()
    params = load(tiny.write_hf(tmp_path, tensors), tp=tp, dtype="bfloat16")
    assert_equal(params, tiny.canonical(tensors))
    config = load_model_config(resolve_model(tmp_path))
    for name, spec in checkpoint_specs(config).items():
        assert params[name].dtype == np.dtype("bfloat16")
        assert params[name].sharding == named_sharding(make_mesh(tp), spec.axes, spec.shape)
    assert params["layers.0.q_proj"].addressable_shards[0].data.shape == (tiny.D, tiny.H // tp, tiny.E)
    assert params["layers.0.down_proj"].addressable_shards[0].data.shape == (tiny.F // tp, tiny.D)


def test_read_gives_any_block(tmp_path: Path) -> None:
    tensors = tiny.hf_tensors()
    specs = checkpoint_specs(load_model_config(resolve_model(tiny.write_hf(tmp_path, tensors))))
    source, want = SafetensorsSource(tmp_path, specs), tiny.canonical(tensors)
    assert_reads_any_block(source, specs, want)


def test_to_stored_inverts_read() -> None:
    tensors = tiny.hf_tensors()
    want = tiny.canonical(tensors)
    q = to_stored("layers.1.q_proj", want["layers.1.q_proj"])
    o = to_stored("layers.1.o_proj", want["layers.1.o_proj"])
    np.testing.assert_array_equal(q, tensors["model.layers.1.self_attn.q_proj.weight"])
    np.testing.assert_array_equal(o, tensors["model.layers.1.self_attn.o_proj.weight"])


def test_tied_head_and_rotary_buffers_are_allowed(tmp_path: Path) -> None:
    tensors = tiny.hf_tensors(tied=True)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(tiny.E // 2, np.float32),
    }
    tiny.write_hf(tmp_path, tensors | extra, tie_word_embeddings=True)
    assert_equal(load(tmp_path), tiny.canonical(tensors))


def test_progress_counts_arrays(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    tiny.write_hf(tmp_path, tiny.hf_tensors())
    load(tmp_path, progress=lambda *event: seen.append(event))
    total = 3 + 9 * tiny.L
    assert seen == [("loading weights", done, total) for done in range(total + 1)]


def test_weights_do_not_alias_the_file(tmp_path: Path) -> None:
    tensors = tiny.hf_tensors()
    params = load(tiny.write_hf(tmp_path, tensors))
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as handle:
        handle.write(bytes(file.stat().st_size))
    assert_equal(params, tiny.canonical(tensors))


def test_problems_name_file_tensor_and_shapes(tmp_path: Path) -> None:
    tensors = tiny.hf_tensors()
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((tiny.D, tiny.F), np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(tiny.H * tiny.E, np.float32)
    with pytest.raises(CheckpointError) as error:
        load(tiny.write_hf(tmp_path, tensors))
    lines = str(error.value).splitlines()
    file = tmp_path / "model.safetensors"
    assert lines[0] == f"{tmp_path}: tensor 'model.norm.weight' [32] is missing"
    assert set(lines[1:]) == {
        f"{file}: tensor 'model.layers.0.mlp.up_proj.weight' has shape [32, 96], the config wants [96, 32]",
        f"{file}: tensor 'model.layers.0.self_attn.q_proj.bias' [64] is no part of this model",
    }


def test_many_problems_are_counted(tmp_path: Path) -> None:
    tiny.write_hf(tmp_path, {"x": np.zeros(1, np.float32)})
    with pytest.raises(CheckpointError, match="and 17 more"):
        load(tmp_path)


def test_untied_head_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' \[64, 32\] is missing"):
        load(tiny.write_hf(tmp_path, tiny.hf_tensors(tied=True)))


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is I8; supported: F32, F16, BF16"):
        load(tiny.write_hf(tmp_path, tiny.hf_tensors(), dtype=np.int8))


def test_why_a_file_cannot_be_opened_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_hf(tmp_path, tiny.hf_tensors())
    opened: Any = Path.open

    def denied(path: Path, *mode: str, **how: Any) -> Any:
        if path.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *mode, **how)

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read: Permission denied$"):
        load(tmp_path)


def test_cut_short_file(tmp_path: Path) -> None:
    file = tiny.write_hf(tmp_path, tiny.hf_tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        load(tmp_path)


def test_missing_shard_file(tmp_path: Path) -> None:
    tiny.write_hf(tmp_path, tiny.hf_tensors(), files=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00003.safetensors: is named by .* but missing"
    ):
        load(tmp_path)


def test_index_must_tell_the_truth(tmp_path: Path) -> None:
    tiny.write_hf(tmp_path, tiny.hf_tensors(), files=2)
    index = tmp_path / "model.safetensors.index.json"
    placed = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": placed | {"ghost": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(CheckpointError, match="tensor 'ghost' is missing, though"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": placed | {"ghost": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        load(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        load(tmp_path)


def test_one_tensor_in_two_files(tmp_path: Path) -> None:
    tensors = tiny.hf_tensors()
    tiny.write_hf(tmp_path, tensors, files=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "model-extra.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'model.norm.weight' is also in"):
        load(tmp_path)


def test_generation_config_names_the_eos_ids(tmp_path: Path) -> None:
    tiny.write_hf(tmp_path, tiny.hf_tensors())
    assert load_model_config(resolve_model(tmp_path)).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_model_config(resolve_model(tmp_path)).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised weights \(gptq\)"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_key_value_heads": 3}, "must divide"),
    ],
)
def test_configs_are_refused_with_file_and_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    resolved = resolve_model(tiny.write_hf(tmp_path, tiny.hf_tensors(), **change))
    with pytest.raises(CheckpointError, match=message) as error:
        load_model_config(resolved)
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_config_must_be_a_json_object(tmp_path: Path, text: str) -> None:
    tiny.write_hf(tmp_path, tiny.hf_tensors())
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model_config(resolve_model(tmp_path))
