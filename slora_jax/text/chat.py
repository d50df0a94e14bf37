"""Chat templates: Jinja programs that ship with a model, rendered in a sandbox as HF renders them."""

from __future__ import annotations

import datetime
import functools
import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

DEFAULT = "default"  # name of the template of a model that has one
TOOL_USE = "tool_use"  # name, where a model has several, of the one for requests with tools

# Tokens that end an assistant's turn in the templates in use; `ChatTemplate.mentions` finds a model's own.
END_OF_TURN_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
)


class ChatTemplate:
    """The templates of one model by name, with the special tokens (`bos_token`, ...) that they may refer to.

    Rendering is thread-safe. A template that does not parse is reported when it is first rendered, so that
    the model still serves plain completions.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        if not templates:
            raise ValueError("ChatTemplate needs at least one template")
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)

    @property
    def text(self) -> str:
        """Source of the template used without tools."""
        return self._source(None)

    def mentions(self, token: str) -> bool:
        """Whether a template writes this token literally."""
        return any(token in source for source in self._templates.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt that the template writes for `messages` (OpenAI's form, see `normalize_messages`).

        Raises ValueError for malformed messages, a template that does not parse, and whatever a template
        raises, with its words (they are meant for the client: "roles must alternate").
        """
        names = {
            **self._special_tokens,
            **(variables or {}),
            "messages": normalize_messages(messages),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _compile(self._source(tools)).render(names)
        except Exception as error:  # the template is the model's program and may raise anything
            raise ValueError(f"chat template: {error}") from error

    def _source(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        if tools and TOOL_USE in self._templates:
            return self._templates[TOOL_USE]
        return self._templates.get(DEFAULT) or next(iter(self._templates.values()))


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: string content, dictionaries for arguments of tool calls, no None.

    Lists of OpenAI text parts are joined with a newline, as vLLM does. Keys whose value is None are dropped,
    since clients send `content: null` beside tool calls and templates would print "None". Raises ValueError
    for messages without a role or without both content and calls, for parts that are not text, and for calls
    whose arguments cannot be read.
    """
    if not messages:
        raise ValueError("messages must hold at least one message")
    return [_normalize_message(i, message) for i, message in enumerate(messages)]


def _normalize_message(i: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages[{i}] must be an object with a string 'role'")
    out = {key: value for key, value in message.items() if value is not None}
    content = out.get("content", "")
    if isinstance(content, list | tuple):
        out["content"] = "\n".join(_part_text(i, part) for part in content)
    elif not isinstance(content, str):
        raise ValueError(f"messages[{i}].content must be a string or a list of text parts")
    calls = out.get("tool_calls")
    if calls:
        if not isinstance(calls, list | tuple):
            raise ValueError(f"messages[{i}].tool_calls must be a list, got {reprlib.repr(calls)}")
        out["tool_calls"] = [_with_parsed_arguments(i, call) for call in calls]
    elif "content" not in out and not out.get("function_call"):
        raise ValueError(f"messages[{i}].content is missing: it must be a string or a list of text parts")
    return out


def _part_text(i: int, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ValueError(f"messages[{i}].content: only text parts are supported, got a part of type {kind!r}")


def _with_parsed_arguments(i: int, call: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI sends arguments as a JSON string; templates print a dictionary (transformers' convention)."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise ValueError(f"messages[{i}].tool_calls: every call must be an object with a 'function'")
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except RecursionError as error:
            raise ValueError(f"messages[{i}].tool_calls: arguments are nested too deeply") from error
        except ValueError as error:  # also an integer of more digits than Python reads
            raise ValueError(f"messages[{i}].tool_calls: arguments are not valid JSON: {error}") from error
    return {**call, "function": function}


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(lineno)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's HTML escapes, in insertion order (transformers' filter of the same name)."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)
