"""`benchmarks.bench_host_loads` counts what the host does for loads beside decodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks.record
from benchmarks import bench_host_loads


def test_a_load_is_few_calls_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.record, "RESULTS", tmp_path)
    monkeypatch.setattr(bench_host_loads, "WARM", 40)
    bench_host_loads.main(["--steps", "10", "--ranks", "64", "--record"])
    (line,) = [json.loads(line) for line in (tmp_path / "cpu.jsonl").read_text().splitlines()]
    assert line["case"] == {"model": "Llama-3-8B", "decodes": 256, "rank": 64}
    assert line["loads"] > 1
    assert line["loads"] <= line["copies"] < 3 * line["loads"], "52 pages each"
