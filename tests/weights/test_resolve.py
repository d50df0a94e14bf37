"""Names and paths to models: what is found, what is refused and how it is said."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from slora_jax.errors import CheckpointError
from slora_jax.weights import ModelNotFoundError, resolve_model
from tests.weights import tiny


def test_local_formats(tmp_path: Path) -> None:
    hf = tiny.write_hf(tmp_path / "hf", tiny.hf_tensors())
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / "tiny-Q4.gguf"
    tiny.write_gguf(file, tiny.hf_tensors())
    for given, path, fmt, name in (
        (hf, hf, "safetensors", "hf"),
        (str(hf), hf, "safetensors", "hf"),
        (file, file, "gguf", "tiny-Q4"),
        (folder, file, "gguf", "folder"),
    ):
        resolved = resolve_model(given)
        assert (resolved.path, resolved.format, resolved.name) == (path, fmt, name)
        assert resolve_model(given, resolved.format) == resolved
    assert resolve_model(file).folder == folder


def test_links_keep_their_name(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "blob", tiny.hf_tensors())
    (tmp_path / "tiny.gguf").symlink_to(tmp_path / "blob")
    assert resolve_model(tmp_path / "tiny.gguf").path == tmp_path / "tiny.gguf"


def test_safetensors_before_gguf_but_either_on_demand(tmp_path: Path) -> None:
    tiny.write_hf(tmp_path, tiny.hf_tensors())
    tiny.write_gguf(tmp_path / "a.gguf", tiny.hf_tensors())
    assert resolve_model(tmp_path).format == "safetensors"
    assert resolve_model(tmp_path, "gguf").path == tmp_path / "a.gguf"
    with pytest.raises(CheckpointError, match="load_format is 'orbax' but it holds safetensors, gguf"):
        resolve_model(tmp_path, "orbax")


@pytest.mark.parametrize("model", ["", "no-such-model", "/no/such/model", "dir/model.gguf", "a/b/c", "./a/b"])
def test_not_there(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"does not exist; a local path may be") as error:
        resolve_model(model)
    assert isinstance(error.value, FileNotFoundError)


def test_unknown_load_format() -> None:
    with pytest.raises(CheckpointError, match="load_format must be one of auto, safetensors"):
        resolve_model("x", "pickle")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no model in this folder"),
        (["adapter_config.json", "adapter_model.safetensors"], "this is a LoRA adapter, not a model"),
        (["a.gguf", "b.gguf"], "holds 2 GGUF files; name one of them: a.gguf, b.gguf"),
        (["config.json", "pytorch_model.bin"], "only pickled weights"),
        (["config.json"], r"no \*.safetensors; finish the download, or use load_format 'dummy'"),
        (["model.safetensors"], "no config.json"),
    ],
)
def test_folders_without_a_model(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=message):
        resolve_model(tmp_path)


def test_files_that_are_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match="give their folder"):
        resolve_model(file)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hub cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_hub_offline(hub: Path) -> None:
    with pytest.raises(ModelNotFoundError) as error:
        resolve_model("some-org/some-model")
    for part in (
        "'some-org/some-model': no such path",
        "offline mode",
        "Give a local path instead",
        "HF_HUB_OFFLINE",
    ):
        assert part in str(error.value)


def test_hub_cache_is_used_offline(hub: Path) -> None:
    repository = hub / "models--some-org--some-model"
    tiny.write_hf(repository / "snapshots" / "c0ffee", tiny.hf_tensors())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    resolved = resolve_model("some-org/some-model")
    assert resolved.path == repository / "snapshots" / "c0ffee"
    assert (resolved.format, resolved.name) == ("safetensors", "some-org/some-model")


class _Hub:
    """Stands in for the Hub: lists files, and records which are fetched."""

    def __init__(self, folder: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.names, self.fetched = folder, names, list[str]()
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", self.model_info)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.download)

    def model_info(self, repo_id: str, *, timeout: float) -> Any:
        assert timeout <= 10
        return SimpleNamespace(sha="abc", siblings=[SimpleNamespace(rfilename=n) for n in self.names])

    def download(self, repo_id: str, name: str, *, revision: str, etag_timeout: float) -> str:
        assert (revision, etag_timeout <= 10) == ("abc", True)
        self.fetched.append(name)
        return str(self.folder / name)


def test_hub_fetches_only_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    others = [
        "README.md",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "onnx/model.onnx",
        "original/tokenizer.model",
    ]
    hub = _Hub(tiny.write_hf(tmp_path, tiny.hf_tensors()), needed + others, monkeypatch)
    assert resolve_model("org/name").name == "org/name"
    assert hub.fetched == needed
    hub.fetched.clear()
    assert resolve_model("org/name", "dummy").format == "dummy"
    assert hub.fetched == [n for n in needed if n != "model.safetensors"]


def test_hub_repositories_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = _Hub(tmp_path, ["README.md", "a-Q4.gguf", "a-Q8.gguf"], monkeypatch)
    with pytest.raises(CheckpointError, match=r"GGUF files only; download one and give its path: a-Q4\.gguf"):
        resolve_model("org/name")
    hub.names = ["config.json", "pytorch_model.bin"]
    with pytest.raises(CheckpointError, match=r"no config.json and model\*.safetensors"):
        resolve_model("org/name")
    assert not hub.fetched


@pytest.mark.parametrize("model", [None, 5, b"bytes", ["a"], "x" * 5000, "a/" * 3000])
def test_what_is_no_path(model: Any) -> None:
    reason = r"must be a path or a Hub id|cannot be read: File name too long"
    with pytest.raises(CheckpointError, match=reason) as told:
        resolve_model(model)
    assert len(str(told.value)) < 300
