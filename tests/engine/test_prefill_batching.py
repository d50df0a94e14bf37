"""A nearly full batch lets prompts gather; beside decodes, prompts take as many tokens as fill a rung."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from slora_jax import SamplingParams
from slora_jax.engine import Engine
from slora_jax.scheduling.scheduler import StepPlan
from tests.engine.simulated_engine import load, simulated_engine

BATCH = 20


def filled(delay: int, **fields: Any) -> Engine:
    """An engine with 18 of 20 sequences decoding, and whatever it launches in `plans`."""
    engine = simulated_engine(
        num_pages=2000, max_batch_size=BATCH, prefill_delay_steps=delay, **{"max_step_tokens": 100, **fields}
    )
    for i in range(18):
        engine.add_request([i], None, SamplingParams(max_tokens=300, ignore_eos=True))
    while len(engine._scheduler.running) < 18:
        engine.step()
    return engine


def admitted_after(engine: Engine, waiting: int) -> int:
    """Steps until nobody waits."""
    for steps in range(1, 50):
        engine.step()
        if engine.stats().num_waiting < waiting:
            return steps
    raise AssertionError("nobody was let in")


def test_a_short_prompt_waits_so_many_steps_of_a_nearly_full_batch_and_no_more() -> None:
    for delay in (0, 3, 8):
        engine = filled(delay)
        engine.add_request([5] * 9, None, SamplingParams(max_tokens=2))
        assert admitted_after(engine, 1) == delay + 1


def test_prompts_that_fill_a_step_do_not_wait() -> None:
    engine = filled(8)
    engine.add_request([5] * 90, None, SamplingParams(max_tokens=2))
    assert admitted_after(engine, 1) == 1


def test_a_batch_with_much_room_does_not_wait() -> None:
    engine = simulated_engine(num_pages=500, max_batch_size=BATCH, prefill_delay_steps=8, max_step_tokens=100)
    engine.add_request([1] * 9, None, SamplingParams(max_tokens=2))
    assert admitted_after(engine, 1) == 1


def plans_of(engine: Engine) -> list[StepPlan]:
    """What the engine launches from now on."""
    plans: list[StepPlan] = []
    launch = engine._runner.launch

    def watched(plan: StepPlan):  # type: ignore[no-untyped-def]
        plans.append(StepPlan(list(plan.decodes), list(plan.prefills)))
        return launch(plan)

    engine._runner.launch = watched  # type: ignore[method-assign]
    return plans


def test_prompts_beside_decodes_leave_the_rows_that_decodes_are_padded_to() -> None:
    engine = filled(0, max_step_tokens=120)
    plans = plans_of(engine)
    for _ in range(2):
        engine.add_request([5] * 90, None, SamplingParams(max_tokens=2))
    for _ in range(6):
        engine.step()
    assert max(sum(c.count for c in p.prefills) for p in plans if p.decodes) == 120 - BATCH


def test_what_a_full_step_leaves_of_a_prompt_waits_for_others_too() -> None:
    """But no longer than a prompt that has not begun."""
    engine = filled(3)
    plans = plans_of(engine)
    engine.add_request([5] * 90, None, SamplingParams(max_tokens=2))
    for _ in range(5):
        engine.step()
    assert [sum(c.count for c in p.prefills) for p in plans] == [80, 0, 0, 0, 10]


def test_with_others_it_fills_the_next_step() -> None:
    engine = filled(3)
    plans = plans_of(engine)
    for token, length in ((5, 90), (6, 75)):  # that share no prefix
        engine.add_request([token] * length, None, SamplingParams(max_tokens=2))
        engine.step()
    assert [[c.count for c in p.prefills] for p in plans] == [[80], [10, 70]]


def leave_free(engine: Engine, pages: int, held: list[int]) -> None:
    """Take pages away from an engine or give some back, so that so many are free; `held` has those taken."""
    excess = engine._pool.num_free - pages
    if excess > 0:
        held += engine._pool.allocate(excess, "kv") or []
    elif excess < 0:
        engine._pool.release(held[excess:])
        del held[excess:]


@pytest.mark.parametrize("short", [1, 6, 12, 13, 20])
def test_a_prompt_that_lacked_pages_does_not_wait_anew(short: int) -> None:
    """Whether pages come while prompts would gather, in the step that would begin them, or after it."""
    delay = 12
    engine = filled(delay, max_step_tokens=120, enable_prefix_caching=False)
    held: list[int] = []
    engine.add_request([5] * 80, None, SamplingParams(max_tokens=2))
    for _ in range(short):
        leave_free(engine, 30, held)  # enough for those that run, but not for 20 more
        engine.step()
        assert engine.stats().num_waiting == 1
    engine._pool.release(held)
    assert short + admitted_after(engine, 1) == max(short, delay) + 1
    assert engine.stats().preemptions == 0


def test_a_prompt_that_lacks_pages_fills_no_step() -> None:
    """The one before it gathers as if nobody were behind it."""
    engine = filled(8, enable_prefix_caching=False)
    held: list[int] = []
    for token, length in ((5, 9), (6, 75)):  # together they would fill a step
        engine.add_request([token] * length, None, SamplingParams(max_tokens=2))
    waiting = []
    for _ in range(9):
        leave_free(engine, 30, held)
        engine.step()
        waiting.append(engine.stats().num_waiting)
    assert waiting == [2] * 8 + [1]


@pytest.mark.parametrize(
    ("own", "other", "chunks"), [(9, 75, [0] * 8 + [9]), (90, 30, [80, 10] + [0] * 7)], ids=["new", "begun"]
)
def test_a_prompt_of_another_turn_fills_no_step(own: int, other: int, chunks: list[int]) -> None:
    """Where one adapter at a time is merged, the batch has none of the others. What has begun goes on at once
    where nobody can join it.
    """
    engine = filled(8, lora_mode="merge")
    load(engine, "a0", 1)
    engine.add_request([6] * other, "a0", SamplingParams(max_tokens=2))
    for _ in range(9):  # however long it waits, it is none of those that gather
        engine.step()
    engine.add_request([5] * own, None, SamplingParams(max_tokens=2))
    plans = plans_of(engine)
    for _ in range(9):
        engine.step()
    assert [sum(c.count for c in p.prefills) for p in plans] == chunks


def test_as_many_prompts_as_a_step_takes_do_not_wait() -> None:
    engine = filled(8)
    engine._scheduler._limits = dataclasses.replace(engine._scheduler._limits, max_prefill_seqs=2)
    for token in (5, 6):
        engine.add_request([token] * 9, None, SamplingParams(max_tokens=2))
    assert admitted_after(engine, 1) == 1


@pytest.mark.parametrize("cached", [0, 88])
def test_what_is_cached_of_a_prompt_is_no_work(cached: int) -> None:
    """With a prefix in the cache it waits for others as a prompt of the other tokens does."""
    engine = filled(8)
    prefix = [7] * cached
    if cached:
        engine.generate([prefix], None, SamplingParams(max_tokens=1))
    engine.add_request(prefix + [8] * 4, None, SamplingParams(max_tokens=2))
    plans = plans_of(engine)
    assert admitted_after(engine, 1) == 9
    assert [c.count for c in plans[-1].prefills] == [4]
