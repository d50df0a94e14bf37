"""What /metrics shows: its labels stay few, and docs/metrics.md says what each metric tells."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from slora_jax.config import EngineConfig
from slora_jax.engine import Engine
from slora_jax.outputs import SequenceMetrics, StreamEvent
from slora_jax.request import GenerateRequest
from slora_jax.sampling_params import SamplingParams
from slora_jax.server.async_engine import AsyncEngine
from slora_jax.server.metrics import ServerMetrics
from slora_jax.server.protocols import EngineLike
from tests.engine.simulated_engine import MODEL, load, simulated_engine
from tests.engine.slow_loading import Bench
from tests.server.fake_engine import FakeEngine
from tests.server.live import serve, wait_for
from tests.server.pace import PacedSteps

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "metrics.md"
PHASES = ("queue", "prefill", "decode", "inference")


def watching(engine: FakeEngine) -> ServerMetrics:
    metrics = ServerMetrics("house-name", 256)
    metrics.watch(AsyncEngine(engine))
    return metrics


def families(metrics: ServerMetrics) -> list[Metric]:
    return list(text_string_to_metric_families(metrics.render().decode()))


class Recording(ServerMetrics):
    """Keeps what it is told of sequences that ended."""

    def __init__(self) -> None:
        super().__init__("model", MODEL.max_position_embeddings)
        self.sequences: list[SequenceMetrics] = []
        self.submitted: list[float] = []

    def ended(self, sequence: SequenceMetrics, submitted: float) -> None:
        super().ended(sequence, submitted)
        self.sequences.append(sequence)
        self.submitted.append(submitted)

    def samples(self) -> dict[str, float]:
        """By the name without its prefix; of the buckets those of lengths, `name{bound}`."""
        found = [sample for family in families(self) for sample in family.samples]
        bounds = [f"{{{s.labels['le']}}}" if "le" in s.labels else "" for s in found]
        return {s.name.partition(":")[2] + b: s.value for s, b in zip(found, bounds, strict=True)}

    def counts(self) -> dict[str, float]:
        """Observations by phase."""
        found = self.samples()
        return {phase: found[f"request_{phase}_time_seconds_count"] for phase in PHASES}

    def sums(self) -> dict[str, float]:
        """Seconds by phase."""
        found = self.samples()
        return {phase: found[f"request_{phase}_time_seconds_sum"] for phase in PHASES}


class PacedBridge:
    """A bridge over a simulated device: steps take 5 ms of a virtual clock, and are the test's to allow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._steps = PacedSteps(monkeypatch, 0.005)
        self.clock, self.allow = self._steps.clock, self._steps.allow

    def run(self, body: Callable[[AsyncEngine, Recording], Awaitable[None]], **fields: Any) -> Recording:
        """What the bridge tells its metrics while `body` runs; `fields` are EngineConfig's."""
        engine, metrics = self._steps.drive(simulated_engine(max_step_tokens=16, **fields)), Recording()

        async def main() -> None:
            bridge = AsyncEngine(engine, metrics)
            metrics.watch(bridge)
            bridge.start()
            try:
                async with asyncio.timeout(120):
                    await body(bridge, metrics)
            finally:
                self.allow(10_000)
                await bridge.shutdown(0)

        asyncio.run(main())
        return metrics


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> PacedBridge:
    return PacedBridge(monkeypatch)


def request(name: str, prompt: list[int], max_tokens: int | None, n: int = 1) -> GenerateRequest:
    return GenerateRequest(name, prompt, None, SamplingParams(max_tokens=max_tokens, n=n))


def refused(found: Iterable[Metric]) -> dict[tuple[str, str], float]:
    """Refusals by tenant and reason."""
    (family,) = [f for f in found if f.name == "slora:requests_refused"]
    return {(s.labels["tenant"], s.labels["reason"]): s.value for s in family.samples}


