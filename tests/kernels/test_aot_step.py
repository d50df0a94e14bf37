"""A whole step of the engine on the Mosaic kernels, compiled for an H200: one graph, the pool in place."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from slora_jax import ModelConfig
from slora_jax.exported_steps import ExportedSteps
from slora_jax.memory.layout import PageLayout
from slora_jax.models.llama import Llama, model_specs
from slora_jax.models.rope import Rope
from slora_jax.pallas_kernels import aot
from slora_jax.pallas_kernels.backend import Backend
from slora_jax.pallas_kernels.mosaic_backend import MOSAIC
from slora_jax.pallas_kernels.padded_bmm import GATHER_BYTES, with_padded_bmm
from slora_jax.programs import GPU_OPTIONS
from slora_jax.step import POOL_SPEC, REPEATED, ModuleLeaves, SlotState, StepConfig, whole_step
from slora_jax.step_shape import ShapeBuckets

pytestmark = pytest.mark.aot
LLAMA_7B = ModelConfig(32000, 4096, 2, 32, 32, 128, 11008, 4096)  # but for its layers
LLAMA_8B = ModelConfig(128256, 4096, 2, 32, 8, 128, 14336, 4096)
ITEMS, RUNS = (100,), (0, 1)  # what a LoRA work list must hold: a batch of many adapters, of few


@pytest.mark.parametrize(
    ("config", "lora", "prefill_tokens"),
    [
        (LLAMA_7B, ITEMS, 0),
        (LLAMA_8B, ITEMS, 0),
        (LLAMA_8B, RUNS, 0),
        (LLAMA_7B, ITEMS, 512),
        (LLAMA_8B, ITEMS, 512),
    ],
    ids=["mha", "gqa", "gqa, few adapters", "mha and prompts", "gqa and prompts"],
)
def test_a_step_is_one_graph_and_makes_no_copy_of_the_pool(
    config: ModelConfig, lora: tuple[int, ...], prefill_tokens: int, tmp_path: Path
) -> None:
    compile_step(config, MOSAIC, lora, prefill_tokens, tmp_path)


def test_the_padded_baseline_too_is_one_graph_and_bounds_its_copies(tmp_path: Path) -> None:
    """Rank 64: 256 tokens' copies of q, k, v and gate, up would take 2 GB."""
    compiled = compile_step(LLAMA_7B, with_padded_bmm(MOSAIC), (8,), 0, tmp_path)
    assert aot.large_temporaries(compiled) < 2 * GATHER_BYTES


def test_a_step_that_was_kept_on_disk_compiles_to_the_same(tmp_path: Path) -> None:
    exported = ExportedSteps(tmp_path / "steps", (), platforms=("cuda",))
    compile_step(LLAMA_8B, MOSAIC, ITEMS, 512, tmp_path, exported)
    assert len(list((tmp_path / "steps").iterdir())) == 1


def compile_step(
    config: ModelConfig,
    backend: Backend,
    lora: tuple[int, ...],
    prefill_tokens: int,
    tmp_path: Path,
    exported: ExportedSteps | None = None,
) -> jax.stages.Compiled:
    """A step of up to 256 decodes, with a LoRA work list of the first rung that holds `lora`."""
    layout = PageLayout.for_model(config, 16, 1)
    mesh = aot.h200_mesh()
    params = {n: aot.shape(s.shape, jnp.bfloat16) for n, s in model_specs(config, 1).items()}
    model = nnx.eval_shape(lambda p: Llama(config, p), params)
    ends, layers = _split(model.ends), [_split(m) for m in model.layers]
    buckets = ShapeBuckets.for_engine(
        layout, backend, max_batch_size=256, max_step_tokens=512, max_model_len=1040, ratio=4
    )
    shape = buckets.fit(
        decodes=256, prefill_tokens=prefill_tokens, prefill_seqs=bool(prefill_tokens), pages=60, bias=0
    )
    shape = buckets.with_lora(shape, lora, (0, 1, 2, 3))
    has_runs = dict(shape.lora).get("runs", (0, 0))[1] > 0
    assert has_runs == (lora == RUNS)
    step_config = StepConfig(layout, Rope.from_config(config), backend, max_logprobs=20, record_logits=False)

    def run(
        ends_leaves: list[jax.Array],
        layer_leaves: list[list[jax.Array]],
        pool: jax.Array,
        slots: SlotState,
        packed: jax.Array,
    ) -> object:
        modules = [layers[0].merge(leaves) for leaves in layer_leaves]
        return whole_step(step_config, shape, ends.merge(ends_leaves), modules, pool, slots, packed)

    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(REPEATED, REPEATED, POOL_SPEC, REPEATED, REPEATED),
        out_specs=(POOL_SPEC, REPEATED, REPEATED),
        check_vma=False,
    )
    pool = jax.ShapeDtypeStruct(
        (config.num_hidden_layers, 12000, layout.page_elems),
        jnp.bfloat16,
        sharding=NamedSharding(mesh, POOL_SPEC),
    )
    slots: Any = SlotState(*(aot.shape(s, jnp.int32) for s in ((256,), (256, config.vocab_size))))  # type: ignore[arg-type]
    packed = aot.shape((shape.packed_size,), jnp.int32)
    options = GPU_OPTIONS | {"xla_dump_to": str(tmp_path)}
    args = ends.leaves, [m.leaves for m in layers], pool, slots, packed
    step: Any = mapped
    if exported is not None:
        exported._exported("step", jax.jit(mapped, donate_argnums=(2, 3)), args)
        step = exported._exported("step", None, args).call  # read: there is nothing to export
    compiled = aot.compile_for_h200(step, *args, donate=(2, 3), options=options)
    assert aot.command_buffers(tmp_path) == 1
    pool_bytes = 2 * pool.size
    assert compiled.memory_analysis().alias_size_in_bytes >= pool_bytes  # type: ignore[union-attr]
    assert aot.large_temporaries(compiled) < pool_bytes / 2
    return compiled


def _split(module: nnx.Module) -> ModuleLeaves:
    """An abstract module's leaves with the mesh's sharding, which nnx.eval_shape drops."""
    split = ModuleLeaves.split(module)
    leaves: list[Any] = [aot.shape(leaf.shape, leaf.dtype) for leaf in split.leaves]
    return dataclasses.replace(split, leaves=leaves)
