"""Reading PEFT folders: what is accepted, and for each refusal a message that names file, key or field."""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from slora_jax.errors import AdapterError
from slora_jax.lora import LoraAdapter, read_adapter
from tests.lora.peft_files import ALL_MODULES, TINY, write_peft_adapter

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
KEY_A, KEY_B = f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LARGEST = {
    np.dtype(np.float32): 3.4028234e38,
    np.dtype(np.float16): 65504.0,
    np.dtype(ml_dtypes.bfloat16): 3.3895314e38,
}


def read(path: Path, max_rank: int = 256) -> LoraAdapter:
    return read_adapter(path, TINY, max_rank=max_rank)


def refusal(path: Path, max_rank: int = 256) -> str:
    with pytest.raises(AdapterError) as refused:
        read(path, max_rank)
    assert str(path) not in refused.value.without_path, "a client would see where the folder lies"
    return str(refused.value)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_reads_what_was_written(dtype: Any, tmp_path: Path) -> None:
    ranks = {"v_proj": 3, "q_proj": 8, "down_proj": 16}
    written = write_peft_adapter(tmp_path, ranks=ranks, dtype=dtype, alpha=4)
    adapter = read(tmp_path)
    assert (adapter.path, adapter.rank, adapter.base_model) == (tmp_path, 16, "tests/tiny")
    assert adapter.target_modules == ("q_proj", "v_proj", "down_proj")
    assert adapter.ranks == ranks
    assert set(adapter.weights) == {(layer, module) for layer in range(3) for module in ranks}
    for place, weights in adapter.weights.items():
        assert weights.a.dtype == weights.b.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(weights.a, written.a[place])
        np.testing.assert_array_equal(weights.b, written.b[place])
        assert weights.scaling == 4 / ranks[place[1]]


@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
@pytest.mark.parametrize("adapter_name", ["", "default", "my-adapter_2"])
def test_spellings_of_keys(prefix: str, adapter_name: str, tmp_path: Path) -> None:
    written = write_peft_adapter(tmp_path, prefix=prefix, adapter_name=adapter_name)
    adapter = read(tmp_path)
    for place, weights in adapter.weights.items():
        np.testing.assert_array_equal(weights.a, written.a[place])
        np.testing.assert_array_equal(weights.b, written.b[place])


def test_any_subset_of_modules_in_any_subset_of_layers(tmp_path: Path) -> None:
    ranks = {(0, "o_proj"): 2, (2, "o_proj"): 9, (2, "up_proj"): 1}
    write_peft_adapter(tmp_path, ranks=ranks)
    adapter = read(tmp_path)
    assert {place: w.a.shape[0] for place, w in adapter.weights.items()} == ranks
    assert adapter.ranks == {"o_proj": 9, "up_proj": 1}


def test_symlinks_and_stray_files_are_fine(tmp_path: Path) -> None:
    write_peft_adapter(tmp_path / "store")
    (tmp_path / "adapter").mkdir()
    for name in (CONFIG, WEIGHTS):
        (tmp_path / "adapter" / name).symlink_to(tmp_path / "store" / name)
    for name in ("added_tokens.json", "tokenizer.json", "README.md", "adapter_model.bin"):
        (tmp_path / "adapter" / name).write_text("{}")
    assert read(tmp_path / "adapter").rank == 8


