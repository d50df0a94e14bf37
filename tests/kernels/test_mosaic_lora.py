"""The Mosaic LoRA kernels in the GPU interpreter, races detected, against one dense x A^T B a token in
float32 NumPy.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from slora_jax.pallas_kernels import lora_work
from slora_jax.pallas_kernels.lora_work import LoraWork, build_lora_work, lora_work_needed
from slora_jax.pallas_kernels.mosaic_lora import apply_lora
from tests.kernels.lora_cases import LAYER
from tests.kernels.mosaic_lora_cases import (
    A_CHUNKS,
    B_CHUNKS,
    DOWN,
    GATE_UP,
    OUTPUT,
    QKV,
    W,
    check,
    pack,
    run,
)

pytestmark = pytest.mark.usefixtures("clean_interpreter")


def test_mixed_ranks_absent_modules_base_tokens() -> None:
    rng = np.random.default_rng(0)
    data = pack(rng, [{0: 8, 1: 16, 2: 4}, {1: 33}, {0: 12, 2: 8}])
    check(rng, data, np.array([0, -1, 1, 1, 2, 0, -1, -1, 2], np.int32))


@pytest.mark.parametrize("split", [2, None])
def test_split_over_thread_blocks(split: int | None) -> None:
    rng = np.random.default_rng(1)
    check(rng, pack(rng, [{0: 8, 1: 8}, {2: 16}]), np.array([0, 1, 1, -1, 0], np.int32), split=split)


@pytest.mark.parametrize("split", [1, 2])
def test_packed_stages(split: int) -> None:
    """As on the GPU. Not the default here: rows of other stages are multiplied with zeros while they
    are filled.
    """
    rng = np.random.default_rng(7)
    data = pack(rng, [{0: 8, 1: 16, 2: 4}, {1: 48}, {0: 12}, {0: 24, 1: 24, 2: 16}])
    check(rng, data, np.array([0, 1, 1, 1, 2, 3, -1], np.int32), split=split, pack=True)


@pytest.mark.parametrize("group", [OUTPUT, GATE_UP, DOWN])
def test_every_group(group: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    data = pack(rng, [{3: 8, 4: 8, 5: 16, 6: 8}, {5: 8, 6: 72}])
    check(rng, data, np.array([1, 0, 0], np.int32), group)


def test_tiles_of_prompts_beside_decodes() -> None:
    rng = np.random.default_rng(3)
    data = pack(rng, [{0: 8, 1: 16}, {2: 24}])
    token_adapter = np.array([0, 1, -1] + [0] * 70 + [-1] * 2 + [1] * 26 + [0] * 3, np.int32)
    check(rng, data, token_adapter, decode_rows=3)


@pytest.mark.parametrize("split", [1, 2])
def test_decodes_of_few_adapters_as_runs(split: int) -> None:
    """Windows full, begun and ended by others, of one token; a number of tokens that is no multiple of 16."""
    rng = np.random.default_rng(9)
    data = pack(rng, [{0: 8, 1: 16}, {2: 24}, {1: 72}, {0: 4, 1: 8, 2: 4}])
    token_adapter = np.array([-1] * 2 + [0] * 5 + [1] * 36 + [2] * 9 + [-1] * 2 + [3] * 18, np.int32)
    check(rng, data, token_adapter, as_runs=True, split=split, pack=split == 2)


@pytest.mark.parametrize(("tokens", "split"), [(7, 1), (24, 2), (32, 1), (37, 2)])
def test_runs_that_begin_anywhere_end_with_the_batch(tokens: int, split: int) -> None:
    """A window of 16 rows from the last 8 on would lie half behind x and y."""
    rng = np.random.default_rng(11)
    data = pack(rng, [{0: 8, 1: 16}, {2: 24}])
    for border in {3, tokens - 8, tokens - 1} & set(range(tokens)):
        token_adapter = (np.arange(tokens) >= border).astype(np.int32)
        check(rng, data, token_adapter, as_runs=True, split=split, pack=True)


@pytest.mark.parametrize("kind", ["distinct", "zipf", "identical"])
def test_popularity(kind: str) -> None:
    rng = np.random.default_rng(4)
    tokens = 12
    drawn = {
        "distinct": np.arange(tokens) % 6,
        "zipf": np.minimum(rng.zipf(1.5, tokens), 4) - 1,
        "identical": np.zeros(tokens, int),
    }[kind]
    data = pack(rng, [{0: 8}, {1: 8}, {2: 8}, {0: 8, 2: 8}, {}, {1: 16}])
    check(rng, data, np.sort(drawn).astype(np.int32))


def test_an_adapter_of_nans_harms_no_other() -> None:
    rng = np.random.default_rng(8)
    data = pack(rng, [{0: 8}, {0: 8, 1: 8}])
    data.pool = data.pool.at[LAYER, jnp.asarray(data.blocks[1][0])].set(jnp.nan)
    token_adapter = np.array([0, 1, 1, 1, -1, 0, 0, 1] + [0] * 30 + [1] * 30, np.int32)
    needed = lora_work_needed(token_adapter, data.blocks, 8)
    host = build_lora_work(
        token_adapter, data.blocks, *needed, a_chunks=A_CHUNKS, b_chunks=B_CHUNKS, decode_rows=8
    )
    work = LoraWork(**{name: jnp.asarray(array) for name, array in host.items()})
    x, y = (jnp.asarray(rng.standard_normal((68, n)), jnp.bfloat16) for n in (128, 256))
    got = np.asarray(run(x, y, data.pool, work, group=QKV, split=1), np.float32)
    np.testing.assert_array_equal(np.isnan(got).any(axis=1), token_adapter == 1)


def test_no_items_is_no_launch() -> None:
    data = pack(np.random.default_rng(5), [])
    none = jnp.zeros((4, 0, lora_work.FIELDS), jnp.int32)
    work = LoraWork(none, none, none, jnp.zeros(1, jnp.int32))
    y = jnp.ones((3, 256), jnp.bfloat16)
    assert run(jnp.ones((3, 128), jnp.bfloat16), y, data.pool, work, group=QKV, split=None) is not None


def test_work_covers_every_token_once() -> None:
    rng = np.random.default_rng(6)
    for _ in range(50):
        token_adapter = np.repeat(rng.integers(-1, 3, 12), rng.integers(1, 90, 12)).astype(np.int32)
        adapters = [([1], [1] * 7, [0] * 7, [0] * 7)] * 3
        rows = int(rng.integers(0, len(token_adapter)))
        as_runs, group = (
            bool(rng.integers(0, 2)) and bool((token_adapter >= 0).any()),
            int(rng.integers(0, 4)),
        )
        _, _, most, _ = lora_work_needed(token_adapter, adapters, rows)
        room = int(rng.integers(0, most + 1))  # with less than is needed, short ones become decode items
        needed = lora_work_needed(token_adapter, adapters, rows, room, as_runs=as_runs)
        assert needed[2] <= room
        assert not as_runs or needed[2] == 0
        host = build_lora_work(
            token_adapter, adapters, *needed, a_chunks=A_CHUNKS, b_chunks=B_CHUNKS, decode_rows=rows
        )
        seen = np.zeros(len(token_adapter), int)
        decode, runs, tiles = (host[name][group] for name in ("decode", "runs", "tiles"))
        assert runs.any() == (as_runs and lora_work.has_runs(group))
        for item in decode:
            tokens = item[0] + np.array([item[1] >> 4 * n & 7 for n in range(item[2])], int)
            seen[tokens] += 1
            assert (token_adapter[tokens] == item[6]).all()  # one page each: page_base is the adapter
        assert (tiles[:, :2].sum(1) >= rows).all()
        assert (tiles[:, lora_work.REAL] == (tiles[:, lora_work.END] > 0).sum()).all()
        assert (runs[:, 2] <= lora_work.RUN).all()
        for item in [*runs, *tiles]:
            seen[item[0] + item[1] : item[0] + item[2]] += 1
            assert (token_adapter[item[0] + item[1] : item[0] + item[2]] == item[6]).all()
        np.testing.assert_array_equal(seen, token_adapter >= 0)
        within = -(-len(token_adapter) // 8) * 8
        assert not runs[:, 2].any() or (runs[:, 0] + lora_work.RUN).max() <= max(within, lora_work.RUN)
        assert not tiles[:, 2].any() or (tiles[:, 0] + lora_work.TILE).max() <= max(within, lora_work.TILE)


def test_limits_are_told() -> None:
    x, y = jnp.zeros((8, 128), jnp.bfloat16), jnp.zeros((8, 256), jnp.bfloat16)
    none = jnp.zeros((4, 0, lora_work.FIELDS), jnp.int32)
    work = LoraWork(jnp.zeros((4, 1, lora_work.FIELDS), jnp.int32), none, none, jnp.zeros(1, jnp.int32))
    pool = jnp.zeros((1, 1, 8 * W), jnp.bfloat16)
    good: dict[str, Any] = {"modules": QKV, "in_dim": 128, "out_dims": (128, 64, 64), "chunk_width": W}
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"modules": (0, 1)}, "modules"),
        ({"chunk_width": 32}, "chunk_width 32 must be one of"),
        ({"chunk_width": 128}, "must divide"),
        ({"in_dim": 64}, "do not fit"),
    )
    for bad, word in cases:
        with pytest.raises(ValueError, match=word):
            apply_lora(x, y, pool, 0, work, **(good | bad))
    with pytest.raises(ValueError, match="bfloat16"):
        apply_lora(x.astype(jnp.float32), y, pool, 0, work, **good)
    with pytest.raises(ValueError, match="decode: 0 items are too few: need 1"):
        build_lora_work(
            np.zeros(1, np.int32),
            [([1], [1] * 7, [0] * 7, [0] * 7)],
            0,
            0,
            0,
            1,
            a_chunks=A_CHUNKS,
            b_chunks=B_CHUNKS,
        )
