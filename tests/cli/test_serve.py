"""`slora-jax serve`: as a process it names its address, answers and leaves on SIGTERM; its own defaults."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from slora_jax.cli.main import main
from slora_jax.cli.serve import SERVER_HELP, VARIABLES
from slora_jax.config import EngineConfig, ModelConfig
from slora_jax.engine import Engine
from tests.cli.command import run_command
from tests.conftest import TINY_CONFIG
from tests.lora.peft_files import write_peft_adapter


def test_serve(tiny_model_dir: Path, tmp_path: Path) -> None:
    write_peft_adapter(tmp_path / "q", ModelConfig.from_hf(TINY_CONFIG), {"q_proj": 4}, std=0.5)
    command = [sys.executable, "-m", "slora_jax.cli.main", "serve", str(tiny_model_dir), "--port", "0"]
    command += ["--adapters", f"q={tmp_path / 'q'}", "--served-model-name", "tiny", "--api-key", "secret"]
    command += ["--load-format", "dummy", "--dtype", "float32", "--num-pages", "64", "--max-batch-size", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            lines: list[str] = []
            for line in server.stderr:
                lines.append(line)
                if address := re.search(r"serving on (http://\S+)", line):
                    break
            else:
                raise AssertionError("".join(lines))
            with httpx.Client(base_url=address[1], timeout=100) as client:
                assert client.get("/v1/models").status_code == 401
                client.headers["Authorization"] = "Bearer secret"
                models = client.get("/v1/models").json()["data"]
                assert [model["id"] for model in models] == ["tiny", "q"]
                body = {"model": "q", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                assert answer.json()["usage"]["completion_tokens"] == 4
            server.send_signal(signal.SIGTERM)
            rest = server.stderr.read()
            assert server.wait() == -signal.SIGTERM, rest  # uvicorn passes the signal on once it has drained
            assert "Application shutdown complete" in rest
            assert "Traceback" not in rest
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("backend", "flags", "warm"),
    [("gpu", [], True), ("cpu", [], False), ("gpu", ["--no-warmup"], False), ("cpu", ["--warmup"], True)],
)
def test_a_server_on_a_gpu_compiles_before_it_answers(
    backend: str, flags: list[str], warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[EngineConfig] = []
    monkeypatch.setattr(Engine, "from_pretrained", lambda *args, **_: made.append(args[2]))
    monkeypatch.setattr("slora_jax.server.serve.run_server", lambda load, *_, **__: load())
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    assert main(["serve", "somewhere", *flags]) == 0
    assert made[0].warmup is warm


@pytest.mark.parametrize("field", VARIABLES)
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("", "must not be empty"),  # of a shell's unset variable: never an open server
        ("k\udce9", "must be UTF-8"),
        ("same", "must differ from"),
    ],
)
def test_a_wrong_value_is_told_by_the_flag_or_the_variable_that_gave_it(
    field: str, wrong: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slora_jax.server.serve.run_server", lambda *_, **__: pytest.fail("it serves"))
    for other, variable in VARIABLES.items():
        monkeypatch.setenv(variable, "same" if other != field else wrong)
    code, _, err = run_command("serve", "somewhere", capsys=capsys)
    assert (code, f"environment variable {VARIABLES[field]}" in err, told in err) == (2, True, True)
    assert "--" not in err
    assert ("; unset it to turn it off" in err) == (wrong == "")

    monkeypatch.setenv(VARIABLES[field], "another")  # a flag goes before it
    flag = f"--{field.replace('_', '-')}"
    code, _, err = run_command("serve", "somewhere", flag, wrong, capsys=capsys)
    assert (code, flag in err, told in err, VARIABLES[field] in err) == (2, True, True, False)
    assert ("; leave it out to turn it off" in err) == (wrong == "")


def test_the_help_names_the_variables() -> None:
    assert all(f"${variable}" in SERVER_HELP[field] for field, variable in VARIABLES.items())


def test_a_server_leaves_out_bad_adapters_of_a_folder_and_counts_them(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.from_hf(TINY_CONFIG)
    for name, rank in (("good", 4), ("big", 12), (tiny_model_dir.name, 4)):
        write_peft_adapter(tmp_path / name, config, {"q_proj": rank})
    engines: list[Engine] = []
    monkeypatch.setattr("slora_jax.server.serve.run_server", lambda load, *_, **__: engines.append(load()))
    command = ["serve", str(tiny_model_dir), "--load-format", "dummy", "--dtype", "float32"]
    command += ["--num-pages", "64", "--max-batch-size", "2", "--max-lora-rank", "9"]
    command += ["--adapters-dir", str(tmp_path)]
    assert main(command) == 0
    assert [info.name for info in engines[0].adapters()] == ["good"]  # one would hide the base
    assert engines[0].stats().adapters_refused == 2
    assert main([*command, "--strict-adapters"]) == 2
