"""From sampled tokens to what a client sees: stop conditions, text, logprobs, events, whole outputs."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping

import numpy as np

from slora_jax.outputs import (
    CompletionOutput,
    FinishReason,
    RequestOutput,
    SequenceMetrics,
    StreamEvent,
    TokenLogprobs,
)
from slora_jax.request import Request, Sequence

logger = logging.getLogger(__name__)


def accept_token(sequence: Sequence, token: int, row: int, fetched: Mapping[str, np.ndarray]) -> StreamEvent:
    """Append the token that a step sampled for `sequence` in `row` of its outputs, and say what is new.

    A token that ends the sequence is in `token_ids`, but not in the text (unless include_stop_str_in_output).
    """
    request = sequence.request
    params, metrics = request.params, request.metrics
    if token < 0:
        error = _not_finite(request)
        logger.warning("%s", error)
        return end(sequence, "error", error=error)
    sequence.tokens.append(token)
    length = len(sequence.tokens)
    metrics.num_output_tokens += 1
    if sequence.first_token_time is None:
        sequence.first_token_time = time.monotonic()
        if metrics.first_token_time is None:
            metrics.first_token_time = sequence.first_token_time
    stopped = token in sequence.stop_ids and length - sequence.prompt_len > params.min_tokens
    full = length >= sequence.max_len
    text = ""
    stop_reason: str | int | None = token if stopped else None
    if sequence.detokenizer is not None:
        shown = [token] if not stopped or params.include_stop_str_in_output else []
        text = sequence.detokenizer.append(shown, final=stopped or full)
        if not stopped:
            stop_reason = sequence.detokenizer.stop_reason
    reason: FinishReason | None = "stop" if stop_reason is not None else "length" if full else None
    event = StreamEvent(
        request_id=request.request_id,
        prompt_index=request.prompt_index,
        index=sequence.index,
        adapter_id=request.adapter_id,
        text=text,
        token_ids=(token,),
        logprobs=None if params.logprobs is None else (_logprobs(row, params.logprobs, fetched),),
        logits=fetched["logits"][row : row + 1] if "logits" in fetched else None,
    )
    if reason is None:
        return event
    return _ended(sequence, event, reason, stop_reason=stop_reason)


def _not_finite(request: Request) -> str:
    if request.adapter_id is None:
        whose, fix = "the base model", "check its weights"
    else:
        whose, fix = f"adapter '{request.adapter_id}'", "check its weights and its lora_alpha"
    return f"request {request.request_id!r}: the logits of {whose} were not finite (NaN or infinity): {fix}"


def end(
    sequence: Sequence,
    reason: FinishReason,
    *,
    error: str | None = None,
    retry_after_s: float | None = None,
) -> StreamEvent:
    """The last event of a sequence that ends without a new token; releases text that was held back."""
    request = sequence.request
    text = "" if sequence.detokenizer is None else sequence.detokenizer.append([], final=True)
    event = StreamEvent(
        request_id=request.request_id,
        prompt_index=request.prompt_index,
        index=sequence.index,
        adapter_id=request.adapter_id,
        text=text,
        token_ids=(),
        error=error,
        retry_after_s=retry_after_s,
    )
    return _ended(sequence, event, reason)


def _ended(
    sequence: Sequence, event: StreamEvent, reason: FinishReason, stop_reason: str | int | None = None
) -> StreamEvent:
    sequence.finish_reason = reason
    metrics = sequence.request.metrics
    metrics.finished_time = time.monotonic()
    metrics.sequences[sequence.index] = SequenceMetrics(
        scheduled_time=sequence.scheduled_time,
        first_token_time=sequence.first_token_time,
        finished_time=metrics.finished_time,
        num_prompt_tokens=sequence.prompt_len,
        num_output_tokens=len(sequence.tokens) - sequence.prompt_len,
    )
    return dataclasses.replace(event, finish_reason=reason, stop_reason=stop_reason, metrics=metrics)


def _logprobs(row: int, wanted: int, fetched: Mapping[str, np.ndarray]) -> TokenLogprobs:
    tokens = fetched["top_tokens"][row, :wanted]
    top = zip(tokens.tolist(), fetched["top_logprobs"][row, :wanted].tolist(), strict=True)
    return TokenLogprobs(
        logprob=float(fetched["logprob"][row]),
        rank=int(fetched["rank"][row]),
        top={token: logprob for token, logprob in top if token >= 0},
    )


class OutputCollector:
    """Builds RequestOutputs from the events of some requests."""

    def __init__(self, requests: list[Request]) -> None:
        self._outputs = [
            RequestOutput(
                request_id=r.request_id,
                prompt=r.prompt,
                prompt_token_ids=r.prompt_token_ids,
                adapter_id=r.adapter_id,
                outputs=[CompletionOutput(index=s.index) for s in r.sequences],
                metrics=r.metrics,
            )
            for r in requests
        ]
        self._logits: dict[tuple[int, int], list[np.ndarray]] = {}

    def add(self, event: StreamEvent) -> None:
        output = self._outputs[event.prompt_index].outputs[event.index]
        output.text += event.text
        output.token_ids += event.token_ids
        if event.logprobs is not None:
            output.logprobs = [*(output.logprobs or []), *event.logprobs]
        if event.logits is not None:
            self._logits.setdefault((event.prompt_index, event.index), []).append(event.logits)
        if event.finish_reason is not None:
            output.finish_reason, output.stop_reason = event.finish_reason, event.stop_reason
            output.error = event.error

    def outputs(self) -> list[RequestOutput]:
        """In the order of the requests."""
        for (prompt, index), logits in self._logits.items():
            self._outputs[prompt].outputs[index].logits = np.concatenate(logits)
        return self._outputs
