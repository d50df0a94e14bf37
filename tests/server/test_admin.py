"""Loading and unloading adapters over HTTP: vLLM's words, keys, and which folders may be read."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import threading
import urllib.parse
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from slora_jax.outputs import StreamEvent
from slora_jax.server.app import create_app
from slora_jax.server.async_engine import AsyncEngine
from slora_jax.server.config import ServerConfig
from tests.lora.names import NO_NAMES
from tests.server.fake_engine import ByteTokenizer, FakeEngine
from tests.server.live import LiveServer, serve, wait_for

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def error_of(live: LiveServer, path: str, body: Any) -> tuple[int, str, str]:
    response = live.post(path, body)
    error = response.json()["error"]
    assert error["code"] == response.status_code
    return response.status_code, error["type"], error["message"]


def test_load_and_unload_in_vllms_words(server: LiveServer, adapter_dir: Path) -> None:
    body = {"lora_name": "words", "lora_path": str(adapter_dir)}
    loaded = server.post(LOAD, body)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'words' added successfully.")
    assert loaded.headers["content-type"].startswith("text/plain")
    status, kind, message = error_of(server, LOAD, body)
    assert (status, kind) == (400, "InvalidUserInput")
    assert message.startswith("The lora adapter 'words' has already been loaded.")
    assert server.post(LOAD, {**body, "load_inplace": True}).status_code == 200
    unloaded = server.post(UNLOAD, {"lora_name": "words"})
    assert (unloaded.status_code, unloaded.text) == (
        200,
        "Success: LoRA adapter 'words' removed successfully.",
    )
    wanted = (404, "NotFoundError", "The lora adapter 'words' cannot be found.")
    assert error_of(server, UNLOAD, {"lora_name": "words"}) == wanted
    assert server.post("/v1/completions", {"model": "words", "prompt": "x"}).status_code == 404


@pytest.mark.parametrize("path", ["/v1/pin_lora_adapter", "/v1/unpin_lora_adapter"])
def test_pins_of_names_that_are_not_there_are_refused(server: LiveServer, path: str) -> None:
    wanted = (404, "NotFoundError", "The lora adapter 'nobody' cannot be found.")
    assert error_of(server, path, {"lora_name": "nobody"}) == wanted
    assert error_of(server, path, {})[:2] == (400, "InvalidUserInput")
    assert error_of(server, path, {"lora_name": 5})[:2] == (400, "BadRequestError")


@pytest.mark.parametrize("name", [*(name for name in NO_NAMES if name != "\ud800"), b"\\ud800", b"\xff"])
@pytest.mark.parametrize("path", [LOAD, UNLOAD, "/v1/pin_lora_adapter", "/v1/unpin_lora_adapter"])
def test_what_is_no_name_is_a_bad_request_everywhere(
    server: LiveServer, adapter_dir: Path, path: str, name: str | bytes
) -> None:
    as_json = json.dumps(name).encode() if isinstance(name, str) else b'"' + name + b'"'
    body = b'{"lora_name": %s, "lora_path": %s}' % (as_json, json.dumps(str(adapter_dir)).encode())
    headers = {"content-type": "application/json"}
    response = httpx.post(server.url + path, content=body, headers=headers, timeout=60, trust_env=False)
    assert response.status_code == 400, response.text
    if isinstance(name, str):
        assert response.json()["error"]["param"] in ("lora_name", None)
        assert "lora_name" in response.json()["error"]["message"]
    else:
        assert "Invalid JSON" in response.json()["error"]["message"]
    assert server.engine.known_adapters == ()


@pytest.mark.parametrize(
    ("body", "status", "kind", "words"),
    [
        ({}, 400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "x", "lora_path": ""}, 400, "InvalidUserInput", "must be provided"),
        ({"lora_name": "x", "lora_path": "/no/such/folder"}, 404, "NotFoundError", "/no/such/folder"),
        ({"lora_name": "x", "lora_path": "a\0b"}, 400, "BadRequestError", "NUL"),
        (
            {"lora_name": "a,b", "lora_path": "p"},
            400,
            "InvalidUserInput",
            "lora_name: an adapter's name",
        ),
        ({"lora_name": "", "lora_path": "p"}, 400, "InvalidUserInput", "must be provided"),
        ({"lora_name": "fake-model", "lora_path": "p"}, 400, "InvalidUserInput", "base model"),
        ({"lora_name": 5, "lora_path": "p"}, 400, "BadRequestError", "lora_name"),
    ],
)
def test_refused_loads(server: LiveServer, body: object, status: int, kind: str, words: str) -> None:
    assert error_of(server, LOAD, body)[:2] == (status, kind)
    assert words in error_of(server, LOAD, body)[2]


@pytest.mark.parametrize("name", ["team/sql", "é", "two words", "../x", "x" * 256])
def test_any_other_name_is_one_everywhere(server: LiveServer, adapter_dir: Path, name: str) -> None:
    assert server.post(LOAD, {"lora_name": name, "lora_path": str(adapter_dir)}).status_code == 200
    answer = server.post("/v1/completions", {"model": name, "prompt": "x"}).json()
    assert (answer["model"], answer["choices"][0]["text"]) == (name, f"{name}:x"[:16])
    assert server.get(f"/v1/models/{urllib.parse.quote(name, safe='')}").json()["id"] == name
    assert server.post(UNLOAD, {"lora_name": name}).status_code == 200


def test_a_bad_adapter_is_the_clients_error_with_its_reason(server: LiveServer, adapter_dir: Path) -> None:
    (adapter_dir / "adapter_config.json").write_text("{}")
    status, kind, message = error_of(server, LOAD, {"lora_name": "bad", "lora_path": str(adapter_dir)})
    assert (status, kind) == (400, "BadRequestError")
    assert "r is missing" in message
    assert server.get("/health").status_code == 200


def test_a_name_is_free_while_its_old_adapter_drains(adapter_dir: Path) -> None:
    engine = FakeEngine(tokenizer=ByteTokenizer(), step_seconds=0.01)
    body = {"lora_name": "a", "lora_path": str(adapter_dir)}
    with serve(engine) as live, live.openai() as client:
        assert live.post(LOAD, body).status_code == 200
        chunks = client.completions.create(model="a", prompt="x" * 50, max_tokens=60, stream=True)
        next(chunks)
        assert live.post(UNLOAD, {"lora_name": "a"}).status_code == 200
        assert [card.id for card in client.models.list()] == ["fake-model"]
        assert live.post("/v1/completions", {"model": "a", "prompt": "x"}).status_code == 404
        assert live.post(LOAD, body).status_code == 200
        assert list(chunks)[-1].choices[0].finish_reason == "stop"


def test_of_two_loads_at_once_one_wins(adapter_dir: Path) -> None:
    engine = FakeEngine()
    engine.folders_answer.clear()
    with serve(engine) as live:
        statuses: list[int] = []
        body = {"lora_name": "a", "lora_path": str(adapter_dir)}
        threads = [
            threading.Thread(target=lambda: statuses.append(live.post(LOAD, body).status_code))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(live.engine._reads) == 2)
        engine.folders_answer.set()
        for thread in threads:
            thread.join()
        assert sorted(statuses) == [200, 400]


def test_a_slow_load_does_not_hold_up_answers(adapter_dir: Path) -> None:
    engine = FakeEngine(tokenizer=ByteTokenizer())
    engine.folders_answer.clear()
    with serve(engine) as live:
        body = {"lora_name": "slow", "lora_path": str(adapter_dir)}
        loader = threading.Thread(target=live.post, args=(LOAD, body))
        loader.start()
        wait_for(lambda: "prepare_adapter" in engine.threads)
        assert live.post("/v1/completions", {"prompt": "x"}).status_code == 200
        assert loader.is_alive()
        engine.folders_answer.set()
        loader.join()


def test_folders_whose_names_are_no_utf_8_are_served_and_shown_escaped(
    tmp_path: Path, adapter_dir: Path
) -> None:
    """Of the model, of an adapter, and of one that is refused."""
    root = tmp_path / os.fsdecode(b"caf\xe9")
    shutil.copytree(adapter_dir, root / "good")
    (root / "empty").mkdir()
    engine = FakeEngine()
    engine.model_name = root.name
    with serve(engine, ServerConfig(adapter_root=root, drain_seconds=0)) as live:
        assert live.post(LOAD, {"lora_name": "good", "lora_path": "good"}).status_code == 200
        base, adapter = live.get("/v1/models").json()["data"]
        assert base["id"] == base["root"] == "caf\\udce9"
        assert adapter["root"] == f"{tmp_path}/caf\\udce9/good"
        assert (
            live.post("/v1/completions", {"model": base["id"], "prompt": [1]}).json()["model"] == base["id"]
        )
        assert live.get("/metrics").status_code == 200
        for path in ("empty", "none", "../out"):
            assert error_of(live, LOAD, {"lora_name": "x", "lora_path": path})[0] in (400, 404)


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_about_what_is_no_utf_8_is_answered(
    stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # pytest-xdist cannot send what is captured of its traceback.
    caplog.set_level(logging.CRITICAL, "slora_jax.server.async_engine")

    def fail() -> list[StreamEvent]:
        raise OSError(f"no such file: {os.fsdecode(b'caf\xe9')}")

    engine = FakeEngine()
    monkeypatch.setattr(engine, "step", fail)
    with serve(engine) as live:
        answer = live.post("/v1/completions", {"prompt": [1], "stream": stream})
        assert "no such file: caf\\\\udce9" in answer.text
        assert live.get("/health").json()["error"]["message"].endswith("no such file: caf\\udce9")


@pytest.fixture
def root(tmp_path: Path, adapter_dir: Path) -> Path:
    """A folder with an adapter `good`, and links to what lies outside (`adapter_dir`)."""
    root = tmp_path / "root"
    shutil.copytree(adapter_dir, root / "team" / "good")
    shutil.copytree(adapter_dir, tmp_path / "root-of-another")
    (root / "link").symlink_to(adapter_dir)
    (root / "inner-link").symlink_to(root / "team" / "good")
    (root / "loop").symlink_to(root / "loop")
    (root / "file-link").mkdir()
    (root / "file-link" / "adapter_config.json").symlink_to(adapter_dir / "adapter_config.json")
    return root


def test_adapters_must_lie_inside_the_root(root: Path) -> None:
    with serve(FakeEngine(), ServerConfig(adapter_root=root, drain_seconds=0)) as live:
        for i, good in enumerate(
            ("team/good", str(root / "team" / "good"), "team/../team/good", "inner-link")
        ):
            assert live.post(LOAD, {"lora_name": f"good{i}", "lora_path": good}).status_code == 200, good
        refused = error_of(live, LOAD, {"lora_name": "x", "lora_path": "team/none"})
        assert refused[0] == 404
        assert refused[2].endswith("given by its path in the server's --adapter-root")
        for bad in (
            "..",
            "../adapter",
            "team/../../adapter",
            "../root-of-another",
            str(root.parent / "adapter"),
            "/etc",
            "/no/such/folder",
            "link",
            "file-link",
            "loop",
            "x" * 4000,
            "~/x/../../..",
        ):
            status, kind, message = error_of(live, LOAD, {"lora_name": "bad", "lora_path": bad})
            assert (status, kind) == (400, "BadRequestError"), bad
            assert "outside the folder" in message or "cannot be resolved" in message
        assert [card["id"] for card in live.get("/v1/models").json()["data"][1:]] == [
            f"good{i}" for i in range(4)
        ]


def test_keys_hold_under_a_prefix(adapter_dir: Path) -> None:
    config = ServerConfig(api_key="user", admin_api_key="root")
    app = Starlette(routes=[Mount("/prefix", create_app(AsyncEngine(FakeEngine()), config))])
    transport = httpx.ASGITransport(app=app)

    async def ask(key: str) -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"authorization": f"Bearer {key}"}
            return (await client.post(f"/prefix{LOAD}", json={}, headers=headers)).status_code

    assert asyncio.run(ask("user")) == 401
    assert asyncio.run(ask("root")) == 400


@pytest.mark.parametrize(
    ("config", "path", "key", "status"),
    [
        ({"api_key": "user", "admin_api_key": "root"}, LOAD, "root", 200),
        ({"api_key": "user", "admin_api_key": "root"}, LOAD, "user", 401),
        ({"api_key": "user", "admin_api_key": "root"}, LOAD, None, 401),
        ({"api_key": "user", "admin_api_key": "root"}, LOAD + "/", "user", 404),
        ({"api_key": "user", "admin_api_key": "root"}, "/v1/completions", "user", 200),
        ({"api_key": "user", "admin_api_key": "root"}, "/v1/completions", "root", 401),
        ({"api_key": "user", "admin_api_key": "root"}, "/v1/completions", "usér", 401),
        ({"api_key": "user"}, LOAD, "user", 403),
        ({"admin_api_key": "root"}, LOAD, "root", 200),
        ({"admin_api_key": "root"}, LOAD, None, 401),
        ({"admin_api_key": "root"}, "/v1/completions", None, 200),
        ({"admin_routes": False}, LOAD, None, 404),
    ],
)
def test_keys(adapter_dir: Path, config: dict[str, Any], path: str, key: str | None, status: int) -> None:
    headers = {} if key is None else {b"authorization": f"Bearer {key}".encode()}
    body = {"prompt": "x", "lora_name": "a", "lora_path": str(adapter_dir)}
    engine = FakeEngine(tokenizer=ByteTokenizer())
    with serve(engine, ServerConfig(drain_seconds=0, **config)) as live:
        response = live.post(path, body, headers=headers)
        assert response.status_code == status, response.text
        if status in (401, 403):
            kind = {401: "AuthenticationError", 403: "PermissionDeniedError"}[status]
            assert response.json()["error"]["type"] == kind
            assert engine.adapters() == []


def test_probes_need_no_key_and_the_openai_client_sends_one() -> None:
    config = ServerConfig(api_key="user", drain_seconds=0)
    with serve(FakeEngine(tokenizer=ByteTokenizer()), config) as live:
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert live.get(path).status_code == 200
        assert live.get("/v1/models").status_code == 401
        assert live.post("/tokenize", {"prompt": "x"}).status_code == 401
        with live.openai("user") as client:
            assert client.completions.create(model="fake-model", prompt="x").choices[0].text == "base:x"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"api_key": ""}, "must not be empty"),
        ({"api_key": "x", "admin_api_key": "x"}, "must differ"),
        ({"max_body_bytes": 0}, "at least 1"),
        ({"drain_seconds": -1}, "drain_seconds must be in"),
        ({"drain_seconds": float("inf")}, "drain_seconds must be in"),
        ({"watchdog_seconds": "300"}, "watchdog_seconds must be a number, got '300'"),
        ({"max_sequences_per_request": 1.5}, "max_sequences_per_request must be an integer, got 1.5"),
        ({"admin_routes": 1}, "admin_routes must be True or False"),
        ({"adapter_root": 5}, "adapter_root must be a path or None, got 5"),
        ({"body_timeout_seconds": 0}, "body_timeout_seconds must be above 0"),
        ({"adapter_root": "/no/such/folder"}, "not a folder"),
        ({"served_model_name": "caf\udce9"}, "served_model_name must be UTF-8; write its character 4"),
        ({"api_key": "\udcff"}, "api_key must be UTF-8"),
        ({"admin_api_key": "\ud800"}, "admin_api_key must be UTF-8"),
    ],
)
def test_wrong_server_configs(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServerConfig(**settings)


@pytest.mark.parametrize(("name", "served"), [("fake-model", None), ("pirate", "pirate")])
def test_an_adapter_that_the_bases_name_would_hide_is_refused_at_the_start(
    name: str, served: str | None, adapter_dir: Path
) -> None:
    engine = FakeEngine()
    engine.load_adapter(name, adapter_dir)
    with pytest.raises(ValueError, match=f"adapter '{name}' has the name of the base.*served_model_name"):
        create_app(AsyncEngine(engine), ServerConfig(served_model_name=served))


_FORGED = "x\nINFO: forged\r\x1b[31m\u2028\x85"


def test_what_clients_send_cannot_forge_or_flood_the_log(
    server: LiveServer, tmp_path: Path, adapter_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    refused, loaded = tmp_path / (_FORGED + "1"), tmp_path / (_FORGED + "2")
    refused.mkdir()
    (refused / "adapter_config.json").write_text("{}")
    shutil.copytree(adapter_dir, loaded)
    fields = {f"{_FORGED}{i}{'y' * 5000}": 1 for i in range(200)}
    answers = [
        server.post("/v1/completions", {"prompt": "x", **fields}),
        server.post(LOAD, {"lora_name": "forger", "lora_path": str(refused)}),
        server.post(LOAD, {"lora_name": "forger", "lora_path": "x\n" * 2000}),
        server.post(LOAD, {"lora_name": "forger", "lora_path": str(loaded)}),
        server.post("/v1/unload_lora_adapter", {"lora_name": "forger", _FORGED: 1}),
    ]
    assert [answer.status_code for answer in answers] == [200, 400, 400, 200, 200]
    assert len([message for message in caplog.messages if "forged" in message]) >= 4
    assert all(message.isprintable() and len(message) < 5000 for message in caplog.messages)
    assert any("200 request fields are ignored" in message for message in caplog.messages)
