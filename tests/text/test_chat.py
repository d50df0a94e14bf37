"""Chat templates: what transformers' environment offers, OpenAI's forms of messages, errors as ValueError."""

from __future__ import annotations

from typing import Any

import pytest

from slora_jax.text.chat import ChatTemplate, normalize_messages
from tests.text.builders import CHATML

USER = {"role": "user", "content": "hi"}


def render(template: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    chat = ChatTemplate({"default": template}, {"bos_token": "<s>", "eos_token": "</s>"})
    return chat.render(messages or [USER], variables=variables)


def test_block_lines_leave_no_blank_lines() -> None:
    chat = ChatTemplate({"default": CHATML}, {})
    one = "<|im_start|>user\nhi<|im_end|>\n\n"  # the newline after the expression stays
    assert chat.render([USER], add_generation_prompt=False) == one
    assert chat.render([USER, USER]) == one * 2 + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        ("{{ {'b': '<é>', 'a': [1]} | tojson }}", '{"b": "<é>", "a": [1]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        (
            "{% set ns = namespace(n=0) %}{% for i in 'ab' %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "2",
        ),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ tools is none }}{{ add_generation_prompt }}", "TrueTrue"),
        ("{{ mood }}", "merry"),
    ],
)
def test_what_templates_may_use(template: str, expected: str) -> None:
    assert render(template, mood="merry") == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
        ("{% if %}", "chat template: Expected an expression"),
        ("{{ messages[0]['content'] + 1 }}", "chat template"),
        ("{{ 1 / 0 }}", "chat template: division by zero"),
        ("{{ messages[0].content.__class__.__mro__ }}", "chat template: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "chat template"),
        ("{{ 'x' + messages[0].name }}", "chat template"),
    ],
)
def test_failures_are_value_errors(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(template)


def test_named_templates_and_tools() -> None:
    chat = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].name }}"}, {})
    assert chat.text == "plain"
    assert chat.render([USER]) == "plain"
    assert chat.render([USER], tools=[{"name": "weather"}]) == "weather"


def test_text_parts_are_joined_and_none_is_dropped() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert normalize_messages([{"role": "user", "content": parts, "name": None}]) == [
        {"role": "user", "content": "one\ntwo"}
    ]


def test_arguments_of_tool_calls_become_dictionaries() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    (message,) = normalize_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message == {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    }
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}  # the caller's is left as it was


_NO_CALLS: tuple[Any, ...] = (5, 0.5, True, "calls", {"function": {}})
_NO_CONTENT: tuple[dict[str, Any], ...] = ({}, {"content": None}, {"content": None, "tool_calls": []})


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "hi"}], "a string 'role'"),
        ([USER, {"role": "user", "content": 5}], r"messages\[1\].content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "part of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "only text parts"),
        ([{"role": "user", "content": ["hi"]}], "part of type 'str'"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "not valid JSON"),
        ([{"role": "assistant", "tool_calls": [1]}], "must be an object with a 'function'"),
        *(
            ([{"role": "assistant", "tool_calls": calls}], r"messages\[0\].tool_calls must be a list, got")
            for calls in _NO_CALLS
        ),
        *(
            ([USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}], message)
            for arguments, message in (
                ("[" * 100_000, r"messages\[1\].tool_calls: arguments are nested too deeply"),
                ('{"a":' * 100_000, r"messages\[1\].tool_calls: arguments are nested too deeply"),
                ("9" * 5000, r"messages\[1\].tool_calls: arguments are not valid JSON"),
            )
        ),
        *(
            ([USER, {"role": role, **content}], r"messages\[1\].content is missing")
            for role in ("user", "system", "assistant", "tool")
            for content in _NO_CONTENT
        ),
    ],
)
def test_malformed_messages(messages: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        normalize_messages(messages)


@pytest.mark.parametrize("depth", [100, 900, 5000, 100_000])
def test_arguments_of_any_depth_are_rendered_or_refused_as_values(depth: int) -> None:
    call = {"function": {"name": "f", "arguments": "[" * depth + "]" * depth}}
    chat = ChatTemplate({"default": "{{ messages[0].tool_calls | tojson }}"}, {})
    try:
        assert "[" * depth in chat.render([{"role": "assistant", "tool_calls": [call]}])
    except ValueError:
        assert depth > 100
