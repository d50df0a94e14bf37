"""The server over the real engine: a tiny Llama with random weights and adapters of mixed ranks."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from slora_jax.config import EngineConfig, ModelConfig
from slora_jax.engine import Engine
from slora_jax.sampling_params import SamplingParams
from slora_jax.server.protocols import EngineLike
from tests.conftest import TINY_CONFIG
from tests.lora.peft_files import write_peft_adapter
from tests.server.live import LiveServer, serve, wait_for
from tests.text.builders import byte_level_backend, write_folder

PROMPTS = ("alpha", "beta and gamma", "délta")
GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, config = tmp_path_factory.mktemp("adapters"), ModelConfig.from_hf(TINY_CONFIG)
    write_peft_adapter(folder / "q", config, {"q_proj": 4, "v_proj": 4}, seed=1, std=0.5)
    write_peft_adapter(folder / "mlp", config, {"up_proj": 9, "down_proj": 9}, seed=2, std=0.5)
    write_peft_adapter(folder / "late", config, {"o_proj": 16}, seed=3, std=0.5)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def engine(
    tiny_model_dir: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Engine:
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    shutil.copytree(tiny_model_dir, folder)
    template = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    write_folder(folder, {"tokenizer_config.json": {"chat_template": template}}, byte_level_backend())
    config = EngineConfig(
        load_format="dummy",
        dtype="float32",
        max_batch_size=4,
        max_step_tokens=16,
        num_pages=256,
        max_model_len=512,
    )
    return Engine.from_pretrained(folder, {"q": adapters["q"], "mlp": adapters["mlp"]}, config)


@pytest.fixture(scope="module")
def expected(engine: Engine, adapters: dict[str, Path]) -> dict[tuple[str, str], str]:
    """Text by (model, prompt), made by the engine itself before a server owns it."""
    engine.load_adapter("late", adapters["late"])
    pairs = [(model, prompt) for model in ("tiny-llama", "q", "mlp", "late") for prompt in PROMPTS]
    names = [None if model == "tiny-llama" else model for model, _ in pairs]
    outputs = engine.generate([prompt for _, prompt in pairs], names, GREEDY)
    engine.unload_adapter("late")
    return {pair: output.text for pair, output in zip(pairs, outputs, strict=True)}


@pytest.fixture(scope="module")
def live(engine: Engine, expected: dict[tuple[str, str], str], broken: Path) -> Iterator[LiveServer]:
    as_served: EngineLike = engine  # the type checker's proof that the engine fits
    with serve(as_served) as live:
        yield live


def test_the_engine_answers_over_http_as_it_does_alone(
    live: LiveServer, engine: Engine, expected: dict[tuple[str, str], str], adapters: dict[str, Path]
) -> None:
    load = {"lora_name": "late", "lora_path": str(adapters["late"])}
    assert live.post("/v1/load_lora_adapter", load).status_code == 200
    assert len({expected[model, PROMPTS[0]] for model in ("tiny-llama", "q", "mlp", "late")}) == 4
    with live.openai() as client:

        def ask(pair: tuple[str, str], stream: bool) -> str:
            if not stream:
                answer = client.completions.create(
                    model=pair[0], prompt=pair[1], max_tokens=12, temperature=0
                )
                return answer.choices[0].text
            chunks = client.completions.create(
                model=pair[0], prompt=pair[1], max_tokens=12, temperature=0, stream=True
            )
            return "".join(chunk.choices[0].text for chunk in chunks)

        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            answers = {pair: pool.submit(ask, pair, i % 2 == 0) for i, pair in enumerate(expected)}
        assert {pair: answer.result() for pair, answer in answers.items()} == expected
    assert live.post("/v1/unload_lora_adapter", {"lora_name": "late"}).status_code == 200
    wait_for(lambda: live.engine.latest_stats.num_running == 0)
    assert live.engine.latest_stats.pages_kv == 0


def test_usage_and_metrics_say_what_the_prefix_cache_saved(live: LiveServer) -> None:
    def samples() -> dict[str, float]:
        lines = [s for s in live.get("/metrics").text.splitlines() if s and not s.startswith("#")]
        return {s.split("{")[0]: float(s.rsplit(" ", 1)[1]) for s in lines}

    before = samples()
    with live.openai() as client:
        request: dict[str, Any] = {"model": "mlp", "max_tokens": 3, "extra_body": {"ignore_eos": True}}
        for hits in (0, 2 * 64):  # 64 tokens of each prompt; one page more would leave none to compute
            answer = client.completions.create(prompt=[[7] * 80, [8] * 70], n=2, **request)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == 150
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == hits
        *_, last = client.chat.completions.create(
            messages=[{"role": "user", "content": "h" * 40}],
            stream=True,
            stream_options={"include_usage": True},
            **request,
        )
        assert last.usage is not None
        assert last.usage.prompt_tokens_details is not None
        assert last.usage.prompt_tokens_details.cached_tokens == 0
    wait_for(lambda: samples()["vllm:num_requests_running"] == 0)
    done = {name: value - before[name] for name, value in samples().items() if name in before}
    assert done["slora:prefix_lookups_total"] == 2 * 4 + 1
    assert done["vllm:prefix_cache_queries_total"] >= 2 * 2 * 150
    assert done["vllm:prefix_cache_hits_total"] >= 2 * 2 * 64
    assert done["slora:prefix_page_evictions_total"] == 0


def test_a_pinned_adapter_says_so(live: LiveServer, engine: Engine) -> None:
    def pinned() -> list[str]:
        return [info.name for info in live.engine.known_adapters if info.pinned]

    assert pinned() == []
    done = live.post("/v1/pin_lora_adapter", {"lora_name": "q"})
    assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'q' pinned successfully.")
    assert pinned() == ["q"]
    assert live.post("/v1/unpin_lora_adapter", {"lora_name": "q"}).status_code == 200
    assert pinned() == []


def test_chat_logprobs_and_n(live: LiveServer) -> None:
    with live.openai() as client:
        answer = client.chat.completions.create(
            model="q",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=5,
            n=2,
            seed=7,
            logprobs=True,
            top_logprobs=3,
            extra_body={"ignore_eos": True},
        )
        again = client.chat.completions.create(
            model="q",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=5,
            n=2,
            seed=7,
            extra_body={"ignore_eos": True},
        )
    assert [c.message.content for c in answer.choices] == [c.message.content for c in again.choices]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 10)
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 5
        for entry in choice.logprobs.content:
            values = [top.logprob for top in entry.top_logprobs]
            assert values == sorted(values, reverse=True)
            assert len(values) == 3
            assert entry.logprob <= values[0] <= 0


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": [9999]}, "prompt", "prompt token 0 is 9999"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "logit_bias names token 9999"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "logit_bias names token -1"),
        ({"stop_token_ids": [9999]}, "stop_token_ids", "stop_token_ids names token 9999"),
        ({"logprobs": 21}, "logprobs", "logprobs 21 is above"),
        ({"prompt": "x" * 600}, "prompt", "maximum context length"),
        ({"messages": [], "logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs 21 is above"),
        ({"messages": [], "logit_bias": {"9999": 1}}, "logit_bias", "logit_bias names token 9999"),
    ],
)
def test_refusals_of_the_engine_name_the_field_of_the_request(
    live: LiveServer, fields: dict[str, Any], param: str, words: str
) -> None:
    if "messages" in fields:
        fields = {**fields, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        answer = live.post("/v1/chat/completions", fields)
    else:
        answer = live.post("/v1/completions", {"prompt": "x", **fields})
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (400, param)
    assert words in error["message"]


def test_adapters_that_are_refused_leave_the_server_well(live: LiveServer, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    refused = live.post("/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": str(tmp_path)})
    assert refused.status_code in (400, 404), refused.text
    missing = live.post("/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": str(tmp_path / "none")})
    assert missing.status_code == 404, missing.text
    assert live.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "assistant", "tool_calls": 5}, "messages[0].tool_calls must be a list"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 100_000}}]},
            "messages[0].tool_calls: arguments are nested too deeply",
        ),
        ({"role": "user"}, "messages[0].content is missing"),
        ({"role": "user", "content": 5}, "messages[0].content: must be a string"),
        ({"content": "x"}, "messages[0].role: Field required"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_malformed_message_is_a_bad_request_that_names_its_field(
    live: LiveServer, path: str, message: dict[str, Any], words: str
) -> None:
    answer = live.post(path, {"messages": [message]})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "messages"
    assert words in error["message"]


_NUMBERS = (  # fields of a completion that are integers; numbers
    ("max_tokens", "min_tokens", "n", "top_k", "seed", "logprobs", "priority"),
    ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "deadline_s"),
)


def _ask(live: LiveServer, field: str, value: str) -> httpx.Response:
    fields = {"model": '"q"', "prompt": "[1]", "max_tokens": "2", field: value}
    content = "{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}"
    headers = {"content-type": "application/json"}
    url = live.url + "/v1/completions"
    return httpx.post(url, content=content.encode(), headers=headers, trust_env=False, timeout=60)


@pytest.mark.parametrize("field", [*_NUMBERS[0], *_NUMBERS[1]])
def test_numbers_are_read_as_vllm_reads_them_and_others_are_refused_by_name(
    live: LiveServer, field: str
) -> None:
    served = {200, 503} if field == "deadline_s" else {200}  # it may have passed
    for good in ("1", "1.0", '"1"', '" 1 "', "1e0", "null"):
        assert _ask(live, field, good).status_code in served, good
    bad = ["[]", "{}", "[1]", '""', '"x"', "NaN", "1e400", "-1e400", f'"{"9" * 5000}"', '"1, 2"', '"0x1"']
    bad += ["1.5", '"1.5"', "1e30", '"1e0"'] if field in _NUMBERS[0] else ['"inf"', '"nan"']
    for value in bad:
        error = _ask(live, field, value).json()["error"]
        assert (error["code"], error["param"]) == (400, field), value
        assert error["message"].startswith(f"{field}: "), value
    for extreme in ("-1", "0", "-0.0", "9" * 40, "1e38", "1e39", "-1e39", "5e-324", str(2**31), str(2**64)):
        assert _ask(live, field, extreme).status_code in served | {400}, extreme
    assert live.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("stop_token_ids", "[3.0]", 200),
        ("stop_token_ids", '["3"]', 200),
        ("stop_token_ids", "[3.5]", 400),
        ("stop_token_ids", "[-1]", 400),
        ("stop_token_ids", f"[{10**30}]", 400),
        ("logit_bias", '{"5": "1.5"}', 200),
        ("logit_bias", '{"5": 1e400}', 400),
        ("logit_bias", '{"x": 1}', 400),
        ("logit_bias", f'{{"{10**30}": 1}}', 400),
        ("prompt", "[1.0]", 400),
        ("prompt", "[true]", 400),
        ("prompt", "[-1]", 400),
        ("prompt", f"[{10**30}]", 400),
    ],
)
def test_token_ids_that_are_no_integers_are_refused(
    live: LiveServer, field: str, value: str, status: int
) -> None:
    assert _ask(live, field, value).status_code == status
    assert live.get("/health").status_code == 200


def _break(folder: Path, how: str) -> None:
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    match how:
        case "no config":
            config.unlink()
        case "no weights":
            weights.unlink()
        case "pickled weights":
            weights.rename(folder / "adapter_model.bin")
        case "a folder in place of weights":
            weights.unlink()
            weights.mkdir()
        case "not JSON":
            config.write_text("{")
        case "a field":
            config.write_text(json.dumps({**json.loads(config.read_text()), "bias": "all"}))
        case "of another base":
            base = {"base_model_name_or_path": str(folder.parent / "base"), "r": 7, "rank_pattern": {}}
            config.write_text(json.dumps({**json.loads(config.read_text()), **base}))
        case "cut short":
            weights.write_bytes(weights.read_bytes()[:200])
        case "gone":
            shutil.rmtree(folder)
        case "touched":
            weights.write_bytes(weights.read_bytes()[::-1])


_WAYS = {  # a way to break an adapter's folder -> what a client is told of it
    "no config": "adapter_config.json is missing",
    "no weights": "adapter_model.safetensors is missing",
    "pickled weights": "adapter_model.bin: pickled weights",
    "a folder in place of weights": "adapter_model.safetensors: not a regular file",
    "not JSON": "adapter_config.json: not valid JSON",
    "a field": "adapter_config.json: field 'bias'",
    "of another base": "adapter_model.safetensors: ",
    "cut short": "adapter_model.safetensors: corrupt or cut short",
    "gone": "",
    "touched": "",
}


@pytest.fixture(scope="module")
def broken(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds adapters that are registered lazily and then broken, each in the way that is its name."""
    root = tmp_path_factory.mktemp("broken")
    for how in _WAYS:
        write_peft_adapter(root / how, ModelConfig.from_hf(TINY_CONFIG), {"q_proj": 4})
        engine.register_adapter(how, os.path.relpath(root / how))
        _break(root / how, how)
    return root


