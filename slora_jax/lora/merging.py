"""One adapter at a time merged into the weights (`lora_mode="merge"`), as PEFT's `merge_adapter` does.

The weights that were loaded stay as they are. A merge writes W + A^T B beside them for the projections that
the adapter targets, and steps take these, so that the next adapter, and the base, begin from the very same
bits in any dtype. It costs a second copy of those projections.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from slora_jax.lora.store import Adapter
from slora_jax.memory.layout import GROUPS, MODULES, PageLayout
from slora_jax.pallas_kernels.xla_lora import LoraBlocks, build_lora_blocks, lora_blocks_needed, merge_lora
from slora_jax.programs import GPU_OPTIONS
from slora_jax.request import BASE_GENERATION
from slora_jax.step import POOL_SPEC, REPEATED, ModuleLeaves

_WEIGHTS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")  # of LlamaLayer, by group of modules


class WeightMerger:
    """Owns the base weights of `layers`, whose `leaves` it replaces by merged ones; the owner of these must
    hold the lists themselves.
    """

    def __init__(self, mesh: Mesh, layout: PageLayout, layers: Seq[ModuleLeaves]) -> None:
        self._mesh, self._layout, self._layers = mesh, layout, layers
        self._base = [list(module.leaves) for module in layers]
        self._options = None if mesh.devices.flat[0].platform == "cpu" else GPU_OPTIONS
        repeated = NamedSharding(mesh, REPEATED)
        self._numbers = [jax.device_put(np.int32(i), repeated) for i in range(len(layers))]
        first = layers[0]
        numbered = jax.tree.unflatten(first.tree, list(range(len(first.leaves))))
        self._leaf = [int(jax.tree.leaves(numbered[name])[0]) for name in _WEIGHTS]
        self._merges = [self._compiled(group, first.specs[leaf]) for group, leaf in enumerate(self._leaf)]
        self._generation: int | None = BASE_GENERATION  # whose weights the layers have; None: of several
        self.switches = 0

    def switch(self, adapter: Adapter | None, pool: jax.Array) -> None:
        """Let the steps launched from now on have a resident adapter's weights, or the base's.

        Waits for the steps under way: the merged weights that they use are freed before new ones are made.
        """
        generation = BASE_GENERATION if adapter is None else adapter.generation
        if generation == self._generation:
            return
        self._generation = None  # a switch that breaks off (Ctrl-C) is begun anew by the next one
        for module, base in zip(self._layers, self._base, strict=True):
            module.leaves[:] = base
        jax.block_until_ready(pool)
        if adapter is not None:
            self._merge(adapter, pool)
        self._generation = generation
        self.switches += 1

    def _merge(self, adapter: Adapter, pool: jax.Array) -> None:
        tables = adapter.shape.layout.tables
        blocks = self._blocks((np.asarray(adapter.weight_pages, np.int32), *tables))
        for group, modules in enumerate(GROUPS):
            if any(m in adapter.shape.layout.rank_blocks for m in modules):
                leaf = self._leaf[group]
                for number, module, base in zip(self._numbers, self._layers, self._base, strict=True):
                    module.leaves[leaf] = self._merges[group](base[leaf], pool, number, blocks)

    def _blocks(self, adapter: Any) -> LoraBlocks:
        """Its rank blocks on the device, padded to powers of two: few shapes to compile for."""
        needs = (1 << (need - 1).bit_length() for need in lora_blocks_needed([adapter]))
        layout = self._layout
        host = build_lora_blocks(
            np.zeros(1, np.int32),
            [adapter],
            *needs,
            a_chunks=[layout.a_chunks(m) for m in MODULES],
            b_chunks=[layout.b_chunks(m) for m in MODULES],
        )
        return LoraBlocks(**jax.device_put(host, NamedSharding(self._mesh, REPEATED)))

    def _compiled(self, group: int, spec: jax.sharding.PartitionSpec) -> Any:
        layout, modules = self._layout, GROUPS[group]
        merge = functools.partial(
            merge_lora,
            modules=tuple(MODULES.index(m) for m in modules),
            in_dim=layout.in_dims[modules[0]],
            out_dims=tuple(layout.out_dims[m] for m in modules),
            chunk_width=layout.chunk_width,
        )

        def of_shard(w: jax.Array, pool: jax.Array, layer: jax.Array, blocks: LoraBlocks) -> jax.Array:
            return merge(w.reshape(w.shape[0], -1), pool, layer, blocks).reshape(w.shape)

        return jax.jit(
            jax.shard_map(
                of_shard,
                mesh=self._mesh,
                in_specs=(spec, POOL_SPEC, REPEATED, REPEATED),
                out_specs=spec,
                check_vma=False,
            ),
            compiler_options=self._options,
        )
