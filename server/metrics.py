"""Prometheus metrics in vLLM's names, so that its dashboards and Kubernetes' inference gateway work
unchanged.

What the engine's thread counts, histograms of steps included, is read from its latest snapshot (nothing is
counted twice, and a scrape never waits for a step); latencies and refusals are observed as they happen, on
the event loop, which renders the page. Names that start with `slora:` are ours. docs/metrics.md says what
each one tells.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from slora_jax.outputs import EngineStats, SequenceMetrics
from slora_jax.request import DEFAULT_TENANT
from slora_jax.sampling_params import SamplingParams
from slora_jax.server.async_engine import AsyncEngine

_TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960),
    *(1920, 7680),
)
_STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_N_BUCKETS = (1, 2, 5, 10, 20)
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 30, 60)
_FINISHED_REASONS = ("stop", "length", "abort", "error")
_PHASES = {  # of a sequence
    "queue": "Time of a sequence from its submission until it enters the batch",
    "prefill": "Time of a sequence from there to its first token",
    "decode": "Time of a sequence from its first token to its end",
    "inference": "Time of a sequence from entering the batch to its end",
}
_REFUSALS = (  # fields of EngineConfig that refuse requests, and the policy that gives them up
    "tenant_max_queue",
    "tenant_tokens_per_minute",
    "adapter_max_queue",
    "adapter_tokens_per_minute",
    "early-abort",
)
_MAX_TENANTS = 256  # with labels of their own, beside those that the configuration names
_OTHER_TENANTS = "(other)"


@dataclasses.dataclass(frozen=True)
class Distribution:
    """A histogram at one moment: how many values are up to each bound and above the one before; their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # one more than bounds: the last are above all of them
    sum: float

    def metric(self, name: str, text: str, model_name: str) -> Metric:
        """As Prometheus has it: each bucket holds those below it, too."""
        bounds = [*map(floatToGoString, self.bounds), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(self.counts), strict=True))
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        family.add_metric([model_name], buckets, self.sum)
        return family


class _Tally:
    """A histogram of one thread, which hands out what others may read. Counting takes no lock."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def now(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._sum)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What the engine's thread has counted, all between the same two steps."""

    stats: EngineStats
    step_seconds: Distribution
    step_tokens: Distribution


