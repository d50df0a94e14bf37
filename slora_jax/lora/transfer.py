"""How an adapter's pages come from host memory into the pool.

An adapter is copied in *pieces* whose page counts are powers of two (its page count's binary digits), so that
a handful of compiled writes serve every size, and nothing is padded. On an accelerator pieces lie in pinned
host memory: their copy to the device is a DMA, which the host and running steps do not wait for. On a CPU
pieces are views of the packed pages, and the write is the only copy.
"""

from __future__ import annotations

import dataclasses
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

logger = logging.getLogger(__name__)

LARGEST_PIECE = 64  # pages
_MEASURED_BYTES = 64 << 20
PINNED_HOST_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_PINNED_HOST = "pinned_host"


@dataclasses.dataclass(frozen=True, eq=False)
class HostCopy:
    """An adapter in host memory; `pieces` are dtype[n_layers, k, tp * page_elems], k a power of two."""

    pieces: tuple[np.ndarray | jax.Array, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class StagedCopy:
    """An adapter on its way to the device, and the pages i32[k] that each of its pieces is for."""

    pieces: tuple[np.ndarray | jax.Array, ...]
    ids: tuple[np.ndarray | jax.Array, ...]

    def is_ready(self) -> bool:
        """Whether the copy is done, rightly or not."""
        arrays: list[Any] = [a for a in (*self.pieces, *self.ids) if isinstance(a, jax.Array)]
        return all(a.is_ready() for a in arrays)

    def wait(self) -> None:
        """Wait for the copy; raises the device's error where it failed."""
        for piece in (*self.pieces, *self.ids):
            if isinstance(piece, jax.Array):
                piece.block_until_ready()


class AdapterTransfer:
    """Copies adapters towards one pool. `host_copy` may be called in any thread, the rest in the owner's.

    `pool` is dtype[n_layers, n_pages, tp * page_elems], split by `pool_spec`; `staged` says whether pieces
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
        self._writers: dict[int, Any] = {}  # pages of a piece -> compiled write
        self._compiling = threading.Lock()
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
        """Pages dtype[n_layers, n, tp * page_elems] in the form they are copied from, and their writes
        compiled.

        On a CPU it shares the memory of `pages`.
        """
        pieces = [pages[:, start:stop] for start, stop in _pieces(pages.shape[1])]
        for piece in pieces:
            self._writer(piece.shape[1])
        if self._pinned_host is None:
            return HostCopy(tuple(pieces))
        moved = jax.device_put([np.ascontiguousarray(piece) for piece in pieces], self._pinned_host)
        return HostCopy(tuple(jax.block_until_ready(moved)))

    def stage(self, copies: Sequence[HostCopy], pages: Sequence[Sequence[int]]) -> list[StagedCopy]:
        """Begin to copy adapters, which are to be written to `pages`, in one transfer; returns at once."""
        ids = [
            tuple(np.asarray(own[start:stop], np.int32) for start, stop in _pieces(len(own))) for own in pages
        ]
        if not self.stages:
            return [StagedCopy(copy.pieces, own) for copy, own in zip(copies, ids, strict=True)]
        arrays = jax.device_put(
            [[list(copy.pieces), list(own)] for copy, own in zip(copies, ids, strict=True)],
            [[[self._device] * len(own), [self._repeated] * len(own)] for own in ids],
        )
        return [StagedCopy(tuple(pieces), tuple(own)) for pieces, own in arrays]

    def write(self, pool: jax.Array, staged: StagedCopy) -> jax.Array:
        """Write a copy into the pool, which is donated, after the steps launched; returns the new pool."""
        for piece, ids in zip(staged.pieces, staged.ids, strict=True):
            pool = self._writer(ids.shape[0])(
                pool,
                ids if isinstance(ids, jax.Array) else jax.device_put(ids, self._repeated),
                piece if isinstance(piece, jax.Array) else jax.device_put(piece, self._device),
            )
        return pool

    def _writer(self, pages: int) -> Any:
        if pages not in self._writers:  # the owner, who needs it last, does not wait for others' compilations
            with self._compiling:
                if pages not in self._writers:
                    self._writers[pages] = self._compile(pages)
        return self._writers[pages]

    def _compile(self, pages: int) -> Any:
        def write(pool: jax.Array, ids: jax.Array, piece: jax.Array) -> jax.Array:
            return pool.at[:, ids].set(piece, mode="drop", unique_indices=True)

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


def _pieces(pages: int) -> Iterator[tuple[int, int]]:
    """Where pieces begin and end: as many of the largest as fit, then falling powers of two."""
    start, size = 0, LARGEST_PIECE
    while start < pages:
        if start + size <= pages:
            yield start, start + size
            start += size
        else:
            size //= 2