@pytest.mark.parametrize(
    "fields",
    [
        {
            "task_type": "CAUSAL_LM",
            "lora_dropout": 0.5,
            "inference_mode": True,
            "revision": "main",
            "peft_version": "9",
        },
        {"megatron_core": "megatron.core", "qalora_group_size": 16, "ensure_weight_tying": True},
        {"loftq_config": {}, "eva_config": {"rho": 2.0}, "corda_config": {"corda_method": "ipm"}},
        {
            "use_dora": False,
            "modules_to_save": None,
            "layer_replication": None,
            "trainable_token_indices": [],
        },
        {"a_field_of_the_future": None, "another_one": False, "and_more": {}, "and_none": 0},
        *({"init_lora_weights": init} for init in (True, False, "gaussian", "eva", "orthogonal", "mica")),
    ],
)
def test_harmless_fields(fields: dict[str, Any], tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, **fields)
    assert read(tmp_path).rank == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "ADALORA"),
        ("peft_type", None),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("use_dora", True),
        ("use_qalora", True),
        ("fan_in_fan_out", True),
        ("alora_invocation_tokens", [1, 2]),
        ("trainable_token_indices", [3]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("megatron_config", {"tensor_model_parallel_size": 2}),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 0.1}),
        ("monteclora_config", {"num_samples": 8}),
        ("velora_config", {"num_groups": 64}),
        ("a_field_of_the_future", True),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "OLoRA"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "something-new"),
        ("r", 0),
        ("r", "8"),
        ("r", True),
        ("lora_alpha", None),
        ("lora_alpha", float("nan")),
        ("lora_alpha", 10**400),
        ("use_rslora", "yes"),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"q_proj": 8.0}),
        ("rank_pattern", {"(q_proj": 8}),
        ("alpha_pattern", {"q_proj": "16"}),
        ("alpha_pattern", {"*": 8}),
        ("target_modules", 3),
        ("target_modules", [1]),
        ("target_modules", "(q_proj"),
        ("exclude_modules", {"q_proj": 1}),
        ("exclude_modules", "[q"),
        ("layers_to_transform", "0"),
        ("layers_to_transform", [True]),
        ("layers_pattern", ["layers"]),
        *(
            (field, value)
            for regex in ("(.+)+X", "a{99999999999999}", "(" * 4000 + ")" * 4000)
            for field, value in (
                ("target_modules", regex),
                ("exclude_modules", regex),
                ("rank_pattern", {regex: 8}),
                ("alpha_pattern", {regex: 8}),
                ("layers_pattern", regex),
            )
        ),
    ],
)
def test_fields_that_are_refused(field: str, value: Any, tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, **{field: value})
    message = refusal(tmp_path)
    assert str(tmp_path / CONFIG) in message
    assert field in message


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_patterns_for_every_module_are_read_soon_and_endless_ones_refused(field: str, tmp_path: Path) -> None:
    own: Any = {f"model.layers.{i}.mlp.{module}": 8 for i in range(126) for module in ALL_MODULES}
    write_peft_adapter(tmp_path, **{field: own})
    began = time.process_time()
    assert read(tmp_path).rank == 8
    assert time.process_time() - began < 5
    endless: Any = {f"q{i}": 8 for i in range(30_000)}
    write_peft_adapter(tmp_path, **{field: endless})
    assert f"field '{field}': has too many patterns" in refusal(tmp_path)


def test_a_regex_cannot_be_combined_with_layers(tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, target_modules=".*q_proj", layers_to_transform=[0])
    assert "'layers_to_transform'" in refusal(tmp_path)


def test_default_targets_need_a_known_model_type(tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, target_modules=None)  # q_proj and v_proj, PEFT's default for Llama
    assert read(tmp_path).target_modules == ("q_proj", "v_proj")
    with pytest.raises(AdapterError, match="'target_modules'"):
        read_adapter(tmp_path, _with(model_type="other"), max_rank=256)


def _with(**changes: Any) -> Any:
    return type(TINY)(**{**TINY.__dict__, **changes})


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no adapter at '.*absent'"):
        read(tmp_path / "absent")


def test_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert f"{tmp_path / 'file'}: not a folder" in refusal(tmp_path / "file")


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_missing_and_irregular_files(name: str, tmp_path: Path) -> None:
    write_peft_adapter(tmp_path)
    (tmp_path / name).unlink()
    assert f"{name} is missing" in refusal(tmp_path)
    (tmp_path / name).symlink_to(tmp_path / "dangling")
    assert f"{name} is missing" in refusal(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)  # opening it would wait for ever
    assert f"{tmp_path / name}: not a regular file" in refusal(tmp_path)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_unreadable_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    write_peft_adapter(tmp_path)
    opened = Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, *mode: (denied if self.name == name else opened)(self, *mode)
    )
    assert f"{tmp_path / name}: cannot be read: Permission denied" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b'{"r": 8,\n "lora_alpha": }', "line 2, column 16"),
        (b"", "line 1, column 1"),
        (b'{"r": "\xff"}', "utf-8"),
        (b'{"r": ' + b"9" * 5000 + b"}", "digits"),
        (b"[" * 100_000, "recursion"),
        (b"[1]", "JSON object"),
    ],
)
def test_invalid_json(text: bytes, where: str, tmp_path: Path) -> None:
    write_peft_adapter(tmp_path)
    (tmp_path / CONFIG).write_bytes(text)
    message = refusal(tmp_path)
    assert str(tmp_path / CONFIG) in message
    assert where in message


