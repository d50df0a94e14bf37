"""What /metrics shows: its labels stay few, and docs/metrics.md says what each metric tells."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from slora_jax.config import EngineConfig
from slora_jax.outputs import StreamEvent
from slora_jax.server.async_engine import AsyncEngine, EngineLike
from slora_jax.server.metrics import ServerMetrics
from tests.engine.slow_loading import Bench
from tests.server.fake_engine import FakeEngine
from tests.server.live import serve, wait_for

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "metrics.md"


def watching(engine: FakeEngine) -> ServerMetrics:
    metrics = ServerMetrics("house-name")
    metrics.watch(AsyncEngine(engine))
    return metrics


def families(metrics: ServerMetrics) -> list[Metric]:
    return list(text_string_to_metric_families(metrics.render().decode()))


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
    engine.config = EngineConfig(tenant_weights={"known": 2.0})
    settings = [field.name for field in dataclasses.fields(EngineConfig)]
    refusing = [name for name in settings if name.endswith(("_max_queue", "_tokens_per_minute"))]
    assert len(refusing) == 4
    counts = refused(families(watching(engine)))
    assert counts == {(t, r): 0 for t in ("known", "default") for r in (*refusing, "early-abort")}


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


def test_the_docs_have_every_metric_and_no_other() -> None:
    metrics = watching(FakeEngine())
    shown = {family.name + ("_total" if family.type == "counter" else "") for family in families(metrics)}
    documented = re.findall(r"^\| `((?:vllm|slora):\w+)", DOCS.read_text(), re.MULTILINE)
    assert len(documented) == len(set(documented))
    assert set(documented) == shown
