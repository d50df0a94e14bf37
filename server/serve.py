"""`run_server`: an engine behind uvicorn until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from slora_jax.checks import as_text
from slora_jax.server.app import create_app
from slora_jax.server.async_engine import AsyncEngine
from slora_jax.server.config import ServerConfig
from slora_jax.server.protocols import EngineLike

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 10  # for clients to read their last events, once the engine has drained


def run_server(
    engine_factory: Callable[[], EngineLike],
    host: str = "127.0.0.1",
    port: int = 8000,
    config: ServerConfig | None = None,
    *,
    log_level: str = "info",
) -> None:
    """Serve on `host:port` (port 0: any free one, logged) until a signal, then drain; blocks.

    The port is bound before `engine_factory` runs, so that a taken port fails (OSError) in a second and not
    after the model has been loaded; connections are answered once it has. Errors of the factory are raised
    here.
    """
    config = config or ServerConfig()
    if not as_text("host", host):
        raise ValueError("host must not be empty, which is every address: 0.0.0.0 or :: says so")
    if not 0 <= port < 2**16:
        raise ValueError(f"port must be in [0, 65535], got {port}")
    with _listen(host, port) as listener:
        engine = AsyncEngine(engine_factory())
        gc.collect()
        gc.freeze()  # what lives as long as the server is not walked again: a pause in the middle of a step
        _warn_if_exposed(host, config)
        logger.info("serving on http://%s:%d", host, listener.getsockname()[1])
        uvicorn_config = uvicorn.Config(
            create_app(engine, config),
            log_level=log_level,
            timeout_graceful_shutdown=round(config.drain_seconds + _ANSWER_SECONDS),
            lifespan="on",
            ws="none",
        )
        server = _Server(uvicorn_config, engine, config.drain_seconds)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again once it has shut down
            server.run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket; raises OSError naming the option that is wrong."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host has such a part
        used = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        fix = "choose another --port" if used else "check --host and --port"
        raise OSError(f"{getattr(error, 'strerror', None) or error}; {fix}") from error


class _Server(uvicorn.Server):
    """A uvicorn server whose engine drains, and aborts what is left, before open connections are cut.

    uvicorn by itself cancels requests at its deadline and only then runs the lifespan's end: clients would
    get a bare 500 in place of the answer to their aborted request.
    """

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, drain_seconds: float) -> None:
        super().__init__(config)
        self._engine, self._drain_seconds = engine, drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, drain the engine, let every client read its last event; a second Ctrl-C aborts what
        runs, and waits for no client.
        """
        logger.info(
            "shutting down: requests that run have %g s to end (--drain-seconds); Ctrl-C aborts them",
            self._drain_seconds,
        )
        draining = asyncio.create_task(self._engine.shutdown(self._drain_seconds))
        forcing = asyncio.create_task(self._abort_when_forced())
        await super().shutdown(sockets)
        await draining
        forcing.cancel()
        if self.force_exit:
            await self.lifespan.shutdown()  # uvicorn leaves it out, and then logs that it was cancelled

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As uvicorn's, which would raise each signal again at the end: a second one only forces it."""
        if not self.should_exit:
            super().handle_exit(sig, frame)
        elif sig == signal.SIGINT:
            self.force_exit = True

    async def _abort_when_forced(self) -> None:
        while not self.force_exit:
            await asyncio.sleep(0.1)
        self._engine.abort_all()


def _warn_if_exposed(host: str, config: ServerConfig) -> None:
    """Adapters can be loaded from any folder that the server may read: say so before others can reach it."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and config.admin_routes and config.api_key is None and config.admin_api_key is None:
        logger.warning(
            "anyone who reaches %s may load and unload adapters: set an admin API key or turn the routes off",
            host,
        )
