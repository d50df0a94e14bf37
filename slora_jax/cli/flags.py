"""Command line flags made from dataclasses, so that names, defaults and help cannot drift from the API's."""

from __future__ import annotations

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

from slora_jax.config import LIMITS, NamedLimits

SAMPLING_SKIP = ("seed",)  # the engine's --seed is the one of every request that names none
SAMPLING_HELP: Mapping[str, str] = {  # a field of SamplingParams -> its help text
    "n": "continuations of each prompt",
    "max_tokens": "longest output in tokens",
    "min_tokens": "no end before so many tokens",
    "temperature": "0 always takes the likeliest token",
    "top_p": "draw among the likeliest tokens that together have this probability",
    "top_k": "draw among so many likeliest tokens; 0: all",
    "min_p": "drop tokens less likely than this share of the likeliest one",
    "repetition_penalty": "divide the scores of tokens seen in prompt and output; above 1 repeats less",
    "presence_penalty": "subtract from the scores of tokens in the output",
    "frequency_penalty": "subtract from the scores of tokens in the output, each time they occurred",
    "stop": "end before this text; may be given again",
    "stop_token_ids": "end at this token; may be given again",
    "ignore_eos": "go on after the model's end token",
    "include_stop_str_in_output": "keep the stop text in the output",
    "skip_special_tokens": "leave special tokens out of the text",
    "logprobs": "likeliest tokens to report at each position (shown with --json)",
    "logit_bias": "add to a token's score; may be given again",
}

_METAVARS: Mapping[Any, str] = {int: "N", float: "X", str: "TEXT"}
_NAMED = re.compile(
    r"""(?<!\w)(?P<quote>["']).*?(?<!\\)(?P=quote)(?!\w)  # a path, a prompt, a value
    | (?P<none>,?\ or\ None|\ in\ EngineConfig)\b
    | \bleave\ (?P<left>\w+)\ None\b
    | ^(?P<first>[a-z_]+)(?=\ (?:(?:must|may)\ |['\d]))
    | (?<![\w/.'"-])(?P<field>[a-z]+(?:_[a-z]+)+)(?![\w/'"-]|\.\w)""",
    re.VERBOSE,
)
_UNITS: Mapping[str, int] = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def add_flags(
    parser: argparse._ArgumentGroup | argparse.ArgumentParser,
    cls: type[Any],
    help_texts: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    skip: Collection[str] = (),
) -> None:
    """Give `parser` one flag a field of the dataclass `cls`: `max_batch_size` becomes `--max-batch-size`.

    Help comes from the field's metadata or from `help_texts`; `defaults` replaces defaults of fields,
    `skip` leaves fields out.
    """
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        text = field.metadata.get("help") or (help_texts or {}).get(field.name, "")
        default = (defaults or {}).get(field.name, _default(field))
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            default=default,
            help=_help(text, default),
            **_parsing(field.name, hints[field.name]),
        )


def from_flags[T](cls: type[T], args: argparse.Namespace, skip: Collection[str] = ()) -> T:
    """The instance of `cls` that the flags of `add_flags` describe; raises ValueError as `cls` does."""
    hints = typing.get_type_hints(cls)
    values = {name: getattr(args, name) for name in hints if name not in skip}
    for name, value in values.items():
        if isinstance(value, list):
            _check_given_once(name, value)
            values[name] = tuple(value) if typing.get_origin(hints[name]) is tuple else dict(value)
    return cls(**values)


def flag_names(parser: argparse.ArgumentParser) -> frozenset[str]:
    """What a command's flags are called in its parsed arguments; without what it takes by position."""
    return frozenset(action.dest for action in parser._actions if action.option_strings)


def in_flags(text: str, flags: Collection[str], variables: Mapping[str, str] | None = None) -> str:
    """A message of the library with the fields that a command's flags set named as these: `max_batch_size`
    as `--max-batch-size`. `flags` are their names in the parsed arguments, as `flag_names` has them; those
    that an environment variable has set are named as it (`variables`: by field).

    What is None there is left out here, or unset. A field of one word (`seed`) is told from prose where a
    message begins with it, and goes on with "must", "may" or what was given. What is quoted is the user's,
    and left as it is.
    """
    text, variables = re.sub(r"^(?:EngineConfig|ServerConfig): ", "", text), variables or {}

    def flag(name: str) -> str:
        if name in variables:
            return f"environment variable {variables[name]}"
        return "--" + name.replace("_", "-") if name in flags else name

    def replaced(found: re.Match[str]) -> str:
        if found["none"]:
            return ""
        if found["left"] == "it" and text.partition(" ")[0] in variables:
            return "unset it"
        if found["left"]:
            return f"leave {flag(found['left'])} out"
        return flag(found["first"] or found["field"] or found[0])

    return _NAMED.sub(replaced, text)


