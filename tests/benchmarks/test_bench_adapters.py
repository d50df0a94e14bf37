"""Each part of `benchmarks.bench_adapters` runs on a tiny model, and measures what it says."""

from __future__ import annotations

import argparse
import collections
import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import benchmarks.record
from benchmarks import bench_engine
from benchmarks.adapters import clustering, workbench
from benchmarks.adapters.loads import LoadStream
from benchmarks.adapters.workbench import Workbench
from benchmarks.adapters.workload import kv_room, running_lengths
from benchmarks.bench_adapters import main
from benchmarks.engine.models import make_engine
from benchmarks.engine.random_adapters import make_resident, random_adapters, register_adapters
from benchmarks.papers import by_popularity, most_overtaken

TINY = "--model tiny --batch 4 --longest 24 --step-tokens 12 --num-pages 1200 --setting S1".split()
Lines = dict[str, list[dict[str, Any]]]


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, arguments: str) -> Lines:
    """The lines that a command recorded, by bench."""
    monkeypatch.setattr(benchmarks.record, "RESULTS", folder)
    main([*TINY, *arguments.split()])
    lines: Lines = collections.defaultdict(list)
    for line in (folder / "engine.jsonl").read_text().splitlines():
        lines[json.loads(line)["bench"]].append(json.loads(line))
    return lines


def test_loads_stream_beside_decodes_and_cold_requests_wait_for_theirs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = run(
        monkeypatch,
        tmp_path,
        "loads cold --load-ranks 8 64 --context 20 --steps 6 --prompt 9 --repeats 3",
    )
    assert [line["case"]["rank"] for line in lines["load_bandwidth"]] == [8, 64]
    for line in lines["load_bandwidth"]:
        assert line["adapters_loaded"] > 4 * line["waiting"], "others were not evicted for them"
        assert line["value"] > 0
        assert line["share_of_pinned_copy"] == pytest.approx(
            line["value"] / line["pinned_copy_bytes_per_s"], abs=1e-3
        )
    cases = [(line["case"]["rank"], line["case"]["source"]) for line in lines["cold_first_token"]]
    assert cases == [(8, "host"), (8, "disk"), (64, "host"), (64, "disk")]
    for line in lines["cold_first_token"]:
        assert line["value"] == pytest.approx(line["cold_ms"] - line["resident_ms"], abs=2e-3)


