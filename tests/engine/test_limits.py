"""Limits of tenants and adapters: who is refused, who is parked, what is charged."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import pytest

from benchmarks.virtual_server import Arrival, VirtualServer
from slora_jax import LimitExceededError, SamplingParams, UnknownAdapterError
from slora_jax.request import GenerateRequest
from tests.engine.policy_server import POLICIES, server, spread
from tests.engine.simulated_engine import simulated_engine
from tests.engine.simulated_runner import simulated_adapter


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


def asked(name: str, prompt: list[int], adapter: str | None = None, **fields: Any) -> GenerateRequest:
    return GenerateRequest(name, prompt, adapter, SamplingParams(max_tokens=3), **fields)


@pytest.mark.parametrize("limits", [{"tenant_max_queue": 9}, {"tenant_max_concurrency": 3}])
def test_limits_without_a_rate_forget_idle_tenants(limits: dict[str, Any]) -> None:
    served = server("fcfs", batch=8, num_pages=100, **limits)
    served.run(Arrival(0.02 * i, 1, 1, tenant=f"user-{i}") for i in range(5000))
    assert served.waiting._limits is not None
    assert len(served.waiting._limits._accounts) < 2500


@pytest.mark.parametrize("policy", POLICIES)
def test_a_name_has_its_own_concurrency_in_place_of_the_usual_one(policy: str) -> None:
    """Also none at all; what it does not name stays as usual."""
    served = server(
        policy,
        batch=16,
        ttft_target_s=100.0,
        tenant_max_concurrency=2,
        tenant_limits={
            "small": {"max_concurrency": 1},
            "large": {"max_concurrency": 5},
            "free": {"max_concurrency": None},
            "other": {"max_queue": 50},
        },
    )
    names = ("small", "large", "free", "other", "nobody")
    arrivals = [Arrival(0.0, 4, 10, tenant=name) for name in names for _ in range(6)]
    most = most_at_once(served, arrivals, "tenant")
    assert most == {"small": 1, "large": 5, "free": 6, "other": 2, "nobody": 2}


def test_an_adapter_has_its_own_concurrency_and_others_none() -> None:
    served = server(batch=16, adapter_limits={"a0": {"max_concurrency": 1}})
    first, second = spread(served, 2)
    arrivals = [Arrival(0.0, 4, 10, adapter=(first, second, None)[i % 3]) for i in range(12)]
    assert most_at_once(served, arrivals, "adapter_id") == {"a0": 1, "a1": 4, "None": 4}


def test_a_name_has_its_own_queue_and_rate_in_an_engine() -> None:
    engine = simulated_engine(
        num_pages=60,
        max_batch_size=1,
        max_step_tokens=16,
        tenant_max_queue=1,
        tenant_tokens_per_minute=30,
        tenant_limits={"acme": {"max_queue": 3, "tokens_per_minute": None}},
        adapter_limits={"x": {"tokens_per_minute": 9}},
    )
    engine.load_adapter("x", simulated_adapter(engine._runner.layout, 1, 8))  # type: ignore[attr-defined]
    engine.add_requests([asked(f"{i}", [1] * 20, tenant="acme") for i in range(3)])
    with pytest.raises(
        LimitExceededError, match=r"'acme' has 3 .* exceed tenant_limits\['acme'\] max_queue 3"
    ):
        engine.add_requests([asked("more", [1], tenant="acme")])
    engine.add_requests([asked("b", [1] * 20, tenant="b")])
    with pytest.raises(LimitExceededError, match="tenant_max_queue 1"):
        engine.add_requests([asked("b2", [1], tenant="b")])
    engine.add_requests([asked("x", [1] * 9, "x", tenant="c")])
    with pytest.raises(LimitExceededError, match=r"'x' has used up adapter_limits\['x'\] \w+ 9") as refused:
        engine.add_requests([asked("x2", [1] * 9, "x", tenant="d")])
    assert refused.value.limit == "adapter_tokens_per_minute"
    while engine.has_unfinished():
        engine.step()
    engine.check_integrity()
    with pytest.raises(LimitExceededError, match="tenant 'b' has used up tenant_tokens_per_minute 30"):
        engine.add_requests([asked("b3", [1] * 20, tenant="b")])
    engine.add_requests([asked("acme", [1] * 20, tenant="acme")])  # which has no rate


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
