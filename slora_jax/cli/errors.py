"""Which errors are the user's to mend: those raised where input is read, never those of a running batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from slora_jax.errors import UnknownAdapterError


class InputError(Exception):
    """Wrong input, told in one line; the error itself is its cause."""


@contextlib.contextmanager
def reading_input() -> Iterator[None]:
    """Turn what the library raises for wrong input into InputError; anything else is a bug and passes."""
    try:
        yield
    except (ValueError, OSError, UnknownAdapterError) as error:
        raise InputError(" ".join(str(error).split())) from error
