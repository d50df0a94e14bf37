"""Random operations on a real engine, scheduler, pool and adapter store, over a simulated device."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from slora_jax import SamplingParams
from slora_jax.outputs import StreamEvent
from tests.engine.histories import EngineMachine
from tests.engine.simulated_engine import VOCAB, simulated_engine
from tests.engine.simulated_runner import (
    BASE,
    SimulatedInFlight,
    SimulatedRunner,
    expected_tokens,
    simulated_adapter,
)
from tests.engine.slow_loading import Bench

TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_many_more_random_histories() -> None:
    run_state_machine_as_test(
        EngineMachine, settings=settings(max_examples=1500, stateful_step_count=80, deadline=None)
    )


def test_preemption_recomputes_and_changes_nothing() -> None:
    engine = simulated_engine(num_pages=24, max_batch_size=6, max_step_tokens=24)
    prompts = [[i] * (5 + i) for i in range(6)]
    outs = engine.generate(prompts, sampling_params=SamplingParams(max_tokens=40))
    assert engine.stats().preemptions > 0
    for prompt, out in zip(prompts, outs, strict=True):
        assert out.token_ids == expected_tokens(prompt, BASE, 40, VOCAB)


@pytest.mark.parametrize("place", ["launch", "fetch", "stage_adapters", "write_adapter"])
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_step_that_breaks_off_costs_others_nothing(place: str, nth: int) -> None:
    engine = simulated_engine(num_pages=90, max_batch_size=4, max_step_tokens=16)
    params = SamplingParams(max_tokens=9)
    names = [None, *(f"a{i}" for i in range(4))]
    for i, name in enumerate(names[1:], 1):
        assert name is not None
        engine.load_adapter(name, simulated_adapter(engine._runner.layout, i, 8))  # type: ignore[attr-defined]
    ids = [engine.add_request([i + 1] * 5, name, params) for i, name in enumerate(names)]
    owner: Any = SimulatedInFlight if place == "fetch" else SimulatedRunner
    whole, calls = getattr(owner, place), itertools.count(1)

    def interrupted(*args: Any) -> Any:
        if next(calls) == nth:
            raise KeyboardInterrupt
        return whole(*args)

    tokens: dict[str, list[int]] = {i: [] for i in ids}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[9, 9]] * 2, None, SamplingParams(max_tokens=90))
        engine.check_integrity()
        while engine.has_unfinished():
            for event in engine.step():
                if event.request_id in tokens:
                    tokens[event.request_id] += event.token_ids
            engine.check_integrity()
    want = [expected_tokens([i + 1] * 5, i or BASE, 9, VOCAB) for i in range(len(ids))]
    assert list(tokens.values()) == want


@pytest.mark.parametrize("chunk", [4, None])
def test_a_prompt_is_not_computed_in_vain(chunk: int | None) -> None:
    engine = simulated_engine(num_pages=24, max_batch_size=4, max_step_tokens=16, prefill_chunk_tokens=chunk)
    for prompt, max_tokens in (([1] * 4, 70), ([2] * 60, 20), ([3] * 30, 20)):
        engine.add_request(prompt, None, SamplingParams(max_tokens=max_tokens))
    while engine.has_unfinished():
        engine.step()
    stats = engine.stats()
    assert stats.preemptions <= 2
    assert stats.prefilled_tokens <= 2 * (4 + 60 + 30)


def test_requests_run_in_order_of_arrival() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=1, max_step_tokens=16)
    ids = [engine.add_request([i, i], None, SamplingParams(max_tokens=3)) for i in range(5)]
    ended = []
    while engine.has_unfinished():
        ended += [e.request_id for e in engine.step() if e.finish_reason]
    assert ended == ids


def test_events_of_other_requests_survive_a_generate_call() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    other = engine.add_request([1, 2, 3], None, SamplingParams(max_tokens=4))
    engine.generate([[5, 6]], sampling_params=SamplingParams(max_tokens=20))
    tokens: list[int] = []
    while engine.has_unfinished():
        tokens += [t for e in engine.step() if e.request_id == other for t in e.token_ids]
    assert tokens == expected_tokens([1, 2, 3], BASE, 4, VOCAB)


def test_aborting_hands_out_first_what_another_stream_collected() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    other = engine.add_request([1, 2, 3], None, SamplingParams(max_tokens=30))
    engine.generate([[5, 6]], sampling_params=SamplingParams(max_tokens=10))
    events = engine.abort(other)
    assert [e.finish_reason for e in events[-2:]] == [None, "abort"]
    tokens = [t for e in events for t in e.token_ids]
    assert len(tokens) > 5
    assert tokens == expected_tokens([1, 2, 3], BASE, len(tokens), VOCAB)
    while engine.has_unfinished():
        assert not engine.step()


def test_closing_a_stream_frees_what_it_held() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    stream = engine.stream([[1] * 20, [2] * 9], sampling_params=SamplingParams(max_tokens=30))
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    assert engine.stats().pages_free + engine.stats().pages_cached == engine.stats().pages_total
    engine.check_integrity()


def test_two_streams_read_in_turn_or_one_after_the_other() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    params = SamplingParams(max_tokens=6)
    prompts = [[1, 2, 3], [4, 5]]

    def tokens(events: Iterable[StreamEvent]) -> list[int]:
        return [t for e in events for t in e.token_ids]

    want = [expected_tokens(p, BASE, 6, VOCAB) for p in prompts]
    pairs = list(zip(*(engine.stream([p], sampling_params=params) for p in prompts), strict=True))
    assert [tokens(column) for column in zip(*pairs, strict=True)] == want
    first, second = (engine.stream([p], sampling_params=params) for p in prompts)
    head = [next(second)]  # the rest of its events come from the first one's steps
    assert [tokens(first), tokens([*head, *second])] == want
    assert not engine.has_unfinished()


@pytest.mark.parametrize("others", [False, True])
def test_generate_waits_for_a_read_also_while_events_of_others_are_kept(others: bool) -> None:
    bench = Bench(num_pages=90, max_batch_size=4, max_step_tokens=16)
    bench.register("a", 7)
    waits: list[float] = []

    def wait(timeout: float) -> bool:
        waits.append(timeout)
        return len(waits) < 3 or bench.executor.run()  # two waits of 10 ms, and it is there

    bench.engine._loader.wait = wait  # type: ignore[method-assign]
    other = bench.engine.add_request([9], None, SamplingParams(max_tokens=2)) if others else ""
    bench.engine.generate([[5, 6]], sampling_params=SamplingParams(max_tokens=9))
    (out,) = bench.engine.generate([[1, 2]], "a", SamplingParams(max_tokens=4))
    assert out.token_ids == expected_tokens([1, 2], 7, 4, VOCAB)
    assert 3 <= len(waits) <= 4  # none, and the steps spin
    events = bench.engine.step() if others else []
    assert [t for e in events for t in e.token_ids] == expected_tokens([9], BASE, 2 * others, VOCAB)
    assert {e.request_id for e in events} <= {other}
    assert not bench.engine.has_unfinished()


def test_a_step_that_has_events_to_hand_out_waits_for_no_read() -> None:
    bench = Bench(num_pages=90, max_batch_size=4, max_step_tokens=16)
    bench.register("a", 7)
    bench.engine._loader.wait = lambda timeout: pytest.fail("it waited")  # type: ignore[method-assign]
    bench.engine.add_request([9], None, SamplingParams(max_tokens=2))
    bench.engine.generate([[5, 6]], sampling_params=SamplingParams(max_tokens=9))
    bench.engine.add_request([1, 2], "a", SamplingParams(max_tokens=4))
    assert [e.finish_reason for e in bench.engine.step()] == [None, "length"]


def test_closing_a_stream_keeps_the_events_of_others() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    stream = engine.stream([[7, 7]], sampling_params=SamplingParams(max_tokens=9))
    next(iter(stream))
    other = engine.add_request([1, 2, 3], None, SamplingParams(max_tokens=4))
    for _ in range(4):  # whose steps give it some
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    tokens: list[int] = []
    while engine.has_unfinished():
        tokens += [t for e in engine.step() if e.request_id == other for t in e.token_ids]
    assert tokens == expected_tokens([1, 2, 3], BASE, 4, VOCAB)


def test_a_caller_that_steps_between_a_stream_s_events_takes_none_of_them() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    other = engine.add_request([1, 2, 3], None, SamplingParams(max_tokens=12))
    streamed: list[int] = []
    stepped: list[StreamEvent] = []
    for event in engine.stream([[4, 5]], sampling_params=SamplingParams(max_tokens=12)):
        streamed += event.token_ids
        stepped += engine.step()
    while engine.has_unfinished():
        stepped += engine.step()
    assert streamed == expected_tokens([4, 5], BASE, 12, VOCAB)
    assert {e.request_id for e in stepped} == {other}
    assert [t for e in stepped for t in e.token_ids] == expected_tokens([1, 2, 3], BASE, 12, VOCAB)


def test_an_open_stream_that_nobody_reads_leaves_others_nothing_to_do() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    stream = engine.stream([[4, 5]], sampling_params=SamplingParams(max_tokens=6))
    head = next(stream)
    steps = 0
    while engine.has_unfinished():
        assert not engine.step()
        steps += 1
    assert steps < 12
    assert [t for e in (head, *stream) for t in e.token_ids] == expected_tokens([4, 5], BASE, 6, VOCAB)


@pytest.mark.parametrize("ended_in", ["generate", "step"])
def test_an_id_is_taken_until_its_last_event_is_handed_out(ended_in: str) -> None:
    """Also for ids that the engine chooses."""
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    params = SamplingParams(max_tokens=2)
    engine.add_request([1, 2, 3], None, params, "request-2")
    outs = [engine.generate([[5, 6]], sampling_params=SamplingParams(max_tokens=9))[0]]
    with pytest.raises(ValueError, match="'request-2' is in use"):
        engine.add_request([7], None, params, "request-2")
    outs += [engine.generate([[5, 6]], sampling_params=SamplingParams(max_tokens=9))[0] for _ in range(3)]
    assert {tuple(o.token_ids) for o in outs} == {tuple(expected_tokens([5, 6], BASE, 9, VOCAB))}
    events = engine.step() if ended_in == "step" else engine.abort("request-2")
    assert [t for e in events for t in e.token_ids] == expected_tokens([1, 2, 3], BASE, 2, VOCAB)
    assert engine.add_request([7], None, params, "request-2") == "request-2"


@pytest.mark.parametrize("ends_by", ["being closed", "its end"])
def test_an_id_is_taken_as_long_as_its_stream_is_open(ends_by: str) -> None:
    """Its request has ended and its last event is handed out, but a stream gets what comes for its ids."""
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    params = SamplingParams(max_tokens=2)
    stream = engine.stream([[4, 5]], sampling_params=params)
    while (event := next(stream)).finish_reason is None:
        pass
    assert not engine.requests
    with pytest.raises(ValueError, match=r"in use; .* or a stream that was not closed"):
        engine.add_request([7], None, params, event.request_id)
    [out] = engine.generate([[1, 2, 3]], sampling_params=params)  # takes another id by itself
    assert out.token_ids == expected_tokens([1, 2, 3], BASE, 2, VOCAB)
    if ends_by == "its end":
        assert list(stream) == []
    else:
        stream.close()  # type: ignore[attr-defined]
    assert engine.add_request([7], None, params, event.request_id) == event.request_id


def test_a_stream_whose_id_was_taken_meanwhile_leaves_that_request_alone() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    stream = engine.stream([[4, 5]], sampling_params=SamplingParams(max_tokens=6))  # queued when it is read
    engine.add_request([1, 2, 3], None, SamplingParams(max_tokens=4), "request-0")
    engine.step()
    with pytest.raises(ValueError, match="'request-0' is in use"):
        next(stream)
    tokens: list[int] = []
    while engine.has_unfinished():
        tokens += [t for e in engine.step() for t in e.token_ids]
    assert tokens == expected_tokens([1, 2, 3], BASE, 4, VOCAB)


def test_who_aborts_a_streamed_request_leaves_the_stream_its_events() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    stream = engine.stream([[4, 5]], sampling_params=SamplingParams(max_tokens=20))
    events = [next(stream)]
    assert not engine.step()
    assert engine.abort(events[0].request_id) == []
    events += stream
    assert events[-1].finish_reason == "abort"
    tokens = [t for e in events for t in e.token_ids]
    assert tokens == expected_tokens([4, 5], BASE, len(tokens), VOCAB)


@pytest.mark.parametrize("every", [3, 7, 50])
def test_a_stream_that_python_collects_in_the_middle_of_a_step_breaks_nothing(every: int) -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    other = engine.add_request([1, 2, 3], None, SamplingParams(max_tokens=20))
    calls = itertools.count(1)

    def collect(frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "call" and "slora_jax" in frame.f_globals.get("__name__", "") and not next(calls) % every:
            gc.collect(0)

    tokens: list[int] = []
    while engine.has_unfinished():
        stream: Any = engine.stream([[4, 5]], sampling_params=SamplingParams(max_tokens=20))
        next(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        sys.setprofile(collect)
        try:
            events = engine.step()
        finally:
            sys.setprofile(None)
        engine.check_integrity()
        tokens += [t for e in events for t in e.token_ids if e.request_id == other]
    assert tokens == expected_tokens([1, 2, 3], BASE, 20, VOCAB)
    assert not engine.requests


def test_a_stream_that_is_collected_in_another_thread_is_left_by_the_next_step() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    stream: Any = engine.stream([[4, 5]], sampling_params=SamplingParams(max_tokens=20))
    next(stream)
    thread = threading.Thread(target=stream.close)
    thread.start()
    thread.join()
    assert len(engine.requests) == 1
    while engine.has_unfinished():
        assert not engine.step()
    assert not engine.requests


def test_what_is_under_way_may_be_asked_for_while_requests_come() -> None:
    """In another thread, which Python runs between any two calls."""
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    engine.add_request([1], None, SamplingParams(max_tokens=20))
    engine.step()

    def come(frame: types.FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_return") and "slora_jax" in frame.f_globals.get("__name__", ""):
            engine.add_request([2], None, SamplingParams(max_tokens=20))

    sys.setprofile(come)
    try:
        told = engine.under_way()
    finally:
        sys.setprofile(None)
    assert "requests have not ended: request-0, request-1" in told


def test_an_engine_that_is_dropped_is_freed_at_once() -> None:
    """Its pool and weights fill a device: the next engine needs the room."""
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    engine.generate([[5, 6]], sampling_params=SamplingParams(max_tokens=3))
    alive = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert alive() is None
    finally:
        gc.enable()


def test_without_max_tokens_an_output_may_fill_what_the_pool_holds_beside_the_adapter() -> None:
    engine = simulated_engine(num_pages=20, max_batch_size=2, max_step_tokens=16)
    adapter = simulated_adapter(engine._runner.layout, 7, 8)  # type: ignore[attr-defined]
    pages = engine.load_adapter("a", adapter).pages
    out = engine.generate([1, 2, 3], "a", SamplingParams(max_tokens=None))[0]
    assert out.finish_reason == "length"
    assert out.token_ids == expected_tokens([1, 2, 3], 7, (19 - pages) * 4 - 3, VOCAB)
    with pytest.raises(ValueError, match="shorten the prompt"):
        engine.generate([1] * ((19 - pages) * 4), "a", SamplingParams(max_tokens=None))
