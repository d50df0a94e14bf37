"""HTTP beyond the openai client: clients that leave, a dead engine, odd bodies, probes, metrics."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from slora_jax.server.config import ServerConfig
from slora_jax.server.schemas import CompletionRequest
from tests.server.fake_engine import ByteTokenizer, FakeEngine
from tests.server.live import LiveServer, serve, wait_for

LONG = {"prompt": "x" * 100, "max_tokens": None, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_goes_away_frees_its_pages(path: str, stream: bool) -> None:
    engine = FakeEngine(
        tokenizer=ByteTokenizer(), step_seconds=0.02, max_model_len=10**6
    )  # hours for one answer
    body: dict[str, object] = {**LONG, "stream": stream, "n": 3}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    with serve(engine) as live:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        with socket.create_connection(live.address, timeout=60) as client:
            client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            if stream:
                assert client.recv(4096).startswith(b"HTTP/1.1 200")
            wait_for(lambda: engine.stats().pages_kv > 0)
        wait_for(lambda: engine.stats().num_running == 0)
        assert engine.stats().requests_aborted == 1
        assert engine.stats().pages_kv == 0
        assert live.get("/health").status_code == 200
        aborted = 'vllm:request_success_total{finished_reason="abort",model_name="fake-model"} 3.0'
        wait_for(lambda: aborted in live.get("/metrics").text)


def test_a_dead_engine_answers_503() -> None:
    engine = FakeEngine(tokenizer=ByteTokenizer(), step_seconds=0.01, fail_at_step=10)
    with serve(engine) as live:
        client = live.openai()
        assert live.get("/health").status_code == 200
        errors: list[BaseException] = []

        def ask(stream: bool) -> None:
            try:
                answer = client.completions.create(
                    model="fake-model", prompt="x" * 50, max_tokens=100, stream=stream
                )
                list(answer)
            except openai.APIError as error:
                errors.append(error)

        threads = [threading.Thread(target=ask, args=(i % 2 == 0,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == 6
        assert all("injected failure" in str(error) for error in errors)
        early = [error for error in errors if isinstance(error, openai.APIStatusError)]
        assert len(early) >= 3  # those that do not stream
        for error in early:  # another replica may answer
            assert (error.status_code, error.response.headers.get("x-should-retry")) == (503, None)
        health = live.get("/health")
        assert health.status_code == 503
        assert "injected failure" in health.json()["error"]["message"]
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="injected failure") as caught:
                client.completions.create(model="fake-model", prompt="x", stream=stream)
            assert caught.value.status_code == 503
        assert _samples(live)["slora:engine_up"] == 0
        client.close()


@pytest.mark.parametrize(
    ("content", "headers", "status", "words"),
    [
        (b"{", {}, 400, "Invalid JSON"),
        (b"", {}, 400, "Invalid JSON"),
        (b"\xff\xfe", {}, 400, "Invalid JSON"),
        (b"[1]", {}, 400, "object"),
        (b"null", {}, 400, "object"),
        (b"[" * 4_000, {}, 400, "Invalid JSON"),
        (b'{"prompt": "\\ud800"}', {}, 400, "Invalid JSON"),
        (b'{"prompt": "x", "temperature": NaN}', {}, 400, "finite"),
        (b'{"prompt": "x", "seed": ' + b"9" * 40 + b"}", {}, 400, "64-bit"),
        (b"{}", {}, 400, "prompt: Field required"),
        (b'{"prompt": "x", "model": 5}', {}, 400, "model: Input should be a valid string"),
        (b'{"prompt": "x", "model": ""}', {}, 400, "model: must not be empty"),
        (b'{"prompt": "x", "model": "a\\nb"}', {}, 404, "does not exist"),
        (b'{"prompt": "x", "model": "a\\ud800"}', {}, 400, "Invalid JSON"),
        (b'{"prompt": "x", "model": "org/none"}', {}, 404, "The model `org/none` does not exist."),
        (b'{"prompt": "x", "n": "many"}', {}, 400, "n: Input should be a valid integer"),
        (b'{"prompt": "x"}', {"content-type": "text/plain"}, 415, "application/json"),
        (b'{"prompt": "' + b"x" * 5000 + b'"}', {}, 413, "4096 bytes"),
    ],
)
def test_odd_bodies(
    small: LiveServer, content: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    headers = {"content-type": "application/json", **headers}
    url = f"{small.url}/v1/completions"
    response = httpx.post(url, content=content, headers=headers, timeout=60, trust_env=False)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert words.lower() in error["message"].lower()


@pytest.fixture(scope="module")
def small() -> Iterator[LiveServer]:
    config = ServerConfig(max_body_bytes=4096, drain_seconds=0, served_model_name="house-name")
    with serve(FakeEngine(tokenizer=ByteTokenizer()), config) as live:
        yield live


def test_a_body_without_a_declared_length_is_limited_too(small: LiveServer) -> None:
    headers = {"content-type": "application/json"}
    chunks = (b" " * 1000 for _ in range(10))
    url = f"{small.url}/v1/completions"
    response = httpx.post(url, content=chunks, headers=headers, timeout=60, trust_env=False)
    assert response.status_code == 413


_SIZED, _CHUNKED = "Content-Length: 200", "Transfer-Encoding: chunked"


@pytest.mark.parametrize("header", [_SIZED, _CHUNKED])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/load_lora_adapter"]
)
def test_a_body_that_trickles_is_cut_off(path: str, header: str) -> None:
    config = ServerConfig(body_timeout_seconds=0.4, drain_seconds=0)
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n{header}\r\n\r\n"
    with serve(FakeEngine(tokenizer=ByteTokenizer()), config) as live:
        with socket.create_connection(live.address, timeout=0.05) as client:
            started, answer = time.monotonic(), b""
            client.sendall(head.encode())
            while b"408" not in answer:  # it never stops for longer than 0.05 s
                assert time.monotonic() - started < 60
                with contextlib.suppress(ConnectionError):  # it is cut off: the answer is there to be read
                    client.sendall(b" " if header == _SIZED else b"1\r\n \r\n")
                with contextlib.suppress(TimeoutError):
                    answer += client.recv(4096)
            assert time.monotonic() - started > 0.3
            client.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                while more := client.recv(4096):
                    answer += more
        reply, _, body = answer.partition(b"\r\n\r\n")
        assert b"connection: close" in reply.lower()
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("RequestTimeoutError", 408)
        assert "within 0.4 s" in error["message"]
        assert live.post("/v1/completions", {"prompt": "x"}).status_code == 200


MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/v1/chat/completions", {"messages": [MESSAGE] * 4097}, "messages", "at most 4096 items"),
        ("/tokenize", {"messages": [MESSAGE] * 4097}, "messages", "at most 4096 items"),
        ("/v1/completions", {"prompt": "x", "stop": ["x"] * 129}, "stop", "at most 128 entries, got 129"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [1] * 129}, "stop_token_ids", "at most 128"),
        (
            "/v1/completions",
            {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(1025)), 1)},
            "logit_bias",
            "at most 1024 entries, got 1025",
        ),
        (
            "/v1/completions",
            {"prompt": "x", **{f"new{i}": 1 for i in range(257)}},
            None,
            "257 unknown fields; at most 256",
        ),
    ],
)
def test_what_a_body_holds_many_of_is_limited(
    server: LiveServer, path: str, fields: dict[str, Any], param: str | None, words: str
) -> None:
    answer = server.post(path, fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


class Gate:
    """Holds up whoever passes it until it is opened."""

    def __init__(self) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self._reached.set()
        assert self._opened.wait(60)

    def reached(self) -> None:
        assert self._reached.wait(60)

    def open(self) -> None:
        self._opened.set()


class GatedTokenizer(ByteTokenizer):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self._gate()
        return super().encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self._gate()
        return super().decode(ids, skip_special_tokens)


def _answers_health_meanwhile(live: LiveServer, gate: Gate, path: str, body: dict[str, Any]) -> int:
    """The status of a request, during which, at the gate, /health answered."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(live.post, path, body)
        gate.reached()
        try:
            assert live.get("/health").status_code == 200
        finally:
            gate.open()
        return answer.result().status_code


