"""`ServerConfig`: what the HTTP server serves, to whom, and within which limits."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Frozen; a wrong value raises ValueError with the fix. Sizes in bytes, times in seconds.

    Keys are compared with `Authorization: Bearer KEY`. With an `api_key` but no `admin_api_key` the adapter
    routes answer 403: whoever may ask the model must not thereby be able to make the server read folders.
    """

    served_model_name: str | None = None  # of the base in `model`; None: the engine's model_name
    api_key: str | None = None  # of /v1/*, /tokenize, /detokenize; None: open
    admin_routes: bool = True  # /v1/(un)load_lora_adapter and /v1/(un)pin_lora_adapter exist at all
    admin_api_key: str | None = None  # of the admin routes
    adapter_root: str | os.PathLike[str] | None = None  # adapters must lie in it; relative paths start there
    max_body_bytes: int = 16 << 20
    body_timeout_seconds: float = 60.0  # within which all of a body must have come
    max_sequences_per_request: int = 1024  # prompts * n
    watchdog_seconds: float = 300.0  # without a step while work is queued: /health says 503; 0: never
    drain_seconds: float = 30.0  # running requests may finish for so long after SIGTERM

    def __post_init__(self) -> None:
        for name in ("served_model_name", "api_key", "admin_api_key"):
            if getattr(self, name) == "":
                raise ValueError(f"ServerConfig: {name} must not be empty; leave it None to turn it off")
        if self.api_key is not None and self.api_key == self.admin_api_key:
            raise ValueError("ServerConfig: admin_api_key must differ from api_key, which every client knows")
        for name in ("max_body_bytes", "max_sequences_per_request"):
            if getattr(self, name) < 1:
                raise ValueError(f"ServerConfig: {name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.body_timeout_seconds < math.inf:
            raise ValueError(
                f"ServerConfig: body_timeout_seconds must be above 0, got {self.body_timeout_seconds}"
            )
        for name in ("watchdog_seconds", "drain_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"ServerConfig: {name} must not be negative, got {getattr(self, name)}")
        if self.adapter_root is not None:
            root = Path(self.adapter_root).resolve()
            if not root.is_dir():
                raise ValueError(
                    f"ServerConfig: adapter_root '{self.adapter_root}' is not a folder; create it"
                )
            object.__setattr__(self, "adapter_root", root)
