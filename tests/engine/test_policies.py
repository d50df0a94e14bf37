"""Whatever the policy: nobody starves or is lost, each has its own tokens, wrong options are refused."""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
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

from benchmarks.virtual_server import Arrival
from slora_jax import EngineConfig, LimitExceededError, SamplingParams
from tests.engine.policy_server import POLICIES, server, spread
from tests.engine.simulated_engine import VOCAB, simulated_engine
from tests.engine.simulated_runner import BASE, expected_tokens, simulated_adapter


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tenant", "", "tenant must have 1 to 256 characters, got 0"),
        ("tenant", "x" * 257, "tenant must have 1 to 256 characters, got 257"),
        ("tenant", 5, "tenant must be a string"),
        ("tenant", "caf\udce9", "tenant must be UTF-8; write its character 4"),
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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of fcfs, cluster, vtc, early-abort"),
        ({"scheduling_policy": ""}, "scheduling_policy must be one of"),
        ({"scheduling_policy": "vtc+vtc"}, "each once"),
        ({"tenant_weights": {"a": 5e-324}}, r"tenant_weights\['a'\] must be in"),
        ({"vtc_output_price": 1e308}, "vtc_output_price must be above 0 and at most 1e"),
        ({"adapter_prefetch": 2**63}, r"adapter_prefetch must be below 2\^48"),
        ({"tenant_max_queue": 0}, "tenant_max_queue must be at least 1 or None"),
        ({"adapter_tokens_per_minute": -1}, "adapter_tokens_per_minute must be at least 1 or None"),
        ({"ttft_target_s": 0.0}, "ttft_target_s must be above 0"),
        ({"cluster_max_passes": -1}, r"cluster_max_passes must be in \[0, 1e\+09\], got -1"),
        ({"tenant_weights": {"a": 0.0}}, r"tenant_weights\['a'\] must be in \[1e-09, 1e\+09\]"),
        ({"tenant_weights": [("a", 1)]}, "tenant_weights must map tenants to weights"),
        ({"tenant_limits": [("a", 1)]}, "tenant_limits must map names to limits, got"),
        ({"adapter_limits": {5: {"max_queue": 1}}}, "a name in adapter_limits must be a string, got 5"),
        ({"tenant_limits": {"a\udce9": {"max_queue": 1}}}, "a name in tenant_limits must be UTF-8"),
        ({"tenant_limits": {"": {"max_queue": 1}}}, "a name in tenant_limits must have 1 to 256 characters"),
        ({"tenant_limits": {"a" * 257: {"max_queue": 1}}}, "a name in tenant_limits must have 1 to 256 char"),
        ({"tenant_weights": {"": 2.0}}, r"a tenant's name \(tenant_weights\) must have 1 to 256 characters"),
        ({"adapter_limits": {"": {"max_queue": 1}}}, "a name in adapter_limits must have 1 to 256 printable"),
        ({"adapter_limits": {"a,b": {"max_queue": 1}}}, "a name in adapter_limits must have .* no comma"),
        ({"adapter_limits": {" a": {"max_queue": 1}}}, "a name in adapter_limits must have .* no space at"),
        ({"tenant_limits": {"a": 3}}, r"tenant_limits\['a'\] must map some of max_concurrency, tokens_per_m"),
        (
            {"tenant_limits": {"a": {}}},
            r"tenant_limits\['a'\] must map some of .* to numbers or None, got {}",
        ),
        ({"adapter_limits": {"x": {"queue": 3}}}, r"adapter_limits\['x'\] must map some of .*max_queue to"),
        (
            {"adapter_limits": {"x": {"max_queue": 0}}},
            r"adapter_limits\['x'\]\['max_queue'\] must be at least 1 and below 2\^48, or None, got 0",
        ),
        (
            {"tenant_limits": {"a": {"max_queue": 2**48}}},
            r"\['max_queue'\] must be at least 1 and below 2\^48",
        ),
        (
            {"tenant_limits": {"a": {"max_queue": 1.5}}},
            r"\['max_queue'\] must be an integer or None, got 1.5",
        ),
        (
            {"tenant_limits": {"a": {"max_queue": True}}},
            r"\['max_queue'\] must be an integer or None, got True",
        ),
    ],
)
def test_a_wrong_option_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_nobody_starves_while_others_keep_coming(policy: str, seed: int) -> None:
    """One request, then a load above what can be served for ever: it still has its answer in bounded time."""
    draw = random.Random(seed)
    served = server(
        policy,
        batch=2,
        num_pages=60,
        load_seconds=draw.choice([None, lambda: draw.choice([0.0, 0.02, 0.1])]),
        ttft_target_s=1e6,
        cluster_max_passes=16,
        priority_s=0.5,
    )
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
    """Any policy and limits; adapters come at once, later, or not at all; users of any tenant come, leave,
    and the clock runs. Everybody ends once.
    """

    @initialize(
        policy=st.sampled_from(POLICIES),
        batch=st.integers(1, 5),
        num_pages=st.integers(30, 80),
        passes=st.integers(0, 6),
        loads=st.none() | st.lists(st.none() | st.sampled_from([0.0, 0.02, 0.3]), min_size=1, max_size=6),
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
    def start(
        self,
        policy: str,
        batch: int,
        num_pages: int,
        passes: int,
        loads: list[float | None] | None,
        limits: dict[str, Any],
    ) -> None:
        seconds = None if loads is None else itertools.cycle([*loads, 0.0])  # some succeed
        self.served = server(
            policy,
            batch=batch,
            num_pages=num_pages,
            load_seconds=None if seconds is None else lambda: next(seconds),
            cluster_max_passes=passes,
            ttft_target_s=0.5,
            tenant_weights={"a": 3.0},
            tenant_limits={"d": {"max_concurrency": 2, "tokens_per_minute": 500, "max_queue": None}},
            adapter_limits={"a0": {"max_concurrency": 1, "max_queue": 4}},
            **limits,
        )
        self.adapters = spread(self.served, 5)

    @rule(
        prompt=st.integers(1, 60),
        output=st.integers(1, 30),
        n=st.integers(1, 3),
        adapter=st.integers(0, 5),
        tenant=st.sampled_from("abcd"),
        priority=st.integers(-2, 2),
        deadline=st.none() | st.floats(0.01, 2.0),
        prompts=st.integers(1, 3),
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
        prompts: int,
    ) -> None:
        mine = self.adapters[adapter] if adapter < 5 else None
        arrival = Arrival(self.served.now, prompt, output, mine, tenant, priority, deadline, n)
        with contextlib.suppress(LimitExceededError, ValueError):  # now, or for ever
            self.served.add_call([arrival] * prompts)

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
        early = [late.request.call for late in self.served.given_up if late.retry_after_s is not None]
        assert not any(call.begun for call in early), "a call was given up after it had begun"
        assert len(self.served.waiting) == 0
        assert self.served.waiting.head() is None
        assert all(not a.in_use and not a.users for a in self.served.store)


TestPolicies = PolicyMachine.TestCase
TestPolicies.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_many_more_random_histories() -> None:
    run_state_machine_as_test(
        PolicyMachine, settings=settings(max_examples=1500, stateful_step_count=80, deadline=None)
    )
