"""From what a user calls a model (folder, file, Hub id) to a local path and the format found there."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import re
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from slora_jax.config import LoadFormat
from slora_jax.errors import CheckpointError

WeightFormat = Literal["safetensors", "gguf", "orbax", "dummy"]

INDEX_FILE = "model.safetensors.index.json"
ORBAX_FOLDER = "params"  # inside a folder made by `convert(..., format="orbax")`
TOKENIZER_GGUF = "tokenizer.gguf"  # the tokenizer of a GGUF file, in a folder made by `convert`
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.json",
    "merges.txt",
)
CONFIG_PATTERNS = ("config.json", "generation_config.json")
_HUB_WEIGHTS = ("model*.safetensors", INDEX_FILE)  # not consolidated.safetensors: the same weights once more
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_TIMEOUT_S = 10.0
_HOW_LOCAL = "a local path may be a Hugging Face folder, a GGUF file or a folder made by `slora-jax convert`"


class ModelNotFoundError(CheckpointError, FileNotFoundError):
    """There is no such model: neither a path on this machine nor reachable on the Hub."""


@dataclasses.dataclass(frozen=True)
class ResolvedModel:
    """A model on this machine: `path` is a folder or a file, `name` what a human would call it."""

    path: Path
    format: WeightFormat
    name: str

    @property
    def folder(self) -> Path:
        """The folder that holds config and tokenizer files (of a GGUF file: the one that it lies in)."""
        return self.path if self.path.is_dir() else self.path.parent


def resolve_model(model: str | os.PathLike[str], load_format: LoadFormat = "auto") -> ResolvedModel:
    """Finds `model` on this machine, or downloads it from the Hub (only the files that are needed).

    An existing path wins over a Hub id of the same spelling. `load_format` other than "auto" demands that
    format; "dummy" needs no weights, only a config.json (or a GGUF file for its metadata).
    Raises CheckpointError (ModelNotFoundError where nothing is there) naming what was tried and the fix.
    """
    if load_format not in get_args(LoadFormat):
        raise CheckpointError(
            f"load_format must be one of {', '.join(get_args(LoadFormat))}, got {load_format!r}"
        )
    if not isinstance(model, str | os.PathLike):
        raise CheckpointError(f"model must be a path or a Hub id, got {reprlib.repr(model)}")
    text = os.fspath(model)
    path = Path(text).expanduser()
    try:
        if text and path.exists():
            return _resolve_local(path, load_format)
    except OSError as error:
        raise CheckpointError(
            f"model {reprlib.repr(text)} cannot be read: {error.strerror}; {_HOW_LOCAL}"
        ) from error
    if _HUB_ID.fullmatch(text) and not text.endswith((".gguf", ".json", ".safetensors")):
        folder = _download(text, weights=load_format != "dummy")
        return dataclasses.replace(_resolve_local(folder, load_format), name=text)
    raise ModelNotFoundError(f"model '{text}' does not exist; {_HOW_LOCAL}, a Hub id looks like 'org/name'")


def _resolve_local(path: Path, load_format: LoadFormat) -> ResolvedModel:
    path = path.absolute()  # not resolve(): the Hub's cache links file names to nameless blobs
    if load_format == "dummy":
        return _resolve_dummy(path)
    found = _formats_in(path)
    if load_format != "auto" and load_format not in found:
        there = f"it holds {', '.join(found)}" if found else "nothing loadable was found there"
        raise CheckpointError(f"{path}: load_format is '{load_format}' but {there}; use load_format 'auto'")
    if not found:
        raise CheckpointError(f"{path}: {_why_nothing(path)}")
    fmt: WeightFormat = next(iter(found)) if load_format == "auto" else load_format
    return ResolvedModel(found[fmt], fmt, _human_name(found[fmt]) if path.is_file() else _human_name(path))


def _resolve_dummy(path: Path) -> ResolvedModel:
    if path.is_file() and path.name == "config.json":
        path = path.parent
    if path.is_dir() and not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) != 1:
            raise CheckpointError(f"{path}: load_format 'dummy' needs a config.json (or one GGUF file) there")
        path = ggufs[0]
    return ResolvedModel(path, "dummy", _human_name(path))


def _formats_in(path: Path) -> dict[WeightFormat, Path]:
    """The formats found at `path`, the preferred one first, each with the path that it is loaded from."""
    if path.is_file():
        return {"gguf": path} if path.suffix == ".gguf" else {}
    found: dict[WeightFormat, Path] = {}
    has_config = (path / "config.json").is_file()
    if has_config and (path / ORBAX_FOLDER).is_dir():
        found["orbax"] = path
    if has_config and ((path / INDEX_FILE).is_file() or safetensors_files(path)):
        found["safetensors"] = path
    ggufs = [p for p in sorted(path.glob("*.gguf")) if p.name != TOKENIZER_GGUF]
    if len(ggufs) == 1:
        found["gguf"] = ggufs[0]
    return found


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a folder without an index: model.safetensors, else every file that may be one."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    skipped = ("consolidated", "adapter_model")
    return [p for p in sorted(folder.glob("*.safetensors")) if not p.name.startswith(skipped)]


def _why_nothing(path: Path) -> str:
    if path.is_file():
        return f"neither *.gguf nor a folder; {_HOW_LOCAL} (for *.safetensors, give their folder)"
    names = {p.name for p in path.iterdir()}
    ggufs = sorted(n for n in names if n.endswith(".gguf") and n != TOKENIZER_GGUF)
    if "adapter_config.json" in names:
        return "this is a LoRA adapter, not a model; give its base model here and this folder as an adapter"
    if len(ggufs) > 1:
        return f"holds {len(ggufs)} GGUF files; name one of them: {', '.join(ggufs)}"
    if any(n.endswith((".bin", ".pt", ".pth")) for n in names):
        return (
            "only pickled weights (*.bin, *.pt) are there, which are never loaded; save as safetensors first"
        )
    if "config.json" in names:
        return "config.json is there but no *.safetensors; finish the download, or use load_format 'dummy'"
    if any(n.endswith(".safetensors") for n in names):
        return "*.safetensors but no config.json; copy the model's config.json into this folder"
    return f"no model in this folder; {_HOW_LOCAL}"


def _human_name(path: Path) -> str:
    return path.stem if path.suffix in (".gguf", ".json") else path.name


def _download(repo_id: str, *, weights: bool) -> Path:
    """The folder of a Hub repository's newest commit, or of the cached one where the Hub cannot be reached.

    Every request has a timeout (`snapshot_download`'s first one has none, and can hang for ever).
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    wanted = [*CONFIG_PATTERNS, *TOKENIZER_PATTERNS, *(_HUB_WEIGHTS if weights else ())]
    try:
        try:
            info = HfApi().model_info(repo_id, timeout=_HUB_TIMEOUT_S)
        except (RepositoryNotFoundError, HFValidationError):
            raise
        except (
            Exception
        ):  # offline, no network, a server error, in whichever HTTP library huggingface-hub uses
            return Path(snapshot_download(repo_id, local_files_only=True))
        names = [f.rfilename for f in info.siblings or () if "/" not in f.rfilename]
        _check_repository(repo_id, names, weights)
        paths = [
            Path(hf_hub_download(repo_id, name, revision=info.sha, etag_timeout=_HUB_TIMEOUT_S))
            for name in names
            if any(fnmatch.fnmatch(name, pattern) for pattern in wanted)
        ]
        return paths[0].parent
    except CheckpointError:
        raise
    except Exception as error:  # of huggingface_hub, its HTTP client or the network
        reason = " ".join(str(error.__context__ or error).split())[:300]
        raise ModelNotFoundError(
            f"model '{repo_id}': no such path on this machine, and as a Hub id it could not be fetched "
            f"({type(error).__name__}: {reason}). Give a local path instead: {_HOW_LOCAL}; or check the "
            "name, the network, HF_HUB_OFFLINE, and HF_TOKEN for a gated model"
        ) from error


def _check_repository(repo_id: str, names: Sequence[str], weights: bool) -> None:
    """Refuses before the download what could not be loaded after it."""
    if "config.json" in names and (not weights or any(fnmatch.fnmatch(n, _HUB_WEIGHTS[0]) for n in names)):
        return
    ggufs = [n for n in names if n.endswith(".gguf")]
    if ggufs:
        raise CheckpointError(
            f"Hub model '{repo_id}' has GGUF files only; download one and give its path: {', '.join(ggufs)}"
        )
    raise CheckpointError(
        f"Hub model '{repo_id}' has no config.json and model*.safetensors, which are needed"
    )
