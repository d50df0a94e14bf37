"""Bad adapters of a folder, as the commands meet them alike; `test_serve.py` has the server."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from slora_jax.config import ModelConfig
from tests.cli.command import ENGINE, run_command
from tests.conftest import TINY_CONFIG
from tests.lora.peft_files import write_peft_adapter


def folder_with_bad_ones(adapters: Path, folder: Path) -> Path:
    """Two good adapters; one of a rank that is too high, one cut short, one whose name none can have."""
    shutil.copytree(adapters, folder)
    write_peft_adapter(folder / "big", ModelConfig.from_hf(TINY_CONFIG), {"q_proj": 12})
    (shutil.copytree(adapters / "mlp", folder / "cut") / "adapter_model.safetensors").write_bytes(b"?")
    shutil.copytree(adapters / "mlp", folder / "a,b")
    return folder


BAD = {  # of that folder, with a max_lora_rank of 9
    "a,b": "adapters['a,b'] = '{folder}/a,b': an adapter's name must have 1 to 256 printable",
    "big": "{folder}/big/adapter_config.json: field 'rank_pattern['q_proj']': rank 12 is above --max-lora",
    "cut": "{folder}/cut/adapter_model.safetensors: corrupt or cut short",
}


@pytest.fixture(params=["generate", "demo"])
def command(request: pytest.FixtureRequest, talking_model: Path) -> list[str]:
    """A command that takes a folder of adapters, but for the folder."""
    own = {
        "generate": ["generate", str(talking_model), "--prompt", "Hi"],
        "demo": ["demo", "--model", str(talking_model), "--question", "Hi"],
    }
    return [*own[request.param], *ENGINE, "--max-tokens", "4", "--max-lora-rank", "9"]


def test_bad_adapters_of_a_folder_are_told_and_left_out(
    command: list[str], adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    folder = folder_with_bad_ones(adapters, tmp_path / "many")
    command += ["--adapters-dir", str(folder)]
    command += ["--prompt-for", "mlp", "Hi"] * (command[0] == "generate")
    code, out, err = run_command(*command, capsys=capsys)
    assert (code, bool(out), "Traceback" in err) == (0, True, False)
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 3
    for name, reason in BAD.items():
        start = f"adapter '{name}' is refused, and not served: {reason.format(folder=folder)}"
        assert [line for line in told if line.startswith(start) and "\n" not in line], (start, told)

    if command[0] == "demo":
        answers = [line.split("]")[0] for line in out.splitlines() if line.startswith("[")]
        assert sorted(answers) == ["[attention r4", "[base", "[mlp r9"]
        assert "2 of 2 resident in the pool, 3 refused" in out

    caplog.clear()
    code, out, err = run_command(*command, "--lazy-adapters", capsys=capsys)
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [line.split("'")[1] for line in told] == ["a,b", "big"]
    # What is read later is refused later, where it is asked for.
    assert code == int(command[0] == "demo")
    assert ("adapter 'cut' could not be loaded" in out + err) == bool(code)


@pytest.mark.parametrize(
    ("command", "more", "whom"),
    [
        *((name, ["--strict-adapters"], "--strict-adapters") for name in ("generate", "demo")),
        *((name, ["--pinned-adapters", "big"], "--pinned-adapters") for name in ("generate", "demo")),
        ("generate", ["--prompt-for", "big", "Hi"], "a prompt"),
        ("generate", ["--adapter"], "--adapters"),
    ],
    indirect=["command"],
)
def test_a_bad_adapter_of_a_folder_that_is_needed_is_an_error(
    more: list[str], whom: str, command: list[str], adapters: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("slora_jax.engine.load_checkpoint", lambda *_, **__: pytest.fail("weights are read"))
    folder = folder_with_bad_ones(adapters, tmp_path / "many")
    shutil.rmtree(folder / "a,b")
    if more == ["--adapter"]:
        shutil.move(folder / "big", tmp_path)
        more = ["--adapter", f"big={tmp_path / 'big'}"]
    code, _, err = run_command(*command, "--adapters-dir", str(folder), *more, capsys=capsys)
    assert code == 2
    assert f"error: {whom}: adapter 'big' is refused: " in err.splitlines()[-1]
    assert "rank 12 is above --max-lora-rank 9" in err.splitlines()[-1]


def test_a_folder_of_bad_adapters_alone_is_an_error(
    command: list[str], adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with_bad_ones(adapters, tmp_path / "many")
    for name in ("attention", "mlp"):
        shutil.move(folder / name, tmp_path)
    named = ["--adapter", f"good={tmp_path / 'mlp'}"] if command[0] == "generate" else []
    code, _, err = run_command(*command, "--adapters-dir", str(folder), *named, capsys=capsys)
    assert code == 2
    last = err.splitlines()[-1]
    assert f"--adapters-dir {folder}: none of its 3 adapters can be served; 'cut' is refused: " in last
