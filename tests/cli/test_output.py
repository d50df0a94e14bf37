"""Output that cannot be written, or not as it is: one line and an exit code, never a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

import pytest

from slora_jax.cli.main import main
from slora_jax.cli.output import checked_output, print_json
from tests.cli.command import ENGINE, run_command

COMMANDS = {
    "generate": "generate MODEL --prompt Hi --max-tokens 2",
    "generate --stream": "generate MODEL --prompt Hi --max-tokens 2 --stream",
    "generate --stream of two": "generate MODEL --prompt Hi --prompt Ho --max-tokens 2 --stream",
    "generate --json": "generate MODEL --prompt Hi --max-tokens 2 --json",
    "generate --json --stream": "generate MODEL --prompt Hi --max-tokens 2 --json --stream",
    "demo": "demo --model MODEL --adapters-dir ADAPTERS --question Hi --max-tokens 2",
    "adapters": "adapters ADAPTERS --model MODEL --load-format dummy",
    "adapters --json": "adapters ADAPTERS --model MODEL --load-format dummy --json",
    "convert": "convert MODEL OUT --load-format dummy",
    "--help": "--help",
    "generate --help": "generate --help",
}


def argv(command: str, model: Path, adapters: Path, out: Path) -> list[str]:
    words = {"MODEL": str(model), "ADAPTERS": str(adapters), "OUT": str(out)}
    engine = ENGINE if "--max-tokens" in command else []
    return [words.get(word, word) for word in command.split()] + engine


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("place", ["full", "pipe"])
def test_output_that_cannot_be_written(
    place: str, command: str, talking_model: Path, adapters: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if place == "full":
        number = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, number = os.pipe()
        os.close(reader)  # as `| head` does
    with open(number, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        try:
            code = main(argv(command, talking_model, adapters, tmp_path / "out"))
        finally:
            monkeypatch.undo()
        stdout.write("Python writes what is left, as it exits")
    err = capsys.readouterr().err
    assert "Traceback" not in err
    if place == "full":
        expected = "slora-jax: error: standard output cannot be written: No space left on device"
        assert (code, err.splitlines()[-1]) == (1, expected)
    else:
        assert (code, "error" in err) == (0, False)


def test_an_answer_is_shown_whatever_the_encoding_of_stdout(
    talking_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = "--prompt Grüße --prompt b😀"
    shown = {}
    for form in ("", "--stream", "--json", "--json --stream"):
        for encoding in ("ascii", "utf-8"):
            data = io.BytesIO()
            monkeypatch.setattr("sys.stdout", io.TextIOWrapper(data, encoding))
            command = f"generate {talking_model} {prompts} --max-tokens 4 --temperature 0 {form}"
            assert main([*command.split(), *ENGINE]) == 0
            shown[form, encoding] = data.getvalue().decode(encoding)
    for form in ("", "--stream"):
        escaped = shown[form, "utf-8"].encode("ascii", "backslashreplace").decode()
        assert sorted(shown[form, "ascii"].splitlines()) == sorted(escaped.splitlines())
    for form in ("--json", "--json --stream"):
        ascii, utf8 = ([json.loads(line) for line in shown[form, e].splitlines()] for e in ("ascii", "utf-8"))
        assert ascii == utf8
    assert "Grüße" in shown["--json", "utf-8"]


def test_only_errors_of_stdout_are_errors_of_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BrokenPipeError), checked_output():
        raise BrokenPipeError("a socket's")


def test_json_is_ascii_where_nothing_is_known_of_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdout = io.StringIO()  # it has no encoding
    monkeypatch.setattr("sys.stdout", stdout)
    print_json({"text": "ß"})
    assert stdout.getvalue() == '{"text": "\\u00df"}\n'


def test_output_that_is_closed_is_no_error(talking_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)  # what Python makes of `>&-`
    assert main(["generate", str(talking_model), "--prompt", "Hi", "--max-tokens", "1", *ENGINE]) == 0


def test_an_error_is_told_on_stderr_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = []
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # closing it fails
        for stderr in (None, full):  # None: what Python makes of `2>&-`
            monkeypatch.setattr("sys.stderr", stderr)
            code = main(["generate", "model"])
            monkeypatch.undo()
            ends.append((code, capsys.readouterr().out))
    assert ends == [(2, "")] * 2


def test_a_batch_goes_on_where_its_progress_cannot_be_shown(
    talking_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, ends = f"generate {talking_model} --prompt x --max-tokens 1 --json", []
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # closing it fails
        monkeypatch.setattr("sys.stderr", full)
        ends.append(main([*command.split(), *ENGINE]))
    monkeypatch.undo()
    assert (ends, json.loads(capsys.readouterr().out)["prompt"]) == ([0], "x")


@pytest.mark.parametrize(
    "command",
    [
        "generate MODEL --prompt x --adapter \x1b[31mred",
        "generate MODEL --prompt x --temperature \x1b[31mred",
        "generate MODEL --prompt x --\x9bflag",
        "generate MODEL --prompt x --dtype \x1b[31mred",
        "generate MODEL --prompt-for \x1b[31mred x",
        "generate MODEL --prompts \x1b[31mred",
        "generate \x1b[31mred --prompt x",
        "adapters \x1b[31mred --model MODEL",
        "convert \x1b[31mred OUT",
        "serve \x1b[31mred",
        "\x1b[31mred",
    ],
)
def test_what_a_terminal_might_obey_is_escaped_in_every_error(
    command: str, talking_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = argv(command, talking_model, tmp_path, tmp_path / "out")
    code, _, err = run_command(*words, capsys=capsys)
    assert code == 2
    assert all(c.isprintable() or c == "\n" for c in err), err