def test_tenants_that_clients_invent_do_not_make_labels_without_end() -> None:
    engine = FakeEngine()
    engine.config = EngineConfig(tenant_weights={"known": 2.0})
    metrics = watching(engine)
    for i in range(5000):
        metrics.refused(f"invented-{i}\n", "tenant_max_queue")
    metrics.refused("known", "tenant_max_queue")
    metrics.refused("default", "tenant_max_queue")
    counts = refused(families(metrics))
    assert len({tenant for tenant, _ in counts}) == 256 + 1 + 2
    got = [counts[tenant, "tenant_max_queue"] for tenant in ("known", "default", "(other)")]
    assert got == [1, 1, 5000 - 256]
    assert sum(counts.values()) == 5002


def test_refusals_of_the_tenants_that_are_known_begin_at_0_for_every_setting_that_refuses() -> None:
    engine = FakeEngine()
    engine.config = EngineConfig(tenant_weights={"known": 2.0}, tenant_limits={"limited": {"max_queue": 3}})
    settings = [field.name for field in dataclasses.fields(EngineConfig)]
    refusing = [name for name in settings if name.endswith(("_max_queue", "_tokens_per_minute"))]
    assert len(refusing) == 4
    counts = refused(families(watching(engine)))
    assert counts == {(t, r): 0 for t in ("known", "limited", "default") for r in (*refusing, "early-abort")}


def test_the_time_since_which_a_counter_counts_is_no_metric_of_its_own() -> None:
    assert "_created" not in watching(FakeEngine()).render().decode()


def test_every_metric_says_which_model_it_is_of_as_vllms_do() -> None:
    metrics = watching(FakeEngine())
    metrics.refused("a", "early-abort")
    for family in families(metrics):
        if family.name != "vllm:lora_requests_info":  # the gateway matches its labels
            assert {s.labels.get("model_name") for s in family.samples} <= {"house-name"}, family.name


def test_the_seconds_of_steps_are_of_steps_that_were_launched() -> None:
    bench = Bench(num_pages=60, max_batch_size=2, max_step_tokens=16)
    bench.register("slow", 7)
    calls, step = 0, bench.engine.step

    def counted() -> list[StreamEvent]:
        nonlocal calls
        calls += 1
        time.sleep(0.001)
        return step()

    bench.engine.step = counted  # type: ignore[method-assign]
    engine: EngineLike = bench.engine
    with serve(engine) as live:
        body = {"model": "slow", "prompt": [1], "max_tokens": 3}
        thread = threading.Thread(target=live.post, args=("/v1/completions", body))
        thread.start()
        wait_for(lambda: calls > 20)
        assert bench.executor.run()
        thread.join()
        wait_for(lambda: live.engine.latest_stats.steps == 3)
        page = live.get("/metrics").text
    found = {s.name: s.value for f in text_string_to_metric_families(page) for s in f.samples}
    assert found["slora:engine_step_seconds_count"] == found["slora:engine_steps_total"] == 3


def test_one_scrape_is_of_one_moment_though_steps_end_meanwhile() -> None:
    metrics, stats = watching(FakeEngine()), FakeEngine().stats()
    found: dict[str, float] = {}
    for steps, family in enumerate(metrics.registry.collect(), 1):  # the scrape is held up at each family
        found |= {sample.name: sample.value for sample in family.samples}
        metrics.step(0.5, 7)
        metrics.published(dataclasses.replace(stats, steps=steps, output_tokens=7 * steps))
    then = found["slora:engine_steps_total"]
    assert 0 < then < steps - 20, "after the families of the event loop, before those of the engine"
    assert [found[f"slora:engine_step_seconds_{of}"] for of in ("count", "sum")] == [then, 0.5 * then]
    assert [found[f"vllm:iteration_tokens_total_{of}"] for of in ("count", "sum")] == [then, 7 * then]
    assert found["vllm:generation_tokens_total"] == 7 * then
    samples = [s for f in families(metrics) for s in f.samples if s.name.startswith("slora:engine_step")]
    assert {s.value for s in samples if s.name.endswith(("_total", "_count"))} == {steps}
    below = {s.labels["le"]: s.value for s in samples if s.name.endswith("_bucket")}
    assert [below[bound] for bound in ("0.3", "0.6", "60.0", "+Inf")] == [0, steps, steps, steps]


