"""Adapters of every size come into the pool whole, from any host memory, on every way there is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from slora_jax.lora import cuda_dma
from slora_jax.lora.transfer import PINNED_HOST_LIMIT_VARIABLE, AdapterTransfer, HostCopy
from slora_jax.sharding.mesh import make_mesh
from slora_jax.step import POOL_SPEC
from tests.lora.fake_dma import FakeDma, FakeEvent

LAYERS, PAGES, ELEMS = 3, 200, 16
SIZES = [1, 2, 3, 7, 63, 64, 65, 150]
Way = Literal["write", "staged", "direct"]
WAYS: tuple[Way, ...] = ("write", "staged", "direct")


def make_transfer(tp: int, way: Way, dma: Sequence[FakeDma] = ()) -> tuple[AdapterTransfer, jax.Array]:
    mesh = make_mesh(tp)
    pool = jnp.zeros((LAYERS, PAGES, tp * ELEMS), jnp.float32, device=NamedSharding(mesh, POOL_SPEC))
    direct = (dma or [FakeDma() for _ in range(tp)]) if way == "direct" else None
    return AdapterTransfer(mesh, pool, POOL_SPEC, staged=way != "write", dma=direct), pool


def random_pages(n: int, tp: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((LAYERS, n, tp * ELEMS)).astype(np.float32)


def random_places(sizes: Sequence[int]) -> list[list[int]]:
    """Pages for adapters of these sizes, half of them in runs."""
    ids = np.arange(1, PAGES)
    np.random.default_rng(0).shuffle(ids[::2])
    return [part.tolist() for part in np.split(ids, np.cumsum(sizes))[: len(sizes)]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_pages_come_to_their_places_and_others_stay(size: int, tp: int, way: Way) -> None:
    transfer, pool = make_transfer(tp, way)
    [ids] = random_places([size])
    pages = random_pages(size, tp, seed=size)
    want = np.zeros(pool.shape, np.float32)
    [copy] = transfer.stage(pool, [transfer.host_copy(pages)], [ids])
    copy.wait()
    assert copy.is_ready()
    want[:, ids] = pages
    np.testing.assert_array_equal(np.asarray(transfer.write(pool, copy)), want)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tp", [1, 2])
def test_several_adapters_travel_together(tp: int, way: Way) -> None:
    transfer, pool = make_transfer(tp, way)
    places = random_places([3, 8, 5])
    pages = [random_pages(len(ids), tp, seed=len(ids)) for ids in places]
    want = np.zeros(pool.shape, np.float32)
    copies = transfer.stage(pool, [transfer.host_copy(p) for p in pages], places)
    for copy, ids, own in zip(copies, places, pages, strict=True):
        while not copy.is_ready():
            pass
        copy.wait()
        pool = transfer.write(pool, copy)
        want[:, ids] = own
    np.testing.assert_array_equal(np.asarray(pool), want)


def test_adapters_of_one_size_share_a_program_which_their_host_copy_compiles() -> None:
    transfer, _ = make_transfer(1, "staged")
    for seed, size in enumerate((5, 70, 5)):
        transfer.host_copy(random_pages(size, 1, seed))
    assert sorted(transfer._writers) == [5, 70]
    direct, _ = make_transfer(1, "direct")
    direct.host_copy(random_pages(5, 1, 0))
    assert not direct._writers


@pytest.mark.parametrize("way", ["staged", "direct"])
def test_where_adapters_are_copied_beside_steps_the_host_copy_is_pinned(way: Way) -> None:
    transfer, _ = make_transfer(1, way)
    pages = random_pages(5, 1, seed=0)
    copy = transfer.host_copy(pages)
    assert isinstance(copy.pages, jax.Array)
    assert copy.pages.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(np.asarray(copy.pages), pages)


def test_where_nothing_is_staged_the_host_copy_takes_no_memory() -> None:
    transfer, _ = make_transfer(1, "write")
    pages = random_pages(5, 1, seed=0)
    assert np.shares_memory(np.asarray(transfer.host_copy(pages).pages), pages)


def test_pages_in_a_row_are_one_copy() -> None:
    dma = FakeDma()
    transfer, pool = make_transfer(1, "direct", [dma])
    transfer.stage(pool, [transfer.host_copy(random_pages(6, 1, 0))], [[5, 6, 7, 2, 9, 10]])
    assert [c["rows"] for c in dma.begun] == [3, 1, 2]


@pytest.mark.parametrize("nth", range(1, 8))
def test_where_a_copy_cannot_begin_none_of_its_transfer_goes_on(nth: int) -> None:
    """Their pages are given back, and become others'."""
    dma = FakeDma()
    dma.fails_at = nth
    transfer, pool = make_transfer(1, "direct", [dma])
    copies = [transfer.host_copy(random_pages(3, 1, seed)) for seed in range(3)]
    places = [[1, 2, 3], [5, 7, 9], [11, 12, 14]]
    if nth <= 6:
        with pytest.raises(cuda_dma.CudaCopyError, match="told to fail"):
            transfer.stage(pool, copies, places)
        assert dma.done == len(dma.begun)
    else:
        transfer.stage(pool, copies, places)


