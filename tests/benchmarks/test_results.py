"""A recorded measurement says what, on which machine, by which command; a peer's is not taken for ours."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.kernels import attention, lora, sampling
from benchmarks.record import RESULTS

OURS = ("bench", "case", "value", "unit", "gpu", "date", "commit", "versions", "command")
PEERS = ("bench", "system", "case", "value", "unit", "gpu", "date", "source")
FILES = sorted(path.name for path in RESULTS.glob("*.jsonl"))


def lines_of(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]


@pytest.mark.parametrize("file", FILES)
def test_every_line_has_what_makes_it_a_measurement(file: str) -> None:
    for line in lines_of(file):
        needed = PEERS if file == "peers.jsonl" else OURS
        assert not [key for key in needed if key not in line], line
        assert isinstance(line["value"], int | float)
        assert isinstance(line["case"], dict)
        texts = [line[key] for key in needed if key not in ("case", "value", "gpu", "versions")]
        assert all(isinstance(text, str) and text for text in texts), line
        assert line["gpu"] or line["cpu"], line


def test_the_benches_of_peers_have_names_of_their_own() -> None:
    """Else theirs would supersede ours where all files are read."""
    peers = {line["bench"] for line in lines_of("peers.jsonl")}
    ours = {line["bench"] for file in FILES if file != "peers.jsonl" for line in lines_of(file)}
    ours |= {case.bench for case in (*lora.CASES, *attention.CASES, *sampling.CASES)}
    assert not peers & ours
    for line in lines_of("peers.jsonl"):
        system, _, bench = line["bench"].partition("_")
        assert line["system"].startswith(system)
        assert bench in ours


def test_recorded_lora_cases_have_the_keys_that_new_ones_have() -> None:
    """Else no later line would supersede them."""
    keys = ["tokens", "distinct", "ranks", "d_model", "modules"]
    for line in lines_of("kernels.jsonl"):
        if line["bench"] in ("lora_decode", "lora_prefill"):
            assert sorted(line["case"]) in (sorted(keys), sorted([*keys, "kv"])), line
            assert line["case"].get("kv") != line["case"]["d_model"], line
