"""A deterministic engine without a model: methods and outputs of `slora_jax.Engine`, with injected trouble.

The continuation of a prompt is the adapter's name (or "base"), a colon and the prompt, over and over; EOS
comes after the first round. A token is a byte, so that characters are split over tokens.
"""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slora_jax.config import EngineConfig
from slora_jax.errors import AdapterError, AdapterExistsError, LimitExceededError, UnknownAdapterError
from slora_jax.outputs import (
    AdapterInfo,
    EngineStats,
    FinishReason,
    LoadStats,
    RequestMetrics,
    SequenceMetrics,
    StreamEvent,
    TokenLogprobs,
)
from slora_jax.request import GenerateRequest
from slora_jax.sampling_params import SamplingParams

BOS, EOS = 256, 257
PAGE_TOKENS = 16


class ByteTokenizer:
    """Bytes are tokens; 256 is BOS and 257 EOS."""

    vocab_size = 258

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def fewest_tokens(self, text: str) -> int:
        return len(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        special = {BOS: "<bos>", EOS: "<eos>"}
        parts = itertools.groupby(ids, key=lambda t: t in special)
        return "".join(
            ("" if skip_special_tokens else "".join(special[t] for t in group))
            if is_special
            else bytes(group).decode(errors="replace")
            for is_special, group in parts
        )

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        if any(message["role"] not in ("system", "user", "assistant") for message in messages):
            raise ValueError("chat template: unknown role")
        turns = "".join(f"[{message['role']}]{message.get('content', '')}" for message in messages)
        return turns + "[assistant]" * add_generation_prompt


@dataclasses.dataclass(frozen=True)
class PreparedFake:
    path: str
    rank: int


@dataclasses.dataclass
class Running:
    request_id: str
    index: int
    adapter_id: str | None
    num_prompt_tokens: int
    pieces: Iterator[tuple[int, str, FinishReason | None, str | int | None]]
    logprobs: int | None
    error: str | None
    metrics: RequestMetrics

    def last(self, reason: FinishReason, error: str | None = None) -> StreamEvent:
        return StreamEvent(
            self.request_id,
            0,
            self.index,
            self.adapter_id,
            "",
            (),
            finish_reason=reason,
            error=error,
            metrics=self.ended(),
        )

    def ended(self) -> RequestMetrics:
        times = self.metrics
        times.sequences[self.index] = SequenceMetrics(
            times.first_scheduled_time,
            times.first_token_time,
            time.monotonic(),
            times.num_prompt_tokens,
            times.num_output_tokens,
        )
        return times


class FakeEngine:
    """`step_seconds`: how slow it is; `fail_at_step`: the step that raises.

    While `paused`, its steps do nothing, as where all wait for an adapter; while `folders_answer` is clear,
    reads of adapters hang. A prompt with "poison" fails by itself; the tenant "greedy" is over its limit.
    `threads` has the names of threads by the method they called.
    """

    def __init__(
        self,
        *,
        max_model_len: int = 256,
        max_batch_size: int = 32,
        step_seconds: float = 0.0,
        fail_at_step: int | None = None,
        tokenizer: ByteTokenizer | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.model_name = "fake-model"
        self.max_model_len = max_model_len
        self.config = EngineConfig(max_batch_size=max_batch_size)
        self.step_seconds = step_seconds
        self.paused = False
        self.folders_answer = threading.Event()
        self.folders_answer.set()
        self.fail_at_step = fail_at_step
        self.threads: defaultdict[str, set[str]] = defaultdict(set)
        self.scheduling: list[tuple[str, int, float | None]] = []  # of each request
        self._adapters: dict[str, AdapterInfo] = {}
        self._draining: list[AdapterInfo] = []
        self._generations = itertools.count(1)
        self._queue: list[Running] = []  # the first max_batch_size run
        self._steps = self._output_tokens = self._prompt_tokens = self._finished = self._aborted = 0

    def _seen(self, method: str) -> None:
        self.threads[method].add(threading.current_thread().name)

    def add_requests(self, asked: Sequence[GenerateRequest]) -> None:
        self._seen("add_requests")
        self.scheduling += [(a.tenant, a.priority, a.deadline_s) for a in asked]
        prompts = [ByteTokenizer().encode(a.prompt) if isinstance(a.prompt, str) else a.prompt for a in asked]
        for a, ids in zip(asked, prompts, strict=True):
            self._check(a, ids)
        for a, ids in zip(asked, prompts, strict=True):
            self._add(a, ids)

    def _check(self, asked: GenerateRequest, ids: Sequence[int]) -> None:
        if asked.tenant == "greedy":
            raise LimitExceededError(
                "tenant 'greedy' has used up tenant_tokens_per_minute 60", 12.3, "tenant_tokens_per_minute"
            )
        if any(running.request_id == asked.request_id for running in self._queue):
            raise ValueError(f"request id '{asked.request_id}' is in use")
        if asked.adapter_id is not None and asked.adapter_id not in self._adapters:
            raise UnknownAdapterError(f"no adapter '{asked.adapter_id}' is registered")
        if any(not 0 <= t < ByteTokenizer.vocab_size for t in ids):
            raise ValueError("prompt: token id outside the vocabulary of 258")
        if len(ids) >= self.max_model_len:
            raise ValueError(f"the prompt has {len(ids)} tokens; at most {self.max_model_len - 1} fit")
        if (asked.params.logprobs or 0) > self.config.max_logprobs:
            raise ValueError(f"logprobs may be at most {self.config.max_logprobs}")

    def _add(self, asked: GenerateRequest, ids: Sequence[int]) -> None:
        text = ByteTokenizer().decode(ids)
        limit = self.max_model_len - len(ids)
        ended: dict[int, SequenceMetrics] = {}
        for index in range(asked.params.n):
            self._queue.append(
                Running(
                    asked.request_id,
                    index,
                    asked.adapter_id,
                    len(ids),
                    _continuation(f"{asked.adapter_id or 'base'}:{text}", asked.params, limit),
                    asked.params.logprobs,
                    "poisoned prompt" if "poison" in text else None,
                    RequestMetrics(time.monotonic(), num_prompt_tokens=len(ids), sequences=ended),
                )
            )
        self._prompt_tokens += len(ids)

    def abort(self, request_id: str) -> list[StreamEvent]:
        self._seen("abort")
        gone = [running for running in self._queue if running.request_id == request_id]
        self._queue = [running for running in self._queue if running.request_id != request_id]
        self._aborted += bool(gone)
        return [running.last("abort") for running in gone]

    def step(self) -> list[StreamEvent]:
        self._seen("step")
        if self.paused:
            time.sleep(0.001)
            return []
        time.sleep(self.step_seconds)
        self._steps += 1
        if self.fail_at_step is not None and self._steps >= self.fail_at_step:
            raise RuntimeError("injected failure")
        events = [self._advance(running) for running in self._queue[: self.config.max_batch_size]]
        ended = {(e.request_id, e.index) for e in events if e.finish_reason is not None}
        self._finished += len(ended)
        self._queue = [r for r in self._queue if (r.request_id, r.index) not in ended]
        return events

    def _advance(self, running: Running) -> StreamEvent:
        if running.metrics.first_scheduled_time is None:
            running.metrics.first_scheduled_time = time.monotonic()
        if running.error is not None:
            return running.last("error", running.error)
        if running.metrics.first_token_time is None:
            running.metrics.first_token_time = time.monotonic()
        token, text, reason, stop_reason = next(running.pieces)
        self._output_tokens += 1
        running.metrics.num_output_tokens += 1
        logprobs = None
        if running.logprobs is not None:
            top = {(token + i) % 258: -0.5 - i for i in range(running.logprobs)}
            logprobs = (TokenLogprobs(-0.5, 1, top),)
        return StreamEvent(
            running.request_id,
            0,
            running.index,
            running.adapter_id,
            text,
            (token,),
            logprobs,
            reason,
            stop_reason,
            metrics=running.ended() if reason else None,
        )

    def has_unfinished(self) -> bool:
        return bool(self._queue)

    @property
    def num_steps(self) -> int:
        return self._steps

    @property
    def last_step_tokens(self) -> int:
        return min(len(self._queue), self.config.max_batch_size)

    def under_way(self) -> str:
        return f"requests {sorted({running.request_id for running in self._queue})}"

    def prepare_adapter(self, path: Any) -> PreparedFake:
        self._seen("prepare_adapter")
        assert self.folders_answer.wait(120)
        file = Path(path) / "adapter_config.json"
        if not file.exists():
            raise FileNotFoundError(f"{file} does not exist")
        config = json.loads(file.read_text())
        if "r" not in config:
            raise AdapterError("r is missing", file=file)
        return PreparedFake(str(path), config["r"])

    def load_adapter(self, name: str, path: Any, *, replace: bool = False) -> AdapterInfo:
        self._seen("load_adapter")
        prepared = path if isinstance(path, PreparedFake) else self.prepare_adapter(path)
        if name in self._adapters and not replace:
            raise AdapterExistsError(f"adapter '{name}' is registered already")
        info = AdapterInfo(
            name, prepared.path, next(self._generations), "resident", prepared.rank, ("q_proj",), 1, 100, 0
        )
        self._adapters[name] = info
        return info

    def unload_adapter(self, name: str) -> None:
        self._seen("unload_adapter")
        if name not in self._adapters:
            raise UnknownAdapterError(f"no adapter '{name}' is registered")
        self._draining.append(dataclasses.replace(self._adapters.pop(name), state="draining"))

    def pin_adapter(self, name: str) -> AdapterInfo:
        return self._pin(name, True)

    def unpin_adapter(self, name: str) -> AdapterInfo:
        return self._pin(name, False)

    def _pin(self, name: str, pinned: bool) -> AdapterInfo:
        if name not in self._adapters:
            raise UnknownAdapterError(f"no adapter '{name}' is registered")
        self._adapters[name] = dataclasses.replace(self._adapters[name], pinned=pinned)
        return self._adapters[name]

    def adapters(self) -> list[AdapterInfo]:
        used = {running.adapter_id for running in self._queue}
        self._draining = [info for info in self._draining if info.name in used]
        return [*self._adapters.values(), *self._draining]

    def stats(self) -> EngineStats:
        running = self._queue[: self.config.max_batch_size]
        waiting = self._queue[self.config.max_batch_size :]
        kv = sum(-(-(r.num_prompt_tokens + r.metrics.num_output_tokens) // PAGE_TOKENS) for r in running)
        return EngineStats(
            num_running=len(running),
            num_waiting=len(waiting),
            pages_total=1000,
            pages_kv=kv,
            pages_cached=0,
            pages_adapter=len(self._adapters),
            pages_free=1000 - kv - len(self._adapters),
            adapters_registered=len(self._adapters),
            adapters_resident=len(self._adapters),
            adapters_pinned=sum(info.pinned for info in self._adapters.values()),
            pages_pinned=sum(info.pages for info in self._adapters.values() if info.pinned),
            adapter_loads=len(self._adapters),
            adapter_evictions=0,
            prefix_lookups=0,
            prefix_query_tokens=0,
            prefix_hit_tokens=0,
            prefix_evictions=0,
            running_adapters=tuple({r.adapter_id for r in running if r.adapter_id}),
            waiting_adapters=tuple({r.adapter_id for r in waiting if r.adapter_id}),
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            prefilled_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            preemptions=0,
            requests_finished=self._finished,
            requests_aborted=self._aborted,
            requests_failed=0,
            last_step_seconds=self.step_seconds,
            last_step_tokens=len(running),
            loading=LoadStats(1, 2, 300, 4, 5, 6, 7, 800, 0.9, 10, 1.1, 1.2, 13, 30, 14, 15),
            adapters_refused=16,
        )


def _continuation(
    round_text: str, params: SamplingParams, limit: int
) -> Iterator[tuple[int, str, FinishReason | None, str | int | None]]:
    """Token, text, finish reason and stop reason of each step."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    max_tokens = min(params.max_tokens or limit, limit)
    text = ""
    rounds = itertools.cycle([*round_text.encode(), EOS])
    for count, token in enumerate(rounds, start=1):
        if token == EOS and not params.ignore_eos and count > params.min_tokens:
            yield EOS, "", "stop", EOS
            return
        new = "" if token == EOS else decoder.decode(bytes([token]))
        text += new
        if token in params.stop_token_ids:
            yield token, "", "stop", token
            return
        if stop := next((s for s in params.stop if text.endswith(s)), None):  # one-character stops only
            yield token, new.removesuffix(stop), "stop", stop
            return
        yield token, new, "length" if count == max_tokens else None, None
