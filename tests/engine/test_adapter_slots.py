"""Without unified memory: adapters lie in slots, and neither they nor KV take the other's pages."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from slora_jax import EngineConfig, SamplingParams
from slora_jax.engine import Engine
from slora_jax.memory.layout import MODULES
from tests.engine.histories import EngineMachine
from tests.engine.simulated_engine import (
    SLOT_PAGES,
    SLOT_RANK,
    VOCAB,
    ask,
    engine_with,
    load,
    resident,
    simulated_engine,
)
from tests.engine.simulated_runner import expected_tokens


class SlotsMachine(EngineMachine):
    """As for one pool: every sequence ends once, and rightly, whatever is loaded, pinned or preempted."""

    fields: ClassVar[dict[str, Any]] = {
        "unified_memory": False,
        "adapter_slots": 2,
        "max_lora_rank": SLOT_RANK,
    }
    slot_pages = 2 * SLOT_PAGES


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_many_more_random_histories_of_slots() -> None:
    run_state_machine_as_test(
        SlotsMachine, settings=settings(max_examples=500, stateful_step_count=80, deadline=None)
    )


def slotted(*ranks: int, slots: int = 2, kv_pages: int = 40, **fields: Any) -> Engine:
    """An engine with adapters "a0", "a1", ... of these ranks, and so many slots and pages for KV."""
    return engine_with(
        *ranks,
        num_pages=kv_pages + slots * SLOT_PAGES + 1,
        unified_memory=False,
        adapter_slots=slots,
        max_lora_rank=SLOT_RANK,
        **fields,
    )


def test_a_slot_holds_any_adapter_of_the_largest_rank() -> None:
    engine = slotted(8, 24)
    layout = engine._layout
    assert layout.adapter(dict.fromkeys(MODULES, SLOT_RANK)).num_pages == SLOT_PAGES
    assert [a.pages for a in engine.adapters()] == [SLOT_PAGES, SLOT_PAGES]
    with pytest.raises(ValueError, match=r"adapter 'a9' has rank 80, max_lora_rank is 24: raise it"):
        load(engine, "a9", 10, rank=80)


def test_there_are_never_more_adapters_than_slots_and_each_gets_its_turn() -> None:
    engine = slotted(*[8] * 5)
    prompts = [[i + 1] * 7 for i in range(10)]
    names = [f"a{i % 5}" for i in range(10)]
    params = SamplingParams(max_tokens=9)
    ids = [engine.add_request(p, n, params) for p, n in zip(prompts, names, strict=True)]
    tokens: dict[str, list[int]] = {i: [] for i in ids}
    most = 0
    while engine.has_unfinished():
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
        assert len(resident(engine)) <= 2
        most = max(most, len(engine.stats().running_adapters))
    assert most == 2
    for i, got in enumerate(tokens.values()):
        assert got == expected_tokens(prompts[i], i % 5 + 1, 9, VOCAB)


def test_where_running_sequences_hold_all_slots_others_wait() -> None:
    engine = slotted(8, 8, slots=1)
    first = engine.add_request([1, 2], "a0", SamplingParams(max_tokens=12))
    engine.step()
    second = engine.add_request([1, 2], "a1", SamplingParams(max_tokens=2))
    ended = []
    while engine.has_unfinished():
        stats = engine.stats()
        assert len(stats.running_adapters) <= 1
        ended += [e.request_id for e in engine.step() if e.finish_reason]
    assert ended == [first, second]


def test_cluster_lets_those_with_a_slot_go_first_but_not_for_ever() -> None:
    engine = slotted(8, 8, slots=1, scheduling_policy="cluster", cluster_max_passes=6)
    params = SamplingParams(max_tokens=6)
    engine.add_request([1], "a0", params)
    engine.step()
    other = engine.add_request([2], "a1", params)
    for i in range(30):
        engine.add_request([3 + i], "a0", params)
    ended = []
    while engine.has_unfinished():
        ended += [e.request_id for e in engine.step() if e.finish_reason]
    assert 4 <= ended.index(other) <= 11


def test_kv_leaves_the_adapters_slots_alone() -> None:
    engine = slotted(8, 8, kv_pages=24)
    ask(engine, [1] * 5, "a0")
    ask(engine, [1] * 5, "a1")
    for i in range(12):
        ask(engine, [i] * 60)  # more than fits beside what is cached
    engine.generate([[i] * 30 for i in range(4)], None, SamplingParams(max_tokens=50))
    stats = engine.stats()
    assert (stats.preemptions > 0, stats.prefix_evictions > 0) == (True, True)
    assert (stats.adapter_evictions, stats.adapters_resident) == (0, 2)


def test_adapters_leave_cached_prefixes_alone() -> None:
    engine = slotted(*[8] * 6)
    ask(engine, [9] * 40)
    for i in range(6):
        ask(engine, [1], f"a{i}")
    before = engine.stats().prefix_hit_tokens
    ask(engine, [9] * 40)
    assert engine.stats().prefix_hit_tokens - before >= 36
    assert engine.stats().adapter_evictions == 4, "one for each that came after the slots were full"


def test_a_request_s_length_is_bounded_by_the_pages_of_kv_alone() -> None:
    engine = slotted(8, kv_pages=20)
    out = engine.generate([1, 2, 3], "a0", SamplingParams(max_tokens=None))[0]
    assert out.token_ids == expected_tokens([1, 2, 3], 1, 20 * 4 - 3, VOCAB)


def test_pins_leave_a_slot_for_the_others() -> None:
    engine = slotted(8, 8, 8)
    engine.pin_adapter("a0")
    with pytest.raises(ValueError, match=r"would take 192 pages of 192, .* raise adapter_slots"):
        engine.pin_adapter("a1")
    for i in (0, 1, 2, 1, 2):
        ask(engine, [i], f"a{i}")
    assert "a0" in resident(engine)
    load(engine, "a0", 1)
    assert [a.pinned for a in engine.adapters()] == [False, False, True]


def test_slots_that_leave_no_page_for_kv_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"adapter_slots 2 of 96 pages \(rank 24 .* has 192: lower adapter_slots"
    ):
        simulated_engine(num_pages=193, unified_memory=False, adapter_slots=2, max_lora_rank=SLOT_RANK)
    with pytest.raises(ValueError, match="max_model_len 90 does not fit: the pool has 20 pages"):
        slotted(kv_pages=20, max_model_len=90)


@pytest.mark.parametrize(
    "fields",
    [{"unified_memory": False}, {"adapter_slots": 4}],
    ids=["no number of slots", "slots in one budget"],
)
def test_slots_and_one_budget_exclude_each_other(fields: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match="adapter_slots says how many adapters the pool holds without unified"
    ):
        EngineConfig(**fields)
    with pytest.raises(ValueError, match="adapter_slots must be at least 1"):
        EngineConfig(unified_memory=False, adapter_slots=0)
