"""Policies by what they do: who runs first, who is overtaken how often, who is given up, who is refused."""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
import statistics
from collections.abc import Iterable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from benchmarks.virtual_server import Arrival, StepCost, VirtualServer
from slora_jax import EngineConfig, LimitExceededError, SamplingParams, UnknownAdapterError
from slora_jax.lora.store import Adapter
from slora_jax.request import GenerateRequest, Request
from tests.engine.simulated_engine import VOCAB, simulated_engine
from tests.engine.simulated_runner import BASE, expected_tokens, simulated_adapter

POLICIES = ("fcfs", "cluster", "vtc", "early-abort", "vtc+cluster", "vtc+cluster+early-abort")


def server(
    policy: str = "fcfs", *, batch: int = 2, num_pages: int = 400, cost: StepCost | None = None, **fields: Any
) -> VirtualServer:
    config = EngineConfig(
        scheduling_policy=policy, max_batch_size=batch, max_step_tokens=64, page_tokens=4, **fields
    )
    return VirtualServer(config, num_pages, cost)


def admission_order(served: VirtualServer) -> list[str]:
    return [s.request.request_id for s in served.admitted]


def overtakes(served: VirtualServer) -> dict[str, int]:
    """How many requests that came later were admitted before each one."""
    order = list(dict.fromkeys(int(i) for i in admission_order(served)))  # without those that came back
    return {str(r): sum(o > r for o in order[: order.index(r)]) for r in order}


# -- fcfs, priorities, deadlines --


def test_fcfs_admits_in_order_of_arrival() -> None:
    served = server()
    served.run(Arrival(0.001 * i, 5, 1 + i % 3) for i in range(20))
    assert admission_order(served) == [str(i) for i in range(20)]


def test_a_lower_priority_number_goes_first_by_the_seconds_it_is_worth() -> None:
    served = server(batch=1, priority_s=10.0)
    arrivals = [Arrival(0.0, 4, 100), Arrival(0.01, 4, 1), Arrival(0.02, 4, 1, priority=-1)]
    arrivals += [Arrival(0.03, 4, 1, priority=1)]
    served.run(arrivals)
    assert admission_order(served) == ["0", "2", "1", "3"]


@pytest.mark.parametrize("policy", POLICIES)
def test_urgent_requests_without_end_do_not_starve_a_patient_one(policy: str) -> None:
    served = server(policy, batch=1, priority_s=1.0, ttft_target_s=1000.0)
    served.run(
        [Arrival(0.0, 4, 20, priority=3)] + [Arrival(0.001 + 0.05 * i, 4, 20, priority=-2) for i in range(60)]
    )
    patient = served.requests[0].metrics
    assert patient.first_token_time is not None
    urgent = [r for r in served.requests[1:] if r.metrics.first_token_time is not None]
    before = [r for r in urgent if (r.metrics.first_token_time or 0) < patient.first_token_time]
    assert all(r.metrics.arrival_time <= 5.0 for r in before), "overtaken by what came 5 steps of 1 s later"


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


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tenant", "", "tenant must have 1 to 256 characters, got 0"),
        ("tenant", "x" * 257, "tenant must have 1 to 256 characters, got 257"),
        ("tenant", 5, "tenant must be a string"),
        ("priority", 101, r"priority must be in \[-100, 100\], got 101"),
        ("priority", 1.5, "priority must be an integer"),
        ("deadline_s", 0.0, "deadline_s must be above 0 seconds"),
        ("deadline_s", "soon", "deadline_s must be a number or None"),
    ],
)
def test_a_wrong_field_of_a_request_is_refused_by_name(field: str, value: Any, message: str) -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=1, max_step_tokens=16)
    with pytest.raises(ValueError, match=message):
        engine.add_request([1], **{field: value})
    assert not engine.has_unfinished()


# -- cluster --


def spread(served: VirtualServer, n: int, pages: int = 3) -> list[Adapter]:
    return [served.register(f"a{i}", pages) for i in range(n)]


