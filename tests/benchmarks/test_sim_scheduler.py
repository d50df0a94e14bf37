"""What the simulations of `benchmarks.sim_scheduler` must show."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

import benchmarks.record
from benchmarks.papers import FAIR_BATCH
from benchmarks.sim_scheduler import _guess, vtc


def test_the_shapes_of_fairness_tell_vtc_from_fcfs_in_a_window_of_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """10 s of steps of at least 5 ms: the GPU's."""
    monkeypatch.setattr(benchmarks.record, "RESULTS", tmp_path)
    vtc(argparse.Namespace(steps=2000 // 5))
    lines = [json.loads(line) for line in (tmp_path / "sim.jsonl").read_text().splitlines()]
    found = {line["case"]["policy"]: line for line in lines if line["case"]["batch"] == FAIR_BATCH}
    assert found["fcfs"]["value"] > 2 * found["fcfs"]["bound"]
    for policy in ("vtc", "vtc+cluster"):
        assert found[policy]["value"] < found[policy]["bound"] / 4
        assert sum(found[policy]["services"].values()) > 4 * found[policy]["bound"]


def test_guesses_are_made_of_the_same_requests_and_counted() -> None:
    runs = {watermark: _guess(16, 4, 2000, watermark, 30.0, seed=3) for watermark in (1.0, 0.2)}
    assert len(runs[1.0][0]) == len(runs[0.2][0])
    assert {"resident", "registered"} <= set(runs[1.0][1])
    off, on = (served.loader.stats() for *_, served in runs.values())
    assert off.guesses == 0
    assert on.guesses >= on.guesses_useful + on.guesses_wasted
    assert on.guesses_useful > 0
    assert on.host_misses > 0
