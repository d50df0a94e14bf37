"""The suite's commands are ones that the benchmarks take; one that fails keeps none from running."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks import bench_adapters, bench_engine, compare_backends, suite, tables, together
from benchmarks.engine import decode, mixed, offline


class Parsed(Exception):
    """A benchmark has taken its arguments, and would begin."""


def begins(*_: object, **__: object) -> None:
    raise Parsed


@pytest.fixture
def parsing_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decode, mixed, offline):
        monkeypatch.setattr(module, "run", begins)
    monkeypatch.setattr(bench_adapters, "Workbench", begins)
    for name in ("compare_shapes", "compare_with_peft"):
        monkeypatch.setattr(compare_backends, name, begins)


def test_every_command_of_a_shared_engine_is_taken(
    parsing_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: str

    def shared(name: str, **_: object) -> None:
        nonlocal model
        model = name

    taken: list[tuple[str, str]] = []

    def takes(benchmark: Any) -> Any:
        def run(argv: Sequence[str], _: object) -> None:
            with pytest.raises(Parsed):
                benchmark.main(argv)
            assert argv[-2:] == ["--model", model]
            taken.append((model, argv[0]))

        return run

    monkeypatch.setattr(together, "make_engine", shared)
    modules = {"bench_engine": bench_engine, "bench_adapters": bench_adapters}
    monkeypatch.setattr(together, "COMMANDS", {name: takes(module) for name, module in modules.items()})
    for part in suite.PARTS.values():
        for module, *argv in part.commands:
            if module == "benchmarks.together":
                together.main(argv)
    assert {("llama-2-7b", "offline"), ("llama-3-8b", "loads"), ("llama-2-13b", "decode")} <= set(taken)


def test_commands_with_an_engine_of_their_own_are_taken(parsing_only: None) -> None:
    modules = {"benchmarks.bench_engine": bench_engine, "benchmarks.compare_backends": compare_backends}
    own = [c for part in suite.PARTS.values() for c in part.commands if c[0] in modules]
    assert {module for module, *_ in own} == modules.keys()
    for module, *argv in own:
        with pytest.raises(Parsed):
            modules[module].main(argv)


def test_every_command_is_of_a_module_and_of_folders_that_exist() -> None:
    for module, *argv in (command for part in suite.PARTS.values() for command in part.commands):
        assert importlib.util.find_spec(module) is not None, module
        assert all((tables.ROOT / word).exists() for word in argv if word.startswith("tests/"))


def test_a_command_that_fails_is_told_and_keeps_none_from_running(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails, works = ("json.tool", "no such file"), ("platform",)
    monkeypatch.setattr(suite, "PARTS", {"two": suite.Part("two commands", 1, (fails, works))})
    with pytest.raises(SystemExit, match=r"failed:\n  python -m json\.tool 'no such file'$"):
        suite.main(["two"])
    assert "exit status 0" in capsys.readouterr().out


def test_the_parts_are_listed_and_unknown_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    suite.main([])
    listed = capsys.readouterr().out
    assert all(f"{name}: {part.what}" in listed for name, part in suite.PARTS.items())
    with pytest.raises(SystemExit):
        suite.main(["7b", "70b"])
    assert "70b: no such part; there are tests, kernels, 7b" in capsys.readouterr().err
