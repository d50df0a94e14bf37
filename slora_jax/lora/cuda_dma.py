"""Copies from pinned host memory straight into arrays on a CUDA device, beside the steps that run there.

JAX begins a copy to the device only when all computations that were launched before have ended, and a step's
input waits behind the copies that were begun before it. So adapters that are loaded with `jax.device_put`
make steps longer by nearly the time that they take (measured on an H200: docs/architecture.md). A copy on a
stream of its own waits for nothing, and nothing for it. This file calls the CUDA driver (libcuda, which JAX
itself runs on) for it, through ctypes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

logger = logging.getLogger(__name__)

_NON_BLOCKING = 1  # a stream that does not wait for the default one
_BLOCKING_SYNC, _NO_TIMING = 1, 2  # of an event: who waits for it sleeps
_HOST, _DEVICE = 1, 2  # CUmemorytype
_NOT_READY = 600


class _Side(ctypes.Structure):
    """One side of CUDA_MEMCPY3D: rows of `pitch` bytes, `height` of them a slice."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("x", "y", "z", "level")),
        ("memory", ctypes.c_uint),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("reserved", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Copy3D(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = (
        ("source", _Side),
        ("target", _Side),
        *((name, ctypes.c_size_t) for name in ("width", "rows", "slices")),
    )


class CudaCopyError(RuntimeError):
    """The CUDA driver refused a call, or a copy failed; the text names the call and what the driver says."""


class CudaEvent:
    """A point in a stream."""

    def __init__(self, dma: CudaDma) -> None:
        self._dma, self._handle = dma, ctypes.c_void_p()
        with dma.current():
            _call("cuEventCreate", ctypes.byref(self._handle), _BLOCKING_SYNC | _NO_TIMING)
            _call("cuEventRecord", self._handle, dma.stream)

    def is_done(self) -> bool:
        """Whether all before it is done; raises CudaCopyError where that failed."""
        with self._dma.current():
            status = _driver().cuEventQuery(self._handle)
        if status != _NOT_READY:
            _check("cuEventQuery", status)
        return bool(status == 0)

    def wait(self) -> None:
        """Until it is done; raises CudaCopyError where that failed."""
        with self._dma.current():
            _check("cuEventSynchronize", _waiting_driver().cuEventSynchronize(self._handle))

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._handle and not _is_finalizing():
            with self._dma.current():
                _driver().cuEventDestroy_v2(self._handle)


class CudaDma:
    """A stream of copies to one device, in the context that JAX uses. One thread at a time."""

    def __init__(self, device: jax.Device) -> None:
        self.stream = ctypes.c_void_p()
        self._context = _primary_context(device.local_hardware_id)
        with self.current():
            _call("cuStreamCreate", ctypes.byref(self.stream), _NON_BLOCKING)

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.stream and not _is_finalizing():
            with self.current():
                _driver().cuStreamDestroy_v2(self.stream)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Calls are made in this device's context."""
        _call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def copy(
        self,
        source: int,
        target: int,
        *,
        slices: int,
        rows: int,
        row_bytes: int,
        source_rows: int,
        target_rows: int,
    ) -> None:
        """Begin to copy target[z, y] = source[z, y] for z < slices, y < rows; returns at once.

        `source` (pinned host memory) and `target` (the device's) are addresses of their first row; a slice of
        theirs has `source_rows` and `target_rows` rows of `row_bytes`.
        """
        copy = _Copy3D(width=row_bytes, rows=rows, slices=slices)
        copy.source.memory, copy.source.host = _HOST, source
        copy.target.memory, copy.target.device = _DEVICE, target
        copy.source.pitch = copy.target.pitch = row_bytes
        copy.source.height, copy.target.height = source_rows, target_rows
        with self.current():
            _call("cuMemcpy3DAsync_v2", ctypes.byref(copy), self.stream)

    def event(self) -> CudaEvent:
        """The point at which the copies that were begun so far are done."""
        return CudaEvent(self)

    def wait(self) -> None:
        """Until all copies that were begun are done; raises CudaCopyError where one failed."""
        with self.current():
            _check("cuStreamSynchronize", _waiting_driver().cuStreamSynchronize(self.stream))


def is_available(device: jax.Device) -> bool:
    """Whether a device is CUDA's, and its driver is found; the log says if it is not."""
    if not device.client.platform_version.startswith("cuda"):
        return False
    try:
        _driver()
    except OSError as error:
        logger.warning("the CUDA driver's library cannot be called from here: %s", error)
        return False
    return True


def address(array: jax.Array) -> int:
    """Where an array of one device begins, in its memory or pinned on the host."""
    return int(array.unsafe_buffer_pointer())


@functools.cache
def _primary_context(number: int) -> ctypes.c_void_p:
    """The context of a device that JAX uses, too; kept for the life of the process."""
    ordinal, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(ordinal), number)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    return context


@functools.cache
def _driver() -> Any:
    """For calls that return at once: they keep the interpreter's lock."""
    return ctypes.PyDLL("libcuda.so.1")


@functools.cache
def _waiting_driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    _check(name, getattr(_driver(), name)(*args))


def _check(name: str, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise CudaCopyError(f"{name}: CUDA error {status}, {(text.value or b'unknown').decode()}")