def test_host_memory_lives_as_long_as_it_is_read() -> None:
    """Also of a copy that nobody knows of any more."""
    dma = FakeDma()
    transfer, pool = make_transfer(1, "direct", [dma])
    copy = transfer.host_copy(random_pages(3, 1, 0))
    host = weakref.ref(copy)
    transfer.stage(pool, [copy], [[5, 7, 9]])
    del copy
    assert host() is not None
    dma.wait()
    transfer.stage(pool, [], [])
    assert host() is None


@pytest.mark.parametrize("tp", [1, 2])
def test_all_copies_are_waited_for_whoever_knows_of_them(tp: int) -> None:
    dma = [FakeDma() for _ in range(tp)]
    transfer, pool = make_transfer(tp, "direct", dma)
    staged = transfer.stage(pool, [transfer.host_copy(random_pages(3, tp, 0))], [[1, 2, 5]])
    transfer.wait()
    assert [each.done for each in dma] == [2] * tp
    assert staged[0].is_ready()


def test_a_device_that_is_lost_does_not_keep_others_copies_from_being_waited_for() -> None:
    def lost() -> None:
        raise cuda_dma.CudaCopyError("CUDA error 719")

    dma = [FakeDma(), FakeDma()]
    transfer, pool = make_transfer(2, "direct", dma)
    staged = transfer.stage(pool, [transfer.host_copy(random_pages(3, 2, 0))], [[1, 2, 5]])
    dma[0].wait = lost  # type: ignore[method-assign]
    transfer.wait()
    assert (dma[0].done, dma[1].done) == (0, 2)
    assert staged


def test_a_copy_that_failed_says_so_when_it_is_taken() -> None:
    class Broken(FakeEvent):
        def is_done(self) -> bool:
            raise cuda_dma.CudaCopyError("CUDA error 719")

        wait: Any = is_done

    dma = FakeDma()
    dma.event = lambda: Broken(dma, 0)  # type: ignore[method-assign]
    transfer, pool = make_transfer(1, "direct", [dma])
    [copy] = transfer.stage(pool, [transfer.host_copy(random_pages(3, 1, 0))], [[1, 2, 3]])
    assert copy.is_ready()
    with pytest.raises(cuda_dma.CudaCopyError, match="719"):
        copy.wait()
    copy.leave_pages()  # it is over


def test_host_memory_of_a_copy_that_is_done_is_let_go() -> None:
    pool = jnp.zeros((2, 16, 8), jnp.float32)
    transfer = AdapterTransfer(make_mesh(1), pool, POOL_SPEC, staged=True, dma=[FakeDma()])
    host = HostCopy(jax.device_put(np.ones((2, 3, 8), np.float32)))
    alive = weakref.ref(host)
    (copy,) = transfer.stage(pool, [host], [[1, 2, 3]])
    copy.wait()
    transfer.write(pool, copy)
    del host, copy
    gc.collect()
    assert alive() is None


def test_xlas_limit_of_pinned_memory_is_read_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer, _ = make_transfer(1, "staged")
    monkeypatch.delenv(PINNED_HOST_LIMIT_VARIABLE, raising=False)
    assert transfer.pinned_host_limit == 64 << 30
    monkeypatch.setenv(PINNED_HOST_LIMIT_VARIABLE, "3")
    assert transfer.pinned_host_limit == 3 << 30
    for wrong in ("", "-1", "1.5", "64G"):
        monkeypatch.setenv(PINNED_HOST_LIMIT_VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"environment variable {PINNED_HOST_LIMIT_VARIABLE} must be"):
            _ = transfer.pinned_host_limit
