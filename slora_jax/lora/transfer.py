"""How an adapter's pages come from host memory into the pool.

On an accelerator an adapter lies in pinned host memory as one array: its copy to the device is one DMA, which
the host and running steps do not wait for, and its write one scatter. Adapters of as many pages that arrive
together are written up to eight at a call, which costs the host as much as one alone. On a CPU an adapter is
the packed pages themselves, and the write is the only copy.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slora_jax.workers import DaemonWorkers

logger = logging.getLogger(__name__)

_MEASURED_BYTES = 64 << 20
_TOGETHER = (8, 4, 2)  # adapters that are written at one call
PINNED_HOST_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_PINNED_HOST = "pinned_host"


@dataclasses.dataclass(frozen=True, eq=False)
class HostCopy:
    """An adapter in host memory: dtype[n_layers, k, tp * page_elems]."""

    pages: np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class StagedCopy:
    """An adapter on its way to the device, and the pages i32[k] of the pool that it is for."""

    pages: np.ndarray | jax.Array
    ids: np.ndarray

    def is_ready(self) -> bool:
        """Whether the copy is done, rightly or not."""
        return not isinstance(self.pages, jax.Array) or self.pages.is_ready()  # type: ignore[attr-defined]

    def wait(self) -> None:
        """Wait for the copy; raises the device's error where it failed."""
        if isinstance(self.pages, jax.Array):
            self.pages.block_until_ready()


class AdapterTransfer:
    """Copies adapters towards one pool. `host_copy` may be called in any thread, the rest in the owner's.

    `pool` is dtype[n_layers, n_pages, tp * page_elems], split by `pool_spec`; `staged` says whether adapters
    are copied to the device before they are written (None: on any platform but the CPU). `bytes_per_s` is
    how fast such copies were measured at the start (None: there are none).
    """

    def __init__(
        self, mesh: Mesh, pool: jax.Array, pool_spec: PartitionSpec, *, staged: bool | None = None
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
        self._writers: dict[tuple[int, int], Any] = {}  # pages of each, adapters -> compiled write
        self._compiling = threading.Lock()
        self._ahead = DaemonWorkers(1, "adapter-write-compiler")
        self.bytes_per_s = self._measure() if self.stages else None

    def _measure(self) -> float:
        """bytes/s of copies to the device; a few milliseconds."""
        n = max(1, _MEASURED_BYTES // (self._pool.shape[2] * self._pool.dtype.itemsize))
        host = np.zeros((1, n, self._pool.shape[2]), self._pool.dtype)
        moved = host if self._pinned_host is None else jax.device_put(host, self._pinned_host)
        seconds = []
        for _ in range(3):
            jax.block_until_ready(moved)
            started = time.perf_counter()
            jax.block_until_ready(jax.device_put(moved, self._device))
            seconds.append(time.perf_counter() - started)
        return host.nbytes / min(seconds)

    @property
    def pinned_host_limit(self) -> int | None:
        """Bytes of pinned host memory that XLA's allocator gives at most; None where copies are in plain
        memory.

        XLA's CUDA client reads this variable, and takes 64 GiB without it.
        """
        if self._pinned_host is None:
            return None
        return int(os.environ.get(PINNED_HOST_LIMIT_VARIABLE, "64")) << 30

    def host_copy(self, pages: np.ndarray) -> HostCopy:
        """Pages dtype[n_layers, k, tp * page_elems] in the form they are copied from, and their write
        compiled, alone; beside others it is soon.

        On a CPU it shares the memory of `pages`.
        """
        size = pages.shape[1]
        if (size, 1) not in self._writers:
            self._writer(size, 1)
            if self.stages:
                self._ahead.submit(f"compiling writes of {size} pages", self._compile_together, size)
        if self._pinned_host is None:
            return HostCopy(pages)
        return HostCopy(jax.block_until_ready(jax.device_put(np.ascontiguousarray(pages), self._pinned_host)))

    def stage(self, copies: Sequence[HostCopy], pages: Sequence[Sequence[int]]) -> list[StagedCopy]:
        """Begin to copy adapters, which are to be written to `pages`, in one transfer; returns at once."""
        arrays = [copy.pages for copy in copies]
        if self.stages:
            arrays = jax.device_put(arrays, [self._device] * len(arrays))
        return [StagedCopy(a, np.asarray(own, np.int32)) for a, own in zip(arrays, pages, strict=True)]

    def groups(self, staged: Sequence[StagedCopy]) -> Iterator[list[StagedCopy]]:
        """The copies in groups that `write` takes."""
        for size, same in itertools.groupby(sorted(staged, key=_size), _size):
            left = list(same)
            while left:
                fit = (n for n in _TOGETHER if n <= len(left) and (size, n) in self._writers)
                n = next(fit, 1)
                yield left[:n]
                left = left[n:]

    def write(self, pool: jax.Array, group: Sequence[StagedCopy]) -> jax.Array:
        """Write a group into the pool, which is donated, after the steps launched; returns the new pool."""
        ids = jax.device_put(np.stack([copy.ids for copy in group]), self._repeated)
        pages = [
            copy.pages if isinstance(copy.pages, jax.Array) else jax.device_put(copy.pages, self._device)
            for copy in group
        ]
        written: jax.Array = self._writer(_size(group[0]), len(group))(pool, ids, *pages)
        return written

    def _compile_together(self, size: int) -> None:
        for n in _TOGETHER:
            self._writer(size, n)

    def _writer(self, size: int, n: int) -> Any:
        if (size, n) not in self._writers:  # whoever has it does not wait for others' compilations
            with self._compiling:
                if (size, n) not in self._writers:
                    self._writers[size, n] = self._compile(size, n)
        return self._writers[size, n]

    def _compile(self, size: int, n: int) -> Any:
        def write(pool: jax.Array, ids: jax.Array, *adapters: jax.Array) -> jax.Array:
            for own, pages in zip(ids, adapters, strict=True):
                pool = pool.at[:, own].set(pages, mode="drop", unique_indices=True)
            return pool

        spec, repeated = self._pool_spec, PartitionSpec()
        mapped = jax.shard_map(
            write, mesh=self._mesh, in_specs=(spec, repeated, *[spec] * n), out_specs=spec, check_vma=False
        )
        shape = (self._pool.shape[0], size, self._pool.shape[2])
        adapter = jax.ShapeDtypeStruct(shape, self._pool.dtype, sharding=self._device)
        ids = jax.ShapeDtypeStruct((n, size), jnp.int32, sharding=self._repeated)
        return jax.jit(mapped, donate_argnums=0).lower(self._pool, ids, *[adapter] * n).compile()


def _size(copy: StagedCopy) -> int:
    return len(copy.ids)
