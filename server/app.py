"""`create_app`: the HTTP surface over an `AsyncEngine`, in OpenAI's and vLLM's conventions."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib.metadata
import logging
from collections.abc import AsyncIterator, Container

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from slora_jax.errors import encodable
from slora_jax.outputs import AdapterInfo
from slora_jax.server import errors
from slora_jax.server.admin import (
    load_lora_adapter,
    pin_lora_adapter,
    unload_lora_adapter,
    unpin_lora_adapter,
)
from slora_jax.server.async_engine import AsyncEngine
from slora_jax.server.chat import chat_completions
from slora_jax.server.completions import completions
from slora_jax.server.config import ServerConfig
from slora_jax.server.context import ServerContext, read_body
from slora_jax.server.errors import ApiError, EngineDeadError, ShuttingDownError
from slora_jax.server.metrics import ServerMetrics
from slora_jax.server.responses import Detokenized, ModelCard, ModelList, Tokens
from slora_jax.server.schemas import DetokenizeRequest, TokenizeRequest
from slora_jax.server.watchdog import watch

logger = logging.getLogger(__name__)

_HANDLED = (ApiError, ValidationError, HTTPException, EngineDeadError, ShuttingDownError, ClientDisconnect)


def check_base_name(base_name: str, adapters: Container[str]) -> None:
    """Raise ValueError where an adapter has the base model's name, by which no request could ask for it."""
    if base_name in adapters:
        raise ValueError(
            f"adapter '{base_name}' has the name of the base model, which would hide it: name it "
            "otherwise, or set served_model_name"
        )


def create_app(engine: AsyncEngine, config: ServerConfig | None = None) -> Starlette:
    """An ASGI application; its lifespan starts the engine and drains it. `engine` must not have been started.

    The engine's latencies go to the application's own metrics registry (`app.state.context.metrics`). Raises
    ValueError where an adapter has the base model's name: no request could ask for it.
    """
    config = config or ServerConfig()
    metrics = ServerMetrics(config.served_model_name or engine.model_name, engine.max_model_len)
    metrics.watch(engine)
    engine.observer = metrics
    context = ServerContext(engine, config, metrics)
    check_base_name(context.base_name, {info.name for info in engine.known_adapters})

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        watchdog = None
        if config.watchdog_seconds:
            watchdog = asyncio.create_task(watch(engine, config.watchdog_seconds))
        try:
            yield
        finally:
            if watchdog is not None:
                watchdog.cancel()
            await engine.shutdown(config.drain_seconds)

    app = Starlette(
        routes=_routes(config),
        lifespan=lifespan,
        exception_handlers={kind: errors.handle for kind in (*_HANDLED, Exception)},
    )
    app.router.redirect_slashes = False
    app.state.context = context
    return app


def _routes(config: ServerConfig) -> list[BaseRoute]:
    """Every route with the key that it wants; probes and scrapers carry none."""
    user = [Middleware(RequireKey, key=config.api_key)] if config.api_key else []
    routes: list[BaseRoute] = [
        Route("/v1/completions", completions, methods=["POST"], middleware=user),
        Route("/v1/chat/completions", chat_completions, methods=["POST"], middleware=user),
        Route("/v1/models", models, middleware=user),
        Route("/v1/models/{model:path}", model, middleware=user),
        Route("/tokenize", tokenize, methods=["POST"], middleware=user),
        Route("/detokenize", detokenize, methods=["POST"], middleware=user),
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version),
        Route("/metrics", metrics_page),
    ]
    if config.admin_routes:
        open_to_all = config.api_key is None and config.admin_api_key is None
        admin = [] if open_to_all else [Middleware(RequireKey, key=config.admin_api_key, who="admin ")]
        routes += [
            Route("/v1/load_lora_adapter", load_lora_adapter, methods=["POST"], middleware=admin),
            Route("/v1/unload_lora_adapter", unload_lora_adapter, methods=["POST"], middleware=admin),
            Route("/v1/pin_lora_adapter", pin_lora_adapter, methods=["POST"], middleware=admin),
            Route("/v1/unpin_lora_adapter", unpin_lora_adapter, methods=["POST"], middleware=admin),
        ]
    return routes


