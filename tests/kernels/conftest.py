"""What the tests of Mosaic kernels share: where compiled ones are written, and an interpreter whose races
fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slora_jax.pallas_kernels import aot


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that this module's PTX goes to."""
    folder = tmp_path_factory.mktemp("aot")
    aot.prepare(folder)
    return folder


_ADDS = {"add_to_memory", "_add_row_plainly"}  # two steps there, one atomic add on the chip


def races(told: str) -> list[str]:
    """Of what the interpreter printed, the races that would be some on the chip: it goes on after one."""
    found = told.split("RACE DETECTED")[1:]
    accesses = [re.findall(r"^ +(?:read|write) of .*\((\S+)\)$", race, re.MULTILINE) for race in found]
    return [
        race for race, who in zip(found, accesses, strict=True) if len(who) != 2 or not _ADDS.issuperset(who)
    ]


@pytest.fixture
def clean_interpreter(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Races fail. A failure inside the interpreter must not fail the tests after it."""
    yield
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state

    reset_gpu_interpret_mode_state()
    assert not races(capsys.readouterr().out)
