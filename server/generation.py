"""What both generating routes share: from checked prompts to a whole response or to server-sent events.

A route makes the prompts and a `Form`, which knows how its response looks; this module runs them, counts
tokens, tells the client of failures, and lets go of the engine's pages when the client does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from slora_jax.errors import LimitExceededError, UnknownAdapterError
from slora_jax.outputs import StreamEvent, TokenLogprobs
from slora_jax.request import GenerateRequest
from slora_jax.sampling_params import SamplingParams
from slora_jax.server.async_engine import EventStream
from slora_jax.server.context import ServerContext
from slora_jax.server.errors import (
    NO_RETRY,
    ApiError,
    as_api_error,
    retry_after,
    too_many_requests,
    unavailable,
)
from slora_jax.server.responses import PromptTokensDetails, Usage
from slora_jax.server.schemas import SamplingBody


@dataclasses.dataclass
class Piece:
    """A run of tokens of one choice: what an event brought, or all of it. `offset`: characters before it."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    offset: int = 0

    def extend(self, event: StreamEvent, params: SamplingParams) -> None:
        """Append an event of the same sequence. `stop_reason` is vLLM's: what the request named, not EOS."""
        self.text += event.text
        self.token_ids.extend(event.token_ids)
        self.logprobs.extend(event.logprobs or ())
        self.finish_reason = event.finish_reason
        if isinstance(event.stop_reason, str) or event.stop_reason in params.stop_token_ids:
            self.stop_reason = event.stop_reason


class Form(Protocol):
    """How a route's response looks; `choice` numbers sequences over all prompts."""

    def whole(self, choices: Sequence[Piece], usage: Usage) -> BaseModel: ...
    def opening_chunks(self) -> Iterable[BaseModel]: ...
    def chunk(self, choice: int, piece: Piece) -> BaseModel: ...
    def usage_chunk(self, usage: Usage) -> BaseModel: ...


@dataclasses.dataclass(frozen=True)
class Identity:
    """The fields by which a client knows a response."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> Identity:
        """A fresh id such as `cmpl-5f0c...`, made now."""
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)


@dataclasses.dataclass
class Job:
    """Prompts of one HTTP request and their events. request i continues prompt i in `params.n`
    choices.
    """

    requests: list[GenerateRequest]
    params: SamplingParams
    stream: EventStream
    num_output_tokens: int = 0
    cached_tokens: dict[str, int] = dataclasses.field(default_factory=dict)  # by request id

    def choice(self, event: StreamEvent) -> int:
        return int(event.request_id.rpartition("-")[2]) * self.params.n + event.index

    def count(self, event: StreamEvent) -> None:
        """Enter an event into the usage."""
        self.num_output_tokens += len(event.token_ids)
        if event.metrics is not None:
            self.cached_tokens[event.request_id] = event.metrics.num_cached_tokens or 0

    def usage(self) -> Usage:
        prompt = sum(len(request.prompt) for request in self.requests)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self.num_output_tokens,
            total_tokens=prompt + self.num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self.cached_tokens.values())),
        )


async def respond(
    context: ServerContext,
    body: SamplingBody,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    form: Form,
    identity: Identity,
    tenant: str,
) -> Response:
    """Run prompts (token ids) for `tenant` on the model or adapter that `body.model` names.

    Returns once the first token is there (streaming: until then a failure still has its own status) or all
    are done. Raises ApiError (400, 404, 429, 500, 503).
    """
    adapter_id = context.adapter_of(body.model)
    requests = [
        GenerateRequest(
            f"{identity.id}-{i}", ids, adapter_id, params, tenant, body.priority or 0, body.deadline_s
        )
        for i, ids in enumerate(prompts)
    ]
    try:
        stream = await context.engine.submit(requests)
    except UnknownAdapterError as error:  # unloaded a moment ago
        raise context.unknown_model(body.model) from error
    except LimitExceededError as error:
        raise too_many_requests(error) from error
    except ValueError as error:
        raise body.blame(error) from error
    job = Job(requests, params, stream)
    try:
        if body.stream:
            if failed := failure(await stream.peek(), context.engine.death):
                raise failed
            return EventStreamResponse(_sse(job, form, body.include_usage, context), stream)
        return Response((await _collect(job, form, context)).model_dump_json(), media_type="application/json")
    except BaseException:
        stream.close()
        raise


def failure(event: StreamEvent, death: str | None) -> ApiError | None:
    """Why an event ends its request without an answer; None for every other event. `death`: the engine's.

    Clients are told not to send again what would end like this again. Another replica may answer what a dead
    engine or a shutdown ended, this one what early-abort gave up.
    """
    if event.finish_reason not in ("error", "abort"):
        return None
    if death is not None:
        return unavailable(death)
    if event.finish_reason == "error":
        return ApiError(500, "InternalServerError", event.error or "the request failed", headers=NO_RETRY)
    if event.error is None:
        return unavailable("the request was aborted: the server is shutting down")
    return unavailable(
        event.error, NO_RETRY if event.retry_after_s is None else retry_after(event.retry_after_s)
    )


async def _collect(job: Job, form: Form, context: ServerContext) -> BaseModel:
    choices = [Piece() for _ in range(len(job.requests) * job.params.n)]
    async for event in job.stream:
        if error := failure(event, context.engine.death):
            raise error
        choices[job.choice(event)].extend(event, job.params)
        job.count(event)
    return form.whole(choices, job.usage())


async def _sse(job: Job, form: Form, include_usage: bool, context: ServerContext) -> AsyncGenerator[bytes]:
    offsets = [0] * (len(job.requests) * job.params.n)
    exclude = None if include_usage else {"usage"}  # with it, chunks but the last have `"usage": null`

    def frame(chunk: BaseModel) -> bytes:
        return b"data: " + chunk.model_dump_json(exclude=exclude).encode() + b"\n\n"

    try:
        for chunk in form.opening_chunks():
            yield frame(chunk)
        async for event in job.stream:
            if error := failure(event, context.engine.death):
                raise error
            job.count(event)
            if not (event.text or event.logprobs or event.finish_reason):
                continue  # half a character, or what may become a stop string
            choice = job.choice(event)
            piece = Piece(offset=offsets[choice])
            piece.extend(event, job.params)
            yield frame(form.chunk(choice, piece))
            offsets[choice] += (
                sum(len(context.token_text(t)) for t in event.token_ids) if event.logprobs else 0
            )
        if include_usage:
            yield frame(form.usage_chunk(job.usage()))
    except Exception as error:  # the status line is out: say it in the stream
        yield b"data: " + json.dumps(as_api_error(error).envelope()).encode() + b"\n\n"
        if not isinstance(error, ApiError):
            raise
    yield b"data: [DONE]\n\n"


class EventStreamResponse(StreamingResponse):
    """Server-sent events; however it ends, its stream is closed."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes], stream: EventStream) -> None:
        super().__init__(frames, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._frames = frames
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)
        finally:
            self.close()
            await self._frames.aclose()

    def close(self) -> None:
        """Abort what still runs."""
        self._stream.close()


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The result of `work`, which is cancelled (and ClientDisconnect raised) when the client goes away first.

    The request's body must have been read.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    except BaseException:
        task.add_done_callback(_discard)  # it may finish before the cancellation reaches it
        task.cancel()
        raise
    finally:
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _discard(task: asyncio.Task[Response]) -> None:
    if (
        not task.cancelled()
        and task.exception() is None
        and isinstance(response := task.result(), EventStreamResponse)
    ):
        response.close()
