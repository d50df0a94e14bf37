"""What a request gives back: a `StreamEvent` for every piece, a `RequestOutput` at the end."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-softmax of the model's own logits at one position.

    `logprob` and `rank` (1: the most likely) are the chosen token's; `top` maps the most likely tokens, best
    first.
    """

    logprob: float
    rank: int
    top: dict[int, float]


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceMetrics:
    """A sequence that has ended: times in seconds of `time.monotonic()`, None where it never came so far;
    counts in tokens.
    """

    scheduled_time: float | None  # when it first entered the batch; preemptions do not change it
    first_token_time: float | None
    finished_time: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclasses.dataclass
class RequestMetrics:
    """Times of one request in seconds of `time.monotonic()`, None until they happen; counts in tokens."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int | None = None  # of the prompt: found in the prefix cache by its first sequence
    sequences: dict[int, SequenceMetrics] = dataclasses.field(default_factory=dict)  # that ended, by index

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclasses.dataclass(slots=True)  # one a token: frozen ones take three times as long to make
class StreamEvent:
    """New output of one sequence. Concatenating `text` (or `token_ids`) over events gives the whole.

    `prompt_index` is the position in the list given to `generate` or `stream` (0 for `add_request`);
    `index` numbers the `n` sequences of a request. The last event of a sequence, and only it, has a
    `finish_reason`; `stop_reason` is then the stop string or token id that matched, `error` the message of an
    "error", or of an "abort" that the engine decided. `retry_after_s`: given up by early-abort, the request
    may be served in so many seconds.
    """

    request_id: str
    prompt_index: int
    index: int
    adapter_id: str | None
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    retry_after_s: float | None = None
    metrics: RequestMetrics | None = None  # on the last event
    logits: np.ndarray | None = None  # float32[n_tokens, vocab] with EngineConfig.record_logits


@dataclasses.dataclass
class CompletionOutput:
    """One of the `n` sequences of a request, whole."""

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logits: np.ndarray | None = None  # float32[n_tokens, vocab]


@dataclasses.dataclass
class RequestOutput:
    """A finished request. `text`, `token_ids`, ... are those of its first sequence; `outputs` has all `n`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    adapter_id: str | None
    outputs: list[CompletionOutput]
    metrics: RequestMetrics

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.outputs[0].logprobs

    @property
    def logits(self) -> np.ndarray | None:
        return self.outputs[0].logits

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason


@dataclasses.dataclass(frozen=True)
class AdapterInfo:
    """A registered adapter. `state` is "registered" (a path, perhaps a host copy), "reading" (into host
    memory), "staged" (on its way into the pool), "resident" or "draining".
    """

    name: str
    path: str
    generation: int
    state: Literal["registered", "reading", "staged", "resident", "draining"]
    rank: int  # largest over modules
    target_modules: tuple[str, ...]
    pages: int  # pages it takes (or would take) in the pool
    host_bytes: int  # of its host copy; 0 while there is none
    running: int  # requests that hold a reference
    pinned: bool = False  # stays resident, once it is


@dataclasses.dataclass(frozen=True)
class LoadStats:
    """What bringing adapters into the pool has cost. Counters only grow; the others are of now."""

    reading: int = 0  # adapters that are read into host memory
    staged: int = 0  # adapters that have pages and are copied into them, or will be next
    host_bytes: int = 0  # of host copies
    host_hits: int = 0  # counter: loads that found a host copy
    host_misses: int = 0  # counter: loads that had to read a folder
    prefetches_useful: int = 0  # counter: loads ahead of need, used before they gave way
    prefetches_wasted: int = 0  # counter: loads ahead of need that gave way unused
    bytes_staged: int = 0  # counter: bytes whose copy into the pool was begun
    wait_seconds: float = 0.0  # counter, over loads: from when a request waits for nothing else
    failures: int = 0  # counter
    read_seconds: float = 0.0  # counter, over reads that have ended, well or not
    copy_seconds: float = 0.0  # counter, over loads: from the begin of the copy until a step finds it done
    cancelled: int = 0  # counter: reads stopped, pages given back before their copy: nobody needed them
    guesses: int = 0  # counter: loads begun though no request asked for their adapters
    guesses_useful: int = 0  # counter: guesses whose adapter a sequence ran on before it was lost
    guesses_wasted: int = 0  # counter: guesses lost unused: evicted, cancelled, failed or unloaded


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine, for metrics and the demo. Counters only grow; the rest are of now."""

    num_running: int
    num_waiting: int
    pages_total: int  # without the reserved null page
    pages_kv: int  # of running sequences
    pages_cached: int  # cached prefixes that no running sequence holds
    pages_adapter: int
    pages_free: int
    adapters_registered: int
    adapters_resident: int
    adapters_pinned: int  # by name, resident or not
    pages_pinned: int  # that these take, or will
    adapter_loads: int  # counter: copies into the pool
    adapter_evictions: int  # counter
    prefix_lookups: int  # counter: sequences let in that looked for a cached prefix
    prefix_query_tokens: int  # counter: tokens of these
    prefix_hit_tokens: int  # counter: tokens that these found
    prefix_evictions: int  # counter: cached pages that gave way
    running_adapters: tuple[str, ...]  # each name once, in no order
    waiting_adapters: tuple[str, ...]
    steps: int  # counter
    prompt_tokens: int  # counter: of prompts whose first token came, cached ones included
    prefilled_tokens: int  # counter: prompt tokens computed, recomputation included
    output_tokens: int  # counter
    preemptions: int  # counter
    requests_finished: int  # counter
    requests_aborted: int  # counter
    requests_failed: int  # counter
    last_step_seconds: float
    last_step_tokens: int
    loading: LoadStats = LoadStats()
    adapters_refused: int = 0  # that the start left out

    def without_load(self) -> EngineStats:
        """The same counters where every request has ended at once and nothing is loaded any more: nobody runs
        or waits, and the KV pages of those who ran are free.
        """
        return dataclasses.replace(
            self,
            num_running=0,
            num_waiting=0,
            pages_kv=0,
            pages_free=self.pages_free + self.pages_kv,
            running_adapters=(),
            waiting_adapters=(),
            loading=dataclasses.replace(self.loading, reading=0, staged=0),
        )
