"""The Mosaic LoRA kernels run over cases: in the GPU interpreter, races detected, or on the chip."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from slora_jax.pallas_kernels import lora_work
from slora_jax.pallas_kernels.lora_work import LoraWork, build_lora_work, lora_work_needed
from slora_jax.pallas_kernels.mosaic_lora import apply_lora
from tests.kernels.lora_cases import LAYER, Adapters, Dims, dense_lora, pack_adapters

ON_GPU = jax.default_backend() == "gpu"  # then on the chip, without the interpreter
W = 64
IN = (128, 128, 128, 64, 128, 128, 192)  # q, k, v, o, gate, up, down
OUT = (128, 64, 64, 128, 192, 192, 128)
DIMS = Dims(chunk_width=W, chunks_per_page=3, ins=IN, outs=OUT)
A_CHUNKS, B_CHUNKS = DIMS.a_chunks, DIMS.b_chunks
QKV, OUTPUT, GATE_UP, DOWN = lora_work.MODULE_GROUPS


def pack(rng: np.random.Generator, ranks: list[dict[int, int]]) -> Adapters:
    return pack_adapters(rng, ranks, DIMS, dtype=jnp.bfloat16, n_pages=64)


def bf16(values: np.ndarray) -> np.ndarray:
    return np.asarray(jnp.asarray(values, jnp.bfloat16), np.float32)


@functools.partial(jax.jit, static_argnames=("group", "split", "pack", "tuning", "dims"))
def run(
    x: jax.Array,
    y: jax.Array,
    pool: jax.Array,
    work: LoraWork,
    *,
    group: tuple[int, ...],
    split: int | None,
    pack: bool = False,
    tuning: tuple[tuple[str, Any], ...] = (),
    dims: Dims = DIMS,
) -> jax.Array:
    return apply_lora(
        x,
        y,
        pool,
        jnp.int32(LAYER),
        work,
        modules=group,
        in_dim=dims.ins[group[0]],
        out_dims=tuple(dims.outs[m] for m in group),
        chunk_width=dims.chunk_width,
        split=split,
        interpret=None if ON_GPU else plgpu.InterpretGPUParams(detect_races=not pack),
        pack=pack or ON_GPU,
        **dict(tuning),
    )


def check(
    rng: np.random.Generator,
    data: Adapters,
    token_adapter: np.ndarray,
    group: tuple[int, ...] = QKV,
    *,
    split: int | None = 1,
    decode_rows: int | None = None,
    as_runs: bool = False,
    spare: int = 1,
    pack: bool = False,
    **tuning: Any,
) -> None:
    """The group's outputs equal y + x A^T B of each token's adapter, one token at a time."""
    *items, lp = lora_work_needed(token_adapter, data.blocks, decode_rows, as_runs=as_runs)
    nd, nr, nt = (n + spare if n else 0 for n in items)
    host = build_lora_work(
        token_adapter,
        data.blocks,
        nd,
        nr,
        nt,
        lp + 1,
        a_chunks=data.dims.a_chunks,
        b_chunks=data.dims.b_chunks,
        decode_rows=decode_rows,
    )
    work = LoraWork(**{name: jnp.asarray(array) for name, array in host.items()})
    outs = [data.dims.outs[m] for m in group]
    x = bf16(rng.standard_normal((len(token_adapter), data.dims.ins[group[0]])))
    y = bf16(rng.standard_normal((len(token_adapter), sum(outs))))
    want = dense_lora(x, y, data, token_adapter, group)
    as_bf16 = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    static: dict[str, Any] = {"group": group, "split": split, "pack": pack, "dims": data.dims}
    static["tuning"] = (*tuning.items(),)
    got = np.asarray(run(as_bf16(x), as_bf16(y), data.pool, work, **static), np.float32)
    # Two roundings of what is added and one of the sum, each at most 2^-8 of its value.
    np.testing.assert_allclose(got, want, rtol=2**-8, atol=2**-6 * np.abs(want - y).max())
    untouched = want == y
    np.testing.assert_array_equal(got[untouched], y[untouched])
