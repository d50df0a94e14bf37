"""What the simulations of `benchmarks.sim_scheduler` must show."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import benchmarks.record
from benchmarks import sim_clustering
from benchmarks.papers import CLUSTER_ADAPTERS, CLUSTER_TOKENS, CLUSTER_WAITING, FAIR_BATCH
from benchmarks.record import RESULTS
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


def test_the_simulated_server_tells_what_a_gpu_recorded() -> None:
    """bench_adapters cluster of 8c587b6: what runs within 2%, requests/s, of other kernels, within 6%."""
    recorded = [json.loads(line) for line in (RESULTS / "engine.jsonl").read_text().splitlines()]
    lines = {
        (line["case"]["alpha"], line["case"]["passes"]): line
        for line in recorded
        if line["bench"] == "cluster" and line["commit"].startswith("8c587b6")
    }
    cases = itertools.takewhile(lambda case: case[0]["what"] == "as measured", sim_clustering.causes())
    for case, found in cases:
        line = lines.pop((case["alpha"], case["passes"]))
        assert case["requests"] == line["case"]["requests"]
        for held in ("mean_running", "mean_adapters_running"):
            assert found[held] == pytest.approx(line[held], rel=0.02)
        assert found["loads"] == pytest.approx(line["loads"], rel=0.07)
        assert found["rate"] == pytest.approx(line["value"], rel=0.06)
    assert not lines


def test_clustering_runs_more_sequences_where_memory_is_the_limit() -> None:
    fcfs, clustered = (
        sim_clustering.backlog(policy, passes, CLUSTER_TOKENS, CLUSTER_ADAPTERS, CLUSTER_WAITING, 1.0, 42)
        for policy, passes in (("fcfs", 0), ("cluster", 64))
    )
    assert clustered["mean_adapters_running"] < 0.8 * fcfs["mean_adapters_running"]
    assert clustered["mean_running"] > 1.03 * fcfs["mean_running"]
    assert clustered["output_tokens_per_s"] > 1.02 * fcfs["output_tokens_per_s"]
    assert clustered["ttft_s"][1] > 1.5 * fcfs["ttft_s"][1]  # its price
    assert fcfs["most_overtaken"] < 10 < clustered["most_overtaken"] <= 70  # passes, and waits for loads


def test_clustered_arrivals_have_their_first_tokens_in_time_more_often() -> None:
    fcfs, clustered = (
        sim_clustering.arriving(policy, passes, 1.0, 1, 42)
        for policy, passes in (("fcfs", 0), ("cluster", 64))
    )
    assert fcfs["requests"] == clustered["requests"]
    assert clustered["attainment"] > fcfs["attainment"] + 0.1
    assert clustered["satisfaction"] > fcfs["satisfaction"] + 0.1
