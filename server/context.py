"""`ServerContext`: what every route needs, made once by `create_app` and kept in `app.state.context`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence

from pydantic import BaseModel
from starlette.requests import Request

from slora_jax.checks import MAX_TENANT_CHARACTERS
from slora_jax.request import DEFAULT_TENANT
from slora_jax.server.async_engine import AsyncEngine
from slora_jax.server.config import ServerConfig
from slora_jax.server.errors import ApiError, bad_request, model_not_found
from slora_jax.server.metrics import ServerMetrics
from slora_jax.server.protocols import ChatTokenizer
from slora_jax.server.schemas import ChatMessage, SamplingBody

_AT_ONCE_BYTES = 256 << 10  # a larger body is validated in a worker thread: it must not hold up other streams


@dataclasses.dataclass(frozen=True)
class ServerContext:
    """Shared by all requests of an application; no state of its own."""

    engine: AsyncEngine
    config: ServerConfig
    metrics: ServerMetrics

    @staticmethod
    def of(request: Request) -> ServerContext:
        """The context of the application that got this request."""
        context = request.app.state.context
        assert isinstance(context, ServerContext)
        return context

    @property
    def base_name(self) -> str:
        """What clients call the base model."""
        return self.config.served_model_name or self.engine.model_name

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a request's `model` names, None for the base (or no name)."""
        return None if model in (None, self.base_name) else model

    def unknown_model(self, model: str | None) -> ApiError:
        """404: neither the base nor a loaded adapter."""
        return model_not_found(self.base_name if model is None else model)

    def check_model(self, model: str | None) -> str:
        """The name to echo; raises ApiError 404 if it was unknown when adapters last changed."""
        name = self.adapter_of(model)
        if name is not None and self.engine.known_adapter(name) is None:
            raise self.unknown_model(model)
        return name or self.base_name

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Raises ApiError 400 for a model without one."""
        if self.engine.tokenizer is None:
            raise bad_request("this model has no tokenizer: send token ids to /v1/completions")
        return self.engine.tokenizer

    async def encode(
        self, texts: Sequence[str], add_special_tokens: bool, *, to_run: bool = False
    ) -> list[list[int]]:
        """Token ids of texts, in a worker thread: a long text must not hold up other streams. Of those that
        are `to_run`, ApiError 400 for one that is surely too long for the model.
        """
        tokenizer = self.tokenizer

        def encode() -> list[list[int]]:
            if to_run:
                for text in texts:
                    self._check_text(text, "prompt")
            return [tokenizer.encode(text, add_special_tokens) for text in texts]

        try:
            return await asyncio.to_thread(encode)
        except ValueError as error:
            raise bad_request(str(error), "prompt") from error

    async def encode_chat(
        self, messages: Sequence[ChatMessage], add_generation_prompt: bool, *, to_run: bool = False
    ) -> list[int]:
        """Token ids of a conversation in the model's template, as `encode` has them; raises ApiError 400
        where the template refuses.
        """
        tokenizer = self.tokenizer

        def render() -> list[int]:
            turns = [message.model_dump(exclude_none=True) for message in messages]
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=add_generation_prompt)
            if to_run:
                self._check_text(text, "messages")
            return tokenizer.encode(text, False)  # the template writes its own BOS

        try:
            return await asyncio.to_thread(render)
        except ValueError as error:
            raise bad_request(str(error), "messages") from error

    def token_text(self, token_id: int) -> str:
        """One token as text (U+FFFD for a part of a character)."""
        if self.engine.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.decode([token_id], False)

    def check_sequences(self, count: int) -> None:
        """Raise ApiError 400 for more sequences (prompts times n) than a request may have."""
        limit = self.config.max_sequences_per_request
        if count > limit:
            raise bad_request(f"prompts * n is {count}; at most {limit} sequences a request", "n")

    def check_length(
        self, num_prompt_tokens: int, max_tokens: int | None, param: str, max_tokens_param: str = "max_tokens"
    ) -> None:
        """Raise ApiError 400 naming the limit for an empty prompt or one that leaves too little room; the
        params are the request's names of the prompt and of `max_tokens`.
        """
        limit = self.engine.max_model_len
        if num_prompt_tokens == 0:
            raise bad_request(f"{param} is empty", param)
        if num_prompt_tokens >= limit:
            raise self._too_long(str(num_prompt_tokens), param)
        if max_tokens is not None and num_prompt_tokens + max_tokens > limit:
            raise bad_request(
                f"'max_tokens' or 'max_completion_tokens' is too large: {max_tokens}. This model's maximum "
                f"context length is {limit} tokens and your request has {num_prompt_tokens} input tokens "
                f"({max_tokens} > {limit} - {num_prompt_tokens}).",
                max_tokens_param,
            )

    def _check_text(self, text: str, param: str) -> None:
        fewest = self.tokenizer.fewest_tokens(text)
        if fewest >= self.engine.max_model_len:
            raise self._too_long(f"at least {fewest}", param)

    def _too_long(self, num_tokens: str, param: str) -> ApiError:
        limit = self.engine.max_model_len
        return bad_request(
            f"This model's maximum context length is {limit} tokens. However, your request has "
            f"{num_tokens} input tokens. Please reduce the length of the input {param}.",
            param,
        )


def tenant_of(request: Request, body: SamplingBody) -> str:
    """Who pays: the header X-Tenant (a gateway sets it, where clients may not choose), else `user`.

    The header is UTF-8, or Latin-1 where it is not. Raises ApiError 400 for one that is too long.
    """
    header = request.headers.get("x-tenant", "")
    with contextlib.suppress(UnicodeDecodeError):
        header = header.encode("latin-1").decode()  # Starlette takes every header for Latin-1
    if len(header) > MAX_TENANT_CHARACTERS:
        raise bad_request(f"X-Tenant may have at most {MAX_TENANT_CHARACTERS} characters", "X-Tenant")
    return header or body.user or DEFAULT_TENANT


async def read_body[B: BaseModel](request: Request, schema: type[B]) -> B:
    """The checked JSON body. Raises ApiError: 415 (other content type), 413 (too large), 408 (too slow), 400
    (pydantic's reasons).
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if (
        content_type != "application/json"
    ):  # also keeps web pages of other origins from posting without a preflight
        message = "Unsupported Media Type: only 'application/json' is allowed; set the Content-Type header"
        raise ApiError(415, "UnsupportedMediaTypeError", message)
    config = ServerContext.of(request).config
    limit = config.max_body_bytes
    too_large = ApiError(413, "RequestTooLargeError", f"the body is larger than {limit} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(config.body_timeout_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
    except TimeoutError as error:
        message = f"the body did not arrive within {config.body_timeout_seconds:g} s; send it at once"
        raise ApiError(408, "RequestTimeoutError", message, headers={"connection": "close"}) from error
    if len(body) <= _AT_ONCE_BYTES:
        return schema.model_validate_json(bytes(body))
    return await asyncio.to_thread(schema.model_validate_json, bytes(body))
