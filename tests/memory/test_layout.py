"""Sizes of pages, chunks and adapters, and the models that do not fit a mesh."""

from __future__ import annotations

import pytest

from slora_jax import ModelConfig
from slora_jax.memory.layout import MODULES, PageLayout

SMOLLM2 = ModelConfig(49152, 576, 30, 9, 3, 64, 1536, 8192)
LLAMA3_8B = ModelConfig(128256, 4096, 32, 32, 8, 128, 14336, 8192)


@pytest.mark.parametrize(
    ("model", "tp", "width"), [(SMOLLM2, 1, 64), (LLAMA3_8B, 1, 256), (LLAMA3_8B, 4, 256)]
)
def test_chunks_are_as_wide_as_every_module_allows(model: ModelConfig, tp: int, width: int) -> None:
    layout = PageLayout.for_model(model, 16, tp)
    assert layout.chunk_width == width
    assert layout.page_elems == layout.chunks_per_page * 8 * width


def test_an_adapter_takes_pages_for_its_true_rank_and_modules() -> None:
    layout = PageLayout.for_model(LLAMA3_8B, 16, 1)
    sizes = {r: layout.adapter({"q_proj": r, "v_proj": r}) for r in (1, 8, 9, 64)}
    assert sizes[1].num_chunks == sizes[8].num_chunks
    assert sizes[9].num_chunks == 2 * sizes[8].num_chunks
    assert sizes[64].num_chunks == 8 * sizes[8].num_chunks
    assert "k_proj" not in sizes[8].rank_blocks


def test_blocks_of_an_adapter_do_not_overlap() -> None:
    layout = PageLayout.for_model(SMOLLM2, 16, 1)
    placed = layout.adapter(dict(zip(MODULES, (3, 8, 17, 0, 64, 1, 256), strict=True)))
    spans = []
    for module, blocks in placed.rank_blocks.items():
        spans.append((placed.a_start[module], blocks * layout.a_chunks(module)))
        spans.append((placed.b_start[module], blocks * layout.b_chunks(module)))
    end = 0
    for start, length in sorted(spans):
        assert start == end
        end = start + length
    assert end == placed.num_chunks


def test_fewer_kv_heads_than_shards_are_repeated() -> None:
    assert PageLayout.for_model(LLAMA3_8B, 16, 16).n_kv == 1


@pytest.mark.parametrize(
    ("tp", "message"), [(2, "tensor_parallel_size 2 must divide num_attention_heads 9"), (9, "num_key_value")]
)
def test_a_mesh_that_does_not_fit_is_refused_by_name(tp: int, message: str) -> None:
    model = ModelConfig(49152, 576, 1, 9, 3, 64, 1536, 8192)
    if tp == 9:
        model = ModelConfig(8 * 9, 576, 1, 18, 6, 64, 8 * 9, 8192)
    with pytest.raises(ValueError, match=message):
        PageLayout.for_model(model, 16, tp)