class ServerMetrics:
    """The `Observer` of an AsyncEngine, and the registry that `/metrics` shows. One an application.

    `max_model_len` is the engine's, in tokens: histograms of lengths end there.
    """

    def __init__(self, model_name: str, max_model_len: int) -> None:
        # Of the whole process: without it every counter has a line more, which nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Time to first token", _TTFT_BUCKETS)
        token_help = "Time between two tokens of a sequence"
        self._token_times = (  # old and new name of the same thing; both are in use
            self._histogram("vllm:time_per_output_token_seconds", token_help, _TOKEN_BUCKETS),
            self._histogram("vllm:inter_token_latency_seconds", token_help, _TOKEN_BUCKETS),
        )
        self._latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time of a sequence", _REQUEST_BUCKETS
        )
        self._step_seconds, self._step_tokens = _Tally(_STEP_BUCKETS), _Tally(_STEP_TOKEN_BUCKETS)
        self._phases = {
            phase: self._histogram(f"vllm:request_{phase}_time_seconds", text, _REQUEST_BUCKETS)
            for phase, text in _PHASES.items()
        }
        lengths = tuple(_lengths(max_model_len))
        self._prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a sequence", lengths
        )
        self._output_tokens = self._histogram(
            "vllm:request_generation_tokens", "Tokens that a sequence generated", lengths
        )
        self._longest = self._histogram(
            "vllm:request_max_num_generation_tokens",
            "Tokens that the longest of a request's n sequences generated",
            lengths,
        )
        self._max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "max_tokens of requests that name it", lengths
        )
        self._n = self._histogram("vllm:request_params_n", "n of a request (prompt)", _N_BUCKETS)
        success = Counter(
            "vllm:request_success",
            "Sequences by how they finished",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._success = {reason: success.labels(model_name, reason) for reason in _FINISHED_REASONS}
        self._refused = Counter(
            "slora:requests_refused",
            "Requests (prompts) that a limit of EngineConfig or early-abort refused, by tenant",
            ["model_name", "tenant", "reason"],
            registry=self.registry,
        )
        self._tenants: set[str] = set()  # with labels of their own
        self._more_tenants = _MAX_TENANTS

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(self._model_name)

    def watch(self, engine: AsyncEngine) -> None:
        """Show the engine's statistics, too, and by name the tenants that its configuration names.

        Their refusals are there from the start: `rate` misses the step of a counter that begins at 1.
        """
        self._tenants |= {DEFAULT_TENANT, *engine.config.tenant_weights, *engine.config.tenant_limits}
        for tenant in self._tenants:
            for reason in _REFUSALS:
                self._refused.labels(self._model_name, tenant, reason)
        self.published(engine.latest_stats)
        self.registry.register(_EngineCollector(self._model_name, engine, lambda: self._snapshot))

    def step(self, seconds: float, num_tokens: int) -> None:
        """One engine step took so long, and computes so many tokens."""
        self._step_seconds.add(seconds)
        self._step_tokens.add(num_tokens)

    def published(self, stats: EngineStats) -> None:
        """The engine's statistics now: a scrape shows them, and the steps up to here, until the next ones."""
        self._snapshot = Snapshot(stats, self._step_seconds.now(), self._step_tokens.now())

    def tokens(self, num_tokens: int, since_previous: float, first: bool) -> None:
        """A sequence got `num_tokens` tokens, its first after its submission or others after the previous."""
        if first:
            self._ttft.observe(since_previous)
        else:
            for histogram in self._token_times:
                histogram.observe(since_previous / num_tokens)

    def finished(self, reason: str, latency: float) -> None:
        """A sequence ended."""
        self._success[reason].inc()
        self._latency.observe(latency)

    def ended(self, sequence: SequenceMetrics, submitted: float) -> None:
        """The engine has let go of a sequence, submitted at `submitted` (`time.monotonic()`).

        A phase that it reached lasted until the next one or its end: who left the queue has waited, too.
        """
        self._prompt_tokens.observe(sequence.num_prompt_tokens)
        self._output_tokens.observe(sequence.num_output_tokens)
        scheduled, first, end = sequence.scheduled_time, sequence.first_token_time, sequence.finished_time
        self._phases["queue"].observe((end if scheduled is None else scheduled) - submitted)
        if scheduled is None:
            return
        self._phases["inference"].observe(end - scheduled)
        self._phases["prefill"].observe((end if first is None else first) - scheduled)
        if first is not None:
            self._phases["decode"].observe(end - first)

    def answered(self, params: SamplingParams, longest: int) -> None:
        """All sequences of a request have ended, the longest with so many tokens."""
        self._longest.observe(longest)
        self._n.observe(params.n)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)

    def refused(self, tenant: str, reason: str) -> None:
        """A request was refused, or given up before it began. Clients may invent tenants: after so many, the
        others share a label.
        """
        if tenant not in self._tenants and self._more_tenants:
            self._tenants.add(tenant)
            self._more_tenants -= 1
        label = tenant if tenant in self._tenants else _OTHER_TENANTS
        self._refused.labels(self._model_name, label, reason).inc()

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)


