"""`ServerConfig`: what the HTTP server serves, to whom, and within which limits."""

from __future__ import annotations

import dataclasses
import os
import reprlib
from pathlib import Path

from slora_jax.checks import Interval, as_text, check_fields

_LONGEST = 1e9  # seconds
_TEXTS = ("served_model_name", "api_key", "admin_api_key")


def _number[T](default: T, limits: Interval) -> T:
    return dataclasses.field(default=default, metadata={"limits": limits})


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
    max_body_bytes: int = _number(16 << 20, Interval(1))
    # Within which all of a body must have come.
    body_timeout_seconds: float = _number(60.0, Interval(0, _LONGEST, above_low=True))
    max_sequences_per_request: int = _number(1024, Interval(1))  # prompts * n
    # Without a step while work is queued: /health says 503; 0: never.
    watchdog_seconds: float = _number(300.0, Interval(0, _LONGEST))
    drain_seconds: float = _number(30.0, Interval(0, _LONGEST))  # for running requests, after SIGTERM

    def __post_init__(self) -> None:
        try:
            check_fields(self)
            for name in _TEXTS:
                if getattr(self, name) is not None:
                    as_text(name, getattr(self, name))
        except ValueError as error:
            raise ValueError(f"ServerConfig: {error}") from None
        for name in _TEXTS:
            if getattr(self, name) == "":
                raise ValueError(f"ServerConfig: {name} must not be empty; leave it None to turn it off")
        if self.api_key is not None and self.api_key == self.admin_api_key:
            raise ValueError("ServerConfig: admin_api_key must differ from api_key, which every client knows")
        if not isinstance(self.adapter_root, str | os.PathLike | None):
            raise ValueError(
                f"ServerConfig: adapter_root must be a path or None, got {reprlib.repr(self.adapter_root)}"
            )
        if self.adapter_root is not None:
            given = os.fspath(self.adapter_root)
            if not given:
                raise ValueError("ServerConfig: adapter_root must not be empty; leave it None for any folder")
            try:
                root = Path(given).resolve()
                found = root.is_dir()
            except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name too long, a NUL
                raise ValueError(
                    f"ServerConfig: adapter_root {reprlib.repr(given)} cannot be looked into: {error}"
                ) from error
            if not found:
                raise ValueError(f"ServerConfig: adapter_root '{given}' is not a folder; create it")
            object.__setattr__(self, "adapter_root", root)
