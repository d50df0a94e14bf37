"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from slora_jax.server.context import ServerContext, read_body, tenant_of
from slora_jax.server.generation import Identity, Piece, respond, unless_disconnected
from slora_jax.server.responses import Completion, CompletionChoice, CompletionLogprobs, Usage
from slora_jax.server.schemas import CompletionRequest


async def completions(request: Request) -> Response:
    """Continue one or many prompts, given as text or as token ids."""
    body = await read_body(request, CompletionRequest)
    return await unless_disconnected(
        request, _complete(ServerContext.of(request), body, tenant_of(request, body))
    )


async def _complete(context: ServerContext, body: CompletionRequest, tenant: str) -> Response:
    identity = Identity.new("cmpl", context.check_model(body.model))
    params = body.sampling_params(max_tokens=body.max_tokens, logprobs=body.logprobs)
    context.check_sequences(len(body.prompt) * params.n)
    texts = [p for p in body.prompt if isinstance(p, str)]  # all or none
    prompts = body.prompt
    if texts:
        prompts = await context.encode(texts, body.add_special_tokens, to_run=True)
    for ids in prompts:
        context.check_length(len(ids), body.max_tokens, "prompt")
    echo: list[str] = []
    if body.echo:
        decode = context.tokenizer.decode
        echo = texts or await asyncio.to_thread(lambda: [decode(ids) for ids in prompts])
    form = CompletionForm(context, identity, echo, params.n, body)
    return await respond(context, body, prompts, params, form, identity, tenant)


@dataclasses.dataclass(frozen=True)
class CompletionForm:
    """`text_completion` objects. `echo` has a prompt's text for every prompt, or is empty."""

    context: ServerContext
    identity: Identity
    echo: list[str]
    n: int
    body: CompletionRequest

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Completion:
        """The response, with the prompt before each text where `echo` asks for it."""
        return self._completion(
            [self._choice(i, piece, self._echo(i)) for i, piece in enumerate(choices)], usage
        )

    def opening_chunks(self) -> Iterable[Completion]:
        """The prompts, if they are to be echoed."""
        for i in range(len(self.echo) * self.n):
            yield self._completion([self._choice(i, Piece(), self._echo(i))])

    def chunk(self, choice: int, piece: Piece) -> Completion:
        """What an event brought."""
        return self._completion([self._choice(choice, piece)])

    def usage_chunk(self, usage: Usage) -> Completion:
        """The last chunk, without choices."""
        return self._completion([], usage)

    def _echo(self, choice: int) -> str:
        return self.echo[choice // self.n] if self.echo else ""

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        identity = self.identity
        return Completion(
            id=identity.id, created=identity.created, model=identity.model, choices=choices, usage=usage
        )

    def _choice(self, index: int, piece: Piece, before: str = "") -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=before + piece.text,
            logprobs=self._logprobs(piece) if self.body.logprobs is not None else None,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )

    def _logprobs(self, piece: Piece) -> CompletionLogprobs:
        out = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        offset = piece.offset
        for token, entry in zip(piece.token_ids, piece.logprobs, strict=True):
            text = self._token(token)
            top = dict(list(entry.top.items())[: self.body.logprobs])
            out.tokens.append(text)
            out.token_logprobs.append(entry.logprob)
            out.top_logprobs.append({self._token(t): p for t, p in top.items()} | {text: entry.logprob})
            out.text_offset.append(offset)
            offset += len(self.context.token_text(token))
        return out

    def _token(self, token: int) -> str:
        return f"token_id:{token}" if self.body.return_tokens_as_token_ids else self.context.token_text(token)
