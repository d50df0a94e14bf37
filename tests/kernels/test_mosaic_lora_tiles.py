"""The Mosaic LoRA kernels' tiles: units shared out to thread blocks, sums by the TMA or in shared memory."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from slora_jax.pallas_kernels import mosaic_lora_tile_expand
from slora_jax.pallas_kernels.lora_work import FIELDS, REAL, LoraWork, build_lora_work, lora_work_needed
from slora_jax.pallas_kernels.mosaic_lora_item import LoraConfig
from slora_jax.pallas_kernels.mosaic_lora_tile_expand import expand_units
from slora_jax.pallas_kernels.mosaic_lora_tiles import shrink_units
from tests.kernels.lora_cases import Dims, pack_adapters
from tests.kernels.mosaic_lora_cases import A_CHUNKS, B_CHUNKS, QKV, check, pack, run

pytestmark = pytest.mark.usefixtures("clean_interpreter")
WAYS = [{"reads_y": True}, {"reads_y": False}]


@pytest.mark.parametrize("way", WAYS)
def test_full_and_partial_tiles(way: dict[str, Any]) -> None:
    """Full tiles with neighbours' windows over them; two items that add to the same columns of q."""
    rng = np.random.default_rng(20)
    data = pack(rng, [{0: 8, 1: 16}, {0: 72, 2: 8}, {2: 24}])
    token_adapter = np.array([0] * 130 + [-1] * 6 + [1] * 66 + [2] * 70, np.int32)
    check(rng, data, token_adapter, spare=5, sms=4, **way)


@pytest.mark.parametrize("spare", [0, 1, 7])
@pytest.mark.parametrize("sms", [1, 2, 3])
def test_more_and_fewer_units_than_thread_blocks(spare: int, sms: int) -> None:
    """Four tiles of up to two parts: 4 or 8 units on 1 to 6 thread blocks."""
    rng = np.random.default_rng(21)
    data = pack(rng, [{0: 64}, {1: 8, 2: 16}])
    token_adapter = np.array([0] * 128 + [1] * 120, np.int32)
    check(rng, data, token_adapter, spare=spare, sms=sms, reads_y=spare == 1)


@pytest.mark.parametrize("tile_split", [1, 2, 4])
def test_parts_forced(tile_split: int) -> None:
    """Of four parts two have no columns."""
    rng = np.random.default_rng(22)
    token_adapter = np.array([-1] * 3 + [0] * 90, np.int32)
    check(rng, pack(rng, [{0: 8, 1: 16}]), token_adapter, tile_split=tile_split, sms=3)


@pytest.mark.parametrize("reads_y", [False, True])
def test_chunks_in_two_steps(reads_y: bool) -> None:
    rng = np.random.default_rng(25)
    dims = Dims(chunk_width=256, chunks_per_page=3, ins=(512,) * 7, outs=(512, 256, 256, 512, 512, 512, 512))
    data = pack_adapters(rng, [{0: 8, 1: 16, 2: 8}, {2: 8}], dims, dtype=jnp.bfloat16, n_pages=64)
    token_adapter = np.array([0] * 64 + [1] * 30, np.int32)
    check(rng, data, token_adapter, sms=2, reads_y=reads_y)


@pytest.mark.parametrize("reads_y", [False, True])
def test_padding_alone_adds_nothing(reads_y: bool) -> None:
    rng = np.random.default_rng(23)
    data = pack(rng, [{0: 8}])
    none = jnp.zeros((4, 0, FIELDS), jnp.int32)
    work = LoraWork(none, none, jnp.zeros((4, 3, FIELDS), jnp.int32), jnp.zeros(1, jnp.int32))
    x, y = (jnp.asarray(rng.standard_normal((70, n)), jnp.bfloat16) for n in (128, 256))
    got = run(x, y, data.pool, work, group=QKV, split=1, tuning=(("reads_y", reads_y),))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("reads_y", [False, True])
def test_nans_stay_with_their_adapter(monkeypatch: pytest.MonkeyPatch, reads_y: bool) -> None:
    """One thread block takes all units: what it held of the adapter of NaNs meets the next one's zeros."""
    rng = np.random.default_rng(24)
    data = pack(rng, [{0: 8}, {0: 40, 1: 24}])
    data.pool = data.pool.at[1, jnp.asarray(data.blocks[1][0])].set(jnp.nan)
    token_adapter = np.array([1] * 64 + [0] * 70 + [-1] * 2 + [1] * 40, np.int32)
    needed = lora_work_needed(token_adapter, data.blocks, 0)
    host = build_lora_work(
        token_adapter, data.blocks, *needed, a_chunks=A_CHUNKS, b_chunks=B_CHUNKS, decode_rows=0
    )
    work = LoraWork(**{name: jnp.asarray(array) for name, array in host.items()})
    x, y = (jnp.asarray(rng.standard_normal((len(token_adapter), n)), jnp.bfloat16) for n in (128, 256))
    monkeypatch.setattr(mosaic_lora_tile_expand, "BLOCKS_OF_SM", 1)  # one thread block takes all units
    tuning = (("reads_y", reads_y), ("sms", 1))
    got = np.asarray(run(x, y, data.pool, work, group=QKV, split=1, tuning=tuning), np.float32)
    np.testing.assert_array_equal(np.isnan(got).any(axis=1), token_adapter == 1)


def test_parts_follow_from_the_real_tiles() -> None:
    """Whatever the length of the list; every unit has a place in h."""
    config = LoraConfig(group=0, in_dim=4096, out_dims=(4096, 1024, 1024), width=256, per_page=8, n_pages=9)
    for nt in (64, 128, 512):
        shrinks, expands = shrink_units(config, nt), expand_units(config, nt)
        for real in (0, 1, 16, 32, 33, 56, 64, 100, 132, 133, 200, 264, 300, 512):
            items = jnp.zeros((4, nt, FIELDS), jnp.int32).at[:, 0, REAL].set(real)
            parts = [int(units.parts(items)) for units in (shrinks, expands)]
            assert real > nt or real * parts[0] <= shrinks.most
            assert parts == {1: [8, 8], 32: [4, 8], 56: [2, 4], 512: [1, 1]}.get(real, parts)
