"""The interpreter's races: what the tests of Mosaic kernels that ask for them rely on."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from slora_jax.pallas_kernels.mosaic_lora_item import LoraConfig, add_to_memory
from tests.kernels.conftest import races

INTERPRET: Any = plgpu.InterpretGPUParams(detect_races=True)
CONFIG = LoraConfig(group=1, in_dim=64, out_dims=(64,), width=64, per_page=1, n_pages=1, interpret=INTERPRET)


@functools.partial(jax.jit, static_argnames="how")
def of_two_blocks(how: str) -> jax.Array:
    """What two thread blocks leave that write, or add, ones to the same rows, or to rows of their own."""

    def kernel(y: Any, ones: Any) -> None:
        ones[...] = jnp.ones_like(ones)
        plgpu.commit_smem()
        rows = pl.ds(8 * lax.axis_index("block") if how == "apart" else 0, 8)
        if how == "adds":
            add_to_memory(ones, y.at[rows], CONFIG)
        else:
            plgpu.copy_smem_to_gmem(ones, y.at[rows])
            plgpu.wait_smem_to_gmem(0)

    y = jax.new_ref(jnp.zeros((16, 64), jnp.bfloat16))
    plgpu.kernel(
        kernel,
        out_type=(),
        grid=(2,),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((8, 64), jnp.bfloat16)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=INTERPRET,
    )(y)
    return jax.freeze(y)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there kernels run on the chip")
@pytest.mark.parametrize(("how", "is_race"), [("apart", False), ("over each other", True), ("adds", False)])
def test_races_are_found_but_for_atomic_adds(
    how: str, is_race: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    sums = np.asarray(of_two_blocks(how), np.float32).sum()
    told = capsys.readouterr().out
    assert sums == {"adds": 2, "apart": 2}.get(how, 1) * 8 * 64
    assert ("RACE" in told) == (how != "apart")
    assert bool(races(told)) == is_race
