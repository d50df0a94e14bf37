"""A real uvicorn on a free loopback port, in a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import uvicorn

from slora_jax.server.app import create_app
from slora_jax.server.async_engine import AsyncEngine
from slora_jax.server.config import ServerConfig
from slora_jax.server.protocols import EngineLike


class LiveServer:
    """Where it listens, with clients for it."""

    def __init__(self, url: str, engine: AsyncEngine) -> None:
        self.url = url
        self.address = ("127.0.0.1", httpx.URL(url).port or 0)
        self.engine = engine

    def openai(self, key: str = "any", max_retries: int = 0) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=max_retries, timeout=30)

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30, trust_env=False, **kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, trust_env=False, **kwargs)


@contextlib.contextmanager
def serve(engine: EngineLike, config: ServerConfig | None = None) -> Iterator[LiveServer]:
    """Run the application over `engine` until the block ends; its thread must end, too."""
    bridge = AsyncEngine(engine)
    app = create_app(bridge, config or ServerConfig(drain_seconds=0))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1)
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="uvicorn")
        thread.start()
        try:
            wait_for(lambda: server.started or not thread.is_alive())
            yield LiveServer(f"http://127.0.0.1:{listener.getsockname()[1]}", bridge)
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll until `condition()`; fails after `seconds`, in which only what hangs is not done."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)