@pytest.mark.slow
def test_loads_end_where_the_pool_holds_far_more_adapters_than_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Room for KV to come holds more adapters than a window: others must still be there to load."""
    arguments = "loads --load-ranks 8 --context 20 --steps 200 --longest 128 --num-pages 120"
    [line] = run(monkeypatch, tmp_path, arguments)["load_bandwidth"]
    assert line["adapters_loaded"] > 4 * line["waiting"]


def test_a_benchmark_whose_adapters_cannot_be_loaded_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine("tiny", max_batch=2, num_pages=20, max_model_len=64)
    names = register_adapters(engine, random_adapters(engine, [8]), 5)
    with pytest.raises(RuntimeError, match="5 adapters need 20 pages, the pool has 19 beside the KV"):
        make_resident(engine, names)
    with pytest.raises(RuntimeError, match="are resident or asked for"):
        LoadStream(engine, names, 6).feed()

    def fail(*_: Any) -> Any:
        raise OSError(errno.ENODEV, "no such device")

    monkeypatch.setattr(engine._runner, "stage_adapters", fail)
    with pytest.raises(RuntimeError, match="'a0' could not be loaded: no such device"):
        make_resident(engine, names[:2])


@pytest.mark.slow
def test_only_a_pool_that_is_too_small_loads_while_it_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = "thrash --adapters-in-pool 5 --working-set 1 4 --popularity uniform --seconds 0.3"
    lines = run(monkeypatch, tmp_path, f"{arguments} --no-unified-memory")["thrash"]
    [held] = {line["pool_holds"] for line in lines}
    found = {(line["case"]["memory"], line["working_set"]): line for line in lines}
    memories = ("all-resident", "unified", "5 slots")
    assert set(found) == {(m, n) for m in memories for n in (held, 4 * held)}
    assert [found["all-resident", n]["loads"] for n in (held, 4 * held)] == [0, 0]
    for line in lines:
        assert line["working_set_of_resident"] == pytest.approx(
            line["working_set"] / line["mean_resident"], rel=0.02
        )
    for memory in memories[1:]:
        assert found[memory, 4 * held]["loads"] > 0
        assert found[memory, 4 * held]["working_set_of_resident"] > 3, "the cap does not hold"
    assert found["all-resident", 4 * held]["working_set_of_resident"] == 1
    for line in found.values():
        assert line["token_ms_p50"] <= line["token_ms_p99"] <= line["token_ms_max"]
        assert line["value"] > 0


@pytest.mark.slow
def test_policies_meet_real_arrivals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = run(
        monkeypatch,
        tmp_path,
        "online fairness --adapters-in-pool 3 --adapters 12 --rate 100 --target 0.4 --online-seconds 1 "
        "--policies fcfs vtc+early-abort --fair-policies fcfs vtc --fair-seconds 1 --fair-batch 3 "
        "--fair-longest 20",
    )
    for line in lines["online"]:
        assert 0 <= line["satisfaction"] <= line["value"] <= 1
        assert line["requests"] > 50
    assert [line["case"]["policy"] for line in lines["online"]] == ["fcfs", "vtc+early-abort"]
    fcfs, vtc = lines["vtc_gap"]
    assert vtc["value"] <= vtc["bound"] < fcfs["value"]
    for line in (fcfs, vtc):
        assert line["bound"] == 2 * 2 * 3 * 2 * 20  # 2 w_q M
        assert line["service_of_bound"] >= 6
        assert line["gap_of_bound"] == pytest.approx(line["value"] / line["bound"], abs=1e-4)
    assert fcfs["share_of_small"] < vtc["share_of_small"] < 0.6


@pytest.mark.slow
def test_clustered_requests_share_fewer_adapters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = "cluster --cluster-tokens 256 --cluster-adapters 8 --cluster-waiting 12 --cluster-seconds 2"
    lines = run(monkeypatch, tmp_path, f"{arguments} --cluster-passes 40 --cluster-alpha 1.0")["cluster"]
    fcfs, clustered = lines
    assert [line["case"]["passes"] for line in (fcfs, clustered)] == [0, 40]
    assert clustered["mean_adapters_running"] < fcfs["mean_adapters_running"]
    assert clustered["mean_running"] > fcfs["mean_running"]
    assert clustered["loads"] / clustered["requests_per_s"] < fcfs["loads"] / fcfs["requests_per_s"]
    assert fcfs["most_overtaken"] < clustered["most_overtaken"]
    for line in (fcfs, clustered):
        assert line["value"] > 0
        assert line["mean_running"] < line["most_running"] <= 4
        assert line["working_set_of_resident"] == pytest.approx(8 / line["mean_resident"], rel=0.01)
        p50, p99 = line["ttft_s"]
        assert 0 < p50 <= p99
        assert line["compilations"] == 0


@pytest.mark.parametrize(("running", "resident"), [(3.9, 2.0), (2.0, 7.9)])
def test_a_pool_that_is_no_limit_compares_no_policies(
    running: float, resident: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that are all taken, or all adapters resident: clustering has nothing to gain there."""
    found = {"mean_running": running, "mean_resident": resident}
    monkeypatch.setattr(clustering, "serve", lambda *_: found)
    bench = SimpleNamespace(batch=4, measured=lambda measure: measure(), report=pytest.fail)
    args = argparse.Namespace(cluster_alpha=[1.0], cluster_passes=[], cluster_adapters=8)
    with pytest.raises(RuntimeError, match="the pool is no limit, and nothing is compared"):
        clustering.run(cast(Workbench, bench), args)


