"""The files of a PEFT folder: where they are, which are never opened, and whether they have changed."""

from __future__ import annotations

import dataclasses
import os
import reprlib
from collections.abc import Iterable
from pathlib import Path

from slora_jax.errors import AdapterError
from slora_jax.lora.peft_config import CONFIG_FILE

WEIGHTS_FILE = "adapter_model.safetensors"

_PICKLED_FILES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")


@dataclasses.dataclass(frozen=True)
class FolderStamp:
    """Which state of an adapter's files was seen, so that a change of them is noticed."""

    folder: str  # absolute
    files: tuple[tuple[int, int], ...]  # (bytes, time of change in ns) of config and weights
    checksum: int | None = None  # CRC-32 of the packed weights; None: not read yet

    def fits(self, other: FolderStamp) -> bool:
        """Whether both may be of the same files: copies may keep sizes and times, not what is read."""
        unread = self.checksum is None or other.checksum is None
        return (self.folder, self.files) == (other.folder, other.files) and (
            unread or self.checksum == other.checksum
        )


def check_adapter_path(path: object) -> None:
    """Raise ValueError for what is no path."""
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"an adapter's path must be a string or a Path, got {reprlib.repr(path)}")
    if not os.fspath(path):  # which would be the working directory
        raise ValueError("an adapter's path must not be empty")


def adapter_folder(path: str | os.PathLike[str]) -> Path:
    """`path`, a folder with an adapter's config or weights; raises FileNotFoundError where nothing lies
    there, AdapterError where it is none, ValueError for what is no path.
    """
    check_adapter_path(path)
    folder = Path(path)
    if not _exists(folder):
        raise FileNotFoundError(
            f"no adapter at '{folder}': give a local folder with {CONFIG_FILE} and {WEIGHTS_FILE} "
            "(nothing is downloaded)"
        )
    if not _is_adapter(_files(folder)):
        raise AdapterError(
            f"neither {CONFIG_FILE} nor {WEIGHTS_FILE} is in this folder; give the adapter's own",
            folder=folder,
        )
    return folder


def _files(folder: Path) -> list[str]:
    """Sorted names in an existing folder; raises AdapterError where it is none."""
    if not folder.is_dir():
        raise AdapterError(
            f"not a folder; give the folder that holds {CONFIG_FILE} and {WEIGHTS_FILE}", folder=folder
        )
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise AdapterError(f"cannot be read: {error.strerror}", folder=folder) from error


def _exists(path: Path) -> bool:
    """Whether something lies there; raises AdapterError where that cannot be told."""
    try:
        path.stat()  # Path.exists takes some errors for an answer, others with each Python
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL character
        return False
    except OSError as error:  # no permission, a name too long, a loop of links, a network folder that is gone
        raise AdapterError(f"cannot be read: {error.strerror}", folder=path) from error
    return True


def config_file(folder: Path) -> Path:
    """Its adapter_config.json; raises AdapterError where it is missing."""
    return _existing(folder, CONFIG_FILE, "save it with save_pretrained")


def _existing(folder: Path, name: str, fix: str) -> Path:
    file = folder / name
    if not _exists(file):
        raise AdapterError(f"{name} is missing; {fix}", folder=folder)
    if not file.is_file():
        raise AdapterError(f"not a regular file; {fix}", file=file)
    return file


def weights_file(folder: Path) -> Path:
    """Its weights, which must be safetensors; raises AdapterError."""
    found = _exists(folder / WEIGHTS_FILE)
    pickled = next((name for name in _PICKLED_FILES if not found and _exists(folder / name)), None)
    if pickled is not None:
        raise AdapterError(
            f"pickled weights are never loaded, since opening them can run code; if you "
            "trust the file, convert it: "
            f"safetensors.torch.save_file(torch.load('{pickled}', weights_only=True), '{WEIGHTS_FILE}')",
            file=folder / pickled,
        )
    return _existing(
        folder, WEIGHTS_FILE, "save the adapter with save_pretrained(..., safe_serialization=True)"
    )


def folder_stamp(path: str | os.PathLike[str]) -> FolderStamp:
    """The present state of an adapter's files. Raises like `read_adapter` where one is missing."""
    folder = adapter_folder(path)
    files = (weights_file(folder), config_file(folder))
    stats = [file.stat() for file in files]
    return FolderStamp(os.path.abspath(folder), tuple((s.st_size, s.st_mtime_ns) for s in stats))


def find_adapters(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Adapter folders by name, sorted: `folder` itself, or those of its sub-folders that look like one.

    A sub-folder looks like an adapter where it holds a config or weights by PEFT's names, even links to
    nothing, and so do one that cannot be looked into and a link to none: who reads it is told why. Raises
    FileNotFoundError or AdapterError where `folder` is none, ValueError where it has none.
    """
    root = Path(folder)
    if not _exists(root):
        raise FileNotFoundError(f"no folder '{root}': give one that is an adapter, or whose sub-folders are")
    children = _files(root)
    if _is_adapter(children):
        return {root.resolve().name: root}
    found = {child: root / child for child in children if _may_be_adapter(root / child)}
    if not found:
        raise ValueError(f"{root}: neither it nor a folder in it holds {CONFIG_FILE} or {WEIGHTS_FILE}")
    return found


def _is_adapter(files: Iterable[str]) -> bool:
    return not {CONFIG_FILE, WEIGHTS_FILE, *_PICKLED_FILES}.isdisjoint(files)


def _may_be_adapter(path: Path) -> bool:
    try:
        return _is_adapter(os.listdir(path))
    except NotADirectoryError:
        return False
    except OSError:
        return True