def test_a_config_of_any_size_is_refused_without_reading_it(tmp_path: Path) -> None:
    write_peft_adapter(tmp_path)
    os.truncate(tmp_path / CONFIG, 1 << 40)  # sparse
    message = refusal(tmp_path)
    assert f"{tmp_path / CONFIG}: has more than 1048576 bytes" in message
    assert "save the adapter again" in message


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("opened",))


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_pickles_are_never_opened(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_peft_adapter(tmp_path / "a")
    (tmp_path / "a" / WEIGHTS).unlink()
    (tmp_path / "a" / name).write_bytes(pickle.dumps(_Bomb()))
    message = refusal(tmp_path / "a")
    assert name in message
    assert "convert it: safetensors.torch.save_file" in message
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize("damage", ["empty", "header", "huge header", "cut", "longer", "not json", "offsets"])
def test_corrupt_safetensors(damage: str, tmp_path: Path) -> None:
    write_peft_adapter(tmp_path)
    file = tmp_path / WEIGHTS
    data = file.read_bytes()
    bad = {
        "empty": b"",
        "header": data[:20],
        "huge header": b"\xff" * 8 + data[8:],
        "cut": data[:-5],
        "longer": data + b"12345678",
        "not json": data[:8] + b"?" * 40 + data[48:],
        "offsets": data.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1),
    }[damage]
    assert bad != data
    file.write_bytes(bad)
    assert f"{file}: corrupt or cut short" in refusal(tmp_path)


def _like(key: str) -> np.ndarray[Any, Any]:
    return np.ones((8, 32), np.float32) if "lora_A" in key else np.ones((32, 8), np.float32)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("base_model.model.lm_head.lora_A.weight", "LoRA on lm_head is not supported"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "LoRA on embed_tokens is not supported"),
        ("base_model.model.model.embed_tokens.weight", "retrained weights of embed_tokens"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", "lora_bias"),
        ("base_model.model.model.layers.0.self_attn.q_proj.bias", "biases"),
        ("base_model.model.model.norm.modules_to_save.weight", "modules_to_save"),
        ("base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight", "has 3 layers only"),
        ("base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight", "matches no module"),
        ("base_model.model.model.layers.0.mlp.q_proj.lora_A.weight", "matches no module"),
        ("base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight", "matches no module"),
        ("base_model.model.transformer.h.0.attn.c_attn.lora_A.weight", "matches no module"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.x.y.weight", "matches no module"),
        ("model.model.layers.0.self_attn.q_proj.lora_A.weight", "matches no module"),
        (f"base_model.model.model.layers.{'9' * 5000}.self_attn.q_proj.lora_A.weight", "has 3 layers only"),
    ],
)
def test_one_key_that_matches_no_module(key: str, reason: str, tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, tensors={key: _like(key)})
    message = refusal(tmp_path)
    assert f"{tmp_path / WEIGHTS}: key '{key}'" in message
    assert reason in message


def test_several_unmatched_keys_are_counted(tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, tensors={f"x{i}": _like("lora_A") for i in range(3)})
    assert "(and 2 more such keys)" in refusal(tmp_path)


@pytest.mark.parametrize(("key", "lost"), [(KEY_A, "lora_A"), (KEY_B, "lora_B")])
def test_one_side_without_the_other(key: str, lost: str, tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, tensors={key: None})
    message = refusal(tmp_path)
    assert f"key '{KEY_B if key == KEY_A else KEY_A}'" in message
    assert f"has no {lost}" in message


def test_two_adapters_in_one_file(tmp_path: Path) -> None:
    twice = f"{Q0}.lora_A.default.weight"
    write_peft_adapter(tmp_path / "twice", tensors={twice: _like(twice)})
    message = refusal(tmp_path / "twice")
    assert f"'{KEY_A}'" in message
    assert f"'{twice}'" in message
    k = "base_model.model.model.layers.0.self_attn.k_proj.lora_{}.other.weight"
    write_peft_adapter(tmp_path / "mixed", tensors={k.format(s): _like(f"lora_{s}") for s in "AB"})
    message = refusal(tmp_path / "mixed")
    assert "belong to two adapters" in message
    assert ".other.weight" in message


def test_no_tensors(tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, ranks={})
    assert f"{tmp_path / WEIGHTS}: holds no LoRA tensors" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"target_modules": ["v_proj"]}, "target_modules"),
        ({"target_modules": ".*v_proj"}, "target_modules"),
        ({"exclude_modules": ["q_proj"]}, "exclude_modules"),
        ({"exclude_modules": ".*q_proj"}, "exclude_modules"),
        ({"layers_to_transform": [1, 2]}, "layers_to_transform"),
        ({"layers_to_transform": [0, 1, 2], "layers_pattern": "h"}, "layers_to_transform"),
    ],
)
def test_a_tensor_that_the_config_leaves_out(fields: dict[str, Any], field: str, tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, **fields)
    message = refusal(tmp_path)
    assert f"{tmp_path / WEIGHTS}: key '{KEY_A}'" in message
    assert f"(field '{field}')" in message


