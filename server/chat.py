"""POST /v1/chat/completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from slora_jax.server.context import ServerContext, read_body, tenant_of
from slora_jax.server.generation import Identity, Piece, respond, unless_disconnected
from slora_jax.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    TopLogprob,
    Usage,
)
from slora_jax.server.schemas import ChatCompletionRequest


async def chat_completions(request: Request) -> Response:
    """The assistant's next message in a conversation."""
    body = await read_body(request, ChatCompletionRequest)
    return await unless_disconnected(
        request, _chat(ServerContext.of(request), body, tenant_of(request, body))
    )


async def _chat(context: ServerContext, body: ChatCompletionRequest, tenant: str) -> Response:
    identity = Identity.new("chatcmpl", context.check_model(body.model))
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = body.top_logprobs or 0 if body.logprobs else None
    params = body.sampling_params(max_tokens=max_tokens, logprobs=logprobs)
    context.check_sequences(params.n)
    prompt = await context.encode_chat(body.messages, body.add_generation_prompt, to_run=True)
    context.check_length(len(prompt), max_tokens, "messages", body.own_names.get("max_tokens", "max_tokens"))
    form = ChatForm(context, identity, params.n, body)
    return await respond(context, body, [prompt], params, form, identity, tenant)


@dataclasses.dataclass(frozen=True)
class ChatForm:
    """`chat.completion` and `chat.completion.chunk` objects."""

    context: ServerContext
    identity: Identity
    n: int
    body: ChatCompletionRequest

    def whole(self, choices: Sequence[Piece], usage: Usage) -> ChatCompletion:
        """The response."""
        return ChatCompletion(
            id=self.identity.id,
            created=self.identity.created,
            model=self.identity.model,
            choices=[
                ChatChoice(
                    index=index,
                    message=AssistantMessage(content=piece.text),
                    logprobs=self._logprobs(piece),
                    finish_reason=piece.finish_reason,
                    stop_reason=piece.stop_reason,
                )
                for index, piece in enumerate(choices)
            ],
            usage=usage,
        )

    def opening_chunks(self) -> Iterable[ChatCompletionChunk]:
        """The role, of every choice."""
        for index in range(self.n):
            delta = ChatDelta(role="assistant", content="")
            yield self._chunk([ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)])

    def chunk(self, choice: int, piece: Piece) -> ChatCompletionChunk:
        """What an event brought."""
        return self._chunk(
            [
                ChatChunkChoice(
                    index=choice,
                    delta=ChatDelta(content=piece.text or None),
                    logprobs=self._logprobs(piece),
                    finish_reason=piece.finish_reason,
                    stop_reason=piece.stop_reason,
                )
            ]
        )

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        """The last chunk, without choices."""
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatCompletionChunk:
        identity = self.identity
        return ChatCompletionChunk(
            id=identity.id, created=identity.created, model=identity.model, choices=choices, usage=usage
        )

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        return ChatLogprobs(
            content=[
                ChatLogprob(
                    **self._top(token, entry.logprob).model_dump(),
                    top_logprobs=[
                        self._top(t, p) for t, p in list(entry.top.items())[: self.body.top_logprobs or 0]
                    ],
                )
                for token, entry in zip(piece.token_ids, piece.logprobs, strict=True)
            ]
        )

    def _top(self, token: int, logprob: float) -> TopLogprob:
        text = self.context.token_text(token)
        name = f"token_id:{token}" if self.body.return_tokens_as_token_ids else text
        return TopLogprob(token=name, logprob=logprob, bytes=list(text.encode()))
