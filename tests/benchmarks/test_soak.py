"""The soak runs, and notices what it is there to notice."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks.soak import Checkpoint, Soak, traced
from tests.engine.simulated_runner import SimulatedRunner


def test_half_a_minute_of_traffic_leaves_nothing_behind() -> None:
    with traced():
        soak = Soak(minutes=0.5, seed=1, checkpoint_minutes=0.25)
        soak.run()
    assert soak.counts["answered"] > 100
    assert len(soak.checkpoints) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ten_minutes_of_traffic_leave_nothing_behind(seed: int) -> None:
    with traced():
        soak = Soak(minutes=10, seed=seed, checkpoint_minutes=1)
        soak.run()
    happened = (
        *("reloads", "unloads", "left", "given_up", "failed", "changed_files", "broken_off", "streams"),
        *("refused_by_tenant_tokens_per_minute", "refused_by_tenant_max_queue"),
    )
    assert all(soak.counts[what] for what in happened), soak.counts
    assert soak.engine.stats().preemptions


def test_a_request_that_is_kept_is_noticed() -> None:
    soak = Soak(minutes=0.5, seed=1, checkpoint_minutes=0.25)
    add, kept = soak.engine.add_request, []

    def leaking(*args: Any, **kwargs: Any) -> str:
        request_id = add(*args, **kwargs)
        kept.append(soak.engine.requests[request_id])
        return request_id

    soak.engine.add_request = leaking  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="requests are kept"):
        soak.run()
    assert kept


def test_a_wrong_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    soak = Soak(minutes=0.5, seed=1, checkpoint_minutes=0.25)
    write: Any = SimulatedRunner.write_adapter

    def nothing_written(runner: SimulatedRunner, copy: Any) -> None:
        """The adapter's pages keep what they held before, once in a while."""
        if soak.counts["steps"] < 300:
            write(runner, copy)

    monkeypatch.setattr(SimulatedRunner, "write_adapter", nothing_written)
    with pytest.raises((AssertionError, TypeError)):
        soak.run()


@pytest.mark.parametrize("field", ["objects", "traced_kb", "rss_kb", "threads"])
def test_what_grows_is_noticed(field: str) -> None:
    soak = Soak(minutes=1, seed=1)
    flat = Checkpoint(minute=1, objects=100_000, traced_kb=5000, rss_kb=200_000, threads=5, kept={})
    soak.checkpoints = [flat] * 9
    soak.check_growth()
    for i in range(9):
        grown = getattr(flat, field) * (1 + 0.2 * i)
        soak.checkpoints[i] = dataclasses.replace(flat, **{field: round(grown)})
    with pytest.raises(AssertionError, match=f"{field} grew"):
        soak.check_growth()
