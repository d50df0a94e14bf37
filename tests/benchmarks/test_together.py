"""Benchmarks that share an engine give each its own lines, and one that fails stops no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import benchmarks.record
from benchmarks import bench_engine
from benchmarks.together import main


def test_commands_share_an_engine_and_fail_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmarks.record, "RESULTS", tmp_path)
    loads = (
        "bench_adapters loads --load-ranks 8 --context 20 --steps 6 --batch 4 --longest 24 --step-tokens 12"
    )
    commands = [
        "bench_engine decode --batch 4 --context 20 --steps 4 --distinct 2",
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


def test_one_that_fails_leaves_the_next_ones_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(benchmarks.record, "RESULTS", tmp_path)
    read, calls = bench_engine.read_profile, iter([RuntimeError("no profile")])

    def fails_once(*args: Any) -> dict[str, Any]:
        for error in calls:
            raise error
        return read(*args)

    monkeypatch.setattr(bench_engine, "read_profile", fails_once)
    command = "bench_engine decode --batch 4 --context 20 --steps 4 --distinct 2"
    with pytest.raises(SystemExit, match=f"^failed: {command}$"):
        main(["tiny", "--max-batch", "4", "--max-lora-rank", "16", command, command])
    (line,) = map(json.loads, (tmp_path / "engine.jsonl").read_text().splitlines())
    assert line["case"]["batch"] == 4


def test_what_the_pool_does_not_hold_is_said_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmarks.record, "RESULTS", tmp_path)
    lacking = bench_engine.pages_lacking
    monkeypatch.setattr(
        bench_engine, "pages_lacking", lambda *args: lacking(*args) + (7 if args[2] == 4 else 0)
    )
    command = "decode --model tiny --batch 4 1 --context 20 --steps 4"
    with pytest.raises(SystemExit, match=r"does not hold batch 4, 0 adapters .* \(7 pages more\)"):
        bench_engine.main(command.split())
    (line,) = map(json.loads, (tmp_path / "engine.jsonl").read_text().splitlines())
    assert line["case"]["batch"] == 1
