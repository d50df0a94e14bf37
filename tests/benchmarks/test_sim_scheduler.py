"""What the simulations of `benchmarks.sim_scheduler` must show."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_server_without_work_guesses_where_it_is_told_to(prefix_cache: bool) -> None:
    fields: dict[str, Any] = {"watermark": 0.2, "seconds": 60.0, "seed": 0, "prefix_cache": prefix_cache}
    runs = [_guess(8, 4, 1 << 60, idle_watermark=share, **fields)[2] for share in (None, 1.0, 0.0)]
    none, off, on = (served.loader.stats() for served in runs)
    assert none.guesses == off.guesses < on.guesses
    assert len({len(served.requests) for served in runs}) == 1
    assert runs[0].idle_seconds > 0