def test_scrapes_of_a_server_under_load_count_as_many_steps_everywhere() -> None:
    engine = FakeEngine(step_seconds=0.001, max_model_len=10**6)
    with serve(engine) as live:
        body = {"prompt": [1], "max_tokens": None, "ignore_eos": True, "stream": True}  # until it is closed
        url, seen = f"{live.url}/v1/completions", set[float]()
        with httpx.stream("POST", url, json=body, timeout=60, trust_env=False):
            while len(seen) < 5:
                page = text_string_to_metric_families(live.get("/metrics").text)
                found = {s.name: s.value for family in page for s in family.samples}
                steps = found["slora:engine_steps_total"]
                assert found["slora:engine_step_seconds_count"] == steps
                assert found["vllm:iteration_tokens_total_count"] == steps
                seen.add(steps)


def test_a_value_on_a_bound_is_in_the_bucket_of_that_bound() -> None:
    metrics = watching(FakeEngine())
    for num_tokens in (0, 1, 2, 8, 16384, 16385):
        metrics.step(0.0, num_tokens)
    metrics.published(FakeEngine().stats())
    (family,) = [f for f in families(metrics) if f.name == "vllm:iteration_tokens_total"]
    assert family.type == "histogram"
    below = {s.labels["le"]: s.value for s in family.samples if "le" in s.labels}
    assert [below[bound] for bound in ("1.0", "8.0", "16.0", "16384.0", "+Inf")] == [2, 4, 4, 5, 6]


def test_phases_of_a_request_that_waited_for_another_to_end(paced: PacedBridge) -> None:
    async def body(bridge: AsyncEngine, _: Recording) -> None:
        paced.allow(1000)
        stream = await bridge.submit([request("first", [1, 2, 3], 20), request("second", [4] * 7, 1)])
        assert len([event async for event in stream]) == 21

    metrics = paced.run(body, max_batch_size=1, num_pages=60)
    assert metrics.counts() == dict.fromkeys(PHASES, 2)
    took, found = metrics.sums(), metrics.samples()
    assert took["decode"] == pytest.approx(19 * 0.005)
    assert took["queue"] > took["decode"]  # the second waited for all of the first's decoding
    assert took["prefill"] + took["decode"] == pytest.approx(took["inference"])
    assert took["queue"] + took["inference"] <= found["e2e_request_latency_seconds_sum"]
    assert found["time_to_first_token_seconds_sum"] >= took["queue"] + took["prefill"]
    for name, lengths in (("request_prompt_tokens", (3, 7)), ("request_generation_tokens", (20, 1))):
        assert (found[f"{name}_count"], found[f"{name}_sum"]) == (2, sum(lengths))
    assert [found[f"request_generation_tokens_bucket{{{le}}}"] for le in ("1.0", "10.0", "20.0")] == [1, 1, 2]
    assert "request_generation_tokens_bucket{50.0}" in found  # the model's length is 96
    assert "request_generation_tokens_bucket{100.0}" not in found
    assert found["request_params_max_tokens_sum"] == 21
    assert found["iteration_tokens_total_sum"] == 10 + 19 + 0  # the last token of each is not computed with
    assert found["iteration_tokens_total_count"] == found["engine_step_seconds_count"]


