"""Each benchmark of `benchmarks.bench_engine` runs on a tiny model, and measures what it says."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import benchmarks.record
from benchmarks.bench_engine import main
from benchmarks.engine import decode, mixed, models, offline, profile
from benchmarks.engine.models import make_engine
from slora_jax.engine import Engine
from slora_jax.programs import GPU_OPTIONS

Lines = list[dict[str, Any]]


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, command: str, engine: Engine | None = None) -> Lines:
    """The lines that a command recorded."""
    monkeypatch.setattr(benchmarks.record, "RESULTS", folder)
    main([*command.split(), "--model", "tiny"], engine)
    return [json.loads(line) for line in (folder / "engine.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_what_the_pool_does_not_hold_is_said_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmarks.record, "RESULTS", tmp_path)
    pages_lacking = decode.pages_lacking

    def lacking(engine: Engine, args: argparse.Namespace, batch: int, names: Sequence[str]) -> int:
        return 7 if batch == 4 else pages_lacking(engine, args, batch, names)

    monkeypatch.setattr(decode, "pages_lacking", lacking)
    command = "decode --model tiny --batch 4 1 --context 20 --steps 4"
    with pytest.raises(SystemExit, match=r"does not hold batch 4, 0 adapters .* \(7 pages more\)"):
        main(command.split())
    (line,) = map(json.loads, (tmp_path / "engine.jsonl").read_text().splitlines())
    assert line["case"]["batch"] == 1


def test_what_is_compiled_with_other_options_is_another_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before, seen = dict(GPU_OPTIONS), list[Any]()
    compile_decodes = decode.compile_decodes

    def compiling(engine: Engine, *args: Any, **kw: Any) -> None:
        compile_decodes(engine, *args, **kw)
        seen.append((GPU_OPTIONS.get("xla_option"), engine.num_compilations))

    monkeypatch.setattr(decode, "compile_decodes", compiling)
    monkeypatch.setattr(models, "gpu_name", lambda: "some GPU")
    engine = make_engine("tiny", max_batch=1, max_model_len=64)
    for options in ("", "--xla xla_option=1", ""):
        lines = run(monkeypatch, tmp_path, f"decode --batch 1 --context 20 --steps 4 {options}", engine)
    assert [line["case"].get("xla") for line in lines] == [None, ["xla_option=1"], None]
    (_, once), (option, twice), (_, again) = seen
    assert (option, twice, again) == ("1", 2 * once, 2 * once)
    assert before == GPU_OPTIONS


def tiny_engine_with_options(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Compiles with GPU_OPTIONS as on a GPU; there are none for a start, as XLA's for a CPU are others."""
    monkeypatch.setattr(models, "gpu_name", lambda: "some GPU")
    for name in list(GPU_OPTIONS):
        monkeypatch.delitem(GPU_OPTIONS, name)
    engine = make_engine("tiny", max_batch=1, max_model_len=64)
    engine._runner._builder._options = GPU_OPTIONS
    return engine


DECODE = "decode --batch 1 --context 20 --steps 4"


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("xla_no_such=1", "No such compile option: 'xla_no_such'"),
        ("xla_cpu_enable_fast_math=7", "not a valid bool"),
    ],
)
def test_an_option_that_xla_refuses_is_named_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, told: str
) -> None:
    engine = tiny_engine_with_options(monkeypatch)
    with pytest.raises(Exception, match=told):
        run(monkeypatch, tmp_path, f"{DECODE} --xla {option}", engine)
    assert not engine.has_unfinished()
    engine.check_integrity()
    (line,) = run(monkeypatch, tmp_path, DECODE, engine)
    assert "xla" not in line["case"]


@pytest.mark.parametrize("value", ["true", "False", "TRUE"])
def test_truth_is_written_as_in_xla_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    option = f"xla_cpu_enable_fast_math={value}"
    engine = tiny_engine_with_options(monkeypatch)
    (line,) = run(monkeypatch, tmp_path, f"{DECODE} --xla {option}", engine)
    assert line["case"]["xla"] == [option]


