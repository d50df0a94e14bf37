"""Who is given up: what early abort cannot serve in time, and what a deadline ends."""

from __future__ import annotations

import random
import statistics

import pytest

from benchmarks.virtual_server import Arrival, StepCost, VirtualServer
from slora_jax import SamplingParams
from slora_jax.request import Request
from slora_jax.runner import InFlight
from slora_jax.scheduling.scheduler import StepPlan
from tests.engine.policy_server import server
from tests.engine.simulated_engine import simulated_engine


def overload(policy: str, rate: float, target: float = 1.0, seconds: float = 40.0) -> VirtualServer:
    """A server of about 20 requests a second (10 at once, 50 steps of 10 ms each) under `rate`."""
    served = server(policy, batch=10, num_pages=1000, ttft_target_s=target)
    draw = random.Random(3)
    now, arrivals = 0.0, []
    while (now := now + draw.expovariate(rate)) < seconds:
        arrivals.append(Arrival(now, 4, draw.randint(30, 70)))
    served.run(arrivals)
    return served


def attained(served: VirtualServer, target: float = 1.0) -> float:
    """Share of requests whose first token came in time."""
    return sum(in_time(r, target) for r in served.requests) / len(served.requests)


def in_time(request: Request, target: float) -> bool:
    first = request.metrics.time_to_first_token
    return first is not None and first <= target


def test_early_abort_gives_up_nobody_whom_fcfs_would_serve_in_time() -> None:
    served = overload("early-abort", rate=12.0)
    assert attained(overload("fcfs", rate=12.0)) == 1.0
    assert not served.reasons


@pytest.mark.parametrize("rate", [25.0, 30.0, 40.0, 80.0])
def test_under_overload_early_abort_serves_in_time_as_many_as_can_be(rate: float) -> None:
    served = overload("early-abort", rate)
    capacity = 20.0 / rate
    kept = [r for r in served.requests if r.request_id not in served.reasons]
    assert sum(in_time(r, 1.0) for r in kept) >= 0.95 * len(kept), "who is not given up is in time"
    assert attained(served) >= 0.9 * capacity
    assert attained(overload("fcfs", rate)) < 0.5 * attained(served)
    assert all("first token would come too late" in reason for reason in served.reasons.values())


def test_of_a_burst_early_abort_serves_those_it_can_and_gives_up_the_others_in_time() -> None:
    runs = {}
    for policy in ("fcfs", "early-abort"):
        served = runs[policy] = server(policy, batch=10, num_pages=1000, ttft_target_s=1.0)
        draw = random.Random(4)
        served.run(Arrival(0.0, 4, draw.randint(30, 70)) for _ in range(60))
    served = runs["early-abort"]
    kept = [r for r in served.requests if r.request_id not in served.reasons]
    assert all(in_time(r, 1.0) for r in kept)
    assert len(kept) >= 0.9 * sum(in_time(r, 1.0) for r in runs["fcfs"].requests)
    assert all((r.metrics.finished_time or 9.9) <= 1.02 for r in served.requests if r not in kept)


def test_the_more_overload_the_fresher_are_those_that_early_abort_serves() -> None:
    """The paper's rule keeps the latest: without it, everybody is served in the last moment."""
    medians = []
    for rate in (30.0, 80.0):
        first = [r.metrics.time_to_first_token for r in overload("early-abort", rate).requests]
        medians.append(statistics.median(t for t in first if t is not None))
    assert medians[0] < 0.85
    assert medians[1] < 0.5


