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
from benchmarks.engine import decode, profile
from benchmarks.engine.models import make_engine
from slora_jax.engine import Engine


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


def test_decodes_near_the_longest_context_run_to_the_last_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmarks.record, "RESULTS", tmp_path)
    read, engines, running = profile.read_profile, list[Engine](), []

    def made(*args: Any, **fields: Any) -> Engine:
        engines.append(make_engine(*args, **fields))
        return engines[-1]

    def watched(*args: Any) -> dict[str, Any]:
        running.append(len(engines[-1]._scheduler.running))
        return read(*args)

    monkeypatch.setattr(decode, "make_engine", made)
    monkeypatch.setattr(profile, "read_profile", watched)
    main("decode --model tiny --batch 2 --context 1030 --steps 4".split())
    assert running == [2]
