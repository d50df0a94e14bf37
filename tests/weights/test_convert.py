"""Conversion: round trips through both formats, tokenizers kept, nothing half-written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from slora_jax.errors import CheckpointError
from slora_jax.models.params import checkpoint_specs
from slora_jax.sharding.mesh import make_mesh
from slora_jax.sharding.rules import named_sharding
from slora_jax.text import load_tokenizer
from slora_jax.weights import convert, load_model_config, resolve_model
from slora_jax.weights.gguf import write_tokenizer_gguf
from tests.weights import tiny
from tests.weights.tiny import assert_equal, load


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tiny.write_hf(tmp_path / "source", tiny.hf_tensors(), eos_token_id=[2, 5])
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    (folder / "README.md").write_text("not needed")
    return folder


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_round_trip(source: Path, tmp_path: Path, format: Any, tp: int) -> None:
    out = convert(source, tmp_path / "a" / "out", format=format, dtype="float32")
    resolved = resolve_model(out)
    config = load_model_config(resolved)
    assert (resolved.format, resolved.name) == (format, "out")
    assert config == load_model_config(resolve_model(source))
    params = load(out, tp=tp, dtype="bfloat16")
    assert_equal(params, tiny.canonical(tiny.hf_tensors()))
    for name, spec in checkpoint_specs(config).items():
        assert params[name].dtype == np.dtype("bfloat16")
        assert params[name].sharding == named_sharding(make_mesh(tp), spec.axes, spec.shape)
    assert (out / "tokenizer_config.json").is_file()
    assert not (out / "README.md").exists()
    assert os.listdir(out.parent) == ["out"]


def test_back_and_forth(source: Path, tmp_path: Path) -> None:
    orbax = convert(source, tmp_path / "orbax", format="orbax", dtype="float32")
    again = convert(orbax, tmp_path / "again", format="safetensors", dtype="float32")
    assert_equal(load(again), tiny.canonical(tiny.hf_tensors()))
    assert json.loads((again / "config.json").read_text())["dtype"] == "float32"


def test_large_models_are_written_in_parts(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slora_jax.weights.conversion._FILE_BYTES", 30_000)
    out = convert(source, tmp_path / "out", format="safetensors")
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert set(json.loads((out / "model.safetensors.index.json").read_text())["weight_map"].values()) == set(
        files
    )
    assert_equal(load(out), tiny.canonical(tiny.hf_tensors()))


def test_written_files_are_as_readable_as_others(source: Path, tmp_path: Path) -> None:
    out = convert(source, tmp_path / "out", format="safetensors")
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode


def test_gguf_keeps_its_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    seen = tiny.write_gguf(
        file, tiny.hf_tensors(tied=True), kind=GGMLQuantizationType.Q8_0, tokens=["a", "b"]
    )
    (tmp_path / "tokenizer.json").write_text("another model's")
    out = convert(file, tmp_path / "out", format="orbax", dtype="float32")
    assert sorted(os.listdir(out)) == ["config.json", "params", "tokenizer.gguf"]
    assert_equal(load(out), tiny.canonical(seen))
    again = convert(out, tmp_path / "again", format="safetensors")
    assert resolve_model(again).format == "safetensors"
    assert (again / "tokenizer.gguf").read_bytes() == (out / "tokenizer.gguf").read_bytes()


def test_gguf_tokenizer_loads_from_the_new_folder(smollm2_gguf: Path, tmp_path: Path) -> None:
    write_tokenizer_gguf(smollm2_gguf, tmp_path / "tokenizer.gguf")
    new, old = load_tokenizer(tmp_path), load_tokenizer(smollm2_gguf)
    assert new is not None
    assert old is not None
    text = "Unified paging, naïve café 東京 <|im_start|>user"
    assert new.encode(text) == old.encode(text)
    assert (new.eos_token_ids, new.chat_template) == (old.eos_token_ids, old.chat_template)


def test_refuses_what_is_in_the_way(source: Path, tmp_path: Path) -> None:
    full, file, empty = tmp_path / "full", tmp_path / "file", tmp_path / "empty"
    full.mkdir()
    (full / "precious").touch()
    file.touch()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for out in (full, file, source, loop):
        with pytest.raises(CheckpointError, match="exists and is not an empty folder"):
            convert(source, out, format="orbax")
    assert (full / "precious").exists()
    empty.mkdir()
    convert(source, empty, format="safetensors")
    assert resolve_model(empty).format == "safetensors"


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_points_to_is_written(
    source: Path, tmp_path: Path, there: bool, format: Any
) -> None:
    link, disk = tmp_path / "link", tmp_path / "disk"
    link.symlink_to(disk)
    if there:
        disk.mkdir()
    assert convert(source, link, format=format) == disk
    assert link.is_symlink()
    assert resolve_model(link).format == format


def test_unknown_format(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="format must be one of orbax, safetensors"):
        convert(source, tmp_path / "out", format="gguf")  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_a_failed_write_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: Any
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("slora_jax.weights.conversion.save_orbax", fail)
    monkeypatch.setattr("slora_jax.weights.conversion.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        convert(source, tmp_path / "out", format=format)
    assert os.listdir(tmp_path) == ["source"]


def test_orbax_checks_names_and_shapes(source: Path, tmp_path: Path) -> None:
    out = convert(source, tmp_path / "out", format="orbax")
    config = json.loads((out / "config.json").read_text())
    for change, message in (
        (
            {"intermediate_size": 48},
            r"'layers.0.gate_proj' has shape \[32, 96\], the config wants \[32, 48\]",
        ),
        ({"num_hidden_layers": 3}, r"array 'layers.2.input_layernorm' \[32\] is missing"),
        ({"num_hidden_layers": 1}, r"array 'layers.1.\w+' is no part of this model"),
        ({"tie_word_embeddings": True}, "array 'lm_head' is no part of this model"),
    ):
        (out / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(CheckpointError, match=message):
            load(out)


def test_broken_orbax_folder(source: Path, tmp_path: Path) -> None:
    out = convert(source, tmp_path / "out", format="orbax")
    (out / "params" / "_METADATA").unlink()
    with pytest.raises(CheckpointError, match="not a readable Orbax checkpoint"):
        load(out)


@pytest.mark.parametrize("out", ["/proc/x", "/dev/null/x", "x" * 5000])
def test_where_nothing_can_be_written_no_weights_are_read(
    out: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("slora_jax.weights.conversion.load_checkpoint", None)
    with pytest.raises(CheckpointError, match=r"cannot be written there: .*; choose another folder for OUT"):
        convert(source, out, format="orbax")
