"""Tenants, priorities, deadlines and limits over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from slora_jax.engine import Engine
from slora_jax.request import GenerateRequest
from slora_jax.server.protocols import EngineLike
from tests.engine.simulated_engine import simulated_engine
from tests.engine.slow_loading import Bench
from tests.server.fake_engine import ByteTokenizer, FakeEngine
from tests.server.live import LiveServer, serve, wait_for
from tests.server.pace import PacedSteps


def refusals(live: LiveServer) -> dict[tuple[str, str, str], float]:
    """Count by model_name, tenant and reason, where there were any."""
    families = text_string_to_metric_families(live.get("/metrics").text)
    return {
        (s.labels["model_name"], s.labels["tenant"], s.labels["reason"]): s.value
        for family in families
        for s in family.samples
        if s.name == "slora:requests_refused_total" and s.value
    }


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
COMPLETION = {"prompt": "hi", "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)], ids=["text", "chat"]
)
def test_requests_carry_their_tenant_priority_and_deadline(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine(tokenizer=ByteTokenizer())
    with serve(engine) as live:
        assert live.post(path, body).status_code == 200
        fields = {"user": "alice", "priority": -3, "deadline_s": 2.5}
        assert live.post(path, {**body, **fields}).status_code == 200
        assert live.post(path, {**body, **fields}, headers={"X-Tenant": "acme"}).status_code == 200
        refused = live.post(path, {**body, "priority": "high"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    assert engine.scheduling == [("default", 0, None), ("alice", -3, 2.5), ("acme", -3, 2.5)]


@pytest.mark.parametrize(
    ("header", "tenant"),
    [
        ("caf\u00e9".encode(), "caf\u00e9"),
        ("caf\u00e9".encode("latin-1"), "caf\u00e9"),
        ("\u6771\u4eac".encode(), "\u6771\u4eac"),
    ],
)
def test_a_tenant_of_any_language_is_the_same_in_header_and_body(header: bytes, tenant: str) -> None:
    """Else its limits by name would not hold where a gateway names it."""
    engine = simulated_engine(tenant_limits={tenant: {"max_queue": 1}})
    with serve(engine) as live:
        body = {"prompt": [[1], [2]], "max_tokens": 1}
        for fields, headers in (({"user": tenant}, {}), ({}, {b"X-Tenant": header})):
            answer = live.post("/v1/completions", {**body, **fields}, headers=headers)
            assert answer.status_code == 400
            assert f"never fit tenant_limits['{tenant}'] max_queue 1" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_over_a_limit_is_429_with_the_reason_and_when_to_come_back(stream: bool) -> None:
    engine = FakeEngine(tokenizer=ByteTokenizer())
    with serve(engine) as live:
        response = live.post("/v1/completions", {**COMPLETION, "user": "greedy", "stream": stream})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "13"
        assert "x-should-retry" not in response.headers
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("RateLimitError", 429)
        assert "tenant 'greedy'" in error["message"]
        with live.openai() as client, pytest.raises(openai.RateLimitError):
            client.completions.create(model="fake-model", prompt=["hi", "ho"], user="greedy")
        assert refusals(live) == {("fake-model", "greedy", "tenant_tokens_per_minute"): 3}
        assert live.post("/v1/completions", COMPLETION).status_code == 200


def test_of_several_prompts_over_a_limit_none_is_left_behind() -> None:
    engine = simulated_engine(
        num_pages=60, max_batch_size=1, max_step_tokens=16, tenant_max_queue=3, tenant_tokens_per_minute=6
    )
    with serve(engine) as live:
        body = {"prompt": [[1], [2], [3]], "max_tokens": 1, "user": "alice"}
        never = live.post("/v1/completions", {**body, "prompt": [[1], [2], [3], [4]]})
        assert never.status_code == 400
        assert "4 sequences at once never fit tenant_max_queue 3" in never.json()["error"]["message"]
        assert live.post("/v1/completions", body).status_code == 200
        refused = live.post("/v1/completions", body)  # three prompts and outputs are 6 tokens
        assert refused.status_code == 429
        assert "tenant_tokens_per_minute 6" in refused.json()["error"]["message"]
        wait_for(lambda: live.engine.latest_stats.num_running == 0)
        assert (engine.stats().requests_finished, engine.stats().requests_aborted) == (3, 0)
        long = {"prompt": [[1, 2, 3] * 3, [2, 1] * 5], "max_tokens": 4, "user": "bob"}
        assert live.post("/v1/completions", long).status_code == 200  # more than a minute's, yet not for ever
    engine.check_integrity()


STEPS = 10_000  # more than are taken


def slow_engine(steps: PacedSteps) -> Engine:
    """One that serves one sequence at a time and wants first tokens within 100 ms."""
    return steps.drive(
        simulated_engine(
            num_pages=60,
            max_batch_size=1,
            max_step_tokens=16,
            scheduling_policy="early-abort",
            ttft_target_s=0.1,
        )
    )


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> PacedSteps:
    """Of 20 ms."""
    return PacedSteps(monkeypatch, 0.02)


class Asking(threading.Thread):
    """A completion that is asked for meanwhile."""

    def __init__(self, live: LiveServer, body: dict[str, Any]) -> None:
        super().__init__()
        self._live, self._body = live, body
        self.start()

    def run(self) -> None:
        self._answer = self._live.post("/v1/completions", self._body)

    def answer(self) -> httpx.Response:
        self.join()
        return self._answer


def begin(live: LiveServer, engine: Engine, steps: PacedSteps) -> Asking:
    """A completion of 60 tokens, of which the first few are there."""
    steps.allow(3)
    running = Asking(live, {"prompt": [1], "max_tokens": 60})
    wait_for(lambda: engine.stats().num_running == 1)
    return running


@pytest.mark.parametrize("stream", [False, True])
def test_of_several_prompts_early_abort_serves_all_or_none(steps: PacedSteps, stream: bool) -> None:
    engine = slow_engine(steps)
    several = {"prompt": [[1], [2], [3]], "max_tokens": 12, "stream": stream}
    with serve(engine) as live:
        asked = Asking(live, several)
        wait_for(lambda: engine.stats().num_waiting == 3)
        steps.allow(3 * 13)
        served = asked.answer()
        assert served.status_code == 200
        assert "error" not in served.text
        assert (engine.stats().requests_finished, refusals(live)) == (3, {})
        running = begin(live, engine, steps)
        given_up = Asking(live, several)
        wait_for(lambda: engine.stats().num_waiting == 3)
        steps.allow(STEPS)
        assert given_up.answer().status_code == 503
        running.join()
        assert engine.stats().output_tokens == 3 * 12 + 60
        assert refusals(live) == {("model", "default", "early-abort"): 3}
    engine.check_integrity()


@pytest.mark.parametrize("stream", [False, True])
def test_what_early_abort_gives_up_is_a_503_that_says_when_to_come_back(
    steps: PacedSteps, stream: bool
) -> None:
    engine = slow_engine(steps)
    with serve(engine) as live:
        running = begin(live, engine, steps)
        asked = Asking(live, {"prompt": [2], "max_tokens": 2, "n": 2, "stream": stream})
        wait_for(lambda: engine.stats().num_waiting == 2)
        steps.allow(STEPS)
        response = asked.answer()
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "x-should-retry" not in response.headers
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("ServiceUnavailableError", 503)
        assert error["message"].endswith("its first token would come too late; retry in 1 s")
        running.join()
        after = live.post("/v1/completions", {"prompt": [2], "max_tokens": 2, "stream": stream})
        assert after.status_code == 200
        assert refusals(live) == {("model", "default", "early-abort"): 1}
    engine.check_integrity()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("why", ["deadline", "adapter", "shutting down"])
def test_openais_client_sends_again_only_what_another_time_or_replica_may_answer(
    why: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(num_pages=60, max_batch_size=1, max_step_tokens=16)
    bench.register("broken", 7)
    bench.disk.failing.append("read")
    monkeypatch.setattr(bench.engine._loader, "wait", lambda timeout: bench.executor.run())
    submitted: list[str] = []
    add = bench.engine.add_requests

    def counted(asked: Sequence[GenerateRequest]) -> None:
        add(asked)
        submitted.extend(one.request_id for one in asked)
        if why == "shutting down":
            bench.engine._outbox.ready += bench.engine.abort(submitted[-1])

    monkeypatch.setattr(bench.engine, "add_requests", counted)
    served: EngineLike = bench.engine
    with (
        serve(served) as live,
        live.openai(max_retries=openai.DEFAULT_MAX_RETRIES) as client,
        pytest.raises(openai.InternalServerError, match=why) as caught,
    ):
        client.completions.create(
            model="broken" if why == "adapter" else "model",
            prompt=[1],
            max_tokens=60,
            stream=stream,
            extra_body={"deadline_s": 1e-6} if why == "deadline" else None,
        )
    assert caught.value.status_code == (500 if why == "adapter" else 503)
    assert len(submitted) == (1 + openai.DEFAULT_MAX_RETRIES if why == "shutting down" else 1)


def test_a_deadline_that_passes_is_a_503_that_says_so() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=1, max_step_tokens=16)
    with serve(engine) as live:
        response = live.post("/v1/completions", {"prompt": [1], "max_tokens": 60, "deadline_s": 1e-6})
        assert response.status_code == 503
        assert "retry-after" not in response.headers
        assert "deadline_s" in response.json()["error"]["message"]
        wrong = live.post("/v1/completions", {"prompt": [1], "deadline_s": -1})
        assert wrong.status_code == 400
        assert "deadline_s: Input should be greater than 0" in wrong.json()["error"]["message"]
