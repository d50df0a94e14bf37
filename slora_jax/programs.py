"""Compiled steps: how `step.begin`, `layer` and `finish` become executables, one set for each step shape.

A program is called as `program(pool, slots, packed) -> (pool, slots, output)`; pool and slots are donated.
`WholeStep` is one executable (GPUs); `LayeredStep` is three, the middle one called for every layer (CPUs).
step.py says why.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from slora_jax.exported_steps import ExportedSteps
from slora_jax.models.llama import Llama
from slora_jax.step import (
    POOL_SPEC,
    REPEATED,
    ModuleLeaves,
    SlotState,
    StepConfig,
    StepOutput,
    begin,
    finish,
    layer,
    whole_step,
)
from slora_jax.step_shape import StepShape

logger = logging.getLogger(__name__)

Result = tuple[jax.Array, SlotState, StepOutput]

# How XLA compiles for a GPU. A step is one CUDA graph: without "CONDITIONAL" and "WHILE" the sampler's
# conditionals cut it into several, and the host waits for the device at each. GEMMs are cuBLASLt's, as its
# heuristics choose them: the same at every start, where XLA's trials of a few runs each differ, and faster
# (docs/architecture.md has figures); XLA's Triton GEMMs would take long to compile.
GPU_OPTIONS: dict[str, Any] = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    ),
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_autotune_level": 0,
    # XLA counts the pool twice, where it comes in and where it goes out updated in place, and would compute
    # things again to save memory that is not short.
    "xla_disable_hlo_passes": "rematerialization",
}


class Program(Protocol):
    """A compiled step of one shape."""

    def __call__(self, pool: jax.Array, slots: SlotState, packed: jax.Array) -> Result: ...


@dataclasses.dataclass(frozen=True)
class WholeStep:
    """A step as one executable with the layers unrolled."""

    executable: Any
    ends: list[jax.Array]
    layers: list[list[jax.Array]]

    def __call__(self, pool: jax.Array, slots: SlotState, packed: jax.Array) -> Result:
        return self.executable(self.ends, self.layers, pool, slots, packed)  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class LayeredStep:
    """A step as three executables; `indices[i]` is i on the device."""

    begin: Any
    layer: Any
    finish: Any
    ends: list[jax.Array]
    layers: list[list[jax.Array]]
    indices: list[jax.Array]

    def __call__(self, pool: jax.Array, slots: SlotState, packed: jax.Array) -> Result:
        x, ops, rows = self.begin(self.ends, slots, packed)
        for index, leaves in zip(self.indices, self.layers, strict=True):
            x, pool = self.layer(leaves, index, x, pool, ops)
        return pool, *self.finish(self.ends, slots, x, rows)


class ProgramBuilder:
    """Compiles programs for a model over a mesh; safe to call from several threads.

    `exported`: where lowered steps are kept from one start to the next (None: nowhere).
    """

    def __init__(
        self,
        config: StepConfig,
        mesh: Mesh,
        model: Llama,
        pool: jax.Array,
        slots: SlotState,
        exported: ExportedSteps | None = None,
    ) -> None:
        self._config, self._mesh, self._exported = config, mesh, exported
        self._ends = ModuleLeaves.split(model.ends)
        self._layers = [ModuleLeaves.split(m) for m in model.layers]
        self._pool, self._slots = jax.tree.map(_abstract, (pool, slots))
        self._layered = mesh.devices.flat[0].platform == "cpu"
        self._options = None if self._layered else GPU_OPTIONS
        repeated = NamedSharding(mesh, REPEATED)
        self._indices = [jax.device_put(jnp.int32(i), repeated) for i in range(len(self._layers))]
        self._compiled: dict[Any, Any] = {}
        self._lock = threading.Lock()
        self._precision = "highest" if pool.dtype == jnp.float32 else "default"

    @property
    def layers(self) -> list[ModuleLeaves]:
        """The model's layers. Programs hold their `leaves` lists: what is put there, steps compute with."""
        return self._layers

    def parameters(self) -> list[jax.Array]:
        """The model's arrays."""
        return [leaf for module in (self._ends, *self._layers) for leaf in module.leaves]

    def build(self, shape: StepShape) -> Program:
        """Compile the program of a shape (or put it together from parts that other shapes have compiled)."""
        packed = jax.ShapeDtypeStruct(
            (shape.packed_size,), jnp.int32, sharding=NamedSharding(self._mesh, REPEATED)
        )
        return self._build_layered(shape, packed) if self._layered else self._build_whole(shape, packed)

    def _build_whole(self, shape: StepShape, packed: jax.ShapeDtypeStruct) -> Program:
        first = self._layers[0]

        def run(
            ends: list[jax.Array],
            layers: list[list[jax.Array]],
            pool: jax.Array,
            slots: SlotState,
            packed: jax.Array,
        ) -> Result:
            modules = [first.merge(leaves) for leaves in layers]
            return whole_step(self._config, shape, self._ends.merge(ends), modules, pool, slots, packed)

        layers = [m.leaves for m in self._layers]
        specs = (self._ends.specs, [m.specs for m in self._layers], POOL_SPEC, REPEATED, REPEATED)
        mapped = self._map(run, specs, (POOL_SPEC, REPEATED, REPEATED))
        executable, _ = self._compile(
            ("step", shape), mapped, (2, 3), self._ends.leaves, layers, self._pool, self._slots, packed
        )
        return WholeStep(executable, self._ends.leaves, layers)

    def _build_layered(self, shape: StepShape, packed: jax.ShapeDtypeStruct) -> Program:
        config, ends, first = self._config, self._ends, self._layers[0]
        begin_step, (x, ops, rows) = self._compile(
            ("begin", shape),
            self._map(
                lambda leaves, slots, packed: begin(config, shape, ends.merge(leaves), slots, packed),
                (ends.specs, REPEATED, REPEATED),
                REPEATED,
            ),
            (),
            ends.leaves,
            self._slots,
            packed,
        )
        layer_step, _ = self._compile(
            "layer",
            self._map(
                lambda leaves, index, x, pool, ops: layer(first.merge(leaves), index, x, pool, ops),
                (first.specs, REPEATED, REPEATED, POOL_SPEC, REPEATED),
                (REPEATED, POOL_SPEC),
            ),
            (2, 3),
            first.leaves,
            self._indices[0],
            x,
            self._pool,
            ops,
        )
        finish_step, _ = self._compile(
            "finish",
            self._map(
                lambda leaves, slots, x, rows: finish(config, ends.merge(leaves), slots, x, rows),
                (ends.specs, REPEATED, REPEATED, REPEATED),
                REPEATED,
            ),
            (1,),
            ends.leaves,
            self._slots,
            x,
            rows,
        )
        layers = [m.leaves for m in self._layers]
        return LayeredStep(begin_step, layer_step, finish_step, ends.leaves, layers, self._indices)

    def _map(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(fn, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _compile(
        self, part: Hashable, fn: Callable[..., Any], donate: tuple[int, ...], *args: Any
    ) -> tuple[Any, Any]:
        """(executable, its abstract outputs), once for each `part` and argument shapes.

        `part` must name all that `fn` closes over: two step shapes may pack into as many words.
        """
        args = jax.tree.map(_abstract, args)
        leaves, tree = jax.tree.flatten(args)
        key = part, tree, tuple((a.shape, a.dtype) for a in leaves)
        with self._lock:
            found = self._compiled.get(key)
        if found is None:
            started = time.perf_counter()
            with jax.default_matmul_precision(self._precision):
                step = jax.jit(fn, donate_argnums=donate)
                if self._exported is None or self._layered:
                    lowered = step.lower(*args)
                else:
                    lowered = self._exported.lower(part, step, args, donate)
            lowering = time.perf_counter()
            sharding = NamedSharding(self._mesh, REPEATED)
            outputs = jax.tree.map(
                lambda o: jax.ShapeDtypeStruct(o.shape, o.dtype, sharding=sharding), lowered.out_info
            )
            found = lowered.compile(self._options), outputs
            logger.debug(
                "%s: lowered in %.1f s, compiled in %.1f s",
                part,
                lowering - started,
                time.perf_counter() - lowering,
            )
            with self._lock:
                self._compiled[key] = found
        return found


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
