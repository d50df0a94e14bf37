"""Lowered steps are kept on disk, found by an engine that starts again, and never taken for others."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path
from typing import Any

import pytest

import slora_jax.exported_steps
import slora_jax.step
from slora_jax import SamplingParams
from slora_jax.engine import Engine
from slora_jax.exported_steps import ExportedSteps
from tests.engine.tiny_engine import ADAPTERS, make_engine

GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5]]


def whole(model: Path, adapters: dict[str, Path], folder: Path, identity: str = "", **fields: Any) -> Engine:
    """An engine of whole steps, as on a GPU, that keeps them in a folder."""
    engine = make_engine(model, adapters, **fields)
    engine._runner._builder._layered = False
    engine._runner._builder._exported = ExportedSteps(folder, (identity,))
    return engine


def answers(engine: Engine) -> list[list[int]]:
    return [o.token_ids for o in engine.generate(PROMPTS, [None, next(iter(ADAPTERS))], GREEDY)]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The step shapes that were traced."""
    shapes: list[Any] = []
    step = slora_jax.step.whole_step

    def seen(config: Any, shape: Any, *args: Any) -> Any:
        shapes.append(shape)
        return step(config, shape, *args)

    monkeypatch.setattr("slora_jax.programs.whole_step", seen)
    return shapes


@pytest.mark.parametrize("tp", [1, 2])
def test_a_second_engine_traces_nothing_and_gives_the_same_tokens(
    tiny_model_dir: Path, adapters: dict[str, Path], tmp_path: Path, traced: list[Any], tp: int
) -> None:
    first = answers(whole(tiny_model_dir, adapters, tmp_path, tensor_parallel_size=tp))
    shapes = len(traced)
    assert shapes == len(list(tmp_path.iterdir())) > 1
    assert answers(whole(tiny_model_dir, adapters, tmp_path, tensor_parallel_size=tp)) == first
    assert len(traced) == shapes
    assert answers(make_engine(tiny_model_dir, adapters)) == first


def test_a_step_made_of_anything_else_is_another(
    tiny_model_dir: Path,
    adapters: dict[str, Path],
    tmp_path: Path,
    traced: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of another model, of changed code, by another jax."""
    first = answers(whole(tiny_model_dir, adapters, tmp_path))
    shapes = len(traced)
    answers(whole(tiny_model_dir, adapters, tmp_path, "another model"))
    assert len(traced) == 2 * shapes
    monkeypatch.setattr(slora_jax.exported_steps, "_sources", lambda: b"changed")
    answers(whole(tiny_model_dir, adapters, tmp_path))
    assert len(traced) == 3 * shapes
    monkeypatch.setattr(slora_jax.exported_steps, "_versions", lambda: [("jax", "99")])
    assert answers(whole(tiny_model_dir, adapters, tmp_path)) == first
    assert len(traced) == 4 * shapes


def test_a_damaged_file_is_made_again(
    tiny_model_dir: Path,
    adapters: dict[str, Path],
    tmp_path: Path,
    traced: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = answers(whole(tiny_model_dir, adapters, tmp_path))
    shapes, files = len(traced), sorted(tmp_path.iterdir())
    files[0].write_bytes(files[0].read_bytes()[:-7])
    files[1].write_bytes(b"")
    assert answers(whole(tiny_model_dir, adapters, tmp_path)) == first
    assert len(traced) == shapes + 2
    assert sum("damaged" in r.getMessage() for r in caplog.records) == 2
    assert answers(whole(tiny_model_dir, adapters, tmp_path)) == first
    assert len(traced) == shapes + 2


def test_a_folder_that_cannot_be_written_is_said_once_and_costs_no_answer(
    tiny_model_dir: Path, adapters: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        engine = whole(tiny_model_dir, adapters, tmp_path / "file" / "steps")
        assert answers(engine) == answers(make_engine(tiny_model_dir, adapters))
    (record,) = [r for r in caplog.records if "lowered anew at each start" in r.getMessage()]
    assert str(tmp_path / "file" / "steps") in record.getMessage()


def test_what_jax_cannot_export_is_said_once_and_costs_no_answer(
    tiny_model_dir: Path,
    adapters: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("cannot serialize code with custom calls")

    monkeypatch.setattr("jax.export.export", lambda *args, **kwargs: refuse)
    first = answers(whole(tiny_model_dir, adapters, tmp_path))
    assert first == answers(make_engine(tiny_model_dir, adapters))
    assert sum("custom calls; steps are lowered anew" in r.getMessage() for r in caplog.records) == 1
    assert not list(tmp_path.iterdir())


def test_all_code_that_a_step_is_traced_from_is_part_of_its_name() -> None:
    seen, todo = set[str](), {"slora_jax.step", "slora_jax.programs"}
    while todo:
        module = todo.pop()
        seen.add(module)
        spec = importlib.util.find_spec(module)
        assert spec is not None
        source = Path(str(spec.origin)).read_text()
        todo |= set(re.findall(r"^from (slora_jax[\w.]*) import", source, re.MULTILINE)) - seen
    packages = {module.rpartition(".")[0] for module in seen} - {""}
    assert packages == set(slora_jax.exported_steps._PACKAGES)