def test_cluster_prefers_adapters_of_the_batch_then_resident_ones_then_the_base_order() -> None:
    served = server("cluster", batch=2)
    batch, resident = spread(served, 2)
    absent = served.register("absent", 385)  # fits when nothing else runs
    served.run([Arrival(0.0, 4, 1, adapter=resident)])  # stays resident, idle
    start = served.now
    long = Arrival(start, 4, 60, adapter=batch)
    for arrival in (long, Arrival(start, 4, 20)):
        served.add(arrival)
    served.step()
    for adapter in (absent, resident, batch, absent, resident, batch):
        served.add(Arrival(served.now, 4, 2, adapter=adapter))
    served.run([])
    assert admission_order(served)[3:] == ["5", "8", "4", "7", "3", "6"]


def test_cluster_counts_those_who_left_the_queue_unserved_as_gone() -> None:
    """Requests that were aborted before it make no room for others to overtake the oldest."""
    served = server("cluster", batch=1, cluster_max_passes=3)
    near, far = spread(served, 2)
    served.add(Arrival(0.0, 4, 5, near))
    served.step()
    gone = [served.add(Arrival(served.now, 4, 5, far)) for _ in range(30)]
    oldest = served.add(Arrival(served.now, 4, 5, far))
    for _ in range(20):
        served.add(Arrival(served.now, 4, 5, near))
    for request in gone:
        served.abort(request, "by the user")
    served.run([])
    assert overtakes(served)[oldest.request_id] == 3


def test_cluster_knows_of_adapters_that_another_tenant_brought_in() -> None:
    served = server("vtc+cluster", batch=2)
    first, second, third = spread(served, 3)
    for adapter, tenant in ((second, "a"), (third, "b"), (first, "b"), (second, "b")):
        served.add(Arrival(0.0, 4, 50 if tenant == "a" else 1, adapter, tenant))
    served.run([])
    assert admission_order(served) == ["0", "3", "1", "2"]


@pytest.mark.parametrize("max_passes", [0, 1, 5, 64])
@pytest.mark.parametrize("policy", ["cluster", "vtc+cluster"])
def test_cluster_overtakes_nobody_more_than_max_passes_times(policy: str, max_passes: int) -> None:
    served = server(policy, batch=3, num_pages=40, cluster_max_passes=max_passes)
    adapters = spread(served, 6)
    draw = random.Random(0)
    arrivals = [
        Arrival(0.01 * i, 4, draw.randint(1, 12), adapter=draw.choice(adapters[: draw.choice((1, 6))]))
        for i in range(300)
    ]
    served.run(arrivals)
    worst = max(overtakes(served).values())
    assert worst <= max_passes
    assert worst > 0 or max_passes == 0, "it never clustered"


def test_cluster_loads_fewer_adapters_than_fcfs() -> None:
    loads = {}
    for policy in ("fcfs", "cluster"):
        served = server(policy, batch=4, num_pages=40)
        adapters = spread(served, 12)
        draw = random.Random(1)
        served.run([Arrival(0.0, 4, 6, adapter=draw.choice(adapters)) for _ in range(200)])
        loads[policy] = served.loads
    assert loads["cluster"] < 0.6 * loads["fcfs"]


# -- vtc --

IN, OUT = 1.0, 2.0


def backlogged(
    weights: dict[str, float], lengths: dict[str, tuple[int, int]], policy: str, steps: int, batch: int = 8
) -> tuple[VirtualServer, float]:
    """Tenants whose queues never empty; the largest gap of any two services (price over weight)."""
    served = server(policy, batch=batch, num_pages=4000, tenant_weights=weights)
    adapters = spread(served, 5)
    draw = random.Random(2)
    services: dict[str, float] = dict.fromkeys(weights, 0.0)
    queued: collections.Counter[str] = collections.Counter()
    gap = 0.0
    for _ in range(steps):
        queued = collections.Counter(s.request.tenant for s in served.waiting)
        for tenant, (prompt, output) in lengths.items():
            for _ in range(20 - queued[tenant]):
                served.add(Arrival(served.now, prompt, output, draw.choice(adapters), tenant))
        before = set(served.scheduler.running)
        plan = served.step()
        for sequence in {c.sequence for c in plan} - before:
            tenant = sequence.request.tenant
            services[tenant] += IN * sequence.prompt_len / weights[tenant]
        for chunk in plan:
            tenant = chunk.sequence.request.tenant
            services[tenant] += OUT * chunk.samples / weights[tenant]
        gap = max(gap, max(services.values()) - min(services.values()))
    served.check_integrity()
    return served, gap


