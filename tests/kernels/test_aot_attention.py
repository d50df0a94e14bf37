"""The Mosaic attention kernels compiled for sm_90a: no spills, no copy of the pool. Needs the CUDA plugin."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from slora_jax.pallas_kernels import aot
from slora_jax.pallas_kernels.mosaic_decode import decode_attention
from slora_jax.pallas_kernels.mosaic_prefill import prefill_attention
from slora_jax.pallas_kernels.mosaic_rope import rope_write_kv

pytestmark = pytest.mark.aot
LAYERS, PAGES, PAGE_TOKENS = 4, 2000, 16


@pytest.mark.parametrize(
    ("h", "n_kv", "e"),
    [(32, 8, 128), (32, 32, 128), (14, 2, 64), (9, 3, 64), (40, 40, 128), (16, 1, 128), (20, 2, 128)],
)
def test_layers_compile_for_h200(dump: Path, h: int, n_kv: int, e: int) -> None:
    """Two layers of KV write, decode and prefill attention, as a step has them."""
    decodes, prompts, pages, tile = 64, 512, 40, 128
    tiles = prompts // tile + 8
    bf16, i32 = jnp.bfloat16, jnp.int32

    def two_layers(
        pool: jax.Array,
        qkv: jax.Array,
        angles: jax.Array,
        tokens: jax.Array,
        table: jax.Array,
        cut: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        sizes: Any = {"n_kv": n_kv, "page_tokens": PAGE_TOKENS, "scale": 0.1}
        for layer in range(2):
            cos, sin, page, offset = *angles, *tokens[:2]
            pool, x = rope_write_kv(
                pool, layer, qkv, cos, sin, page, offset, n_kv=n_kv, page_tokens=PAGE_TOKENS
            )
            one = decode_attention(x[:decodes], pool, layer, table, tokens[2][:decodes], **sizes)
            rest = prefill_attention(
                x[decodes:],
                pool,
                layer,
                table,
                tokens[2][decodes:],
                cut[0],
                cut[1],
                cut[2],
                tokens[1][decodes:],
                tile=tile,
                **sizes,
            )
            out = jnp.concatenate([one, rest])
            qkv = jnp.concatenate([out, qkv[:, h:]], axis=1)
        return pool, out

    t, elems = decodes + prompts, 2 * n_kv * PAGE_TOKENS * e
    compiled = aot.compile_for_h200(
        two_layers,
        aot.shape((LAYERS, PAGES, elems), bf16),
        aot.shape((t, h + 2 * n_kv, e), bf16),
        aot.shape((2, t, e // 2), jnp.float32),
        aot.shape((3, t), i32),
        aot.shape((decodes, pages), i32),
        aot.shape((3, tiles), i32),
        donate=(0,),
    )
    memory: Any = compiled.memory_analysis()
    pool_bytes = LAYERS * PAGES * elems * 2
    assert memory.alias_size_in_bytes == pool_bytes
    assert aot.large_temporaries(compiled) < pool_bytes // 4
    reports = aot.ptx_reports(dump)
    names = {r.name.rsplit("_", 1)[0] for r in reports}  # of every shape so far
    assert {"decode", "prefill", "write_kv" if h % 8 or n_kv % 8 else "rope_write_kv"} <= names
    for report in reports:
        assert report.spill_bytes == 0, report


def test_layers_of_decode_share_zeroed_counters() -> None:
    """The counters of parts are zeroed once for all layers, and never copied."""
    s, pages, layers, h, n_kv, e = 64, 40, 3, 32, 8, 128

    def decode(pool: jax.Array, x: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
        sizes: Any = {"n_kv": n_kv, "page_tokens": PAGE_TOKENS, "scale": 0.1}
        for layer in range(layers):
            x = decode_attention(x, pool, layer, table, lengths, **sizes)
        return x

    compiled = aot.compile_for_h200(
        decode,
        aot.shape((LAYERS, PAGES, 2 * n_kv * PAGE_TOKENS * e), jnp.bfloat16),
        aot.shape((s, h, e), jnp.bfloat16),
        aot.shape((s, pages), jnp.int32),
        aot.shape((s,), jnp.int32),
    )
    program = compiled.as_text() or ""
    entry = program[program.index("ENTRY") :]
    assert len(re.findall(r" fusion\(\), .*broadcast", entry)) == 1
    assert " copy(" not in entry
