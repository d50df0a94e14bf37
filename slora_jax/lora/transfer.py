"""How an adapter's pages come from host memory into the pool.

On a CPU an adapter in host memory is the packed pages themselves, and one write into the pool is the only
copy. On an accelerator it lies in pinned host memory, where there is any. A CUDA device copies it from there
straight into its pages of the pool, beside the steps that run (`cuda_dma`). Any other device copies it to an
array of its own, which one scatter between two steps writes into the pool.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slora_jax.lora import cuda_dma
from slora_jax.memory.page_pool import runs

logger = logging.getLogger(__name__)

PINNED_HOST_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_PINNED_HOST = "pinned_host"
_MEASURED_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class HostCopy:
    """An adapter in host memory: dtype[n_layers, k, tp * page_elems]."""

    pages: np.ndarray | jax.Array


class StagedCopy(Protocol):
    """An adapter on its way to the device."""

    def is_ready(self) -> bool:
        """Whether the copy is done, rightly or not."""

    def wait(self) -> None:
        """Wait for the copy; raises the device's error where it failed."""

    def leave_pages(self) -> None:
        """Until this returns, the copy may still write into the pages that it is for."""


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayCopy:
    """One that becomes an array, which `AdapterTransfer.write` puts into its pages of the pool."""

    pages: np.ndarray | jax.Array  # dtype[n_layers, k, tp * page_elems]
    ids: np.ndarray  # i32[k]

    def is_ready(self) -> bool:
        return not isinstance(self.pages, jax.Array) or self.pages.is_ready()  # type: ignore[attr-defined]

    def wait(self) -> None:
        if isinstance(self.pages, jax.Array):
            self.pages.block_until_ready()

    def leave_pages(self) -> None:
        """Nothing is written before `write`."""


class Event(Protocol):
    """When the copies of one device are done: `cuda_dma.CudaEvent`."""

    def is_done(self) -> bool: ...
    def wait(self) -> None: ...


@dataclasses.dataclass(frozen=True, eq=False)
class DirectCopy:
    """One straight into its pages of the pool."""

    host: HostCopy  # lives as long as it is read
    events: tuple[Event, ...]  # of the devices' copies, one each

    def is_ready(self) -> bool:
        try:
            return all(event.is_done() for event in self.events)
        except RuntimeError:
            return True

    def wait(self) -> None:
        for event in self.events:
            event.wait()

    def leave_pages(self) -> None:
        for event in self.events:
            try:
                event.wait()
            except RuntimeError:
                logger.exception("a copy of an adapter that nobody needs any more failed")


class Dma(Protocol):
    """A stream of copies to one device: `cuda_dma.CudaDma`."""

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
    ) -> None: ...
    def event(self) -> Event: ...
    def wait(self) -> None: ...