@pytest.mark.parametrize("policy", ["vtc", "vtc+cluster"])
@pytest.mark.parametrize(
    "weights", [{"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 4.0, "b": 1.0, "c": 2.0}], ids=["even", "weighted"]
)
def test_services_of_backlogged_tenants_differ_by_no_more_than_vtc_proves(
    policy: str, weights: dict[str, float]
) -> None:
    lengths = {"a": (4, 40), "b": (40, 4), "c": (10, 10)}
    batch = 8
    _, gap = backlogged(weights, lengths, policy, 3000, batch)
    longest = max(p + o for p, o in lengths.values())
    bound = 2 * max(IN * 40, OUT * batch * longest) / min(weights.values())
    assert gap <= bound
    _, unfair = backlogged(weights, lengths, "fcfs", 3000, batch)
    assert unfair > 4 * gap, "first come, first served drifts apart without end"


def test_vtc_gives_a_tenant_back_from_idleness_no_credit() -> None:
    served = server("vtc", batch=1)
    for _ in range(30):
        served.add(Arrival(0.0, 4, 10, tenant="busy"))
    for _ in range(150):
        served.step()
    first = len(served.admitted)
    for _ in range(30):
        served.add(Arrival(served.now, 4, 10, tenant="late"))
    served.run([])
    order = [s.request.tenant for s in served.admitted[first:]]
    assert abs(order[:20].count("late") - 10) <= 1, "the late tenant shares from now on, it does not catch up"


def test_vtc_lifts_a_tenant_that_finds_nobody_waiting_to_the_one_that_left_last() -> None:
    served = server("vtc", batch=1)
    served.run(Arrival(0.0, 4, 10, tenant="busy") for _ in range(15))
    for tenant in ("late", "busy"):
        for _ in range(20):
            served.add(Arrival(served.now, 4, 10, tenant=tenant))
    served.run([])
    order = [s.request.tenant for s in served.admitted[15:]]
    assert abs(order[:20].count("late") - 10) <= 1


def test_vtc_does_not_let_one_tenants_queue_delay_another() -> None:
    served = server("vtc", batch=2)
    for _ in range(200):
        served.add(Arrival(0.0, 8, 10, tenant="flood"))
    served.step()
    other = served.add(Arrival(served.now, 8, 10, tenant="other"))
    served.run([])
    waited = (other.metrics.first_token_time or 1e9) - other.metrics.arrival_time
    assert waited < 0.2


def test_vtc_forgets_idle_tenants() -> None:
    served = server("vtc", batch=8, num_pages=100)
    served.run(Arrival(0.02 * i, 1, 1, tenant=f"user-{i}") for i in range(5000))
    assert served.waiting._vtc is not None
    assert len(served.waiting._vtc.counters()) < 2500


@pytest.mark.parametrize("limits", [{"tenant_max_queue": 9}, {"tenant_max_concurrency": 3}])
def test_limits_without_a_rate_forget_idle_tenants(limits: dict[str, Any]) -> None:
    served = server("fcfs", batch=8, num_pages=100, **limits)
    served.run(Arrival(0.02 * i, 1, 1, tenant=f"user-{i}") for i in range(5000))
    assert served.waiting._limits is not None
    assert len(served.waiting._limits._accounts) < 2500


# -- early abort --


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
    assert all("first token would miss the target of 1 s" in reason for reason in served.reasons.values())


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


def test_a_deadline_that_passed_is_no_reason_to_come_back() -> None:
    served = server(batch=1)
    served.run([Arrival(0.0, 4, 1000, deadline_s=0.5)])
    assert [late.retry_after_s for late in served.given_up] == [None]


def test_one_slow_first_token_does_not_make_early_abort_refuse_an_idle_server_for_ever() -> None:
    served = server("early-abort", batch=4, num_pages=2000, ttft_target_s=0.5, cost=StepCost(step=0.01))
    served.run([Arrival(0.1 * i, 4, 2) for i in range(50)])
    served.cost = StepCost(step=2.0)  # it compiles
    served.run([Arrival(served.now, 4, 2)])
    served.cost = StepCost(step=0.01)
    start = served.now
    served.run([Arrival(start + 0.5 * i, 4, 2) for i in range(20)])
    assert not served.reasons


def test_early_abort_never_gives_up_what_has_begun() -> None:
    served = server("early-abort", batch=4, num_pages=30, ttft_target_s=0.5)  # pages for preemptions
    served.run(Arrival(0.05 * i, 8, 40) for i in range(60))
    assert served.scheduler.preemptions > 0
    assert served.reasons
    for request in served.requests:
        if request.request_id in served.reasons:
            assert request.metrics.first_scheduled_time is None


# -- limits --


def most_at_once(served: VirtualServer, arrivals: Iterable[Arrival], key: str) -> dict[str, int]:
    for arrival in arrivals:
        served.add(arrival)
    most: collections.Counter[str] = collections.Counter()
    while served.live:
        plan = served.step()
        now = collections.Counter(str(getattr(c.sequence.request, key)) for c in plan)
        most |= now
        served.check_integrity()
    return dict(most)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tenant_runs_at_most_max_concurrency_sequences_and_delays_nobody(policy: str) -> None:
    served = server(policy, batch=8, tenant_max_concurrency=2, ttft_target_s=100.0)
    arrivals = [Arrival(0.0, 4, 10, tenant="greedy") for _ in range(20)] + [Arrival(0.0, 4, 10, tenant="b")]
    assert most_at_once(served, arrivals, "tenant") == {"greedy": 2, "b": 1}
    assert served.requests[-1].metrics.first_token_time == pytest.approx(0.01)


def test_limits_of_tenant_and_adapter_hold_together() -> None:
    served = server(batch=8, tenant_max_concurrency=3, adapter_max_concurrency=2)
    first, second = spread(served, 2)
    arrivals = [
        Arrival(0.0, 4, 3 + i % 4, adapter=(first, second, None)[i % 3], tenant="ab"[i % 2])
        for i in range(40)
    ]
    most = most_at_once(served, arrivals, "adapter_id")
    assert most.pop("None") > 2
    assert most == {"a0": 2, "a1": 2}


def test_those_that_a_limit_holds_back_count_as_nobodys_queue_for_early_abort() -> None:
    served = server("early-abort", batch=8, num_pages=2000, ttft_target_s=1.0, tenant_max_concurrency=1)
    greedy = [Arrival(0.001 * i, 4, 400, tenant="greedy") for i in range(30)]
    others = [Arrival(2.0 + 0.05 * i, 4, 3, tenant=f"t{i}") for i in range(100)]
    served.run(greedy + others)
    given_up = {served.requests[int(i)].tenant for i in served.reasons}
    assert given_up <= {"greedy"}


def test_deadlines_of_requests_that_ended_in_time_are_forgotten() -> None:
    served = server(batch=64, num_pages=4000)
    for i in range(5000):
        served.add(Arrival(served.now, 2, 1, deadline_s=1e9))
        if i % 32 == 31:
            while served.live:
                served.step()
    assert len(served.waiting._deadlines) < 2200


def test_more_sequences_than_a_queue_takes_are_an_error_not_a_reason_to_retry() -> None:
    served = server(tenant_max_queue=3)
    with pytest.raises(
        ValueError, match="4 sequences at once never fit tenant_max_queue 3: lower n"
    ) as error:
        served.add(Arrival(0.0, 2, 1, n=4))
    assert not isinstance(error.value, LimitExceededError)


def test_a_full_queue_refuses_with_the_limit_and_takes_more_when_it_has_moved() -> None:
    served = server(batch=1, tenant_max_queue=2, adapter_max_queue=1)
    (adapter,) = spread(served, 1)
    served.add(Arrival(0.0, 4, 5, tenant="a"))
    served.step()  # it runs, and waits no more
    served.add(Arrival(0.0, 4, 5, adapter, tenant="b"))
    with pytest.raises(LimitExceededError, match=r"'a0' has 1 sequences waiting.*adapter_max_queue 1"):
        served.add(Arrival(0.0, 4, 5, adapter, tenant="a"))
    served.add(Arrival(0.0, 4, 5, tenant="a", n=2))
    with pytest.raises(LimitExceededError, match=r"'a' has 2 sequences waiting.*tenant_max_queue 2") as e:
        served.add(Arrival(0.0, 4, 5, tenant="a"))
    assert e.value.retry_after_s > 0
    served.run([])
    served.add(Arrival(served.now, 4, 5, adapter, tenant="a"))
    served.run([])
    assert all(r.metrics.num_output_tokens == 5 * len(r.sequences) for r in served.requests)


def test_tokens_a_minute_count_prompt_and_output_and_refill() -> None:
    served = server(batch=4, tenant_tokens_per_minute=60)
    served.add(Arrival(0.0, 30, 40, tenant="a"))
    served.run([])  # 70 tokens used: 10 in debt
    with pytest.raises(LimitExceededError, match="tenant 'a' has used up tenant_tokens_per_minute 60") as e:
        served.add(Arrival(served.now, 5, 1, tenant="a"))
    assert e.value.retry_after_s == pytest.approx(15.0, abs=0.5)
    served.add(Arrival(served.now, 5, 1, tenant="b"))
    served.run([])
    served.now += e.value.retry_after_s
    served.add(Arrival(served.now, 5, 1, tenant="a"))
    served.run([])
    with pytest.raises(LimitExceededError):
        served.add(Arrival(served.now, 5, 1, tenant="a"))
    served.now += 3600
    served.add(
        Arrival(served.now, 100, 1, tenant="a")
    )  # longer than a minute's tokens, yet not for ever refused


def test_a_prompt_that_was_never_run_is_not_charged() -> None:
    served = server(batch=1, tenant_tokens_per_minute=100)
    served.add(Arrival(0.0, 4, 30, tenant="other"))
    served.step()
    for _ in range(5):
        served.abort(served.add(Arrival(served.now, 60, 1, tenant="a")), "by the user")
    served.add(Arrival(served.now, 90, 1, tenant="a"))


def asked(name: str, prompt: list[int], adapter: str | None = None, **fields: Any) -> GenerateRequest:
    return GenerateRequest(name, prompt, adapter, SamplingParams(max_tokens=3), **fields)


@pytest.mark.parametrize("limits", [{"tenant_max_queue": 3}, {"adapter_max_queue": 3}])
def test_several_requests_are_queued_whole_or_refused_whole(limits: dict[str, Any]) -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=1, max_step_tokens=16, **limits)
    engine.load_adapter("x", simulated_adapter(engine._runner.layout, 1, 8))  # type: ignore[attr-defined]
    engine.add_requests([asked("a", [1], "x"), asked("b", [1], "x")])
    for together in ([asked("c", [1], "x"), asked("d", [2], "x")], [asked("c", [1]), asked("a", [2])]):
        with pytest.raises((LimitExceededError, ValueError), match=r"max_queue 3: retry later|'a' is in use"):
            engine.add_requests(together)
        engine.check_integrity()
        assert engine.stats().num_waiting == 2
    with pytest.raises(ValueError, match=r"4 sequences at once never fit \w+_max_queue 3"):
        engine.add_requests([asked(f"{i}", [1], "x") for i in range(4)])
    with pytest.raises(ValueError, match="'c' is in use"):
        engine.add_requests([asked("c", [1]), asked("c", [2])])
    with pytest.raises(UnknownAdapterError):
        engine.add_requests([asked("c", [1]), asked("d", [2], "nobody")])
    engine.add_requests([asked("c", [1], "x")])
    while engine.has_unfinished():
        engine.step()
        engine.check_integrity()
    assert (engine.stats().requests_finished, engine.stats().requests_aborted) == (3, 0)


def test_of_several_requests_all_prompts_are_charged_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16, tenant_tokens_per_minute=60)
    engine.add_requests([asked("a", [1] * 20), asked("b", [1] * 20)])  # 20 of 60 left
    for _ in range(3):
        with pytest.raises(LimitExceededError, match=r"retry in 10\.0 s") as refused:
            engine.add_requests([asked("c", [1] * 15), asked("d", [1] * 15)])
        assert refused.value.limit == "tenant_tokens_per_minute"
    engine.add_requests([asked("c", [1] * 10), asked("d", [1] * 10)])
    engine.add_requests([asked(f"{i}", [1] * 60, tenant="another") for i in range(2)])  # more than ever fit
    while engine.has_unfinished():
        engine.step()