def test_a_preemption_is_in_the_phase_that_it_interrupts_and_no_second_wait_in_the_queue(
    paced: PacedBridge,
) -> None:
    async def body(bridge: AsyncEngine, _: Recording) -> None:
        paced.allow(1000)
        stream = await bridge.submit([request("a", [1] * 4, 40), request("b", [2] * 4, 40)])
        assert [event async for event in stream]
        while bridge.latest_stats.num_running:
            await asyncio.sleep(0.01)
        assert bridge.latest_stats.preemptions == 1

    metrics = paced.run(body, max_batch_size=2, num_pages=17)
    first, preempted = metrics.sequences
    assert first.scheduled_time is not None
    assert preempted.scheduled_time is not None
    assert preempted.first_token_time is not None
    assert preempted.first_token_time < first.finished_time < preempted.finished_time
    took = metrics.sums()
    assert metrics.counts() == dict.fromkeys(PHASES, 2)
    queued = first.scheduled_time + preempted.scheduled_time - sum(metrics.submitted)
    assert took["queue"] == pytest.approx(queued)
    assert took["queue"] < took["decode"]
    decoding = [s.finished_time - (s.first_token_time or 0) for s in metrics.sequences]
    assert took["decode"] == pytest.approx(sum(decoding))


def test_who_gives_up_before_it_ran_has_waited_and_had_no_other_phase(paced: PacedBridge) -> None:
    async def body(bridge: AsyncEngine, metrics: Recording) -> None:
        paced.allow(3)
        running = await bridge.submit([request("running", [1], None)])
        await running.peek()
        waiting = await bridge.submit([request("waiting", [2] * 5, 30)])
        paced.clock.now += 1
        waiting.close()
        while not metrics.sequences:
            await asyncio.sleep(0.005)
        found = metrics.samples()
        assert metrics.counts() == {"queue": 1, "prefill": 0, "decode": 0, "inference": 0}
        assert metrics.sums()["queue"] == pytest.approx(1, abs=3 * 0.005)
        assert found["request_prompt_tokens_sum"] == 5
        lengths = [found[f"request_generation_tokens_{of}"] for of in ("count", "sum")]
        assert lengths == [1, 0]
        assert [found[f"request_params_{of}_count"] for of in ("n", "max_tokens")] == [1, 1]
        running.close()
        while len(metrics.sequences) < 2:
            await asyncio.sleep(0.005)
        assert metrics.counts() == {"queue": 2, "prefill": 1, "decode": 1, "inference": 1}
        found = metrics.samples()
        assert found["request_generation_tokens_sum"] > 0
        assert [found[f"request_params_{of}_count"] for of in ("n", "max_tokens")] == [2, 1]

    paced.run(body, max_batch_size=1, num_pages=60)


def test_the_sequences_of_a_request_have_times_of_their_own_and_its_parameters_count_once(
    paced: PacedBridge,
) -> None:
    async def body(bridge: AsyncEngine, metrics: Recording) -> None:
        paced.allow(35)  # the first takes 31, the second would as many
        stream = await bridge.submit([request("both", [1, 2], 30, n=2)])
        ended = 0
        async for event in stream:
            ended += event.finish_reason is not None
            if ended and event.index == 1 and event.token_ids:
                break
        stream.close()  # the second had begun
        while len(metrics.sequences) < 2:
            await asyncio.sleep(0.005)

    metrics = paced.run(body, max_batch_size=1, num_pages=60)
    first, second = metrics.sequences
    assert (second.scheduled_time or 0) >= first.finished_time
    assert (first.num_output_tokens, second.num_output_tokens < 30) == (30, True)
    found = metrics.samples()
    assert found["request_prompt_tokens_sum"] == 2 * 2
    assert [found[f"request_params_{of}"] for of in ("n_count", "n_sum")] == [1, 2]
    assert [found[f"request_params_max_tokens_{of}"] for of in ("count", "sum")] == [1, 30]
    assert [found[f"request_max_num_generation_tokens_{of}"] for of in ("count", "sum")] == [1, 30]


@pytest.mark.parametrize(
    ("scheduled", "first_token", "phases"),
    [
        (None, None, {"queue": 10}),
        (4.0, None, {"queue": 3, "inference": 7, "prefill": 7}),
        (4.0, 6.0, {"queue": 3, "inference": 7, "prefill": 2, "decode": 5}),
        (4.0, 11.0, {"queue": 3, "inference": 7, "prefill": 7, "decode": 0}),  # by its first token
    ],
)
def test_a_phase_that_was_reached_lasts_until_the_next_or_the_end(
    scheduled: float | None, first_token: float | None, phases: dict[str, float]
) -> None:
    metrics = Recording()
    metrics.ended(SequenceMetrics(scheduled, first_token, 11.0, 3, 2), submitted=1.0)
    assert metrics.counts() == {phase: float(phase in phases) for phase in PHASES}
    assert metrics.sums() == dict.fromkeys(PHASES, 0.0) | phases


