"""Where one adapter at a time is merged: the batch has one, all get their turn, and the turns are bounded."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from slora_jax import SamplingParams
from slora_jax.engine import Engine
from tests.engine.histories import EngineMachine
from tests.engine.simulated_engine import SLOT_PAGES, SLOT_RANK, VOCAB, engine_with
from tests.engine.simulated_runner import BASE, expected_tokens


class MergeMachine(EngineMachine):
    """As for mixed batches: every sequence ends once, and rightly; the runner refuses batches of two."""

    fields: ClassVar[dict[str, Any]] = {"lora_mode": "merge", "cluster_max_passes": 4}


class MergeInSlotsMachine(EngineMachine):
    """The same with one slot, which the merged adapter holds."""

    slot_pages = SLOT_PAGES
    fields: ClassVar[dict[str, Any]] = {
        "lora_mode": "merge",
        "unified_memory": False,
        "adapter_slots": 1,
        "max_lora_rank": SLOT_RANK,
        "scheduling_policy": "vtc",
    }


TestMerge = MergeMachine.TestCase
TestMerge.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestMergeInSlots = MergeInSlotsMachine.TestCase
TestMergeInSlots.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [MergeMachine, MergeInSlotsMachine])
def test_many_more_random_histories_of_merges(machine: type[EngineMachine]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=500, stateful_step_count=80, deadline=None)
    )


def merging(adapters: int, **fields: Any) -> Engine:
    return engine_with(*[8] * adapters, lora_mode="merge", num_pages=fields.pop("num_pages", 200), **fields)


def run(engine: Engine) -> tuple[list[str], list[set[str | None]]]:
    """Requests in the order of their ends, and the adapters of each step's batch."""
    ended, batches = [], []
    while engine.has_unfinished():
        ended += [e.request_id for e in engine.step() if e.finish_reason]
        engine.check_integrity()
        batches.append({s.request.adapter_id for s in engine._scheduler.running})
    return ended, batches


def test_requests_of_one_adapter_run_together_though_others_came_between() -> None:
    engine = merging(2)
    names = [None, "a0", "a1"] * 4
    ids = [
        engine.add_request([i + 1] * 5, name, SamplingParams(max_tokens=5)) for i, name in enumerate(names)
    ]
    ended, batches = run(engine)
    assert all(len(batch) <= 1 for batch in batches)
    turns = [name for name, _ in itertools.groupby(names[ids.index(i)] for i in ended)]
    assert turns == [None, "a0", "a1"]


def test_the_tokens_are_each_adapter_s_own() -> None:
    engine = merging(3, num_pages=60)
    names = [None, "a0", "a1", "a2", "a0", None]
    outs = engine.generate([[i] * 20 for i in range(6)], names, SamplingParams(max_tokens=20))
    for i, (name, out) in enumerate(zip(names, outs, strict=True)):
        fingerprint = BASE if name is None else int(name[1:]) + 1
        assert out.token_ids == expected_tokens([i] * 20, fingerprint, 20, VOCAB)


@pytest.mark.parametrize(("turn", "waits"), [("a0", "a1"), ("a0", None), (None, "a0")])
def test_a_turn_ends_when_enough_were_overtaken(turn: str | None, waits: str | None) -> None:
    """The turn's adapter never runs out of requests, and still the other's gets in."""
    engine = merging(2, cluster_max_passes=6)
    params = SamplingParams(max_tokens=4)
    engine.add_request([1], turn, params)
    engine.step()
    other = engine.add_request([2], waits, params)
    ended: list[str] = []
    for i in range(400):
        if other in ended:
            break
        engine.add_request([3 + i % 50], turn, params)
        ended += [e.request_id for e in engine.step() if e.finish_reason]
    # The first, those that overtook, and a batch of four at most that had begun when the limit was met.
    assert 1 + 6 <= ended.index(other) + 1 <= 1 + 6 + 4 + 1


def test_while_the_next_turn_s_adapter_is_loaded_nobody_takes_its_turn() -> None:
    engine = merging(3)
    seek, held = engine._loader.seek, True

    def slow(adapter: Any, **how: Any) -> bool:
        return False if held and adapter.name == "a1" else seek(adapter, **how)

    engine._loader.seek = slow  # type: ignore[method-assign]
    first = engine.add_request([1], "a1", SamplingParams(max_tokens=3))
    second = engine.add_request([1], "a2", SamplingParams(max_tokens=3))
    for _ in range(5):
        assert engine.step() == []
    assert engine.stats().num_running == 0
    held = False
    assert run(engine)[0] == [first, second]