def test_generate_queues_more_than_a_queues_limit_while_others_are_refused() -> None:
    engine = simulated_engine(
        num_pages=60, max_batch_size=2, max_step_tokens=16, tenant_max_queue=2, adapter_max_queue=1
    )
    engine.load_adapter("x", simulated_adapter(engine._runner.layout, 1, 8))  # type: ignore[attr-defined]
    prompts = [[i + 1] for i in range(9)]
    outputs = engine.generate(prompts, [None, "x", None] * 3, SamplingParams(max_tokens=3, n=2))
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert all(c.finish_reason == "length" for o in outputs for c in o.outputs)
    events = engine.stream(prompts, None, SamplingParams(max_tokens=3))
    next(events)
    with pytest.raises(LimitExceededError, match="tenant_max_queue 2"):
        engine.add_request([1], None, SamplingParams(max_tokens=3))
    assert sum(event.finish_reason == "length" for event in events) == 9
    engine.check_integrity()


def test_generate_over_a_rate_is_refused_before_anything_runs() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=2, max_step_tokens=16, tenant_tokens_per_minute=30)
    engine.generate([[1] * 10, [2] * 10], None, SamplingParams(max_tokens=1))
    steps = engine.stats().steps
    with pytest.raises(LimitExceededError, match="tenant_tokens_per_minute 30"):
        engine.generate([[1] * 4, [2] * 8], None, SamplingParams(max_tokens=1))
    assert (engine.stats().steps, engine.has_unfinished()) == (steps, False)


