"""Regexes of module paths from files that are not trusted, refused where matching one could take too long.

`re` backtracks, and holds the GIL while it does: a regex such as `(.+)+X` would stop the process. In how many
ways a regex can match a text bounds its steps, and is found from its syntax tree.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from re import _constants, _parser  # type: ignore[attr-defined]  # the tree has no public door
from typing import Any, NamedTuple

_LONGEST_REGEX = 10_000  # characters: every module of a model, joined by '|'
_LONGEST_PATH = 40  # characters of model.layers.123.self_attn.q_proj, and some
MOST_WAYS = 300_000  # of the regexes that a path is held against
_TOO_MANY = MOST_WAYS + 1  # exact numbers may have millions of digits


class _Ways(NamedTuple):
    """At most factor * C(_LONGEST_PATH + repeats, repeats) ways: repeats without a limit share the text."""

    factor: int
    repeats: int

    @property
    def total(self) -> int:
        return self.factor * math.comb(_LONGEST_PATH + self.repeats, self.repeats)


_ONE = _Ways(1, 0)


def check_module_regex(regex: str) -> int:
    """In how many ways `regex` may match a module's path.

    Raises ValueError, which says why, where it is no regex or these are more than MOST_WAYS.
    """
    if len(regex) > _LONGEST_REGEX:
        raise ValueError(f"a regular expression of {len(regex)} characters: at most {_LONGEST_REGEX}")
    try:
        re.compile(regex)
        ways = _sequence(_parser.parse(regex))
    except (re.error, OverflowError) as error:
        raise ValueError(f"is not a valid regular expression: {error}") from error
    except RecursionError as error:
        raise ValueError("is not a valid regular expression: its groups are nested too deeply") from error
    if ways.total > MOST_WAYS:
        raise ValueError(
            "could take too long to match: a repeat in a repeated group, as in (.+)+, or too many repeats "
            "match one path in very many ways"
        )
    return ways.total


def _sequence(items: Iterable[Any]) -> _Ways:
    factor, repeats = 1, 0
    for op, argument in items:
        ways = _item(op, argument)
        factor, repeats = min(factor * ways.factor, _TOO_MANY), repeats + ways.repeats
    return _Ways(factor, repeats)


def _item(op: Any, argument: Any) -> _Ways:
    match op:
        case _constants.MAX_REPEAT | _constants.MIN_REPEAT | _constants.POSSESSIVE_REPEAT:
            return _repeat(*argument)
        case _constants.BRANCH:
            return _branch(argument[1])
        case _constants.SUBPATTERN:
            return _sequence(argument[-1])
        case _constants.ATOMIC_GROUP:
            return _sequence(argument)
        case _constants.ASSERT | _constants.ASSERT_NOT:
            return _sequence(argument[1])
        case _constants.GROUPREF_EXISTS:
            return _branch([argument[1], argument[2] or []])
        case _:  # one character, a position or a group's text again
            return _ONE


def _repeat(least: int, most: int, body: Any) -> _Ways:
    once = _sequence(body)
    times = min(most, max(least, _LONGEST_PATH))
    if once == _ONE:
        if times < most and least <= 1:
            return _Ways(1, 1)
        # `re` counts up to `least` even where nothing is left to match.
        may_be_empty = body.getwidth()[0] == 0
        return _Ways(max(times - least + 1, least if may_be_empty else 1), 0)
    counted = min(times, 32)  # two ways, so often, are too many
    factor = once.factor**counted * (times - least + 1)
    return _Ways(min(factor, _TOO_MANY), once.repeats * counted)


def _branch(branches: list[Any]) -> _Ways:
    literals = [_literal(branch) for branch in branches]
    if None not in literals:
        texts = sorted(text for text in literals if text is not None)
        if not any(later.startswith(text) for text, later in itertools.pairwise(texts)):
            return _ONE  # whatever the text, one of them matches at most
    ways = [_sequence(branch) for branch in branches]
    return _Ways(sum(w.factor for w in ways), max(w.repeats for w in ways))


def _literal(items: Iterable[Any]) -> str | None:
    """The one text that a branch matches, without regard to case, or None where there are more."""
    pairs = list(items)
    if all(op is _constants.LITERAL for op, _ in pairs):
        return "".join(chr(code) for _, code in pairs).casefold()
    return None
