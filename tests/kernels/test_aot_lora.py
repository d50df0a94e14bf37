"""Mosaic LoRA compiled for sm_90a: no spills, no copy of the pool, y in place (needs the CUDA plugin)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from slora_jax.pallas_kernels import aot
from slora_jax.pallas_kernels.lora_work import FIELDS, MODULE_GROUPS, LoraWork
from slora_jax.pallas_kernels.mosaic_lora import apply_lora

pytestmark = pytest.mark.aot
LAYERS, PAGES = 4, 1000
SMEM_OF_TWO = (233_472 - 2 * 1024) // 2  # bytes for each of two thread blocks of an SM
BARRIERS = 512  # bytes, at most
REGISTERS_OF_TWO = 65536 // (2 * 256)  # of a thread, where two blocks of two warpgroups share an SM


@pytest.mark.parametrize(
    ("tokens", "nd", "nr", "nt", "in_dim", "out_dims", "width", "page_elems"),
    [
        (256, 256, 0, 0, 4096, (4096, 4096, 4096), 256, 131072),  # Llama-2-7B, fused
        (256, 32, 0, 0, 4096, (4096, 4096, 4096), 256, 131072),  # split
        (256, 256, 0, 0, 4096, (4096, 1024, 1024), 256, 32768),  # Llama-3-8B
        (256, 256, 0, 0, 5120, (13824, 13824), 256, 163840),  # Llama-2-13B, gate and up
        (256, 256, 0, 0, 11008, (4096,), 256, 131072),  # down
        (32, 32, 0, 0, 896, (896, 128, 128), 128, 16384),  # chunks of 128
        (64, 64, 0, 0, 576, (576, 192, 192), 64, 6144),  # SmolLM2-135M
        (256, 0, 64, 0, 4096, (4096, 4096, 4096), 256, 131072),  # decodes of few adapters
        (256, 0, 64, 0, 4096, (4096,), 256, 131072),
        (256, 0, 64, 0, 5120, (13824, 13824), 256, 163840),
        (128, 0, 64, 0, 576, (576, 192, 192), 64, 6144),
        (2048, 64, 0, 40, 4096, (4096, 4096, 4096), 256, 131072),  # prompts beside decodes
        (40, 8, 0, 2, 4096, (4096, 1024, 1024), 256, 32768),  # one short prompt: padded to a tile
    ],
)
def test_compiles_for_h200(
    dump: Path,
    tokens: int,
    nd: int,
    nr: int,
    nt: int,
    in_dim: int,
    out_dims: tuple[int, ...],
    width: int,
    page_elems: int,
) -> None:
    modules = next(g for g in MODULE_GROUPS if len(g) == len(out_dims))

    def two_layers(y: jax.Array, x: jax.Array, pool: jax.Array, work: LoraWork) -> jax.Array:
        shapes: dict[str, Any] = {"in_dim": in_dim, "out_dims": out_dims, "chunk_width": width}
        for layer in range(2):
            reads_y = bool(nt) and layer == 1  # both kinds of tiles
            y = apply_lora(x, y, pool, layer, work, modules=modules, **shapes, reads_y=reads_y)
        return y

    bf16, i32 = jnp.bfloat16, jnp.int32
    items: Any = [aot.shape((4, n, FIELDS), i32) for n in (nd, nr, nt)]
    pages: Any = aot.shape((4096,), i32)
    work = LoraWork(items[0], items[1], items[2], pages)
    y, x = aot.shape((tokens, sum(out_dims)), bf16), aot.shape((tokens, in_dim), bf16)
    compiled = aot.compile_for_h200(
        two_layers, y, x, aot.shape((LAYERS, PAGES, page_elems), bf16), work, donate=(0,)
    )
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == tokens * sum(out_dims) * 2, "y is not updated in place"
    assert aot.large_temporaries(compiled) < 64 << 20  # h of the tiles; the pool has 100 MB and more
    reports = aot.ptx_reports(dump)
    assert reports
    assert [r for r in reports if r.spill_bytes] == []
    assert [r for r in reports if "lora_decode" in r.name and r.registers > REGISTERS_OF_TWO] == []
    for path in [*dump.rglob("lora_decode*.resources.txt"), *dump.rglob("lora_tile_expand*.resources.txt")]:
        sizes = re.findall(r"smem_scratch_bytes=(\d+)", path.read_text())
        assert int(sizes[0]) + BARRIERS <= SMEM_OF_TWO, f"{path.stem}: only one thread block fits an SM"
