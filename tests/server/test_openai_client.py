"""The official openai client against a live server."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.server.fake_engine import EOS
from tests.server.live import LiveServer


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


@pytest.fixture
def sql(server: LiveServer, adapter_dir: Path) -> Iterator[str]:
    body = {"lora_name": "sql", "lora_path": str(adapter_dir)}
    assert server.post("/v1/load_lora_adapter", body).status_code == 200
    yield "sql"
    server.post("/v1/unload_lora_adapter", {"lora_name": "sql"})


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake-model", prompt="héllo", max_tokens=100)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "fake-model"
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(0, "base:héllo", "stop")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        7,
        12,
        19,
    )


def test_max_tokens_defaults_to_16_and_null_means_the_models_length(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake-model", prompt="x" * 50)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    longest = client.completions.create(
        model="fake-model", prompt="x" * 50, max_tokens=None, extra_body={"ignore_eos": True}
    )
    assert longest.usage is not None
    assert longest.usage.total_tokens == 256


@pytest.mark.parametrize(
    ("prompt", "texts", "prompt_tokens"),
    [
        ("ab", ["base:ab"], 3),
        (["ab", "cd"], ["base:ab", "base:cd"], 6),
        ([97, 98], ["base:ab"], 2),
        ([[97, 98], [99]], ["base:ab", "base:c"], 3),
    ],
)
def test_forms_of_a_prompt(
    client: openai.OpenAI, prompt: list[str] | list[int], texts: list[str], prompt_tokens: int
) -> None:
    answer = client.completions.create(model="fake-model", prompt=prompt)
    assert [choice.text for choice in answer.choices] == texts
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == prompt_tokens


def test_n_numbers_choices_over_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake-model", prompt=["a", "b"], n=3)
    assert [(c.index, c.text) for c in answer.choices] == [(i, f"base:{'ab'[i // 3]}") for i in range(6)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4  # once a prompt
    assert answer.usage.completion_tokens == 6 * 7


def test_streamed_completion_equals_the_whole(client: openai.OpenAI) -> None:
    texts = ["", "", "", ""]
    reasons: list[str | None] = [None] * 4
    usage = None
    with client.completions.create(
        model="fake-model",
        prompt=["héllo wörld 🙂", "zwei"],
        n=2,
        max_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
    ) as chunks:
        for chunk in chunks:
            assert chunk.object == "text_completion"
            usage = chunk.usage
            for choice in chunk.choices:
                assert reasons[choice.index] is None, "nothing comes after the end"
                texts[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason
    assert texts == ["base:héllo wörld 🙂"] * 2 + ["base:zwei"] * 2
    assert reasons == ["stop"] * 4
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (19 + 5, 2 * (24 + 10))


def test_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake-model", prompt="ab", echo=True)
    assert answer.choices[0].text == "abbase:ab"
    chunks = client.completions.create(model="fake-model", prompt=[97], echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abase:a"


def test_stop(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake-model", prompt="ab", stop=":")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("base", "stop")
    by_eos = client.completions.create(model="fake-model", prompt="ab")
    assert by_eos.choices[0].model_extra == {"stop_reason": None}
    assert answer.choices[0].model_extra == {"stop_reason": ":"}
    by_token = client.completions.create(
        model="fake-model", prompt="ab", stop=["x"], extra_body={"stop_token_ids": [ord(":")]}
    )
    assert by_token.choices[0].model_extra == {"stop_reason": ord(":")}


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake-model", prompt="ab", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [*"base:ab", "<eos>"]
    assert logprobs.token_logprobs == [-0.5] * 8
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"b": -0.5, "c": -1.5}
    assert logprobs.text_offset == list(range(8))
    streamed = client.completions.create(model="fake-model", prompt="ab", logprobs=2, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [t for part in parts if part for t in part.tokens or ()] == logprobs.tokens
    assert [o for part in parts if part for o in part.text_offset or ()] == logprobs.text_offset


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake-model",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
    )
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content == "base:[system]Be brief.[user]a\nb[assistant]"
    assert choice.finish_reason == "stop"  # the default length is the model's


def test_streamed_chat_says_its_role_first(client: openai.OpenAI) -> None:
    chunks: list[ChatCompletionChunk] = list(
        client.chat.completions.create(
            model="fake-model", messages=[{"role": "user", "content": "ü"}], n=2, stream=True
        )
    )
    for index in (0, 1):
        deltas = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert deltas[0].delta.role == "assistant"
        assert all(delta.delta.role is None for delta in deltas[1:])
        assert "".join(delta.delta.content or "" for delta in deltas) == "base:[user]ü[assistant]"
        assert deltas[-1].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake-model",
        messages=[{"role": "user", "content": "é"}],
        logprobs=True,
        top_logprobs=2,
        max_completion_tokens=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["b", "a", "s"]
    assert [(t.token, t.logprob) for t in logprobs.content[0].top_logprobs] == [("b", -0.5), ("c", -1.5)]
    assert logprobs.content[0].bytes == [ord("b")]
    bare = client.chat.completions.create(
        model="fake-model", messages=[{"role": "user", "content": "x"}], logprobs=True, max_tokens=2
    )
    assert bare.choices[0].logprobs is not None
    assert [entry.top_logprobs for entry in bare.choices[0].logprobs.content or ()] == [[], []]


def test_model_picks_the_adapter(client: openai.OpenAI, sql: str) -> None:
    answer = client.completions.create(model=sql, prompt="ab")
    assert (answer.model, answer.choices[0].text) == ("sql", "sql:ab")
    chat = client.chat.completions.create(model=sql, messages=[{"role": "user", "content": "x"}])
    assert (chat.model, chat.choices[0].message.content) == ("sql", "sql:[user]x[assistant]")


def test_models(client: openai.OpenAI, sql: str, adapter_dir: Path) -> None:
    base, adapter = client.models.list().data
    assert base.id == "fake-model"
    assert (base.model_extra or {})["parent"] is None
    assert (base.model_extra or {})["max_model_len"] == 256
    assert adapter.id == sql
    assert (adapter.model_extra or {})["parent"] == "fake-model"
    assert (adapter.model_extra or {})["root"] == str(adapter_dir)
    assert client.models.retrieve(sql).id == sql
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="nobody", prompt="x")
    assert caught.value.body == {
        "message": "The model `nobody` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    with pytest.raises(openai.NotFoundError):  # before the first event, hence with a status of its own
        client.completions.create(model="nobody", prompt="x", stream=True)


@pytest.mark.parametrize(
    ("options", "param", "reason"),
    [
        ({"prompt": "x" * 300}, "prompt", "maximum context length is 256 tokens"),
        ({"max_tokens": 300}, "max_tokens", "300 > 256 - 2"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"temperature": -1}, "temperature", "not below 0"),
        ({"top_p": 0}, "top_p", r"in \(0, 1\]"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 2000}, "n", "at most 1024"),
        ({"prompt": []}, "prompt", "must be a string"),
        ({"prompt": ""}, None, None),  # BOS alone: a fine prompt
        ({"prompt": [300]}, "prompt", "outside the vocabulary"),
        ({"prompt": [True]}, "prompt", "must be a string"),
        ({"prompt": ["a", 1]}, "prompt", "must be a string"),
        ({"logprobs": 30}, "logprobs", "logprobs may be at most 20"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"best_of": 4}, "best_of", "not supported"),
        ({"echo": True, "logprobs": 1}, "echo", "not supported"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "integer"),
        ({"stop": [""]}, "stop", "empty string"),
        ({"stop": [1]}, "stop", "valid string"),
        *(({"stop": value}, "stop", "valid array") for value in (0, 1, False, True, {}, {"a": 1}, 0.0)),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ],
)
def test_bad_requests(
    client: openai.OpenAI, options: dict[str, object], param: str | None, reason: str | None
) -> None:
    request = {"model": "fake-model", "prompt": "x", **options}
    if reason is None:
        client.completions.create(**request)  # type: ignore[call-overload]
        return
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        client.completions.create(**request)  # type: ignore[call-overload]
    assert caught.value.param == param
    assert caught.value.type == "BadRequestError"


@pytest.mark.parametrize(
    ("options", "param", "reason"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", "unknown role"),
        ({"messages": [{"content": "x"}]}, "messages", "role: Field required"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "text only"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "maximum context length"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        ({"logprobs": True, "top_logprobs": 30}, "top_logprobs", "^[^_]*top_logprobs may be at most 20"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be at least 1"),
        ({"max_completion_tokens": 300}, "max_completion_tokens", "300 > 256"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1"),
        (
            {"max_completion_tokens": 2, "extra_body": {"min_tokens": 3}},
            "min_tokens",
            "min_tokens 3 must not be above max_completion_tokens 2",
        ),
        ({"user": "x" * 257}, "user", "at most 256 characters"),
        ({"extra_headers": {"X-Tenant": "x" * 257}}, "X-Tenant", "at most 256 characters"),
        ({"extra_body": {"priority": 101}}, "priority", "less than or equal to 100"),
        ({"extra_body": {"deadline_s": 0}}, "deadline_s", "greater than 0"),
    ],
)
def test_bad_chat_requests(
    client: openai.OpenAI, options: dict[str, object], param: str, reason: str
) -> None:
    request = {"model": "fake-model", "messages": [{"role": "user", "content": "x"}], **options}
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        client.chat.completions.create(**request)  # type: ignore[call-overload]
    assert caught.value.param == param


def test_what_asks_for_nothing_and_what_is_unknown_is_ignored(client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="fake-model",
        messages=[{"role": "user", "content": "x"}],
        response_format={"type": "text"},
        tool_choice="none",
        user="someone",
        temperature=None,
        n=None,
        stop=None,
        extra_body={"a_field_of_tomorrow": {"x": 1}, "tools": []},
    )


def test_a_request_that_fails_alone(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="poisoned prompt"):
        client.completions.create(model="fake-model", prompt="poison")
    with pytest.raises(openai.APIError, match="poisoned prompt"):
        list(client.completions.create(model="fake-model", prompt="poison", stream=True))
    assert client.completions.create(model="fake-model", prompt="x").choices[0].text == "base:x"


def test_fifty_at_once(client: openai.OpenAI, sql: str) -> None:
    def ask(i: int) -> tuple[str, str]:
        model = ("fake-model", sql)[i % 2]
        if i % 3:
            return model, client.completions.create(model=model, prompt=f"p{i}").choices[0].text
        chunks = client.completions.create(model=model, prompt=f"p{i}", stream=True)
        return model, "".join(chunk.choices[0].text for chunk in chunks)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(50)))
    for i, (model, text) in enumerate(answers):
        assert text == f"{'base' if model == 'fake-model' else model}:p{i}"


def test_token_ids_in_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake-model", prompt="a", logprobs=0, extra_body={"return_tokens_as_token_ids": True}
    )
    assert answer.choices[0].logprobs is not None
    assert (answer.choices[0].logprobs.tokens or [])[-1] == f"token_id:{EOS}"
