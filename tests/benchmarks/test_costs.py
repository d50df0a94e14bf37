"""The simulated H200 takes as long for a step as the measured one, and its loads as many pages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.costs import H200, H200_LOADS, adapter_pages
from benchmarks.record import RESULTS

PAGE_BYTES = 16 * 2 * 32 * 128 * 32 * 2  # 16 tokens, K and V, 32 heads of 128, 32 layers, bfloat16
LINES: list[dict[str, Any]] = [
    json.loads(text) for text in (RESULTS / "engine.jsonl").read_text().splitlines()
]
RANKS = (64, 32, 16, 8)


def measured(commit: str, bench: str, **case: object) -> dict[str, Any]:
    """The line of a case that a commit has: later ones are of other code."""
    [line] = [
        line
        for line in LINES
        if line["bench"] == bench
        and line["case"] == {"model": "llama-2-7b", **case}
        and line["commit"][:7] == commit
    ]
    return line


def pages(tokens: float) -> int:
    return -(-int(tokens) // 16)


@pytest.mark.parametrize(("batch", "distinct"), [(16, 0), (64, 0), (64, 32), (256, 0), (256, 32), (256, 256)])
def test_decode_steps(batch: int, distinct: int) -> None:
    ranks = "64/32/16/8" if distinct else ""
    commit = "59badf3" if batch == 256 else "bfb9210"
    line = measured(commit, "decode_step", batch=batch, context=400, distinct=distinct, ranks=ranks)
    seconds = H200.seconds(
        decodes=batch,
        kv_pages=batch * pages(line["mean_context"]),
        prompt_tokens=0,
        adapters=sum(adapter_pages(RANKS[i % 4]) for i in range(distinct)),
        loaded=0,
    )
    assert 1e3 * seconds == pytest.approx(line["value"], rel=0.02)


@pytest.mark.parametrize("prompt_tokens", [896, 1792])
def test_prompts_beside_decodes(prompt_tokens: int) -> None:
    def simulated(tokens: int) -> float:
        return 1e3 * H200.seconds(decodes=240, kv_pages=0, prompt_tokens=tokens, adapters=0, loaded=0)

    def line(tokens: int) -> float:
        case = {"decodes": 240, "context": 400, "prompt_tokens": tokens}
        return float(measured("5683199", "mixed_step", **case)["value"])

    longer = simulated(prompt_tokens) - simulated(0)
    assert longer == pytest.approx(line(prompt_tokens) - line(0), rel=0.05)


@pytest.mark.parametrize("rank", [8, 64])
def test_adapters_take_as_many_pages_and_as_long(rank: int) -> None:
    line = measured("789bf0a", "load_bandwidth", batch=256, context=400, rank=rank)
    assert adapter_pages(rank) * PAGE_BYTES == line["adapter_bytes"]
    assert PAGE_BYTES / H200_LOADS.copy_page == pytest.approx(line["value"], rel=0.05)
