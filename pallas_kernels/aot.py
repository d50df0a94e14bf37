"""Compile for an H200 on a machine that has none, and read what came out: spills, copies, command buffers.

Needs jax-cuda13-plugin and jax-cuda13-pjrt (installed with --no-deps) and a ptxas on PATH. JAX must be
imported with JAX_PLATFORMS=cpu. Call `prepare` before the first compilation of the process:

    aot.prepare(dump_folder)
    compiled = aot.compile_for_h200(fn, aot.shape((256, 4096), jnp.bfloat16), ..., donate=(0,))
    aot.ptx_reports(dump_folder)
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

H200_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  model_str: "sm_9.0a with 151397597184B RAM, 132 cores, 1980000KHz clock, 3750000KHz mem clock, 52428800B L2$"
  device_address_bits: 64
  pcie_bandwidth: 34359738368
  ecc_enabled: true
  name: "NVIDIA H200"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""  # noqa: E501 (one line of the text is long)


@dataclasses.dataclass(frozen=True)
class PtxReport:
    """What ptxas says of one kernel."""

    name: str
    registers: int
    spill_bytes: int


def prepare(dump: Path) -> None:
    """Have this process write the PTX of its Mosaic kernels, and XLA's thunks, to a folder."""
    os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump)
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + f" --xla_dump_to={dump}"


@functools.cache
def h200_mesh(n_gpus: int = 1) -> Mesh:
    """A mesh of `n_gpus` H200s, axis `tp`, that exist only for the compiler."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H200_TARGET, topology=f"1x1x{n_gpus}"
    )
    return topologies.make_mesh(topo=topology, mesh_shape=(n_gpus,), axis_names=("tp",))


def shape(dims: Sequence[int], dtype: Any, mesh: Mesh | None = None) -> jax.ShapeDtypeStruct:
    """An argument of `compile_for_h200`, repeated on every GPU of the mesh."""
    sharding = NamedSharding(mesh or h200_mesh(), PartitionSpec())
    return jax.ShapeDtypeStruct(tuple(dims), dtype, sharding=sharding)


def compile_for_h200(
    fn: Callable[..., Any],
    *args: Any,
    donate: Sequence[int] = (),
    options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compile `fn` for arguments made by `shape` (or pytrees of them), always anew, with XLA `options`.

    The persistent cache is off meanwhile: what it holds for a GPU cannot be read back where there is none.
    """
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        return jax.jit(fn, donate_argnums=tuple(donate)).lower(*args).compile(options)
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def ptx_reports(dump: Path) -> list[PtxReport]:
    """Registers and spills of every Mosaic kernel whose PTX lies in the folder; raises where ptxas fails."""
    reports = []
    for path in sorted(dump.rglob("*.ptx")):
        command = ["ptxas", "-arch=sm_90a", "-v", "-o", os.devnull, str(path)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        registers = [int(n) for n in re.findall(r"Used (\d+) registers", told)]
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", told)]
        reports.append(PtxReport(path.stem, max(registers, default=0), sum(spills)))
    return reports


def large_temporaries(compiled: jax.stages.Compiled) -> int:
    """Bytes of temporary memory of an executable: a copy of the pool would show."""
    return int(compiled.memory_analysis().temp_size_in_bytes)  # type: ignore[union-attr]


def command_buffers(dump: Path) -> int:
    """Command buffers (CUDA graphs) in the thunks that lie in the folder."""
    return sum(
        text.count("kCommandBuffer") for text in (p.read_text() for p in dump.rglob("*thunk_sequence*.txt"))
    )
