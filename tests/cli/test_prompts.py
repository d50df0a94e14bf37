"""Files of prompts: what a line may hold, and where the user is told that the mistake is."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slora_jax.text import Tokenizer
from tests.cli.command import ENGINE, run_command


def stdin(data: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(data), "ascii")  # whatever the locale is, lines are UTF-8


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "not a line of JSON (Expecting value, column 1): not json"),
        ('{"prompt": "x"', "not a line of JSON (Expecting ',' delimiter, column 15)"),
        ("[" * 100_000, "not a line of JSON ("),
        ('{"prompt": [' + "9" * 5000 + "]}", "not a line of JSON ("),
        ('["list"]', 'expected {"prompt": ..., "adapter_id": ...}, got ["list"]'),
        ('{"text": "x"}', "field 'text' is none of prompt, adapter_id"),
        ('{"prompt": "x", "adapter": "q"}', "field 'adapter' is none of prompt, adapter_id"),
        ('{"prompt": "x", "seed": 1}', r"field 'seed' is none of prompt, adapter_id: "),  # --seed is another
        (
            '{"prompt": "x", "max_tokens": "4"}',
            "field 'max_tokens' is none of .* --max-tokens sets it for all",
        ),
        ('{"adapter_id": "q"}', "field 'prompt' is missing"),
        ('{"prompt": null}', "field 'prompt': a prompt is a string or a list of token ids"),
        ('{"prompt": [1, true]}', "field 'prompt': a prompt is a string or a list of token ids"),
        ('{"prompt": [1, 2.0]}', "field 'prompt': a prompt is a string or a list of token ids"),
        (
            '{"prompt": "x", "adapter_id": 5}',
            "field 'adapter_id': the name of an adapter is a string or null",
        ),
        ('{"prompt": "x", "adapter_id": ["q"]}', "field 'adapter_id': the name of an adapter is a string or"),
        (
            '{"prompt": "x", "adapter_id": "typo"}',
            "field 'adapter_id': 'typo' is not .* given (q); add --adapter",
        ),
        (
            '{"prompt": "x", "adapter_id": "a b=c"}',
            "field 'adapter_id': 'a b=c' is not .* given (q); only --adapters-dir",
        ),
        (
            '{"prompt": "x", "adapter_id": "a b"}',
            "field 'adapter_id': 'a b' is not .* given (q); add --adapter 'a b=PATH'",
        ),
        *(
            (f'{{"prompt": "x", "adapter_id": "{name}"}}', "field 'adapter_id': an adapter's name must have")
            for name in ("", " q", "a,b", "\\u001b[31m", "long" * 100)
        ),
        ('{"prompt": "x", "prompt": "x"}', "field 'prompt' is given twice; keep one"),
        (
            '{"adapter_id": "q", "prompt": "x", "adapter_id": null}',
            "field 'adapter_id' is given twice; keep one",
        ),
        ('{"prompt": {"a": 1, "a": 2}}', "field 'prompt': a prompt is a string or a list of token ids"),
        ("\x1b[31mred", "not a line of JSON (Expecting value, column 1): \\x1b[31mred"),
        ('{"prompt": ""}', "field 'prompt': the prompt is empty"),
        ('{"prompt": []}', "field 'prompt': the prompt is empty"),
        ('{"prompt": [1, 9999]}', "field 'prompt': prompt token 1 is 9999; token ids are integers in [0, "),
        ('{"prompt": [-1]}', "field 'prompt': prompt token 0 is -1; token ids are integers in [0, "),
        (
            '{"prompt": [' + "1, " * 19 + "1]}",
            "field 'prompt': the prompt has 20 tokens; .* (--max-model-len 20)",
        ),
        (
            '{"prompt": "' + "x" * 20 + '"}',
            "field 'prompt': the prompt has 20 tokens; .* (--max-model-len 20)",
        ),
        ('{"prompt": "\\ud800"}', "field 'prompt': text must be a string of valid Unicode"),
    ],
    ids=lambda value: value[:30],
)
@pytest.mark.parametrize("source", ["file", "stdin"])
def test_a_wrong_line_of_prompts_is_told_with_its_place_before_weights_are_read(
    source: str,
    line: str,
    message: str,
    talking_model: Path,
    adapters: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("slora_jax.engine.load_checkpoint", lambda *_, **__: pytest.fail("weights are read"))
    text = '{"prompt": "fine", "adapter_id": "q"}\n\n{"prompt": "a\u2028line"}\n' + line
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    monkeypatch.setattr("sys.stdin", stdin(text.encode()))
    given = str(path) if source == "file" else "-"
    command = ["generate", str(talking_model), "--adapter", f"q={adapters / 'attention'}", "--prompts", given]
    code, out, err = run_command(*command, *ENGINE, "--max-model-len", "20", capsys=capsys)
    assert (code, out, "Traceback" in err) == (2, "", False)
    pattern = (
        re.escape(f"{path if source == 'file' else source}, line 4")
        + "(: |, )"
        + re.escape(message).replace(r"\.\*", ".*")
    )
    assert re.search(pattern, err.splitlines()[-1]), err


@pytest.mark.parametrize("flags", [[], ["--chat"]], ids=str)
def test_a_prompt_that_is_surely_too_long_is_refused_before_it_is_tokenized(
    flags: list[str],
    talking_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("it is tokenized"))
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "ab " * 10_000}))
    command = ["generate", str(talking_model), "--prompts", str(path), *ENGINE, *flags]
    code, _, err = run_command(*command, "--max-model-len", "20", capsys=capsys)
    assert code == 2
    told = rf"{path}, line 1, field 'prompt': the prompt has at least \d+ tokens; .* \(--max-model-len 20\)"
    assert re.search(told, err.splitlines()[-1])


def test_a_prompts_line_may_hold_what_unicode_calls_a_line_break(
    talking_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["a\u2028b", "a\x85b\u2029", "plain"]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes("\r\n".join(json.dumps({"prompt": p}, ensure_ascii=False) for p in prompts).encode())
    command = ["generate", str(talking_model), "--prompts", str(path), "--max-tokens", "1", "--json"]
    code, out, _ = run_command(*command, *ENGINE, capsys=capsys)
    assert (code, [json.loads(line)["prompt"] for line in out.split("\n")[:-1]]) == (0, prompts)


@pytest.mark.parametrize("source", ["file", "stdin"])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"prompt": "caf\xe9"}\n', "line 1: not UTF-8 (byte 16 of the line, 0xe9: "),
        (b'\n{"prompt": "fine"}\r\n\n{"prompt": "\xff', "line 4: not UTF-8 (byte 13 of the line, 0xff: "),
        (b'{"prompt": "\xed\xa0\x80"}', "line 1: not UTF-8 (byte 13 of the line, 0xed: "),
        ('{"prompt": "x"}'.encode("utf-16"), "line 1: not UTF-8 (byte 1 of the line, 0x"),
    ],
    ids=["latin-1", "last line", "surrogate", "utf-16"],
)
def test_bytes_that_are_not_utf_8_are_told_with_their_line(
    source: str, data: bytes, message: str, talking_model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "red\x1b[31m.jsonl"
    path.write_bytes(data)
    monkeypatch.setattr("sys.stdin", stdin(data))
    given, shown = (str(path), "red\\x1b[31m.jsonl") if source == "file" else ("-", "stdin")
    code, _, err = run_command("generate", str(talking_model), "--prompts", given, *ENGINE, capsys=capsys)
    assert (code, len(err.splitlines())) == (2, 1)
    assert f"{shown}, {message}" in err


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_a_byte_order_mark_and_any_end_of_line_are_good_input(
    source: str, talking_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    data = '{"prompt": "ä"}\r\n{"prompt": "b"}\r \t\n\xa0\n{"prompt": "c"}'.encode("utf-8-sig")
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(data)
    monkeypatch.setattr("sys.stdin", stdin(data))
    given = str(path) if source == "file" else "-"
    command = ["generate", str(talking_model), "--prompts", given, "--max-tokens", "1", "--json"]
    code, out, _ = run_command(*command, *ENGINE, capsys=capsys)
    assert (code, [json.loads(line)["prompt"] for line in out.splitlines()]) == (0, ["ä", "b", "c"])


def test_a_prompt_that_does_not_fit_beside_its_adapter_is_told_with_its_place(
    talking_model: Path, adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('\n{"prompt": "fits"}\n' + json.dumps({"prompt": "x" * 500, "adapter_id": "a"}) + "\n")
    command = ["generate", str(talking_model), "--adapter", f"a={adapters / 'attention'}"]
    few = [*ENGINE, "--num-pages", "34", "--max-tokens", "2"]
    code, _, err = run_command(*command, "--prompts", str(path), *few, capsys=capsys)
    assert code == 2
    assert f"error: {path}, line 3, field 'prompt': the request needs up to" in err.splitlines()[-1]
    assert "and adapter 'a'" in err
    code, _, err = run_command(*command, "--prompt-for", "a", "x" * 500, *few, capsys=capsys)
    assert (code, "error: --prompt-for a 'xxx" in err.splitlines()[-1]) == (2, True)


@pytest.fixture
def children_take_ctrl_c() -> Iterator[None]:
    """Also where the tests run in the background of a shell, which has them and their children ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("children_take_ctrl_c")
def test_ctrl_c_while_stdin_is_read_ends_with_130(talking_model: Path) -> None:
    command = [sys.executable, "-m", "slora_jax.cli.main", "generate", str(talking_model), "--prompts", "-"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        # More than a pipe holds: all of it is written only once it is read.
        process.stdin.write(b"\n" * (1 << 20))
        process.stdin.flush()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stdout is not None
        assert process.stderr is not None
        assert (process.stdout.read(), process.stderr.read()) == (b"", b"")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/proc/self/mem", "Input/output error"),
        ("/nowhere.jsonl", "No such file or directory"),
        ("/", "Is a directory"),
        ("x" * 5000, "File name too long"),
    ],
    ids=lambda value: value[:20],
)
def test_a_file_of_prompts_that_cannot_be_read_is_named(
    name: str, reason: str, talking_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_command("generate", str(talking_model), "--prompts", name, capsys=capsys)
    assert (code, err) == (2, f"slora-jax: error: --prompts {name}: cannot be read: {reason}\n")


def test_stdin_that_is_closed_is_wrong_input(
    talking_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)  # what Python makes of `<&-`
    code, out, err = run_command("generate", str(talking_model), "--prompts", "-", capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("slora-jax: error: --prompts - reads stdin, which is closed")
