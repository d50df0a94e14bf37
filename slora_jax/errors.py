"""The errors a caller may want to tell apart; each message names what, where and the fix."""


class CheckpointError(ValueError):
    """A model that cannot be loaded: file, tensor or field, and why."""


class AdapterError(ValueError):
    """An adapter folder that is refused: file, key or field, and why."""


class AdapterExistsError(ValueError):
    """An adapter of this name is registered already; unload it first or load with `replace=True`."""


class UnknownAdapterError(LookupError):
    """No adapter of this name is registered."""


class LimitExceededError(RuntimeError):
    """A tenant or an adapter is at a limit of its queue or rate; the same request may be served later."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