@pytest.mark.parametrize("how", _WAYS)
def test_of_a_broken_adapter_clients_see_the_file_and_never_where_it_lies(
    live: LiveServer, broken: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = os.path.relpath(broken / how)
    answers = [live.post("/v1/load_lora_adapter", {"lora_name": "broken", "lora_path": given})]
    answers += [
        live.post("/v1/completions", {"model": how, "prompt": "x", "max_tokens": 1, "stream": stream})
        for stream in (False, True)
    ]
    assert [answer.status_code for answer in answers] == [404 if how == "gone" else 400, 500, 500]
    for answer in answers:
        message = answer.json()["error"]["message"].replace(given, "GIVEN")
        assert _WAYS[how] in message
        assert str(broken) not in message
    assert str(broken) in caplog.text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_pages(
    live: LiveServer, engine: Engine, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "mlp", "prompt": "x", "max_tokens": 500, "ignore_eos": True, "n": 4, "stream": stream}
    before = live.engine.latest_stats.requests_aborted
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: "
    step, steps = engine.step, iter(range(3))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", lambda: [] if next(steps, None) is None else step())  # never to the end
        with socket.create_connection(live.address) as client:
            client.sendall(f"{head}{len(content)}\r\n\r\n".encode() + content)
            wait_for(lambda: live.engine.latest_stats.num_running > 0)
        wait_for(lambda: engine.stats().requests_aborted > before)
    wait_for(lambda: live.engine.latest_stats.num_running == 0)
    stats = live.engine.latest_stats
    assert stats.pages_kv == 0
    assert stats.pages_free + stats.pages_adapter + stats.pages_cached == stats.pages_total