def test_an_engine_refuses_over_the_limit_and_forgets_the_request() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=1, max_step_tokens=16, tenant_max_queue=1)
    engine.load_adapter("x", simulated_adapter(engine._runner.layout, 1, 8))  # type: ignore[attr-defined]
    engine.add_request([1], None, SamplingParams(max_tokens=3), tenant="a")
    with pytest.raises(LimitExceededError, match="tenant_max_queue 1"):
        engine.add_request([1], "x", SamplingParams(max_tokens=3), "mine", tenant="a")
    engine.check_integrity()  # the refused one holds no adapter
    engine.add_request([1], None, SamplingParams(max_tokens=3), "mine", tenant="b")
    while engine.has_unfinished():
        engine.step()
    assert engine.stats().requests_finished == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of fcfs, cluster, vtc, early-abort"),
        ({"scheduling_policy": ""}, "scheduling_policy must be one of"),
        ({"tenant_weights": {"a": 5e-324}}, r"tenant_weights\['a'\] must be in"),
        ({"vtc_output_price": 1e308}, "vtc_output_price must be above 0 and at most 1e"),
        ({"adapter_prefetch": 2**63}, r"adapter_prefetch must be below 2\^48"),
        ({"tenant_max_queue": 0}, "tenant_max_queue must be at least 1 or None"),
        ({"adapter_tokens_per_minute": -1}, "adapter_tokens_per_minute must be at least 1 or None"),
        ({"ttft_target_s": 0.0}, "ttft_target_s must be above 0"),
        ({"cluster_max_passes": -1}, r"cluster_max_passes must be in \[0, 1e\+09\], got -1"),
        ({"tenant_weights": {"a": 0.0}}, r"tenant_weights\['a'\] must be in \[1e-09, 1e\+09\]"),
        ({"tenant_weights": [("a", 1)]}, "tenant_weights must map tenants to weights"),
    ],
)
def test_a_wrong_option_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)