@pytest.mark.parametrize("targets", [["q_proj", "v_proj", "o_proj"], r".*\.[qvo]_proj", "all-linear"])
def test_a_targeted_module_without_tensors(targets: Any, tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, target_modules=targets)
    message = refusal(tmp_path)
    assert f"{tmp_path / WEIGHTS}: no key for model.layers.0.self_attn." in message
    assert "'target_modules'" in message
    assert "'tests/tiny'" in message


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_a_targeted_head_or_embedding(name: str, tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, target_modules=["q_proj", "v_proj", name])
    message = refusal(tmp_path)
    assert name in message
    assert "'target_modules'" in message


def test_ranks_of_file_and_config_differ(tmp_path: Path) -> None:
    write_peft_adapter(tmp_path / "r", r=4, rank_pattern={})
    message = refusal(tmp_path / "r")
    assert f"key '{KEY_A}': rank 8, but {CONFIG} says 4 (field 'r')" in message
    write_peft_adapter(tmp_path / "pattern", rank_pattern={"0.*q_proj": 9})
    message = refusal(tmp_path / "pattern")
    assert "says 9 (field 'rank_pattern['0.*q_proj']')" in message


def test_ranks_of_a_and_b_differ(tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, tensors={KEY_B: np.ones((32, 7), np.float32)})
    message = refusal(tmp_path)
    assert f"key '{KEY_B}': rank 7" in message
    assert f"'{KEY_A}' has rank 8" in message


@pytest.mark.parametrize(
    ("key", "shape", "wanted"),
    [(KEY_A, (8, 64), "[r, 32]"), (KEY_B, (64, 8), "[32, r]"), (KEY_A, (32, 8), "[r, 32]")],
)
def test_another_base_model(key: str, shape: tuple[int, int], wanted: str, tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, tensors={key: np.ones(shape, np.float32)})
    message = refusal(tmp_path)
    assert f"{tmp_path / WEIGHTS}: key '{key}': shape {list(shape)}" in message
    assert wanted in message
    assert "base_model_name_or_path 'tests/tiny'" in message


@pytest.mark.parametrize("shape", [(8,), (0,), (8, 32, 1)])
def test_not_a_matrix(shape: tuple[int, ...], tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, tensors={KEY_A: np.ones(shape, np.float32)})
    assert f"key '{KEY_A}': shape {list(shape)} is not a matrix" in refusal(tmp_path)


def test_rank_zero(tmp_path: Path) -> None:
    empty = {KEY_A: np.ones((0, 32), np.float32), KEY_B: np.ones((32, 0), np.float32)}
    write_peft_adapter(tmp_path, tensors=empty)
    assert f"key '{KEY_A}': rank 0" in refusal(tmp_path)


def test_rank_limits(tmp_path: Path) -> None:
    write_peft_adapter(tmp_path / "256", ranks={"o_proj": 256})
    assert read(tmp_path / "256").rank == 256
    message = refusal(tmp_path / "256", max_rank=255)
    assert "o_proj.lora_A.weight': rank 256 is above max_lora_rank 255; raise it in EngineConfig" in message
    write_peft_adapter(tmp_path / "257", ranks={"o_proj": 257})
    assert "o_proj.lora_A.weight': rank 257 is above 256" in refusal(tmp_path / "257", max_rank=1000)


@pytest.mark.parametrize(
    "dtype", [np.float64, np.int8, np.int32, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
)
def test_other_dtypes(dtype: Any, tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, tensors={KEY_B: np.ones((32, 8), dtype)})
    message = refusal(tmp_path)
    assert f"key '{KEY_B}': dtype " in message
    assert "float32, float16 or bfloat16" in message


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_inf(dtype: Any, value: float, tmp_path: Path) -> None:
    bad = np.ones((32, 8), dtype)
    bad[31, 2] = value
    write_peft_adapter(tmp_path, dtype=dtype, tensors={KEY_B: bad})
    message = refusal(tmp_path)
    assert f"{tmp_path / WEIGHTS}: key '{KEY_B}': {value} at [31, 2]" in message


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_largest_numbers_are_finite(dtype: Any, tmp_path: Path) -> None:
    largest = np.full((32, 8), _LARGEST[np.dtype(dtype)], dtype)
    write_peft_adapter(tmp_path, dtype=dtype, tensors={KEY_B: -largest})
    assert (read(tmp_path).weights[0, "q_proj"].b == -largest).all()


def test_the_helper_writes_all_modules(tmp_path: Path) -> None:
    write_peft_adapter(
        tmp_path, ranks=dict.fromkeys(ALL_MODULES, 2), layers=[1], target_modules=list(ALL_MODULES)
    )
    assert len(load_file(tmp_path / WEIGHTS)) == 2 * 7
    assert json.loads((tmp_path / CONFIG).read_text())["layers_to_transform"] == [1]
    assert read(tmp_path).target_modules == ALL_MODULES
