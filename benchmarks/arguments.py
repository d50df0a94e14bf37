"""Types of options: argparse refuses what cannot be measured by the option's name, before anything runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from benchmarks.papers import by_popularity
from slora_jax import EngineConfig
from slora_jax.checks import Interval

_KINDS = {int: "an integer", float: "a number"}


def number[T: (int, float)](kind: type[T], limits: Interval) -> Callable[[str], T]:
    """Reads a number within `limits`; ArgumentTypeError says them of any other."""

    def read(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {_KINDS[kind]}, got {text!r}") from None
        if value not in limits:  # as nan is not
            raise argparse.ArgumentTypeError(f"must be {limits}, got {text}")
        return value

    return read


MOST = 10**6
COUNT = number(int, Interval(1, MOST))  # of what is measured
COUNT_OR_NONE = number(int, Interval(0, MOST))  # 0: a case without them
POSITIVE = number(float, Interval(0, MOST, above_low=True))  # seconds, rates, shapes of distributions


def policy(text: str) -> str:
    """A scheduling policy as EngineConfig has it, such as "vtc+cluster"."""
    try:
        return EngineConfig(scheduling_policy=text).scheduling_policy
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def popularity(text: str) -> str:
    """A distribution of adapters as `by_popularity` has it."""
    try:
        by_popularity(text, 1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def xla_option(text: str) -> str:
    """OPTION=VALUE of XLA's compiler."""
    if not text.partition("=")[0] or "=" not in text:
        raise argparse.ArgumentTypeError(f"must be OPTION=VALUE, got {text!r}")
    return text


def add_xla_argument(parser: argparse.ArgumentParser) -> None:
    """`--xla`, whose values are part of a case."""
    parser.add_argument(
        "--xla",
        type=xla_option,
        nargs="+",
        default=[],
        metavar="OPTION=VALUE",
        help="compile steps with these too",
    )