def test_an_engine_that_died_tells_nothing_of_its_sequences() -> None:
    metrics = Recording()

    async def main() -> None:
        bridge = AsyncEngine(FakeEngine(fail_at_step=3), metrics)
        bridge.start()
        stream = await bridge.submit([request("a", [1, 2], 9)])
        assert [event.finish_reason async for event in stream][-1] == "error"

    asyncio.run(main())
    assert metrics.counts() == dict.fromkeys(PHASES, 0)
    assert metrics.samples()["e2e_request_latency_seconds_count"] == 1


def of_load(metrics: ServerMetrics) -> dict[str, float]:
    """Of each gauge of load its samples summed, and how many adapters the gateway's names."""
    found = {family.name: family for family in families(metrics)}
    (info,) = found["vllm:lora_requests_info"].samples
    pages = found["slora:pages"].samples
    return {
        name: found[name].samples[0].value
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    } | {
        "kv": sum(s.value for s in pages if s.labels["kind"] == "kv"),
        "adapters": len(info.labels["running_lora_adapters"] + info.labels["waiting_lora_adapters"]),
    }


def counted(metrics: ServerMetrics) -> dict[tuple[str, ...], float]:
    """Every counter, and every count of a histogram, by name and labels."""
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families(metrics)
        if family.type in ("counter", "histogram")
        for sample in family.samples
    }


@pytest.mark.parametrize("books", ["whole", "broken"])
@pytest.mark.parametrize("dies_in", ["a step", "a command"])
def test_a_dead_engine_has_no_load_and_its_counters_stay(
    dies_in: str, books: str, paced: PacedBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(BaseException):
        pass

    def fail(*_: Any) -> Any:
        raise Lost

    async def body(bridge: AsyncEngine, metrics: Recording) -> None:
        engine = bridge._engine
        assert isinstance(engine, Engine)
        await bridge._call(lambda: load(engine, "a0", 1))
        sampling = SamplingParams(max_tokens=50)
        asked = [GenerateRequest(str(i), [1, 2, 3], "a0", sampling) for i in range(3)]
        streams = [await bridge.submit([one]) for one in asked]
        paced.allow(4)
        await anext(streams[0])
        paced.clock.now += 1  # what is counted now is published
        while of_load(metrics)["vllm:num_requests_running"] < 2:
            await asyncio.sleep(0.005)
        before = counted(metrics)
        assert all(of_load(metrics).values()), "a gauge that this load does not move"
        if books == "broken":
            monkeypatch.setattr(engine, "stats", fail)
        if dies_in == "a step":
            monkeypatch.setattr(engine._runner, "launch", fail)
            paced.allow(1)
        else:
            with pytest.raises(Lost):
                await bridge._call(fail)
        for stream in streams:
            assert [event.finish_reason async for event in stream][-1] == "error"
        assert not any(of_load(metrics).values())
        after = counted(metrics)
        assert {name for name in before if after[name] < before[name]} == set()
        assert after["vllm:request_success_total", "error", "model"] == 3
        assert metrics.samples()["engine_up"] == 0
        assert bridge.latest_stats.num_running == bridge.latest_stats.num_waiting == 0

    paced.run(body, max_batch_size=2)


def test_the_docs_have_every_metric_and_no_other() -> None:
    metrics = watching(FakeEngine())
    shown = {family.name + ("_total" if family.type == "counter" else "") for family in families(metrics)}
    documented = re.findall(r"^\| `((?:vllm|slora):\w+)", DOCS.read_text(), re.MULTILINE)
    assert len(documented) == len(set(documented))
    assert set(documented) == shown