# -- passing over, as a scheduler does while an adapter is loaded --


@pytest.mark.parametrize("policy", POLICIES)
def test_candidates_are_those_whom_the_policy_would_take_one_after_the_other(policy: str) -> None:
    """Those passed over are put back at their ranks; with one passed over, the others keep their order."""
    served = server(policy, batch=1, num_pages=4000, ttft_target_s=100.0)
    adapters = spread(served, 4)
    draw = random.Random(5)
    for i in range(40):
        adapter = draw.choice([*adapters, None])
        served.add(Arrival(0.0, 4, 2, adapter, "abc"[i % 3], draw.randint(-1, 1)))
    with contextlib.closing(served.waiting.candidates()) as candidates:
        seen = list(candidates)
    assert set(seen) == set(served.waiting)
    with contextlib.closing(served.waiting.candidates()) as candidates:
        assert [next(candidates) for _ in range(7)] == seen[:7]
    assert served.waiting.head() is seen[0]
    with contextlib.closing(served.waiting.candidates()) as candidates:
        next(candidates)
        second = next(candidates)
        served.waiting.admitted(second)
        assert second not in served.waiting
        if policy in ("fcfs", "early-abort"):
            assert next(candidates) is seen[2]
    assert served.waiting.head() is not second
    assert len(served.waiting) == 39