def _check_given_once(name: str, values: list[Any]) -> None:
    keys = [value[0] for value in values if isinstance(value, tuple)]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"--{name.replace('_', '-')}: '{key}' is given twice; keep one")


def a_path(text: str) -> str:
    """Parse a path or a Hub id. Empty, of a shell's unset variable, it would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("a path must not be empty")
    return text


def name_and_path(text: str) -> tuple[str, str]:
    """Parse `NAME=PATH`."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"expected NAME=PATH, got '{text}'")
    return name, path


def unique_adapters(pairs: list[tuple[str, str]] | None) -> dict[str, str]:
    """Adapters by name; raises ValueError where a name is given twice."""
    adapters: dict[str, str] = {}
    for name, path in pairs or ():
        if name in adapters:
            raise ValueError(
                f"adapter '{name}' is given twice by --adapters: {adapters[name]} and {path}; rename one"
            )
        adapters[name] = path
    return adapters


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING and not isinstance(field.default, tuple):
        return field.default
    return []  # tuples and mappings: flags that may be given again


def _help(text: str, default: Any) -> str:
    text = re.sub(r"\b[a-z]+(?:_[a-z]+)+\b(?!\.)", lambda name: "--" + name[0].replace("_", "-"), text)
    text = text.replace("None:", "default:").replace("%", "%%")
    return text if default is None or default == [] or isinstance(default, bool) else f"{text} (%(default)s)"


def _parsing(name: str, hint: Any) -> dict[str, Any]:
    """The keywords of `add_argument` that read a value of this type."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [t for t in typing.get_args(hint) if t is not types.NoneType]
        hint = members[0] if len(members) == 1 else str
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": typing.get_args(hint)}
    if typing.get_origin(hint) is tuple:
        return {"action": "append"} | _parsing(name, typing.get_args(hint)[0])
    if hint == Mapping[int, float]:
        return {"action": "append", "type": _token_and_bias, "metavar": "TOKEN=X"}
    if hint == Mapping[str, float]:
        return {"action": "append", "type": _name_and_number, "metavar": "NAME=X"}
    if hint == NamedLimits:
        return {"action": "append", "type": _name_and_limits, "metavar": "NAME=LIMIT:N,..."}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if name.endswith("_bytes"):
        return {"type": _bytes, "metavar": "N[KMG]"}
    return {"type": hint, "metavar": "DIR" if name.endswith(("_dir", "_root")) else _METAVARS[hint]}


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.lower())
    if not match:
        raise argparse.ArgumentTypeError(f"expected bytes such as 4096, 512M or 1.5G, got '{text}'")
    return int(float(match[1]) * _UNITS[match[2]])


def _token_and_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected TOKEN=X such as 42=-100, got '{text}'") from None


def _name_and_limits(text: str) -> tuple[str, dict[str, int | None]]:
    """Parse `acme=max-concurrency:8,max-queue:none`."""
    name, _, listed = text.rpartition("=")
    limits: dict[str, int | None] = {}
    try:
        for limit, colon, number in (item.partition(":") for item in listed.split(",")):
            key = limit.strip().replace("-", "_")
            if not (name and colon) or key not in LIMITS or key in limits:
                raise ValueError
            limits[key] = None if number.strip() == "none" else int(number)
    except ValueError:
        known = ", ".join(limit.replace("_", "-") for limit in LIMITS)
        raise argparse.ArgumentTypeError(
            f"expected NAME=LIMIT:N,... such as acme=max-concurrency:8,max-queue:none with some of {known}, "
            f"each once, got '{text}'"
        ) from None
    return name, limits


def _name_and_number(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        return name, float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected NAME=X such as team-a=2, got '{text}'") from None
