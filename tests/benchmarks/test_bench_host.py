"""`benchmarks.bench_host` times each part of a step, of batches with and without adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks.record
from benchmarks.bench_host import BATCH, main


def test_every_part_of_a_step_has_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.record, "RESULTS", tmp_path)
    main(["--steps", "5", "--record"])
    lines = [json.loads(line) for line in (tmp_path / "cpu.jsonl").read_text().splitlines()]
    assert {(line["case"]["adapters"], line["case"]["mixed"]) for line in lines} == {
        (adapters, mixed) for adapters in (0, BATCH) for mixed in (False, True)
    }
    for line in lines:
        parts = line["parts"]
        assert 0 < parts["build"] < parts["launch"]
        assert parts["schedule"] + parts["launch"] + parts["collect"] <= parts["step"] * 1.5