def test_health_answers_while_a_large_body_is_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, validate = Gate(), CompletionRequest.model_validate_json

    def validate_at_the_gate(content: bytes) -> CompletionRequest:
        gate()
        return validate(content)

    monkeypatch.setattr(CompletionRequest, "model_validate_json", validate_at_the_gate)
    body = {"prompt": "x" * 300_000}
    with serve(FakeEngine(tokenizer=ByteTokenizer())) as live:
        assert _answers_health_meanwhile(live, gate, "/v1/completions", body) == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x"}),
        ("/tokenize", {"messages": [MESSAGE], "return_token_strs": True}),
        ("/detokenize", {"tokens": [65]}),
        ("/v1/completions", {"prompt": [65], "echo": True}),
        ("/v1/chat/completions", {"messages": [MESSAGE]}),
    ],
)
def test_health_answers_while_a_long_text_is_tokenized(path: str, body: dict[str, Any]) -> None:
    gate = Gate()
    with serve(FakeEngine(tokenizer=GatedTokenizer(gate))) as live:
        assert _answers_health_meanwhile(live, gate, path, body) == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 300}),
        ("/v1/completions", {"prompt": ["x", "x" * 300], "stream": True}),
        ("/v1/chat/completions", {"messages": [MESSAGE, MESSAGE | {"content": "x" * 300}]}),
    ],
)
def test_a_text_that_is_surely_too_long_is_refused_before_it_is_tokenized(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "encode", lambda *_: pytest.fail("it is tokenized"))
    with serve(FakeEngine(tokenizer=ByteTokenizer())) as live:
        answer = live.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prompt" if "prompt" in body else "messages")
    assert "maximum context length is 256 tokens. However, your request has at least 3" in error["message"]


