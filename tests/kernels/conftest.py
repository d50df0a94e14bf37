"""What the tests of Mosaic kernels share: where compiled ones are written, and a clean interpreter."""

from __future__ import annotations

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


@pytest.fixture
def clean_interpreter() -> Iterator[None]:
    """A failure inside the interpreter must not fail the tests after it."""
    yield
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state

    reset_gpu_interpret_mode_state()
