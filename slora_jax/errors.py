"""The errors a caller may want to tell apart; each message names what, where and the fix."""

import os
from collections.abc import Iterable

_SHOWN = 8  # names in a message


class CheckpointError(ValueError):
    """A model that cannot be loaded: file, tensor or field, and why."""


class AdapterError(ValueError):
    """An adapter folder that is refused: the file in it (or the folder), key or field, and why.

    Its text begins with the path of that file or folder. `without_path` names the file alone: whoever asks
    over a network need not know how this machine's folders are called.
    """

    def __init__(
        self,
        reason: str,
        *,
        file: str | os.PathLike[str] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        assert (file is None) != (folder is None), "an adapter's error is of a file or of its folder"
        super().__init__(f"{file or folder}: {reason}")
        self.without_path = reason if file is None else f"{os.path.basename(file)}: {reason}"


def reason_without_path(error: BaseException) -> str:
    """Why an adapter could not be read, for clients: nothing of what an error may say of this machine."""
    match error:
        case AdapterError():
            return error.without_path
        case FileNotFoundError():
            return "its folder is gone, or a file of it: put it back, or load the adapter in place"
        case OSError():
            return error.strerror or type(error).__name__
        case _:
            return f"{type(error).__name__}; the log has the reason"


def printable(text: object, limit: int | None = None) -> str:
    """What files are called, or a client sent, for terminals, logs and answers: one line, cut at `limit`
    characters, with what a terminal might obey, and what no encoding has, as Python escapes it.
    """
    given = str(text)
    shown = given if limit is None or len(given) <= limit else f"{given[:limit]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def encodable(text: object) -> str:
    """The same text, but what no encoding has, of a file whose name is not UTF-8, as Python escapes it."""
    return str(text).encode("utf-8", "backslashreplace").decode()


def some_of(names: Iterable[str]) -> str:
    """The first few, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more if every else "none"


class PromptError(ValueError):
    """A prompt of several that cannot be served, for which none was queued: its place among them, and why."""

    def __init__(self, prompt_index: int, reason: str) -> None:
        super().__init__(f"prompts[{prompt_index}]: {reason}")
        self.prompt_index, self.reason = prompt_index, reason


class AdapterExistsError(ValueError):
    """An adapter of this name is registered already; unload it first or load with `replace=True`."""


class UnknownAdapterError(LookupError):
    """No adapter of this name is registered."""


class LimitExceededError(RuntimeError):
    """A tenant or an adapter is at a limit of its queue or rate; the same request may be served later.

    `limit` is the field of EngineConfig that says so, such as "tenant_max_queue".
    """

    def __init__(self, message: str, retry_after_s: float, limit: str) -> None:
        super().__init__(message)
        self.retry_after_s, self.limit = retry_after_s, limit