@pytest.mark.parametrize("option", ["xla_option", "=1", ""])
def test_what_is_no_option_and_value_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*DECODE.split(), "--model", "tiny", "--xla", option])
    assert f"must be OPTION=VALUE, got {option!r}" in capsys.readouterr().err


def test_options_that_reach_no_compiler_are_refused() -> None:
    with pytest.raises(SystemExit, match="--xla a=1 b=2: the engine gives XLA options on a GPU only"):
        main([*DECODE.split(), "--model", "tiny", "--xla", "a=1", "b=2"])


@pytest.mark.slow
def test_decodes_near_the_longest_context_run_to_the_last_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read, engines, running = profile.read_profile, list[Engine](), []

    def made(*args: Any, **fields: Any) -> Engine:
        engines.append(make_engine(*args, **fields))
        return engines[-1]

    def watched(*args: Any) -> dict[str, Any]:
        running.append(len(engines[-1]._scheduler.running))
        return read(*args)

    monkeypatch.setattr(decode, "make_engine", made)
    monkeypatch.setattr(profile, "read_profile", watched)
    run(monkeypatch, tmp_path, "decode --batch 2 --context 1030 --steps 4")
    assert running == [2]


@pytest.mark.slow
def test_what_offline_counts_is_of_the_timed_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not of the warm-up, nor of the settings before."""
    run_all = offline.run_all

    def preempted_once(engine: Engine, requests: Sequence[offline.Offline]) -> int:
        engine._scheduler.preemptions += 1
        return run_all(engine, requests)

    monkeypatch.setattr(offline, "run_all", preempted_once)
    monkeypatch.setattr(offline, "LONGEST", 12)
    engine = make_engine("tiny", max_batch=2, max_model_len=32, max_step_tokens=32, num_pages=100)
    lines = run(monkeypatch, tmp_path, "offline --setting S1 --n 0 2 --requests 3", engine)
    assert [line["case"]["n"] for line in lines] == [0, 2]
    assert [line["preemptions"] for line in lines] == [1, 1]
    assert [line["adapter_loads"] for line in lines] == [0, 2]
    assert all(line["value"] > 0 and line["requests"] == 3 for line in lines)


@pytest.mark.slow
def test_offline_profiles_a_full_batch_behind_the_timed_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Outside what is timed and counted, over and over where the requests are few, and ends them."""
    run_all, read = offline.run_all, profile.read_profile
    engine = make_engine("tiny", max_batch=2, max_model_len=32, max_step_tokens=32, num_pages=100)
    happened: list[Any] = []

    def timed(engine: Engine, requests: Sequence[offline.Offline]) -> int:
        happened.append(len(requests))
        return run_all(engine, requests)

    def profiled(folder: str, steps: int) -> dict[str, Any]:
        happened.append((steps, len(engine.requests) > 0))
        assert read(folder, steps) == {"idle_share": None, "shares": None}  # of a CPU
        return {"idle_share": 0.25, "shares": {"gemm": 1.0}}

    monkeypatch.setattr(offline, "run_all", timed)
    monkeypatch.setattr(profile, "read_profile", profiled)
    monkeypatch.setattr(offline, "LONGEST", 12)
    (line,) = run(monkeypatch, tmp_path, "offline --setting S1 --n 2 --requests 3", engine)
    assert happened[-2:] == [3, (offline.PROFILED, True)]
    assert (line["idle_share"], line["shares"]) == (0.25, {"gemm": 1.0})
    assert line["requests"] == 3
    assert not engine.requests
    assert not engine.has_unfinished()
    assert not engine.adapters()


def test_a_profiler_that_fails_is_told_and_loses_no_timed_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise OSError("no trace")

    monkeypatch.setattr(profile, "read_profile", broken)
    monkeypatch.setattr(offline, "LONGEST", 12)
    engine = make_engine("tiny", max_batch=2, max_model_len=32, max_step_tokens=32, num_pages=100)
    with pytest.raises(OSError, match="no trace"):
        run(monkeypatch, tmp_path, "offline --requests 3", engine)
    (line,) = map(json.loads, (tmp_path / "engine.jsonl").read_text().splitlines())
    assert line["value"] > 0
    assert (line["idle_share"], line["shares"]) == (None, None)


