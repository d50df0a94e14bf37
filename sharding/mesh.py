"""The device mesh: one axis, "tp" (tensor parallelism), of size 1 unless asked otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

TP = "tp"


def make_mesh(tensor_parallel_size: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over the first `tensor_parallel_size` devices. Raises ValueError where there are fewer."""
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size {tensor_parallel_size} needs as many devices, found {len(devices)} "
            f"({devices[0].platform}); lower it, or on a CPU set jax_num_cpu_devices before JAX starts"
        )
    return jax.make_mesh(
        (tensor_parallel_size,), (TP,), axis_types=(AxisType.Auto,), devices=devices[:tensor_parallel_size]
    )
