"""An engine whose adapters are copied straight into their pages of the pool, as a CUDA device's are."""

from __future__ import annotations

import functools
import gc
from pathlib import Path

import pytest

import slora_jax.runner
from slora_jax.engine import Engine
from slora_jax.lora.transfer import AdapterTransfer
from tests.engine.tiny_engine import GREEDY, PROMPTS, make_engine
from tests.lora.fake_dma import FakeDma


@pytest.fixture
def dma(monkeypatch: pytest.MonkeyPatch) -> FakeDma:
    fake = FakeDma()
    direct = functools.partial(AdapterTransfer, staged=True, dma=[fake])
    monkeypatch.setattr(slora_jax.runner, "AdapterTransfer", direct)
    return fake


def tokens(engine: Engine, names: list[str | None]) -> list[list[int]]:
    return [out.token_ids for out in engine.generate(PROMPTS, names, GREEDY)]


def test_the_same_tokens_come_as_from_copies_that_steps_write(
    tiny_model_dir: Path, adapters: dict[str, Path], dma: FakeDma, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [None, *adapters]
    direct = make_engine(tiny_model_dir, adapters)
    got = [tokens(direct, names), tokens(direct, names[::-1])]
    copied = len(dma.begun)
    assert copied > 0
    monkeypatch.undo()
    plain = make_engine(tiny_model_dir, adapters)
    assert got == [tokens(plain, names), tokens(plain, names[::-1])]


def test_no_copy_goes_on_into_the_pool_of_an_engine_that_is_dropped(
    tiny_model_dir: Path, adapters: dict[str, Path], dma: FakeDma
) -> None:
    engine = make_engine(tiny_model_dir, adapters)
    engine.add_request([1, 2, 3], next(iter(adapters)), GREEDY)
    before = len(dma.begun)
    while len(dma.begun) == before:
        engine.step()
    del engine
    gc.collect()
    assert dma.done == len(dma.begun)
