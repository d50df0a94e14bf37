"""What is asked of the CUDA driver, and what is said where it refuses. On a GPU benchmarks copy with it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from slora_jax.lora import cuda_dma

DEVICE: Any = SimpleNamespace(local_hardware_id=0, client=SimpleNamespace(platform_version="cuda 13000"))


class FakeDriver:
    """Notes its calls and copies; `refuses` names the one that fails."""

    def __init__(self) -> None:
        self.refuses = ""
        self.calls: list[str] = []
        self.copies: list[dict[str, tuple[int, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == "cuGetErrorString":
                args[1]._obj.value = b"out of memory"
            if name == "cuStreamCreate":
                args[0]._obj.value = 7
            if name == "cuMemcpy3DAsync_v2":
                copy = args[0]._obj
                sides = {
                    side: (at.memory, at.host or at.device, at.pitch, at.height)
                    for side, at in (("source", copy.source), ("target", copy.target))
                }
                self.copies.append({**sides, "extent": (copy.width, copy.rows, copy.slices)})
            return 2 if name == self.refuses else 0

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(cuda_dma, "_driver", lambda: fake)
    monkeypatch.setattr(cuda_dma, "_waiting_driver", lambda: fake)
    monkeypatch.setattr(cuda_dma, "_primary_context", cuda_dma._primary_context.__wrapped__)
    return fake


def test_a_run_of_pages_of_all_layers_is_one_copy(driver: FakeDriver) -> None:
    dma = cuda_dma.CudaDma(DEVICE)
    dma.copy(1000, 2000, slices=32, rows=3, row_bytes=64, source_rows=7, target_rows=500)
    event = dma.event()
    assert event.is_done()
    event.wait()
    [copy] = driver.copies
    assert copy == {"source": (1, 1000, 64, 7), "target": (2, 2000, 64, 500), "extent": (64, 3, 32)}
    assert driver.calls.count("cuCtxPushCurrent_v2") == driver.calls.count("cuCtxPopCurrent_v2")


def test_the_structure_is_the_drivers() -> None:
    """CUDA_MEMCPY3D of cuda.h on a 64-bit machine: two sides of 88 bytes and three sizes."""
    assert ctypes.sizeof(cuda_dma._Copy3D) == 2 * 88 + 3 * 8


@pytest.mark.parametrize("name", ["cuInit", "cuDevicePrimaryCtxRetain", "cuStreamCreate"])
def test_a_driver_that_refuses_is_told_of_by_the_calls_name(driver: FakeDriver, name: str) -> None:
    driver.refuses = name
    with pytest.raises(cuda_dma.CudaCopyError, match=f"{name}: CUDA error 2, out of memory"):
        cuda_dma.CudaDma(DEVICE)


def test_a_copy_that_is_refused_leaves_the_context_as_it_was(driver: FakeDriver) -> None:
    dma = cuda_dma.CudaDma(DEVICE)
    driver.refuses = "cuMemcpy3DAsync_v2"
    with pytest.raises(cuda_dma.CudaCopyError, match="cuMemcpy3DAsync_v2: CUDA error 2"):
        dma.copy(1000, 2000, slices=1, rows=1, row_bytes=64, source_rows=1, target_rows=9)
    assert driver.calls.count("cuCtxPushCurrent_v2") == driver.calls.count("cuCtxPopCurrent_v2")


def test_a_missing_driver_is_no_silent_detour(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda_dma, "_driver", missing)
    assert not cuda_dma.is_available(DEVICE)
    assert "libcuda.so.1: cannot open" in caplog.text