def test_vtc_foresees_who_comes_next_as_if_those_before_had_been_admitted() -> None:
    """What is loaded ahead is what will be needed: tenants take turns, each by the price of its prompts."""
    served = server("vtc", batch=1, num_pages=4000)
    for i in range(30):
        served.add(Arrival(0.0, 20 if i % 2 else 5, 1, tenant="ab"[i % 2]))
    with contextlib.closing(served.waiting.candidates()) as candidates:
        foreseen = [s.request.request_id for s in itertools.islice(candidates, 15)]
    served.run([])
    tenants = [served.requests[int(r)].tenant for r in foreseen]
    assert tenants.count("a") == 12  # each is four times as cheap
    assert len(set(foreseen) & set(admission_order(served)[:15])) >= 14  # outputs cost, too


# -- nobody starves, nobody is lost --


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_nobody_starves_while_others_keep_coming(policy: str, seed: int) -> None:
    """One request, then a load above what can be served for ever: it still has its answer in bounded time."""
    draw = random.Random(seed)
    served = server(policy, batch=2, num_pages=60, ttft_target_s=1e6, cluster_max_passes=16, priority_s=0.5)
    adapters = spread(served, 5)
    for _ in range(10):
        served.add(Arrival(0.0, draw.randint(1, 60), draw.randint(1, 60), draw.choice(adapters), "a"))
    mine = served.add(Arrival(0.0, 60, 60, adapters[0], "me", priority=draw.randint(0, 2)))
    for _ in range(4000):
        if mine.finished:
            break
        while len(served.live) < 60:
            adapter = draw.choice([*adapters[1:], None])
            tenant = draw.choice(("a", "b", f"new-{len(served.requests)}"))
            served.add(
                Arrival(
                    served.now, draw.randint(1, 40), draw.randint(1, 40), adapter, tenant, draw.randint(-2, 0)
                )
            )
        served.step()
    assert mine.finished
    served.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy_an_engine_gives_each_request_its_own_tokens(policy: str) -> None:
    engine = simulated_engine(
        num_pages=46,
        max_batch_size=4,
        max_step_tokens=16,
        scheduling_policy=policy,
        tenant_max_concurrency=3,
        tenant_weights={"b": 2.0},
        ttft_target_s=1000.0,
    )
    layout = engine._runner.layout  # type: ignore[attr-defined]
    for i, name in enumerate("xyz", 1):
        engine.load_adapter(name, simulated_adapter(layout, i, 8))
    draw = random.Random(6)
    want: dict[str, list[int]] = {}
    got: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
    for i in range(30):
        prompt, output = [i] * draw.randint(1, 30), draw.randint(1, 60)
        pick = draw.randint(0, 3)
        request_id = engine.add_request(
            prompt,
            (None, "x", "y", "z")[pick],
            SamplingParams(max_tokens=output),
            tenant=draw.choice("abc"),
            priority=draw.randint(-1, 1),
            deadline_s=1000.0,
        )
        want[request_id] = expected_tokens(prompt, pick or BASE, output, VOCAB)
    while engine.has_unfinished():
        for event in engine.step():
            got[event.request_id] += event.token_ids
        engine.check_integrity()
    assert got == want
    assert engine.stats().preemptions > 0


