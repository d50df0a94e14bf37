"""Owns everything on the devices: the model, the page pool, the slots' state, and a program per step shape.

`launch` only enqueues work and returns; `InFlight.fetch` waits for it. State arrays are donated to each step
and replaced by its results, so nothing else may hold them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import os
import time
import weakref
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from slora_jax import interrupts
from slora_jax.batch import BatchBuilder, PackedStep
from slora_jax.compile_cache import steps_folder
from slora_jax.config import EngineConfig, ModelConfig
from slora_jax.exported_steps import ExportedSteps
from slora_jax.lora.merging import WeightMerger
from slora_jax.lora.transfer import AdapterTransfer, HostCopy, StagedCopy
from slora_jax.memory.layout import GROUPS, PageLayout
from slora_jax.models.llama import Llama, fuse_layer, layer_params, model_specs
from slora_jax.models.params import checkpoint_specs
from slora_jax.models.rope import Rope
from slora_jax.pallas_kernels.backend import Backend, KernelShape, select_backend
from slora_jax.pallas_kernels.padded_bmm import with_padded_bmm
from slora_jax.programs import Program, ProgramBuilder
from slora_jax.request import Sequence
from slora_jax.sampling import update_token_counts
from slora_jax.scheduling.scheduler import Chunk, StepPlan
from slora_jax.sharding.rules import named_sharding, partition_spec
from slora_jax.step import POOL_SPEC, REPEATED, SlotState, StepConfig, StepOutput
from slora_jax.step_shape import ShapeBuckets, StepShape
from slora_jax.weights import Progress

logger = logging.getLogger(__name__)

COUNT_TOKENS = 1024  # cached tokens that are entered into a slot's counts at once
_BUCKET_RATIO = 4


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A step that runs on the device, and which chunk each row of its outputs belongs to."""

    rows: list[tuple[int, Chunk]]  # of chunks that sample
    output: StepOutput
    wants_logprobs: bool

    def fetch(self) -> dict[str, np.ndarray]:
        """Wait for the step; its outputs [R, ...] by name (logprobs and logits only where asked for)."""
        out = {"tokens": np.asarray(self.output.tokens)}
        if self.wants_logprobs:
            sample = self.output.sample
            for name in ("logprob", "rank", "top_tokens", "top_logprobs"):
                out[name] = np.asarray(getattr(sample, name))
        if self.output.logits is not None:
            out["logits"] = np.asarray(self.output.logits)
        return out


def choose_backend(
    model_config: ModelConfig, config: EngineConfig, mesh: Mesh, layout: PageLayout
) -> Backend:
    """The kernels of `kernel_backend` on this mesh; raises ValueError like `select_backend`."""
    device = mesh.devices.flat[0]
    kernel_shape = KernelShape(
        dtype=config.dtype,
        n_q=model_config.num_attention_heads // layout.tp,
        n_kv=layout.n_kv,
        head_dim=layout.head_dim,
        page_tokens=layout.page_tokens,
        chunk_width=layout.chunk_width,
    )
    capability = getattr(device, "compute_capability", None)
    return select_backend(config.kernel_backend, device.platform, capability, kernel_shape)


