"""Benchmarks that share an engine give each its own lines, and one that fails stops no other."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import benchmarks.record
from benchmarks import bench_engine
from benchmarks.together import main
from slora_jax.engine import Engine


def test_commands_share_an_engine_and_fail_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmarks.record, "RESULTS", tmp_path)
    loads = (
        "bench_adapters loads --load-ranks 8 --context 20 --steps 6 --batch 4 --longest 24 --step-tokens 12"
    )
    commands = [
        "bench_engine decode --batch 4 --context 20 --steps 4 --distinct 2 --ranks 8",
        "bench_engine offline --lora-mode merge",
        "bench_engine decode --batch 8",
        f"{loads} --setting S1",
    ]
    with pytest.raises(SystemExit, match=r"failed: bench_engine offline --lora-mode merge; .* --batch 8"):
        main(["tiny", "--max-batch", "4", "--max-lora-rank", "8", *commands])
    lines = [json.loads(line) for line in (tmp_path / "engine.jsonl").read_text().splitlines()]
    assert [line["bench"] for line in lines] == ["decode_step", "load_bandwidth"]
    told = capsys.readouterr().err
    assert "lora_mode need an engine of their own" in told
    assert "batches of 4" in told


@pytest.mark.parametrize("at", [3, 8, 14])  # among the first steps, the timed ones, the profiled ones
def test_one_that_fails_leaves_the_next_ones_nothing(
    at: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmarks.record, "RESULTS", tmp_path)
    step, calls, engines = Engine.step, itertools.count(1), list[Engine]()

    def fails_once(engine: Engine) -> Any:
        if next(calls) == at:
            engines.append(engine)
            raise RuntimeError("a step that was told to fail")
        return step(engine)

    monkeypatch.setattr(Engine, "step", fails_once)
    command = "bench_engine decode --batch 4 --context 20 --steps 4 --distinct 2"
    with pytest.raises(SystemExit, match=f"^failed: {command}$"):
        main(["tiny", "--max-batch", "4", "--max-lora-rank", "16", command, command])
    assert engines[0]._runner.launch.__name__ == "launch"  # nothing is wrapped around it any more
    (line,) = map(json.loads, (tmp_path / "engine.jsonl").read_text().splitlines())
    assert line["case"]["batch"] == 4


def test_what_the_pool_does_not_hold_is_said_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmarks.record, "RESULTS", tmp_path)
    pages_lacking = bench_engine.pages_lacking

    def lacking(engine: Engine, args: argparse.Namespace, batch: int, names: Sequence[str]) -> int:
        return 7 if batch == 4 else pages_lacking(engine, args, batch, names)

    monkeypatch.setattr(bench_engine, "pages_lacking", lacking)
    command = "decode --model tiny --batch 4 1 --context 20 --steps 4"
    with pytest.raises(SystemExit, match=r"does not hold batch 4, 0 adapters .* \(7 pages more\)"):
        bench_engine.main(command.split())
    (line,) = map(json.loads, (tmp_path / "engine.jsonl").read_text().splitlines())
    assert line["case"]["batch"] == 1


def test_decodes_near_the_longest_context_run_to_the_last_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmarks.record, "RESULTS", tmp_path)
    make, read, engines, running = bench_engine.make_engine, bench_engine.read_profile, [], []

    def made(*args: Any, **fields: Any) -> Engine:
        engines.append(make(*args, **fields))
        return engines[-1]

    def watched(*args: Any) -> dict[str, Any]:
        running.append(len(engines[-1]._scheduler.running))
        return read(*args)

    monkeypatch.setattr(bench_engine, "make_engine", made)
    monkeypatch.setattr(bench_engine, "read_profile", watched)
    bench_engine.main("decode --model tiny --batch 2 --context 1030 --steps 4".split())
    assert running == [2]
