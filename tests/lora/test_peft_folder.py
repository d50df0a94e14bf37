"""What counts as an adapter's folder, and what is said of one that cannot be looked into."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from slora_jax.config import ModelConfig
from slora_jax.errors import AdapterError
from slora_jax.lora.peft_folder import find_adapters, folder_stamp
from tests.conftest import TINY_CONFIG
from tests.lora.peft_files import write_peft_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    folder = tmp_path / "good"
    write_peft_adapter(folder, ModelConfig.from_hf(TINY_CONFIG), {"q_proj": 4})
    return folder


def test_what_may_be_an_adapter_is_found(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads it says what is wrong; what was passed over would be missed by its clients only."""
    root = good.parent
    for name in (CONFIG, WEIGHTS, "adapter_model.bin"):
        (root / f"only {name}").mkdir()
        (root / f"only {name}" / name).touch()
        (root / f"dead {name}").mkdir()
        (root / f"dead {name}" / name).symlink_to(root / "nowhere")
    (root / "link").symlink_to(good)
    (root / "dead link").symlink_to(root / "nowhere")
    (root / "loop").symlink_to(root / "loop")
    found = {path.name for path in root.iterdir()}
    (root / "empty").mkdir()
    (root / "other").mkdir()
    (root / "other" / "README.md").touch()
    (root / "README.md").touch()
    (root / "link to a file").symlink_to(root / "README.md")
    assert find_adapters(root).keys() == found

    listed = os.listdir

    def denied(path: Path) -> list[str]:
        if Path(path).name == "empty":
            raise PermissionError(errno.EACCES, "Permission denied")
        return listed(path)

    monkeypatch.setattr(os, "listdir", denied)
    assert find_adapters(root).keys() == found | {"empty"}
    with pytest.raises(AdapterError, match="empty: cannot be read: Permission denied"):
        find_adapters(root / "empty")


@pytest.mark.parametrize("code", [errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", ["good", CONFIG, WEIGHTS])
def test_what_cannot_be_looked_into_is_not_called_missing(
    good: Path, name: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = Path.stat

    def failing(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path.name == name:
            raise OSError(code, os.strerror(code))
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", failing)
    path = good if name == "good" else good / name
    with pytest.raises(AdapterError) as refused:
        folder_stamp(good)
    assert str(refused.value) == f"{path}: cannot be read: {os.strerror(code)}"