class ModelRunner:
    """Runs plans. `params` are the checkpoint's arrays by canonical name, sharded; it takes them over."""

    def __init__(
        self,
        model_config: ModelConfig,
        config: EngineConfig,
        mesh: Mesh,
        layout: PageLayout,
        num_pages: int,
        max_model_len: int,
        params: dict[str, jax.Array],
    ) -> None:
        self._mesh, self._layout = mesh, layout
        device = mesh.devices.flat[0]
        self._on_cpu = device.platform == "cpu"
        self.backend = choose_backend(model_config, config, mesh, layout)
        logger.info("kernels: %s on %s", self.backend.name, device.device_kind)
        if config.lora_mode == "padded-bmm":
            self.backend = with_padded_bmm(self.backend)
        step_config = StepConfig(
            layout=layout,
            rope=Rope.from_config(model_config),
            backend=self.backend,
            max_logprobs=min(config.max_logprobs, model_config.vocab_size),
            record_logits=config.record_logits,
        )
        model = Llama(model_config, _fuse(model_config, layout.tp, mesh, params))
        self._pool, self._slots = _initial_state(model_config, config, mesh, layout, num_pages)
        exported, folder = None, steps_folder(config.compile_cache_dir)
        if folder is not None and not self._on_cpu:  # a CPU has no whole steps
            identity = steps_identity(model_config, config, layout, mesh, self.backend)
            exported = ExportedSteps(folder, identity)
        self._builder = ProgramBuilder(step_config, mesh, model, self._pool, self._slots, exported)
        self.buckets = ShapeBuckets.for_engine(
            layout,
            self.backend,
            max_batch_size=config.max_batch_size,
            max_step_tokens=config.max_step_tokens,
            max_model_len=max_model_len,
            ratio=_BUCKET_RATIO,
        )
        self._merger = (
            WeightMerger(mesh, layout, self._builder.layers) if config.lora_mode == "merge" else None
        )
        self._batches = BatchBuilder(layout, self.backend, self.buckets, merged=self._merger is not None)
        self._programs: dict[StepShape, Program] = {}
        self.packed: tuple[StepPlan, StepShape] | None = None  # the last plan that has a shape
        self._transfer = AdapterTransfer(mesh, self._pool, POOL_SPEC)
        weakref.finalize(self, self._transfer.wait)  # no copy goes on into a pool that is dropped
        # How fast adapters are copied into the pool beside the steps; None where they are not.
        self.copy_bytes_per_s = self._transfer.measure(self._pool)
        self._count_tokens = jax.jit(
            update_token_counts, donate_argnums=0, out_shardings=NamedSharding(mesh, REPEATED)
        )
        self.compilations = 0
        self.compiling = False  # a step's shape that was just met

    def launch(self, plan: StepPlan) -> InFlight:
        """Enqueue a plan that the scheduler has committed; compiles its shape first where that is new."""
        for chunk in plan:
            sequence = chunk.sequence
            if 0 < chunk.start == sequence.num_cached and sequence.request.params.has_penalties:
                self._count_cached_tokens(sequence)
        if self._merger is not None:
            self._merger.switch(next(iter(plan)).sequence.adapter, self._pool)
        step = self._batches.build(plan)
        shape = step.shape
        self.packed = plan, shape
        packed = jax.device_put(step.words, self._sharding())
        self._pool, self._slots, output = self.program(shape)(self._pool, self._slots, packed)
        # A CPU has nothing to copy, and the copy's callback aborts an exiting process (jaxlib 0.11.2).
        if not self._on_cpu:
            output.tokens.copy_to_host_async()
        wants_logprobs = step.wants_logprobs
        self._batches.launched(step, output.tokens)
        rows = [(row, chunk) for row, chunk in _rows(plan, shape) if chunk.samples]
        return InFlight(rows, output, wants_logprobs)

    @property
    def merges(self) -> int:
        """How often the weights changed from one adapter (or the base) to another."""
        return 0 if self._merger is None else self._merger.switches

    @property
    def stages_adapters(self) -> bool:
        """Whether copies of adapters to the device take their time; on a CPU the write is the only copy."""
        return self._transfer.stages

    @property
    def pinned_host_limit(self) -> int | None:
        """Bytes that host copies may take together, where they are in pinned host memory."""
        return self._transfer.pinned_host_limit

    def host_copy(self, pages: np.ndarray) -> HostCopy:
        """An adapter's pages [n_layers, n, tp * page_elems] as `stage_adapters` takes them. Any thread."""
        return self._transfer.host_copy(pages)

    def stage_adapters(self, copies: Seq[HostCopy], pages: Seq[Seq[int]]) -> Seq[StagedCopy]:
        """Begin to copy adapters to the device, for these pages each; returns at once.

        No step may be under way that was planned when the pages were another's: a copy waits for none.
        """
        return self._transfer.stage(self._pool, copies, pages)

    def write_adapter(self, staged: StagedCopy) -> None:
        """A copy has come: enqueue its write into the pool, if it needs one, after the steps launched."""
        self._pool = self._transfer.write(self._pool, staged)

    def wait(self) -> None:
        """Until no step and no copy of an adapter is under way; what they raise is the next one's to tell."""
        with contextlib.suppress(Exception):
            jax.block_until_ready(self._pool)
        self._transfer.wait()

    def _count_cached_tokens(self, sequence: Sequence) -> None:
        """Begin a slot's token counts with the tokens of a cached prefix, which no step computes for it."""
        own, none = sequence.slot, self._slots.token_counts.shape[0]
        assert own is not None
        for start in range(0, sequence.num_cached, COUNT_TOKENS):
            n = min(COUNT_TOKENS, sequence.num_cached - start)
            slot, token = np.full(COUNT_TOKENS, none, np.int32), np.zeros(COUNT_TOKENS, np.int32)
            slot[:n], token[:n] = own, sequence.tokens[start : start + n]
            is_prompt = np.arange(start, start + COUNT_TOKENS) < sequence.prompt_len
            reset = np.array([none if start else own], np.int32)
            arrays = jax.device_put((slot, token, is_prompt, reset), self._sharding())
            counts = self._count_tokens(self._slots.token_counts, *arrays)
            self._slots = dataclasses.replace(self._slots, token_counts=counts)

    def program(self, shape: StepShape) -> Program:
        """The compiled step of a shape."""
        found = self._programs.get(shape)
        if found is None:
            started = time.perf_counter()
            self.compiling = True
            try:
                with interrupts.let_in():
                    found = self._programs[shape] = self._builder.build(shape)
            finally:
                self.compiling = False
            self.compilations += 1
            logger.info(
                "compiled a step of %d decodes and %d prompt tokens, contexts to %d, %s, in %.1f s",
                shape.decode_rows,
                shape.prefill_tokens,
                shape.pages * self._layout.page_tokens,
                _targets(shape),
                time.perf_counter() - started,
            )
            logger.debug("its shape: %s", shape)
        return found

    def warmup(self, lora_groups: Iterable[int], progress: Progress | None = None) -> None:
        """Compile the usual shapes, with LoRA for these groups of modules."""
        shapes = self.buckets.usual(self.expect(lora_groups))
        self.compile([s for s in shapes if self._merger is None or not s.lora], progress)

    def expect(self, lora_groups: Iterable[int]) -> tuple[int, ...]:
        """See `BatchBuilder.expect`."""
        return self._batches.expect(lora_groups)

    def compile(self, shapes: Iterable[StepShape], progress: Progress | None = None) -> None:
        """Compile the programs of shapes in threads; `progress("compiling", done, total)`. On a GPU each then
        runs once, on nothing, while no request waits for it.

        Broken off (Ctrl-C), it waits for those under way only.
        """
        todo = [s for s in dict.fromkeys(shapes) if s not in self._programs]
        pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1)
        try:
            futures = {pool.submit(self._builder.build, shape): shape for shape in todo}
            for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                self._programs[futures[future]] = future.result()
                self.compilations += 1
                logger.info("compiled %d of %d steps", done, len(todo))
                if progress is not None:
                    progress("compiling", done, len(todo))
        finally:
            pool.shutdown(cancel_futures=True)
        if not self._on_cpu:
            for shape in todo:
                self.rehearse(shape)

    def rehearse(self, shape: StepShape) -> None:
        """Run a step of padding, which changes nothing: what a device does at a program's first run only, as
        loading its kernels and making its CUDA graphs, is done after it.
        """
        words = PackedStep.of(shape, no_slot=self.buckets.max_batch_size).words
        packed = jax.device_put(words, self._sharding())
        self._pool, self._slots, output = self.program(shape)(self._pool, self._slots, packed)
        jax.block_until_ready(output)

    @property
    def pool(self) -> jax.Array:
        """The page pool; valid until the next launch or write, which take it over."""
        return self._pool

    def parameters(self) -> list[jax.Array]:
        """The model's arrays."""
        return self._builder.parameters()

    def _sharding(self) -> NamedSharding:
        return NamedSharding(self._mesh, REPEATED)