def _lengths(longest: int) -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, ... up to `longest` tokens."""
    steps = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    return itertools.takewhile(lambda length: length <= longest, steps)


class _EngineCollector(Collector):
    def __init__(self, model_name: str, engine: AsyncEngine, latest: Callable[[], Snapshot]) -> None:
        self._model_name = model_name
        self._engine = engine
        self._latest = latest

    def collect(self) -> Iterable[Metric]:
        snapshot = self._latest()  # once: the engine's thread replaces it at any moment
        stats = snapshot.stats
        for name, text, values in (
            ("slora:engine_step_seconds", "Host time of an engine step", snapshot.step_seconds),
            ("vllm:iteration_tokens_total", "Tokens computed in an engine step", snapshot.step_tokens),
        ):
            yield values.metric(name, text, self._model_name)
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield from self._pool(stats)
        yield _lora_requests(stats, self._engine.config.max_batch_size)

    def _gauges(self, stats: EngineStats) -> Iterable[Metric]:
        usage = stats.pages_kv / max(1, stats.pages_total)
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in the batch", stats.num_running),
            ("vllm:num_requests_waiting", "Requests that wait to be scheduled", stats.num_waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the page pool that running requests' KV takes, 0 to 1",
                usage,
            ),
            ("vllm:gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc", usage),
            ("slora:adapter_host_bytes", "Host memory of adapters' copies", stats.loading.host_bytes),
            ("slora:pinned_adapters", "Adapters whose names are pinned", stats.adapters_pinned),
            ("slora:pinned_pages", "Pages that pinned adapters take, or will", stats.pages_pinned),
            (
                "slora:engine_stalled_seconds",
                "Time without a completed step while work is queued",
                self._engine.stalled_seconds,
            ),
            ("slora:engine_up", "1 while the engine serves", float(self._engine.death is None)),
        ):
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family

    def _counters(self, stats: EngineStats) -> Iterable[Metric]:
        loading = stats.loading
        for name, text, value in (
            ("vllm:prompt_tokens", "Of prompts whose first token came, cached ones too", stats.prompt_tokens),
            (
                "slora:prefilled_tokens",
                "Prompt tokens computed, again after preemptions",
                stats.prefilled_tokens,
            ),
            ("vllm:generation_tokens", "Tokens generated", stats.output_tokens),
            ("vllm:num_preemptions", "Requests whose pages were taken back", stats.preemptions),
            ("slora:adapter_loads", "Copies of an adapter into the pool", stats.adapter_loads),
            ("slora:adapter_evictions", "Idle adapters whose pages were taken", stats.adapter_evictions),
            ("slora:prefix_page_evictions", "Cached pages that gave way", stats.prefix_evictions),
            ("slora:prefix_lookups", "Sequences that looked for a cached prefix", stats.prefix_lookups),
            ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache", stats.prefix_query_tokens),
            ("vllm:prefix_cache_hits", "Tokens found in the prefix cache", stats.prefix_hit_tokens),
            ("slora:adapter_host_hits", "Loads that found a host copy", loading.host_hits),
            ("slora:adapter_host_misses", "Loads that read a folder", loading.host_misses),
            ("slora:adapter_prefetches_useful", "Loads ahead of need, then used", loading.prefetches_useful),
            ("slora:adapter_prefetches_wasted", "Loads ahead of need, unused", loading.prefetches_wasted),
            ("slora:adapter_guesses", "Loads of adapters that no request asked for", loading.guesses),
            ("slora:adapter_guesses_useful", "Guesses that a sequence then ran on", loading.guesses_useful),
            ("slora:adapter_guesses_wasted", "Guesses that were lost unused", loading.guesses_wasted),
            ("slora:adapter_staged_bytes", "Bytes whose copy into the pool was begun", loading.bytes_staged),
            ("slora:adapter_wait_seconds", "Time that loads kept requests waiting", loading.wait_seconds),
            ("slora:adapter_load_failures", "Loads that failed", loading.failures),
            ("slora:adapter_loads_cancelled", "Loads that nobody needed any more", loading.cancelled),
            ("slora:adapter_read_seconds", "Time of reads into host memory, summed", loading.read_seconds),
            ("slora:adapter_copy_seconds", "Time of copies into the pool, summed", loading.copy_seconds),
            ("slora:engine_steps", "Engine steps", stats.steps),
        ):
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family

    def _pool(self, stats: EngineStats) -> Iterable[Metric]:
        for name, text, label, values in (
            (
                "slora:pages",
                "Pages of the pool by what they hold",
                "kind",
                {
                    "kv": stats.pages_kv,
                    "prefix": stats.pages_cached,
                    "adapter": stats.pages_adapter,
                    "free": stats.pages_free,
                },
            ),
            (
                "slora:adapters",
                "Adapters by where they are",
                "state",
                {
                    "registered": stats.adapters_registered,
                    "reading": stats.loading.reading,
                    "staged": stats.loading.staged,
                    "resident": stats.adapters_resident,
                    "refused": stats.adapters_refused,
                },
            ),
        ):
            family = GaugeMetricFamily(name, text, labels=["model_name", label])
            for value, count in values.items():
                family.add_metric([self._model_name, value], count)
            yield family


def _lora_requests(stats: EngineStats, max_lora: int) -> Metric:
    """The gateway's gauge: its value is the time, so that the newest of several label sets wins.

    `max_lora` is what one batch can hold: every running sequence may have an adapter of its own.
    """
    labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
    family = GaugeMetricFamily(
        "vllm:lora_requests_info", "Adapters of running and waiting requests", labels=labels
    )
    names = [",".join(sorted(names)) for names in (stats.running_adapters, stats.waiting_adapters)]
    family.add_metric([str(max_lora), *names], time.time())
    return family
