"""Benchmarks that share an engine give each its own lines, and one that fails stops no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks.record
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