def test_those_given_up_are_told_when_the_queue_of_that_moment_will_be_served() -> None:
    target = 1.0
    told = [late.retry_after_s for late in overload("early-abort", 80.0, target).given_up]
    steady = [seconds for seconds in told[len(told) // 2 :] if seconds is not None]
    assert len(steady) == len(told) - len(told) // 2
    assert all(0 <= seconds <= target for seconds in steady)
    # Those kept are as many as are served before their first tokens would be late: target less 0.02 or so.
    assert 0.7 < statistics.median(steady) <= target


def test_before_any_service_was_measured_the_target_is_when_to_come_back() -> None:
    served = server("early-abort", batch=1, ttft_target_s=0.5)
    served.run([Arrival(0.0, 4, 100), Arrival(0.0, 4, 1)])
    assert [(late.request.request_id, late.retry_after_s) for late in served.given_up] == [("1", 0.5)]


def test_one_slow_first_token_does_not_make_early_abort_refuse_an_idle_server_for_ever() -> None:
    served = server("early-abort", batch=4, num_pages=2000, ttft_target_s=0.5, cost=StepCost(step=0.01))
    served.run([Arrival(0.1 * i, 4, 2) for i in range(50)])
    served.cost = StepCost(step=2.0)  # it compiles
    served.run([Arrival(served.now, 4, 2)])
    served.cost = StepCost(step=0.01)
    start = served.now
    served.run([Arrival(start + 0.5 * i, 4, 2) for i in range(20)])
    assert not served.reasons


def test_nobody_for_whom_a_slot_is_free_is_given_up_after_a_slow_first_token() -> None:
    served = server("early-abort", batch=16, num_pages=4000, ttft_target_s=2.0, cost=StepCost(step=8.0))
    served.run([Arrival(0.0, 4, 1)])
    served.cost = StepCost(step=0.01)
    start = served.now
    long = [Arrival(start, 4, 1000)]  # the engine is never idle
    served.run(long + [Arrival(start + 0.1 * i, 4, 20) for i in range(1, 60)])
    assert not served.reasons


def test_a_burst_larger_than_the_free_slots_is_judged_from_the_first_that_finds_none() -> None:
    served = server("early-abort", batch=4, num_pages=4000, ttft_target_s=2.0, cost=StepCost(step=8.0))
    served.run([Arrival(0.0, 4, 1)])
    served.cost = StepCost(step=0.01)
    served.add(Arrival(served.now, 4, 1000))
    served.step()
    burst = [served.add(Arrival(served.now, 4, 50)) for _ in range(8)]
    served.step()
    assert list(served.reasons) == [request.request_id for request in burst[3:]]


def test_steps_that_compiled_are_left_out_of_what_first_tokens_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    engine = simulated_engine(max_batch_size=1, scheduling_policy="early-abort", ttft_target_s=2.0)
    launch = engine._runner.launch

    def compile_and_launch(plan: StepPlan) -> InFlight:
        nonlocal now
        now += 8.0
        engine._runner.compilations += 1
        return launch(plan)

    engine._runner.launch = compile_and_launch  # type: ignore[method-assign]
    engine.generate([[1, 2]], None, SamplingParams(max_tokens=1))
    engine._runner.launch = launch  # type: ignore[method-assign]
    engine.add_request([1, 2], None, SamplingParams(max_tokens=5))
    engine.step()
    engine.add_request([1, 2], None, SamplingParams(max_tokens=5))
    ends = []
    while engine.has_unfinished():
        now += 0.1
        ends += [e.finish_reason for e in engine.step() if e.finish_reason is not None]
    assert ends == ["length", "length"]


def test_early_abort_never_gives_up_what_has_begun() -> None:
    served = server("early-abort", batch=4, num_pages=30, ttft_target_s=0.5)  # pages for preemptions
    served.run(Arrival(0.05 * i, 8, 40) for i in range(60))
    assert served.scheduler.preemptions > 0
    assert served.reasons
    for request in served.requests:
        if request.request_id in served.reasons:
            assert request.metrics.first_scheduled_time is None


def call_of(served: VirtualServer, *outputs: int, tenant: str = "default") -> list[Request]:
    return served.add_call(Arrival(served.now, 4, output, tenant=tenant) for output in outputs)


def test_prompts_of_a_call_are_all_served_once_one_has_begun() -> None:
    served = server("early-abort", batch=1, ttft_target_s=0.1)
    served.add(Arrival(0.0, 4, 5))
    served.step()
    together = call_of(served, 12, 12, 12)
    alone = [call_of(served, 12) for _ in range(3)]
    served.run([])
    assert set(served.reasons) == {request.request_id for (request,) in alone}
    assert all(r.metrics.num_output_tokens == 12 for r in together)


def test_prompts_of_a_call_that_has_not_begun_are_given_up_in_one_step() -> None:
    served = server("early-abort", batch=1, num_pages=2000, ttft_target_s=0.1, tenant_max_concurrency=2)
    served.add(Arrival(0.0, 4, 400))
    served.step()
    together = call_of(served, 5, 5, 5)  # a limit holds two of them back
    left = call_of(served, 5, 5, tenant="another")
    served.abort(left[0], "by the user")
    while together[0].request_id not in served.reasons:
        served.step()
    assert {late.request.request_id for late in served.given_up} == {
        request.request_id for request in (*together, left[1])
    }
    served.check_integrity()


@pytest.mark.parametrize("size", [2, 5])
def test_under_overload_with_calls_of_several_prompts_each_is_served_whole_or_given_up_whole(
    size: int,
) -> None:
    served = server("early-abort", batch=10, num_pages=1000, ttft_target_s=1.0)
    draw, calls = random.Random(7), []
    for i in range(800):
        while served.now < 0.033 * size * i:
            served.step()
        calls.append(call_of(served, *(draw.randint(30, 70) for _ in range(size))))
    served.run([])
    given_up = [{r.request_id in served.reasons for r in call} for call in calls]
    assert all(len(outcomes) == 1 for outcomes in given_up)
    kept = [call for call, outcomes in zip(calls, given_up, strict=True) if outcomes == {False}]
    assert len(kept) > 0.9 * len(calls) * 20 * 0.033  # of the 20 requests a second that can be served
    assert sum(any(in_time(r, 1.0) for r in call) for call in kept) > 0.95 * len(kept)


def test_those_that_a_limit_holds_back_count_as_nobodys_queue_for_early_abort() -> None:
    served = server("early-abort", batch=8, num_pages=2000, ttft_target_s=1.0, tenant_max_concurrency=1)
    greedy = [Arrival(0.001 * i, 4, 400, tenant="greedy") for i in range(30)]
    others = [Arrival(2.0 + 0.05 * i, 4, 3, tenant=f"t{i}") for i in range(100)]
    served.run(greedy + others)
    given_up = {served.requests[int(i)].tenant for i in served.reasons}
    assert given_up <= {"greedy"}


def test_a_request_that_has_not_ended_by_its_deadline_is_ended_with_the_reason() -> None:
    served = server(batch=1)
    running = served.add(Arrival(0.0, 4, 1000, deadline_s=0.5))
    waiting = served.add(Arrival(0.0, 4, 5, deadline_s=0.3))
    patient = served.add(Arrival(0.0, 4, 5, deadline_s=60.0))
    served.run([])
    assert "deadline_s of 0.5 s" in served.reasons[running.request_id]
    assert "deadline_s of 0.3 s" in served.reasons[waiting.request_id]
    assert running.metrics.finished_time == pytest.approx(0.5, abs=0.02)
    assert waiting.metrics.finished_time == pytest.approx(0.3, abs=0.02)
    assert patient.request_id not in served.reasons


def test_an_engine_ends_a_late_request_with_abort_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    engine = simulated_engine(num_pages=60, max_batch_size=1, max_step_tokens=16)
    late = engine.add_request([1, 2], None, SamplingParams(max_tokens=20, n=2), deadline_s=2.0)
    good = engine.add_request([3], None, SamplingParams(max_tokens=2), deadline_s=9.0)
    events = engine.step() + engine.step()
    now = 102.5
    while engine.has_unfinished():
        events += engine.step()
        engine.check_integrity()
    ends = [e for e in events if e.finish_reason is not None]
    assert [(e.finish_reason, e.error) for e in ends if e.request_id == late] == [
        ("abort", "not finished within its deadline_s of 2 s")
    ] * 2
    assert [(e.finish_reason, e.error) for e in ends if e.request_id == good] == [("length", None)]


def test_clients_are_told_when_to_come_back_and_the_log_the_setting_and_the_rates(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "slora_jax.scheduling.early_abort")
    served = overload("early-abort", 80.0, seconds=5.0)
    for late in served.given_up:
        assert late.reason.endswith("; retry in 1 s")
        assert not any(word in late.reason for word in ("ttft_target_s", "calls/s"))
    assert all("ttft_target_s 1 (" in message for message in caplog.messages)
    assert sum(int(message.split()[3]) for message in caplog.messages) == len(served.given_up)
    assert "calls/s arrive" in caplog.messages[-1]
    assert "0.00" not in caplog.messages[-1]


def test_rates_that_were_not_measured_yet_are_not_logged_as_0(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "slora_jax.scheduling.early_abort")
    served = server("early-abort", batch=1, ttft_target_s=0.5, cost=StepCost(step=1.0))
    served.run([Arrival(0.0, 4, 3), Arrival(0.1, 4, 1)])
    assert caplog.messages == [
        "early-abort gave up 1 requests, the oldest after 0.90 s: their first tokens would miss "
        "ttft_target_s 0.5 (no rates were measured yet)"
    ]


def test_a_deadline_that_passed_is_no_reason_to_come_back() -> None:
    served = server(batch=1)
    served.run([Arrival(0.0, 4, 1000, deadline_s=0.5)])
    assert [late.retry_after_s for late in served.given_up] == [None]


def test_deadlines_of_requests_that_ended_in_time_are_forgotten() -> None:
    served = server(batch=64, num_pages=4000)
    for i in range(5000):
        served.add(Arrival(served.now, 2, 1, deadline_s=1e9))
        if i % 32 == 31:
            while served.live:
                served.step()
    assert len(served.waiting._deadlines) < 2200