def steps_identity(
    model_config: ModelConfig, config: EngineConfig, layout: PageLayout, mesh: Mesh, backend: Backend
) -> tuple[object, ...]:
    """What an engine's steps are made of beside code, versions, shapes and settings: `ExportedSteps`."""
    device = mesh.devices.flat[0]
    capability = getattr(device, "compute_capability", None)
    return (
        *(device.platform, device.device_kind, capability, mesh.shape_tuple),
        *(model_config, layout, backend.name, config.lora_mode),
        *(config.max_logprobs, config.record_logits),
    )


def _targets(shape: StepShape) -> str:
    if not shape.lora:
        return "without adapters"
    modules = [module for group in shape.lora_groups for module in GROUPS[group]]
    return f"with adapters on {', '.join(modules)}"


def _rows(plan: StepPlan, shape: StepShape) -> Iterable[tuple[int, Chunk]]:
    yield from enumerate(plan.decodes)
    yield from enumerate(plan.prefills, shape.decode_rows)


def _fuse(config: ModelConfig, tp: int, mesh: Mesh, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Checkpoint arrays -> model arrays, a layer at a time, freeing as it goes."""
    before, after = checkpoint_specs(config), model_specs(config, tp)
    in_specs = {n: named_sharding(mesh, s.axes, s.shape).spec for n, s in layer_params(before, 0).items()}
    out_specs = {n: partition_spec(s.axes) for n, s in layer_params(after, 0).items()}
    fuse = jax.jit(
        jax.shard_map(
            functools.partial(fuse_layer, config, tp),
            mesh=mesh,
            in_specs=(in_specs,),
            out_specs=out_specs,
            check_vma=False,
        )
    )
    out = {name: array for name, array in params.items() if not name.startswith("layers.")}
    for i in range(config.num_hidden_layers):
        layer = {name: params.pop(f"layers.{i}.{name}") for name in in_specs}
        out |= {f"layers.{i}.{name}": array for name, array in fuse(layer).items()}
    return out


def _initial_state(
    model_config: ModelConfig, config: EngineConfig, mesh: Mesh, layout: PageLayout, num_pages: int
) -> tuple[jax.Array, SlotState]:
    """The pool dtype[n_layers, num_pages, tp * page_elems] and the slots, all zero."""
    shape = (layout.n_layers, num_pages, layout.tp * layout.page_elems)
    repeated, slots = NamedSharding(mesh, REPEATED), config.max_batch_size
    pool = jnp.zeros(shape, jnp.dtype(config.dtype), device=NamedSharding(mesh, POOL_SPEC))
    last_tokens = jnp.zeros((slots,), jnp.int32, device=repeated)
    token_counts = jnp.zeros((slots, model_config.vocab_size), jnp.int32, device=repeated)
    return pool, SlotState(last_tokens, token_counts)
