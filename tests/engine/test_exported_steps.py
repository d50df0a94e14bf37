"""Lowered steps are kept on disk, found by an engine that starts again, and never taken for others."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import re
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest
from jax import export

import slora_jax.exported_steps
import slora_jax.step
from slora_jax import EngineConfig, ModelConfig, SamplingParams
from slora_jax.compile_cache import steps_folder
from slora_jax.engine import Engine
from slora_jax.exported_steps import ExportedSteps
from slora_jax.memory.layout import PageLayout
from slora_jax.pallas_kernels.backend import XLA
from slora_jax.pallas_kernels.mosaic_backend import MOSAIC
from slora_jax.runner import steps_identity
from slora_jax.sharding.mesh import make_mesh
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
    """Of another model, of changed code, by another jax, with another setting of it."""
    first = answers(whole(tiny_model_dir, adapters, tmp_path))
    shapes = len(traced)
    answers(whole(tiny_model_dir, adapters, tmp_path, "another model"))
    assert len(traced) == 2 * shapes
    monkeypatch.setattr(slora_jax.exported_steps, "_SOURCES", b"changed")
    monkeypatch.setattr(slora_jax.exported_steps, "_sources", lambda: b"changed")
    answers(whole(tiny_model_dir, adapters, tmp_path))
    assert len(traced) == 3 * shapes
    monkeypatch.setattr(slora_jax.exported_steps, "_versions", lambda: [("jax", "99")])
    assert answers(whole(tiny_model_dir, adapters, tmp_path)) == first
    assert len(traced) == 4 * shapes
    assert "jax_softmax_custom_jvp" in dict(slora_jax.exported_steps._settings())
    monkeypatch.setattr(slora_jax.exported_steps, "_settings", lambda: [("jax_softmax_custom_jvp", "other")])
    assert answers(whole(tiny_model_dir, adapters, tmp_path)) == first
    assert len(traced) == 5 * shapes


def test_a_step_of_code_that_is_not_on_disk_any_more_is_not_kept(
    tiny_model_dir: Path, adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edited since it was imported: the next start would take the old step for the new code's."""
    monkeypatch.setattr(slora_jax.exported_steps, "_sources", lambda: b"edited")
    answers(whole(tiny_model_dir, adapters, tmp_path))
    assert not list(tmp_path.iterdir())


def test_each_fact_of_an_engine_that_a_step_is_made_of_is_in_its_name() -> None:
    model = ModelConfig(332, 64, 2, 4, 2, 16, 96, 4096)
    others = [
        dataclasses.replace(model, rms_norm_eps=1e-6),
        dataclasses.replace(model, rope_theta=5e5),
        dataclasses.replace(model, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    ]
    settings: list[dict[str, Any]] = [{}, {"record_logits": True}, {"max_logprobs": 7}, {"page_tokens": 8}]
    settings += [{"lora_mode": "merge"}, {"tensor_parallel_size": 2}]
    cases = [(model, fields) for fields in settings] + [(other, {}) for other in others]
    names = set()
    for config, fields in cases:
        engine = EngineConfig(**fields)
        layout = PageLayout.for_model(config, engine.page_tokens, engine.tensor_parallel_size)
        mesh = make_mesh(engine.tensor_parallel_size)
        names |= {repr(steps_identity(config, engine, layout, mesh, backend)) for backend in (XLA, MOSAIC)}
    assert len(names) == 2 * len(cases)


@pytest.mark.parametrize(
    ("directory", "of_jax", "enabled", "found"),
    [
        (None, "/cache", True, "/cache/steps"),
        ("", "/cache", True, None),
        (None, "", True, None),
        (None, "gs://bucket/cache", True, None),
        (None, "/cache", False, None),
    ],
)
def test_steps_are_kept_beside_jax_s_cache_where_that_is_a_folder(
    directory: str | None, of_jax: str, enabled: bool, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = mock.Mock(jax_compilation_cache_dir=of_jax, jax_enable_compilation_cache=enabled)
    monkeypatch.setattr("slora_jax.compile_cache.jax.config", values)
    assert steps_folder(directory) == (None if found is None else Path(found))


def test_what_no_start_used_for_long_is_deleted(tmp_path: Path) -> None:
    for name, days in (("used", 3), ("unused", 90)):
        (tmp_path / name).write_text("")
        then = time.time() - days * 86400
        os.utime(tmp_path / name, (then, then))
    ExportedSteps(tmp_path, ())
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", interrupted)
    step = export.export(jax.jit(lambda x: x + 1))(jax.ShapeDtypeStruct((), "int32"))
    with pytest.raises(KeyboardInterrupt):
        ExportedSteps(tmp_path, ())._write(tmp_path / "name", step)
    assert not list(tmp_path.iterdir())


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
