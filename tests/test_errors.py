"""What clients are told of an adapter that could not be read: a reason, and nothing of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from slora_jax.errors import reason_without_path
from slora_jax.lora import read_adapter
from tests.lora.peft_files import TINY


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as ours:
        read_adapter(tmp_path / "gone", TINY, max_rank=8)
    with pytest.raises(FileNotFoundError) as systems:
        (tmp_path / "gone").stat()
    for error in (ours.value, systems.value):
        told = reason_without_path(error)
        assert told == "its folder is gone, or a file of it: put it back, or load the adapter in place"


@pytest.mark.parametrize("error", [PermissionError(13, "Denied", "/srv/x"), OSError(5, "I/O error")])
def test_what_the_system_says_is_told_without_the_path(error: OSError) -> None:
    assert reason_without_path(error) == error.strerror


def test_of_the_unforeseen_only_its_kind_is_told() -> None:
    assert reason_without_path(KeyError("/srv/x")) == "KeyError; the log has the reason"
