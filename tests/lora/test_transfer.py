"""Adapters of every size come into the pool whole, from any host memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from slora_jax.lora.transfer import AdapterTransfer
from slora_jax.sharding.mesh import make_mesh
from slora_jax.step import POOL_SPEC

LAYERS, PAGES, ELEMS = 3, 200, 16
SIZES = [1, 2, 3, 7, 63, 64, 65, 150]


def make_transfer(tp: int, staged: bool) -> tuple[AdapterTransfer, jax.Array]:
    mesh = make_mesh(tp)
    pool = jnp.zeros((LAYERS, PAGES, tp * ELEMS), jnp.float32, device=NamedSharding(mesh, POOL_SPEC))
    return AdapterTransfer(mesh, pool, POOL_SPEC, staged=staged), pool


def random_pages(n: int, tp: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((LAYERS, n, tp * ELEMS)).astype(np.float32)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_pages_come_to_their_places_and_others_stay(size: int, tp: int, staged: bool) -> None:
    transfer, pool = make_transfer(tp, staged)
    ids = np.random.default_rng(size).permutation(np.arange(1, PAGES))[:size].tolist()
    pages = random_pages(size, tp, seed=size)
    [copy] = transfer.stage([transfer.host_copy(pages)], [ids])
    copy.wait()
    assert copy.is_ready()
    want = np.asarray(pool).copy()
    want[:, ids] = pages
    np.testing.assert_array_equal(np.asarray(transfer.write(pool, [copy])), want)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_several_adapters_travel_together(tp: int, compiled: bool) -> None:
    """Those of one size at one call, where that is compiled already; else, and others, one by one."""
    transfer, pool = make_transfer(tp, staged=True)
    sizes = [3, 8, *[5] * 7, 3]
    ids = np.random.default_rng(0).permutation(np.arange(1, PAGES))
    places = [part.tolist() for part in np.split(ids, np.cumsum(sizes))[: len(sizes)]]
    pages = [random_pages(n, tp, seed=i) for i, n in enumerate(sizes)]
    copies = [transfer.host_copy(p) for p in pages]
    if compiled:
        transfer._compile_together(5)
    want = np.asarray(pool).copy()
    calls = []
    for group in transfer.groups(transfer.stage(copies, places)):
        pool = transfer.write(pool, group)
        calls.append((len(group[0].ids), len(group)))
    for place, own in zip(places, pages, strict=True):
        want[:, place] = own
    np.testing.assert_array_equal(np.asarray(pool), want)
    assert sum(size * n for size, n in calls) == sum(sizes)
    if compiled:
        assert [n for size, n in calls if size == 5] == [4, 2, 1]


def test_adapters_of_one_size_share_a_program_which_their_host_copy_compiles() -> None:
    transfer, _ = make_transfer(1, staged=True)
    for seed, size in enumerate((5, 70, 5)):
        transfer.host_copy(random_pages(size, 1, seed))
    assert {(5, 1), (70, 1)} <= transfer._writers.keys()
    assert {size for size, _ in transfer._writers} == {5, 70}


def test_where_pages_are_staged_the_host_copy_is_pinned_and_its_own() -> None:
    transfer, _ = make_transfer(1, staged=True)
    pages = random_pages(5, 1, seed=0)
    copy = transfer.host_copy(pages)
    assert isinstance(copy.pages, jax.Array)
    assert copy.pages.sharding.memory_kind == "pinned_host"
    want, pages[:] = pages.copy(), 0
    np.testing.assert_array_equal(np.asarray(copy.pages), want)


def test_where_nothing_is_staged_the_host_copy_takes_no_memory() -> None:
    transfer, _ = make_transfer(1, staged=False)
    pages = random_pages(5, 1, seed=0)
    assert np.shares_memory(np.asarray(transfer.host_copy(pages).pages), pages)
