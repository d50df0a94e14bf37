"""One map from exceptions to responses, in OpenAI's envelope `{"error": {message, type, param, code}}`.

Types and statuses are vLLM's where it has the case. A handler raises; nothing else builds an error response.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from slora_jax.errors import (
    AdapterError,
    AdapterExistsError,
    LimitExceededError,
    UnknownAdapterError,
    encodable,
    printable,
)

logger = logging.getLogger(__name__)


class EngineDeadError(RuntimeError):
    """The engine thread ended with an error; the process must be restarted."""


class ShuttingDownError(RuntimeError):
    """The server takes no more work."""


class ApiError(Exception):
    """A refusal with its HTTP status, vLLM's error type and, where one is to blame, the request's field."""

    def __init__(
        self,
        status: int,
        type_: str,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.type, self.param = status, type_, param
        self.message = encodable(message)
        self.headers = dict(headers or {})

    def envelope(self) -> dict[str, Any]:
        """The response body; `code` is the HTTP status, as vLLM has it."""
        return {
            "error": {"message": self.message, "type": self.type, "param": self.param, "code": self.status}
        }


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400 BadRequestError; `param` names the field."""
    return ApiError(400, "BadRequestError", message, param)


def too_many_requests(error: LimitExceededError) -> ApiError:
    """429 RateLimitError with Retry-After."""
    return ApiError(429, "RateLimitError", str(error), headers=retry_after(error.retry_after_s))


def unavailable(message: str, headers: Mapping[str, str] | None = None) -> ApiError:
    """503 ServiceUnavailableError, on which clients send a request again unless `headers` are NO_RETRY."""
    return ApiError(503, "ServiceUnavailableError", message, headers=headers)


# OpenAI's clients send what got 408, 409, 429 or a 5xx again, twice, but for answers with this header.
NO_RETRY = {"x-should-retry": "false"}


def retry_after(seconds: float) -> dict[str, str]:
    """The header, in whole seconds and at least one, as clients of OpenAI honour it."""
    return {"retry-after": str(max(1, math.ceil(seconds)))}


def model_not_found(name: str) -> ApiError:
    """404 in vLLM's words."""
    return ApiError(404, "NotFoundError", f"The model `{name}` does not exist.", "model")


_STATUS_TYPES = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
}


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception. Unforeseen ones give a bare 500: their text may hold secrets."""
    match error:
        case ApiError():
            return error
        case ValidationError():
            return _invalid_field(error)
        case UnknownAdapterError():
            return ApiError(404, "NotFoundError", _text(error))
        case AdapterExistsError():
            return ApiError(400, "InvalidUserInput", str(error), "lora_name")
        case AdapterError():
            return bad_request(error.without_path, "lora_path")
        case EngineDeadError() | ShuttingDownError():
            return unavailable(str(error))
        case HTTPException():
            kind = _STATUS_TYPES.get(error.status_code, "BadRequestError")
            return ApiError(error.status_code, kind, error.detail)
        case _:
            return ApiError(
                500, "InternalServerError", "internal server error; the server's log has the reason"
            )


def _invalid_field(error: ValidationError) -> ApiError:
    """The first wrong field, by its place in the request: `messages[0].role: Field required`."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    parts = (f"[{part}]" if isinstance(part, int) else f".{printable(part, 64)}" for part in first["loc"])
    field = "".join(parts).removeprefix(".")
    message = first["msg"].removeprefix("Value error, ")
    return bad_request(f"{field}: {message}" if field else message, str(first["loc"][0]) if field else None)


def _text(error: Exception) -> str:
    """Message of a LookupError, whose str() may be the repr of its argument (KeyError)."""
    return str(error.args[0]) if error.args else str(error)


async def handle(_: Request, error: Exception) -> Response:
    """Starlette's exception handler for everything."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    api_error = as_api_error(error)
    if api_error.status == 500 and not isinstance(error, ApiError):
        logger.error("unforeseen error in a request", exc_info=error)
    headers = api_error.headers | dict(getattr(error, "headers", None) or {})
    if api_error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(api_error.envelope(), status_code=api_error.status, headers=headers)
