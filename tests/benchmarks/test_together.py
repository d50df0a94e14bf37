"""Benchmarks that share an engine give each its own lines, and one that fails stops no other."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import benchmarks.record
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
        "bench_engine decode --batch 4 --memory-fraction 0.5",
        f"{loads} --setting S1",
    ]
    with pytest.raises(
        SystemExit, match=r"failed: bench_engine offline --lora-mode merge; .* --batch 8; .*-fraction 0.5"
    ):
        main(["tiny", "--max-batch", "4", "--max-lora-rank", "8", *commands])
    lines = [json.loads(line) for line in (tmp_path / "engine.jsonl").read_text().splitlines()]
    assert [line["bench"] for line in lines] == ["decode_step", "load_bandwidth"]
    told = capsys.readouterr().err
    assert "lora_mode need an engine of their own" in told
    assert "batches of 4" in told
    assert "--memory-fraction wants an engine of its own" in told


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