@pytest.mark.slow
def test_arrivals_meet_a_pool_of_so_many_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = "online --pool-tokens 640 --adapters 12 --rate 40 --target 0.4 --online-seconds 0.5"
    [line] = run(monkeypatch, tmp_path, f"{arguments} --policies cluster")["online"]
    assert line["case"]["pool_tokens"] == 640
    assert "adapters_in_pool" not in line["case"]
    assert 0 <= line["satisfaction"] <= line["value"] <= 1


def test_a_working_set_that_no_pool_holds_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="lower --adapters-in-pool"):
        run(monkeypatch, tmp_path, "thrash --adapters-in-pool 1000")
    for command in ("cluster --cluster-tokens", "online --pool-tokens"):
        with pytest.raises(SystemExit, match="a pool of 20000 tokens has 1251 pages, the one on the device"):
            run(monkeypatch, tmp_path, f"{command} 20000")
    with pytest.raises(SystemExit, match=r"200 slots of 8 pages .* lower --adapter-slots"):
        run(monkeypatch, tmp_path, "thrash --no-unified-memory --adapter-slots 2 200")


def test_a_steady_state_meets_long_outputs_more_often_at_any_age() -> None:
    prompt, age, output = running_lengths(200_000, 512, np.random.default_rng(1))
    lengths = np.arange(8, 513)
    assert output.mean() == pytest.approx((lengths**2).sum() / lengths.sum(), rel=0.01)
    assert (age / output).mean() == pytest.approx(0.5, abs=0.01)
    assert (age < output).all()
    assert prompt.mean() == pytest.approx(260, rel=0.01)
    mean_pages = (-(-(prompt + age) // 16)).mean()
    assert 1 < kv_room(256, 512, 16) / (256 * (mean_pages + 1)) < 1.1


def test_popularity_draws_what_its_name_says() -> None:
    rng = np.random.default_rng(0)
    for name, first in (("uniform", 1 / 4), ("zipf", 1 / (1 + 1 / 2 + 1 / 3 + 1 / 4)), ("1.0", 1 / 4)):
        pick = by_popularity(name, 4)
        draws = np.bincount([pick(rng) for _ in range(20_000)], minlength=4)
        assert draws[0] / 20_000 == pytest.approx(first, abs=0.02)
        assert len(draws) == 4


def test_those_that_still_wait_count_as_overtaken() -> None:
    assert most_overtaken([0, 1, 2], [3, 4]) == 0
    assert most_overtaken([1, 2, 0, 3], []) == 2
    assert most_overtaken([1, 3, 2], [0, 4]) == 3
    assert most_overtaken([], [0]) == 0


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("cluster --batch 0", "--batch: must be in [1, 1000000], got 0"),
        ("cluster --longest 1", "--longest: must be in [8, 1000000], got 1"),
        ("cluster --step-tokens 0", "--step-tokens: must be in [1, 1000000]"),
        ("cluster --num-pages 1", "--num-pages: must be in [2, 2147483647]"),
        ("loads --load-ranks 8 0", "--load-ranks: must be in [1, 256], got 0"),
        ("loads --load-ranks 257", "--load-ranks: must be in [1, 256], got 257"),
        ("loads --steps -1", "--steps: must be in [1, 1000000]"),
        ("loads --context 30 --steps 30", "--context and --steps: loads decodes to 70 tokens"),
        ("cold --repeats 0", "--repeats: must be in [1, 1000000]"),
        ("cold --prompt 0", "--prompt: must be in [1, 1000000]"),
        ("cold --prompt 13", "--prompt must be at most 12"),
        ("cold --prompt 64 --step-tokens 99", "--prompt must be at most 63"),
        ("thrash --adapters-in-pool -2", "--adapters-in-pool: must be in [1, 1000000], got -2"),
        ("thrash --adapters-in-pool 2.5", "--adapters-in-pool: must be an integer, got '2.5'"),
        ("thrash --thrash-batch 5", "--thrash-batch must be at most --batch"),
        ("thrash --working-set 1 0", "--working-set: must be in [1, 1000000]"),
        ("thrash --seconds 0", "--seconds: must be above 0 and at most 1000000, got 0"),
        ("thrash --no-unified-memory --adapter-slots 0", "--adapter-slots: must be in [1, 1000000]"),
        ("online --adapters 0", "--adapters: must be in [1, 1000000]"),
        ("online --alpha nan", "--alpha: must be above 0 and at most 1000000, got nan"),
        ("online --rate inf", "--rate: must be above 0 and at most 1000000, got inf"),
        ("online --cv 0", "--cv: must be above 0 and at most 1000000"),
        ("online --target x", "--target: must be a number, got 'x'"),
        ("online --rate 1 --online-seconds 0.1", "--rate and --online-seconds: of one tenant no request"),
        (
            "online --policies fcfs lifo",
            "--policies: EngineConfig: scheduling_policy must be one of fcfs, cluster",
        ),
        (
            "fairness --fair-policies vtc+vtc",
            "--fair-policies: EngineConfig: scheduling_policy must be one of",
        ),
        ("fairness --fair-seconds -1", "--fair-seconds: must be above 0 and at most 1000000"),
        ("fairness --batch 1", "--fair-batch must be at least 2, and --batch with it"),
        ("fairness --fair-batch 1", "--fair-batch must be at least 2"),
        ("fairness --fair-batch 5", "--fair-batch and --fair-longest must be at most --batch and --longest"),
        ("fairness --fair-longest 25", "--fair-batch and --fair-longest must be at most --batch and"),
        ("fairness --fair-longest 7", "--fair-longest: must be in [8, 1000000], got 7"),
        ("cluster --cluster-tokens 0", "--cluster-tokens: must be in [1, 1000000]"),
        ("cluster --cluster-adapters 0", "--cluster-adapters: must be in [1, 1000000]"),
        ("cluster --cluster-waiting 0", "--cluster-waiting: must be in [1, 1000000]"),
        (f"cluster --cluster-waiting {10**400}", "--cluster-waiting: must be in [1, 1000000]"),
        ("cluster --cluster-seconds 0", "--cluster-seconds: must be above 0 and at most 1000000, got 0"),
        ("online --pool-tokens 0", "--pool-tokens: must be in [1, 1000000], got 0"),
        ("cluster --cluster-passes 4 -1", "--cluster-passes: must be in [0, 1000000], got -1"),
        ("cluster --cluster-alpha 1 0", "--cluster-alpha: must be above 0 and at most 1000000, got 0"),
        ("cluster --cluster-alpha -1", "--cluster-alpha: must be above 0 and at most 1000000, got -1"),
        ("cluster --cluster-alpha nan", "--cluster-alpha: must be above 0 and at most 1000000, got nan"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_an_engine_is_made(
    command: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workbench, "make_engine", pytest.fail)
    with pytest.raises(SystemExit):
        main([*TINY, *command.split()])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (main, ["cluster"]),
        *((bench_engine.main, [name]) for name in bench_engine.BENCHMARKS),
    ],
)
def test_no_option_takes_any_number(
    command: Callable[[list[str]], None], argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add, kinds = argparse._ActionsContainer.add_argument, list[object]()

    def added(self: Any, *names: Any, **fields: Any) -> Any:
        kinds.append(fields.get("type"))
        return add(self, *names, **fields)

    monkeypatch.setattr(argparse._ActionsContainer, "add_argument", added)
    with pytest.raises(SystemExit):
        command([*argv, "--no-such-option"])
    assert len(kinds) > 5
    assert not {int, float} & set(kinds)


def test_what_json_does_not_have_is_not_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(benchmarks.record, "RESULTS", tmp_path)
    for value, ttft_s in ((float("nan"), [0.1]), (1.0, [0.1, float("inf")])):
        with pytest.raises(ValueError, match="nothing that JSON has"):
            benchmarks.record.record("engine", "cluster", {"batch": 4}, value, "requests/s", ttft_s=ttft_s)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["zipfian", "0", "-1", "nan", "inf", ""])
def test_a_popularity_that_draws_nothing_is_refused_before_anything_runs(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*TINY, "thrash", "--popularity", "zipf", kind])
    assert f"--popularity: '{kind}' must be zipf, uniform, or S-LoRA's alpha" in capsys.readouterr().err