class PolicyMachine(RuleBasedStateMachine):
    """Any policy and limits; users of any tenant come, leave, and the clock runs. Everybody ends once."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        batch=st.integers(1, 5),
        num_pages=st.integers(30, 80),
        passes=st.integers(0, 6),
        limits=st.fixed_dictionaries(
            {
                name: st.none() | st.integers(1, most)
                for kind in ("tenant", "adapter")
                for name, most in (
                    (f"{kind}_max_concurrency", 3),
                    (f"{kind}_tokens_per_minute", 3000),
                    (f"{kind}_max_queue", 6),
                )
            }
        ),
    )
    def start(self, policy: str, batch: int, num_pages: int, passes: int, limits: dict[str, Any]) -> None:
        self.served = server(
            policy,
            batch=batch,
            num_pages=num_pages,
            cluster_max_passes=passes,
            ttft_target_s=0.5,
            tenant_weights={"a": 3.0},
            **limits,
        )
        self.limits = limits
        self.adapters = spread(self.served, 5)

    @rule(
        prompt=st.integers(1, 60),
        output=st.integers(1, 30),
        n=st.integers(1, 3),
        adapter=st.integers(0, 5),
        tenant=st.sampled_from("abcd"),
        priority=st.integers(-2, 2),
        deadline=st.none() | st.floats(0.01, 2.0),
    )
    def add(
        self,
        prompt: int,
        output: int,
        n: int,
        adapter: int,
        tenant: str,
        priority: int,
        deadline: float | None,
    ) -> None:
        mine = self.adapters[adapter] if adapter < 5 else None
        arrival = Arrival(self.served.now, prompt, output, mine, tenant, priority, deadline, n)
        over = (LimitExceededError, ValueError) if any(self.limits.values()) else ()  # now, or for ever
        with contextlib.suppress(*over):
            self.served.add(arrival)

    @rule(pick=st.integers(0, 100))
    def abort(self, pick: int) -> None:
        live = list(self.served.live)
        if live:
            self.served.abort(live[pick % len(live)], "by the user")

    @rule(steps=st.integers(1, 10))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.served.step()
            self.served.check_integrity()

    @rule(seen=st.integers(0, 30))
    def look(self, seen: int) -> None:
        """What a scheduler that passes sequences over sees: each once, and the same the next time."""
        looks = []
        for _ in range(2):
            with contextlib.closing(self.served.waiting.candidates()) as candidates:
                looks.append(list(itertools.islice(candidates, seen)))
        assert looks[0] == looks[1]
        assert len(set(looks[0])) == len(looks[0])
        assert all(s in self.served.waiting for s in looks[0])

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "served"):
            self.served.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "served"):
            return
        for _ in range(4000):
            if not self.served.live:
                break
            self.served.step()
        assert not self.served.live, "a request never ended"
        for request in self.served.requests:
            wanted = sum(s.max_len - s.prompt_len for s in request.sequences)
            got = sum(len(s.tokens) - s.prompt_len for s in request.sequences)
            assert got == wanted or request.request_id in self.served.reasons
        assert len(self.served.waiting) == 0
        assert self.served.waiting.head() is None
        assert all(not a.in_use and not a.users for a in self.served.store)


TestPolicies = PolicyMachine.TestCase
TestPolicies.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_many_more_random_histories() -> None:
    run_state_machine_as_test(
        PolicyMachine, settings=settings(max_examples=1500, stateful_step_count=80, deadline=None)
    )