class AdapterTransfer:
    """Copies adapters into one pool. `host_copy` may be called in any thread, the rest in the owner's.

    `pool` is dtype[n_layers, n_pages, tp * page_elems], split by `pool_spec`. Pages that copies are begun for
    must be used by no step under way. `staged`: whether there are copies that take their time, apart from
    the write (None: on any platform but the CPU); `dma`: a stream for each device of the mesh (None: CUDA's,
    where the devices are). Raises CudaCopyError where the CUDA driver refuses one.
    """

    def __init__(
        self,
        mesh: Mesh,
        pool: jax.Array,
        pool_spec: PartitionSpec,
        *,
        staged: bool | None = None,
        dma: Sequence[Dma] | None = None,
    ) -> None:
        device = mesh.devices.flat[0]
        self.stages = device.platform != "cpu" if staged is None else staged
        self._mesh, self._pool_spec = mesh, pool_spec
        self._pool = jax.ShapeDtypeStruct(pool.shape, pool.dtype, sharding=NamedSharding(mesh, pool_spec))
        self._repeated = NamedSharding(mesh, PartitionSpec())
        self._device = NamedSharding(mesh, pool_spec)
        self._pinned_host: NamedSharding | None = None
        if self.stages and _PINNED_HOST in {memory.kind for memory in device.addressable_memories()}:
            self._pinned_host = NamedSharding(mesh, pool_spec, memory_kind=_PINNED_HOST)
        elif self.stages:
            logger.warning(
                "%s has no pinned host memory: adapters are loaded at pageable speed", device.platform
            )
        if dma is None and self._pinned_host is not None and cuda_dma.is_available(device):
            dma = [cuda_dma.CudaDma(each) for each in mesh.devices.flat]
        self._dma = dict(zip(mesh.devices.flat, dma, strict=True)) if dma is not None else None
        self._begun = collections.deque[DirectCopy]()  # oldest first: host memory lives as long as it is read
        if self._dma is not None:
            jax.block_until_ready(pool)  # what fills it at the start must not come after a copy
        if self.stages and self._dma is None:
            logger.warning(
                "%s copies adapters between steps, not beside them: steps are longer while some are loaded",
                device.platform,
            )
        self._writers: dict[int, Any] = {}  # number of pages -> compiled write
        self._compiling = threading.Lock()

    @property
    def pinned_host_limit(self) -> int | None:
        """Bytes of pinned host memory that XLA's allocator gives at most; None where copies are in plain
        memory.

        XLA's CUDA client reads this variable, and takes 64 GiB without it.
        """
        if self._pinned_host is None:
            return None
        limit = os.environ.get(PINNED_HOST_LIMIT_VARIABLE, "64")
        if not limit.strip().isdecimal():
            raise ValueError(
                f"environment variable {PINNED_HOST_LIMIT_VARIABLE} must be a number of GiB, got '{limit}'"
            )
        return int(limit) << 30

    def host_copy(self, pages: np.ndarray) -> HostCopy:
        """Pages dtype[n_layers, k, tp * page_elems] in the form they are copied from.

        Where there is a write, it is compiled. Without pinned memory (a CPU) the copy is `pages` itself.
        """
        if self._dma is None:
            self._writer(pages.shape[1])
        if self._pinned_host is None:
            return HostCopy(pages)
        return HostCopy(jax.block_until_ready(jax.device_put(np.ascontiguousarray(pages), self._pinned_host)))

    def stage(
        self, pool: jax.Array, copies: Sequence[HostCopy], pages: Sequence[Sequence[int]]
    ) -> Sequence[StagedCopy]:
        """Begin to copy adapters into these `pages` each; returns at once.

        Raises CudaCopyError where the driver refuses; then none of the copies is under way any more.
        """
        if self._dma is not None:
            self._let_go()
            try:
                begun = [self._copy_directly(pool, *each) for each in zip(copies, pages, strict=True)]
            except BaseException:
                self.wait()  # whoever gets the pages back may use them at once
                raise
            self._begun += begun
            return begun
        arrays = [copy.pages for copy in copies]
        if self.stages:
            arrays = jax.device_put(arrays, [self._device] * len(arrays))
        return [ArrayCopy(a, np.asarray(own, np.int32)) for a, own in zip(arrays, pages, strict=True)]

    def write(self, pool: jax.Array, staged: StagedCopy) -> jax.Array:
        """The pool with a copy that is done in its pages.

        One straight into the pool lies there; else the write comes after the steps launched, and `pool` is
        donated.
        """
        if not isinstance(staged, ArrayCopy):
            self._let_go()
            return pool
        ids, pages = jax.device_put(staged.ids, self._repeated), staged.pages
        if not isinstance(pages, jax.Array):
            pages = jax.device_put(pages, self._device)
        written: jax.Array = self._writer(len(staged.ids))(pool, ids, pages)
        return written

    def wait(self) -> None:
        """Until no copy straight into the pool is under way; what they raise is theirs to tell."""
        for dma in (self._dma or {}).values():
            with contextlib.suppress(RuntimeError):
                dma.wait()
        self._begun.clear()

    def measure(self, pool: jax.Array) -> float | None:
        """bytes/s of copies straight into the pool, which still holds zeros; None where there are none.

        Takes a few milliseconds.
        """
        if self._dma is None:
            return None
        n_layers, n_pages, elems = pool.shape
        size = max(1, min(n_pages, _MEASURED_BYTES // (n_layers * elems * pool.dtype.itemsize)))
        zeros = HostCopy(jax.device_put(np.zeros((n_layers, size, elems), pool.dtype), self._pinned_host))
        jax.block_until_ready(zeros.pages)
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            self._copy_directly(pool, zeros, range(size)).wait()
            seconds.append(time.perf_counter() - started)
        return n_layers * size * elems * pool.dtype.itemsize / min(seconds)

    def _let_go(self) -> None:
        """Of the host memory of copies that are done."""
        while self._begun and self._begun[0].is_ready():
            self._begun.popleft()

    def _copy_directly(self, pool: jax.Array, host: HostCopy, pages: Sequence[int]) -> DirectCopy:
        assert self._dma is not None and isinstance(host.pages, jax.Array)
        n_layers, n_pages, _ = pool.shape
        sources = {shard.device: shard.data for shard in host.pages.addressable_shards}
        events = list[Event]()
        for shard in pool.addressable_shards:
            dma, source = self._dma[shard.device], sources[shard.device]
            page_bytes = shard.data.shape[2] * pool.dtype.itemsize
            first, target = cuda_dma.address(source), cuda_dma.address(shard.data)
            start = 0
            for page, length in runs(pages):
                dma.copy(
                    first + start * page_bytes,
                    target + page * page_bytes,
                    slices=n_layers,
                    rows=length,
                    row_bytes=page_bytes,
                    source_rows=len(pages),
                    target_rows=n_pages,
                )
                start += length
            events.append(dma.event())
        return DirectCopy(host, tuple(events))

    def _writer(self, pages: int) -> Any:
        if pages not in self._writers:  # the owner, who needs it last, does not wait for others' compilations
            with self._compiling:
                if pages not in self._writers:
                    self._writers[pages] = self._compile(pages)
        return self._writers[pages]

    def _compile(self, pages: int) -> Any:
        def write(pool: jax.Array, ids: jax.Array, adapter: jax.Array) -> jax.Array:
            return pool.at[:, ids].set(adapter, mode="drop", unique_indices=True)

        spec, repeated = self._pool_spec, PartitionSpec()
        mapped = jax.shard_map(
            write, mesh=self._mesh, in_specs=(spec, repeated, spec), out_specs=spec, check_vma=False
        )
        shape = (self._pool.shape[0], pages, self._pool.shape[2])
        return (
            jax.jit(mapped, donate_argnums=0)
            .lower(
                self._pool,
                jax.ShapeDtypeStruct((pages,), jnp.int32, sharding=self._repeated),
                jax.ShapeDtypeStruct(shape, self._pool.dtype, sharding=self._device),
            )
            .compile()
        )