@pytest.mark.slow
def test_offline_keeps_no_profile_of_steps_that_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = make_engine("tiny", max_batch=2, max_model_len=32, max_step_tokens=32, num_pages=100)

    def compiles(run: Any, steps: int) -> dict[str, Any]:
        engine._runner.compilations += 1
        return {"idle_share": 0.9, "shares": {}}

    monkeypatch.setattr(offline, "profile", compiles)
    monkeypatch.setattr(offline, "LONGEST", 12)
    (line,) = run(monkeypatch, tmp_path, "offline --requests 3", engine)
    assert (line["idle_share"], line["shares"]) == (None, None)
    assert line["value"] > 0


def test_a_profile_says_what_kernels_leave_idle_of_a_step() -> None:
    """Two steps of 1 ms: kernels of two streams that overlap, a copy, and a host that comes late once."""
    ms = 1e6
    spans = [
        (0.0, 0.5 * ms, "nvjet_gemm"),
        (0.25 * ms, 0.75 * ms, "decode_mosaic"),
        (0.8 * ms, 1.1 * ms, "MemcpyH2D"),
        (1.0 * ms, 1.5 * ms, "lora_decode_kernel"),
        (1.75 * ms, 2.0 * ms, "loop_fusion"),
    ]
    found = profile.summary(spans[::-1], 2)
    assert found["traced_ms"] == 1
    assert found["busy_ms"] == 0.75
    assert found["idle_share"] == 0.25
    assert found["longest_gaps_us"][:2] == [250, 250]
    shares = {"attention": 0.286, "gemm": 0.286, "lora": 0.286, "other": 0.143}
    assert found["shares"] == shares
    assert profile.summary(spans[2:3], 2) == {"idle_share": None, "shares": None}


@pytest.mark.slow
def test_a_mixed_step_computes_the_prompts_beside_the_decodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mixed, "BATCH", 8)
    monkeypatch.setattr(mixed, "DECODES", 4)
    command = "mixed --context 20 --steps 4 --prompt-tokens 0 300 --distinct 2 --ranks 16/8"
    lines = run(monkeypatch, tmp_path, command)
    assert [line["tokens_of_last_step"] for line in lines] == [4, 304]
    assert {line["case"]["ranks"] for line in lines} == {"16/8"}


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("decode --batch 4 0", "--batch: must be in [1, 1000000]"),
        ("decode --distinct -1", "--distinct: must be in [0, 1000000]"),
        ("decode --steps 0", "--steps: must be in [1, 1000000]"),
        ("decode --ranks 16 8/", "--ranks: '8/' must be ranks of 1 and more"),
        ("decode --batch 2 --distinct 3", "3 distinct adapters are more than a batch has sequences"),
        ("mixed --prompt-tokens 1 -1", "--prompt-tokens: must be in [0, 1000000]"),
        ("mixed --ranks 0", "--ranks: '0' must be ranks of 1 and more"),
        ("mixed --context 2 --steps 4", "--context must be above half of --steps"),
        ("offline --requests 0", "--requests: must be in [1, 1000000]"),
        ("offline --setting S1 --n -1", "--n: must be in [0, 1000000]"),
        ("offline --adapter-slots 0", "--adapter-slots: must be in [1, 1000000]"),
        (
            "offline --scheduling-policy lifo",
            "--scheduling-policy: EngineConfig: scheduling_policy must be one of fcfs,",
        ),
        ("decode --memory-fraction nan", "--memory-fraction: must be above 0 and at most 1, got nan"),
        ("offline --n 100", "have the ranks of a --setting: one of S1, S2, S4"),
        ("offline --setting S1 none --n 0 100", "have the ranks of a --setting: one of S1, S2, S4"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_an_engine_is_made(
    command: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (decode, mixed, offline):
        monkeypatch.setattr(module, "make_engine", pytest.fail)
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert told in f"{ended.value} {capsys.readouterr().err}"
