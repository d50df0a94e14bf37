"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's words; and the like to pin and unpin."""

from __future__ import annotations

import logging
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from slora_jax.errors import (
    AdapterError,
    AdapterExistsError,
    UnknownAdapterError,
    printable,
    reason_without_path,
)
from slora_jax.lora.peft_config import CONFIG_FILE
from slora_jax.lora.peft_folder import WEIGHTS_FILE
from slora_jax.lora.registry import check_adapter_name
from slora_jax.server.context import ServerContext, read_body
from slora_jax.server.errors import ApiError, bad_request
from slora_jax.server.schemas import LoadLoraRequest, PinLoraRequest, UnloadLoraRequest

logger = logging.getLogger(__name__)


async def load_lora_adapter(request: Request) -> Response:
    """Read, check and register an adapter; with `load_inplace` it replaces one of the same name."""
    context = ServerContext.of(request)
    body = await read_body(request, LoadLoraRequest)
    name = body.lora_name
    if not name or not body.lora_path:
        raise ApiError(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
    _check_name(name)
    if name == context.base_name:
        message = f"'{name}' is the name of the base model; choose another name for the adapter"
        raise ApiError(400, "InvalidUserInput", message, "lora_name")
    if not body.load_inplace and context.engine.known_adapter(name) is not None:
        raise _already_loaded(name)  # before its files are read; the engine has the last word
    path = _adapter_path(body.lora_path, context.config.adapter_root)
    try:
        info = await context.engine.load_adapter(name, path, replace=body.load_inplace)
    except AdapterExistsError as error:
        raise _already_loaded(name) from error
    except (OSError, ValueError) as error:
        logger.warning(
            "refused to load adapter '%s' from %s: %s", name, printable(path, 500), printable(error, 500)
        )
        raise _refused(body.lora_path, context.config.adapter_root, error) from error
    logger.info("loaded adapter '%s' (generation %d) from %s", name, info.generation, printable(path, 500))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora_adapter(request: Request) -> Response:
    """Unregister an adapter; requests that run on it finish."""
    context = ServerContext.of(request)
    body = await read_body(request, UnloadLoraRequest)
    if not body.lora_name:
        raise ApiError(400, "InvalidUserInput", "'lora_name' needs to be provided.", "lora_name")
    try:
        await context.engine.unload_adapter(body.lora_name)
    except UnknownAdapterError as error:
        raise _not_found(body.lora_name) from error
    logger.info("unloaded adapter '%s'", body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def pin_lora_adapter(request: Request) -> Response:
    """Keep an adapter in the pool from its next use on."""
    return await _set_pinned(request, True)


async def unpin_lora_adapter(request: Request) -> Response:
    """Let an adapter give way when nobody uses it."""
    return await _set_pinned(request, False)


async def _set_pinned(request: Request, pinned: bool) -> Response:
    context = ServerContext.of(request)
    name = (await read_body(request, PinLoraRequest)).lora_name
    if not name:
        raise ApiError(400, "InvalidUserInput", "'lora_name' needs to be provided.", "lora_name")
    try:
        await context.engine.pin_adapter(name, pinned)
    except UnknownAdapterError as error:
        raise _not_found(name) from error
    except ValueError as error:  # too many pages would be pinned
        raise bad_request(str(error), "lora_name") from error
    done = "pinned" if pinned else "unpinned"
    logger.info("%s adapter '%s'", done, name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' {done} successfully.")


def _refused(given: str, root: object, error: OSError | ValueError) -> ApiError:
    """Why an adapter was not loaded, in terms of the path as the client gave it."""
    match error:
        case FileNotFoundError():
            message = (
                f"No adapter found for {given}: it must be a folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
                + ("" if root is None else ", given by its path in the server's --adapter-root")
            )
            return ApiError(404, "NotFoundError", message, "lora_path")
        case OSError():
            return bad_request(f"cannot read {given}: {reason_without_path(error)}", "lora_path")
        case AdapterError():
            return bad_request(f"{given}: {error.without_path}", "lora_path")
        case _:  # it does not fit this engine; says sizes and limits
            return bad_request(str(error), "lora_path")


def _not_found(name: str) -> ApiError:
    """404; raises 400 for what is no adapter's name."""
    _check_name(name)
    return ApiError(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.", "lora_name")


def _already_loaded(name: str) -> ApiError:
    return ApiError(
        400,
        "InvalidUserInput",
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
        "set 'load_inplace' to True.",
        "lora_name",
    )


def _check_name(name: str) -> None:
    try:
        check_adapter_name(name)
    except ValueError as error:
        raise ApiError(400, "InvalidUserInput", f"lora_name: {error}", "lora_name") from error


def _adapter_path(given: str, root: object) -> Path:
    """The folder to read. With a root: it and every file in it, symlinks resolved, must lie inside (else
    ApiError).
    """
    if "\0" in given:
        raise bad_request("lora_path must not hold a NUL character", "lora_path")
    if root is None:
        return Path(given)
    assert isinstance(root, Path)
    try:
        path = (root / given).resolve()
        inside = path.is_relative_to(root)
        if inside and path.is_dir():
            inside = all(entry.resolve().is_relative_to(root) for entry in path.iterdir())
    except (OSError, RuntimeError) as error:  # a loop of symlinks, a name too long, no permission
        raise bad_request(f"lora_path '{given}' cannot be resolved", "lora_path") from error
    if not inside:
        raise bad_request(
            f"lora_path '{given}' is outside the folder that adapters may be loaded from", "lora_path"
        )
    return path
