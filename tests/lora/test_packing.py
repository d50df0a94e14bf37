"""Packing into pages and back: equal to dense scaling * B @ A, laid out as memory/layout.py says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slora_jax.config import ModelConfig
from slora_jax.errors import AdapterError
from slora_jax.lora import LoraAdapter, LoraWeights, pack_adapter, read_adapter, unpack_adapter, unpack_delta
from slora_jax.memory.layout import MODULES, PageLayout
from tests.lora.peft_files import ALL_MODULES, TINY, WrittenAdapter, features, write_peft_adapter

DTYPES = [np.float32, ml_dtypes.bfloat16]


def model(n_q: int, n_kv: int) -> ModelConfig:
    return dataclasses.replace(
        TINY,
        hidden_size=64,
        num_attention_heads=n_q,
        num_key_value_heads=n_kv,
        head_dim=16,
        intermediate_size=96,
    )


def check(written: WrittenAdapter, config: ModelConfig, tp: int, dtype: Any, page_tokens: int = 16) -> None:
    adapter = read_adapter(written.path, config, max_rank=256)
    layout = PageLayout.for_model(config, page_tokens, tp)
    packed = pack_adapter(adapter, layout, dtype)
    assert packed.pages.shape == (layout.n_layers, packed.layout.num_pages, tp * layout.page_elems)
    assert packed.pages.dtype == np.dtype(dtype)
    assert packed.pages.flags.c_contiguous
    assert packed.nbytes == packed.pages.size * np.dtype(dtype).itemsize
    deltas = unpack_adapter(packed, layout)
    assert set(deltas) == {(i, m) for i in range(layout.n_layers) for m in packed.target_modules}
    for (layer, module), delta in deltas.items():
        assert delta.shape == features(config, module)
        if (layer, module) not in written.a:
            assert not delta.any()
            continue
        # A and scaling * B are each rounded once to the pool's dtype: twice its roundoff, 2^-8 in bfloat16
        a = written.a[layer, module].astype(np.float32)
        b = written.b[layer, module].astype(np.float32) * np.float32(written.scaling[layer, module])
        exact = a.astype(dtype).astype(np.float32).T @ b.astype(dtype).astype(np.float32).T
        scale = np.abs(a).T @ np.abs(b).T
        np.testing.assert_array_less(np.abs(delta - exact), 1e-5 * scale + 1e-12)
        tolerance = 2.0**-22 if dtype is np.float32 else 2.0**-6.99
        np.testing.assert_array_less(
            np.abs(delta - written.delta(layer, module)), (tolerance + 1e-5) * scale + 1e-12
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 3, 5, 8, 13, 33, 64, 256])
def test_ranks(rank: int, dtype: Any, tmp_path: Path) -> None:
    written = write_peft_adapter(tmp_path, ranks=dict.fromkeys(ALL_MODULES, rank), seed=rank)
    check(written, TINY, 1, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n_q", "n_kv", "tp"), [(4, 4, 2), (4, 2, 2), (4, 2, 4), (8, 1, 4), (4, 1, 2), (8, 4, 4)]
)
def test_shards(n_q: int, n_kv: int, tp: int, dtype: Any, tmp_path: Path) -> None:
    config = model(n_q, n_kv)
    ranks = dict(zip(ALL_MODULES, (3, 8, 13, 16, 1, 9, 24), strict=True))
    check(write_peft_adapter(tmp_path, config, ranks, use_rslora=True), config, tp, dtype)


@pytest.mark.parametrize("file_dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_file_dtypes(file_dtype: Any, dtype: Any, tmp_path: Path) -> None:
    ranks = {"q_proj": 5, "down_proj": 12}
    check(write_peft_adapter(tmp_path, ranks=ranks, dtype=file_dtype, alpha=7), TINY, 1, dtype)


@pytest.mark.parametrize("page_tokens", [8, 16, 64])
def test_page_sizes(page_tokens: int, tmp_path: Path) -> None:
    check(write_peft_adapter(tmp_path, ranks={"k_proj": 9, "up_proj": 17}), TINY, 2, np.float32, page_tokens)


def test_layers_with_other_ranks_and_without(tmp_path: Path) -> None:
    ranks = {(0, "q_proj"): 3, (2, "q_proj"): 20, (1, "down_proj"): 8, (2, "v_proj"): 1}
    check(write_peft_adapter(tmp_path, ranks=ranks), TINY, 1, np.float32)


def test_scale_is_rounded_once(tmp_path: Path) -> None:
    """bfloat16(scaling) * bfloat16(B) would differ from bfloat16(scaling * B) in most elements."""
    written = write_peft_adapter(tmp_path, ranks={"q_proj": 8}, alpha=8 * 1.00390625 * 1.3)
    layout = PageLayout.for_model(TINY, 16, 1)
    packed = pack_adapter(read_adapter(tmp_path, TINY), layout, ml_dtypes.bfloat16)
    start = packed.layout.b_start["q_proj"] * 8 * layout.chunk_width
    stored = packed.pages[0].ravel()[start : start + 8 * 32]
    expected = (written.b[0, "q_proj"] * np.float32(written.scaling[0, "q_proj"])).astype(ml_dtypes.bfloat16)
    chunks = expected.T.reshape(8, 32 // layout.chunk_width, layout.chunk_width).swapaxes(0, 1)
    np.testing.assert_array_equal(stored, chunks.ravel())


@pytest.mark.parametrize("tp", [1, 2])
def test_bytes_lie_where_the_layout_says(tp: int, tmp_path: Path) -> None:
    """Every element of the pages, counted out with plain loops from the docstring of memory/layout.py."""
    written = write_peft_adapter(tmp_path, ranks={"o_proj": 9, "k_proj": 3}, layers=[1], alpha=9)
    layout = PageLayout.for_model(TINY, 8, tp)
    packed = pack_adapter(read_adapter(tmp_path, TINY), layout, np.float32)
    width, kv_width, o_width = layout.chunk_width, 16 // tp, 32 // tp
    expected = np.zeros_like(packed.pages)
    for shard in range(tp):
        chunk = 0
        for module in ("k_proj", "o_proj"):
            a, b = written.a[1, module], written.b[1, module].T * np.float32(written.scaling[1, module])
            if module == "k_proj":
                b = b[:, shard * kv_width : (shard + 1) * kv_width]
            else:
                a = a[:, shard * o_width : (shard + 1) * o_width]
            for matrix in (a, b):
                for first in range(0, matrix.shape[0], 8):
                    for column in range(0, matrix.shape[1], width):
                        block = np.zeros((8, width), np.float32)
                        part = matrix[first : first + 8, column : column + width]
                        block[: len(part)] = part
                        page, slot = divmod(chunk, layout.chunks_per_page)
                        at = shard * layout.page_elems + slot * 8 * width
                        expected[1, page, at : at + 8 * width] = block.ravel()
                        chunk += 1
        assert chunk == packed.layout.num_chunks
    np.testing.assert_array_equal(packed.pages, expected)


def test_shards_repeat_kv_heads(tmp_path: Path) -> None:
    """Four shards of two KV heads: shards 0 and 1 hold head 0's columns of B, shards 2 and 3 head 1's."""
    config = model(4, 2)
    write_peft_adapter(tmp_path, config, {"v_proj": 8})
    layout = PageLayout.for_model(config, 16, 4)
    packed = pack_adapter(read_adapter(tmp_path, config), layout, np.float32)
    shards = packed.pages.reshape(3, -1, 4, layout.page_elems).swapaxes(0, 2)
    np.testing.assert_array_equal(shards[0], shards[1])
    np.testing.assert_array_equal(shards[2], shards[3])
    assert (shards[0] != shards[2]).any()
    delta = unpack_delta(packed, layout, 0, "v_proj")
    assert delta.shape == (64, 32)


def test_refusals(tmp_path: Path) -> None:
    write_peft_adapter(tmp_path)
    adapter = read_adapter(tmp_path, TINY)
    layout = PageLayout.for_model(TINY, 16, 1)
    with pytest.raises(ValueError, match="must be float32 or bfloat16, got float16"):
        pack_adapter(adapter, layout, np.float16)
    for other in (model(4, 2), dataclasses.replace(TINY, num_hidden_layers=2)):
        with pytest.raises(ValueError, match=r"does not fit a layout"):
            pack_adapter(adapter, PageLayout.for_model(other, 16, 1), np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_overflow_is_refused(dtype: Any, tmp_path: Path) -> None:
    weights = LoraWeights(np.ones((8, 32), np.float32), np.full((32, 8), 1e30, np.float32), 1e30)
    adapter = LoraAdapter(tmp_path, 8, ("q_proj",), {"q_proj": 8}, {(1, "q_proj"): weights}, None)
    with pytest.raises(AdapterError, match=r"layer 1 q_proj: overflows .* scaling 1e\+30"):
        pack_adapter(adapter, PageLayout.for_model(TINY, 16, 1), dtype)


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.dictionaries(
        st.tuples(st.integers(0, 2), st.sampled_from(MODULES)), st.integers(1, 40), min_size=1, max_size=8
    ),
    heads=st.sampled_from([(4, 4), (4, 2), (8, 1)]),
    tp=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(DTYPES),
    rslora=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_adapter_comes_back(
    ranks: dict[tuple[int, str], int],
    heads: tuple[int, int],
    tp: int,
    dtype: Any,
    rslora: bool,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    config = model(*heads)
    written = write_peft_adapter(tmp_path_factory.mktemp("a"), config, ranks, use_rslora=rslora, seed=seed)
    check(written, config, tp, dtype)