class RequireKey:
    """Middleware of a route: 401 without `Authorization: Bearer <key>`; 403 for all where no key is set."""

    def __init__(self, app: ASGIApp, key: str | None, who: str = "") -> None:
        self._app = app
        self._key = key
        self._who = who

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        request = Request(scope)
        if error := self._refusal(request):
            response = await errors.handle(request, error)
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> ApiError | None:
        if self._key is None:
            message = "this needs an admin API key, and the server was started without one"
            return ApiError(403, "PermissionDeniedError", message)
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._key.encode()):
            return None
        message = f"missing or wrong {self._who}API key: send 'Authorization: Bearer KEY'"
        return ApiError(401, "AuthenticationError", message)


def _json(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def _card(context: ServerContext, info: AdapterInfo | None) -> ModelCard:
    limit = context.engine.max_model_len
    if info is None:
        return ModelCard(
            id=context.base_name, root=context.engine.model_name, parent=None, max_model_len=limit
        )
    return ModelCard(id=info.name, root=encodable(info.path), parent=context.base_name, max_model_len=limit)


async def models(request: Request) -> Response:
    """The base, then the adapters that new requests may name."""
    context = ServerContext.of(request)
    cards = [_card(context, None)]
    cards += [_card(context, info) for info in context.engine.known_adapters]
    return _json(ModelList(data=cards))


async def model(request: Request) -> Response:
    """One of them."""
    context = ServerContext.of(request)
    name = request.path_params["model"]
    if name == context.base_name:
        return _json(_card(context, None))
    info = context.engine.known_adapter(name)
    if info is None:
        raise context.unknown_model(name)
    return _json(_card(context, info))


async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of a conversation in the model's template."""
    context = ServerContext.of(request)
    body = await read_body(request, TokenizeRequest)
    context.check_model(body.model)
    if body.messages:
        ids = await context.encode_chat(body.messages, body.add_generation_prompt)
    else:
        (ids,) = await context.encode([body.prompt or ""], body.add_special_tokens)

    def answer() -> Response:
        texts = [context.token_text(t) for t in ids] if body.return_token_strs else None
        limit = context.engine.max_model_len
        return _json(Tokens(count=len(ids), max_model_len=limit, tokens=ids, token_strs=texts))

    return await asyncio.to_thread(answer)


async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens included."""
    context = ServerContext.of(request)
    body = await read_body(request, DetokenizeRequest)
    context.check_model(body.model)
    tokenizer = context.tokenizer

    def answer() -> Response:
        if bad := [t for t in body.tokens if t >= tokenizer.vocab_size]:
            raise errors.bad_request(f"token id {bad[0]} is outside the vocabulary", "tokens")
        return _json(Detokenized(prompt=tokenizer.decode(body.tokens, False)))

    return await asyncio.to_thread(answer)


async def health(request: Request) -> Response:
    """200 while the engine serves; 503 with the reason while it completes no step, and after its end."""
    context = ServerContext.of(request)
    engine, limit = context.engine, context.config.watchdog_seconds
    if engine.death is not None:
        raise EngineDeadError(engine.death)
    if not engine.accepting:
        raise ShuttingDownError("the server is shutting down")
    if limit and (seconds := engine.stalled_seconds) > limit:
        raise errors.unavailable(
            f"no step has completed for {seconds:.0f} s though requests wait; the log says what is under way"
        )
    return Response()


async def version(request: Request) -> Response:
    """The version of this package."""
    return JSONResponse({"version": importlib.metadata.version("slora-jax")})


async def metrics_page(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(ServerContext.of(request).metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})