def test_tokenize_counts_what_is_too_long_to_be_run(server: LiveServer) -> None:
    assert server.post("/tokenize", {"prompt": "x" * 300, "add_special_tokens": False}).json()["count"] == 300


def test_served_model_name(small: LiveServer) -> None:
    assert small.get("/v1/models").json()["data"][0]["id"] == "house-name"
    assert small.post("/v1/completions", {"prompt": "x"}).json()["model"] == "house-name"
    assert small.post("/v1/completions", {"prompt": "x", "model": "house-name"}).status_code == 200
    assert small.post("/v1/completions", {"prompt": "x", "model": "fake-model"}).status_code == 404


def test_a_model_without_a_name_is_not_taken_for_the_base(server: LiveServer) -> None:
    answer = server.get("/v1/models/")
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
    assert "fake-model" not in answer.text
    assert server.get("/v1/models/fake-model").status_code == 200


def test_unknown_routes_and_methods_have_the_envelope(server: LiveServer) -> None:
    assert server.get("/nothing").json()["error"]["type"] == "NotFoundError"
    wrong = server.get("/v1/completions")
    assert wrong.status_code == 405
    assert wrong.json()["error"]["code"] == 405


def test_probes(server: LiveServer) -> None:
    assert server.get("/health").status_code == 200
    assert server.get("/ping").status_code == 200
    assert server.post("/ping", {}).status_code == 200
    assert server.get("/version").json()["version"]


def test_the_stream_is_server_sent_events(server: LiveServer) -> None:
    response = server.post("/v1/completions", {"prompt": "é", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert all(frame.startswith("data: ") for frame in frames[:-1])
    assert frames[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "base:é"
    assert "usage" not in chunks[0]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


def test_tokenize_and_detokenize(server: LiveServer) -> None:
    tokens = server.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert tokens == {
        "count": 4,
        "max_model_len": 256,
        "tokens": [256, 104, 195, 169],
        "token_strs": ["<bos>", "h", "\ufffd", "\ufffd"],
    }
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "<bos>hé"}
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()
    assert server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"] == "[user]x[assistant]"
    assert server.post("/tokenize", {}).status_code == 400
    assert server.post("/tokenize", {"prompt": "x", "model": "nobody"}).status_code == 404
    assert server.post("/detokenize", {"tokens": [5000]}).status_code == 400
    assert server.post("/detokenize", {"tokens": [-1]}).status_code == 400


def test_a_model_without_a_tokenizer_takes_token_ids() -> None:
    with serve(FakeEngine()) as live:
        assert live.post("/v1/completions", {"prompt": [97]}).json()["choices"][0]["text"] == "base:a"
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/completions", {"prompt": [97], "echo": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/tokenize", {"prompt": "x"}),
        ):
            response = live.post(path, body)
            assert response.status_code == 400
            assert "no tokenizer" in response.json()["error"]["message"]


def test_metrics(adapter_dir: Path) -> None:
    engine = FakeEngine(tokenizer=ByteTokenizer(), max_batch_size=2)
    engine.paused = True
    with serve(engine) as live:
        for name in ("a", "b"):
            live.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(adapter_dir)})
        threads = [
            threading.Thread(target=live.post, args=("/v1/completions", {**LONG, "model": model}))
            for model in ("a", "a", "b")
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: _samples(live).get("vllm:num_requests_waiting") == 1.0)
        busy = _samples(live)
        assert busy["vllm:num_requests_running"] == 2.0
        assert 0 < busy["vllm:kv_cache_usage_perc"] < 1
        assert busy["vllm:gpu_cache_usage_perc"] == busy["vllm:kv_cache_usage_perc"]
        engine.paused = False
        for thread in threads:
            thread.join()
        wait_for(lambda: _samples(live)["vllm:num_requests_running"] == 0)
        done = _samples(live)
    assert done["vllm:prompt_tokens_total"] == 3 * 101
    assert done["vllm:generation_tokens_total"] == 3 * 155
    assert done["vllm:num_preemptions_total"] == 0
    loads = {name: value for name, value in done.items() if name.startswith("slora:adapter")}
    assert loads == loads | {
        "slora:adapters{reading}": 1,
        "slora:adapters{staged}": 2,
        "slora:adapters{refused}": 16,
        "slora:adapter_host_bytes": 300,
        "slora:adapter_host_hits_total": 4,
        "slora:adapter_host_misses_total": 5,
        "slora:adapter_prefetches_useful_total": 6,
        "slora:adapter_prefetches_wasted_total": 7,
        "slora:adapter_guesses_total": 30,
        "slora:adapter_guesses_useful_total": 14,
        "slora:adapter_guesses_wasted_total": 15,
        "slora:adapter_staged_bytes_total": 800,
        "slora:adapter_wait_seconds_total": 0.9,
        "slora:adapter_load_failures_total": 10,
        "slora:adapter_loads_cancelled_total": 13,
        "slora:adapter_read_seconds_total": 1.1,
        "slora:adapter_copy_seconds_total": 1.2,
    }
    assert done["vllm:request_success_total{length}"] == 3
    assert done["vllm:time_to_first_token_seconds_count"] == 3
    assert done["vllm:time_per_output_token_seconds_count"] == 3 * 154
    assert done["vllm:inter_token_latency_seconds_count"] == 3 * 154
    assert done["vllm:e2e_request_latency_seconds_count"] == 3
    assert done["slora:engine_step_seconds_count"] == done["slora:engine_steps_total"]
    assert done["slora:pages{free}"] == 998
    assert done["slora:adapters{resident}"] == 2
    assert done["slora:adapter_loads_total"] == 2
    assert done["slora:adapter_evictions_total"] == 0


def test_the_gateways_metric_names_running_and_waiting_adapters(adapter_dir: Path) -> None:
    engine = FakeEngine(tokenizer=ByteTokenizer(), max_batch_size=1)
    engine.paused = True
    with serve(engine) as live:
        live.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": str(adapter_dir)})
        live.post("/v1/load_lora_adapter", {"lora_name": "b", "lora_path": str(adapter_dir)})
        threads = []
        for model in ("a", "b"):
            body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True, "model": model}
            threads.append(threading.Thread(target=live.post, args=("/v1/completions", body)))
            threads[-1].start()
            wait_for(lambda: engine.stats().num_running + engine.stats().num_waiting == len(threads))

        def labels() -> dict[str, str]:
            asked = time.time()
            families = text_string_to_metric_families(live.get("/metrics").text)
            (sample,) = next(f for f in families if f.name == "vllm:lora_requests_info").samples
            assert asked <= sample.value <= time.time()
            return sample.labels

        wanted = {"max_lora": "1", "running_lora_adapters": "a", "waiting_lora_adapters": "b"}
        wait_for(lambda: labels() == wanted)
        engine.paused = False
        for thread in threads:
            thread.join()
        wait_for(lambda: labels()["running_lora_adapters"] == "")


def _samples(live: LiveServer) -> dict[str, float]:
    """Value by name; labels other than the model's are appended in braces."""
    response = live.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    out = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model_name"]
            out[sample.name + (f"{{{','.join(labels)}}}" if labels else "")] = sample.value
    return out
