"""The commands as a user meets them: help, answers of a tiny model, one clear line for what is wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import slora_jax
from slora_jax.cli import demo, smollm2
from slora_jax.cli.errors import InputError
from slora_jax.cli.main import main
from slora_jax.config import EngineConfig, ModelConfig
from slora_jax.engine import Engine
from slora_jax.lora import read_adapter
from slora_jax.outputs import StreamEvent
from slora_jax.runner import ModelRunner
from slora_jax.scheduling.scheduler import StepPlan
from tests.cli.command import ENGINE, run_command
from tests.conftest import TINY_CONFIG
from tests.engine.simulated_engine import simulated_engine
from tests.lora.peft_files import write_peft_adapter


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [1, 2, 3]}\n\n{"prompt": [4, 5], "adapter_id": null}\n')
    return path


def test_help_lists_the_commands_and_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = run_command("--help", capsys=capsys)
    assert code == 0
    commands = ("demo", "generate", "serve", "adapters", "convert")
    assert all(f"\n    {name} " in out for name in commands)
    for name in commands:
        code, out, _ = run_command(name, "--help", capsys=capsys)
        assert code == 0
        assert max(map(len, out.splitlines())) <= 105


@pytest.mark.parametrize("name", ["demo", "generate MODEL", "serve MODEL", "adapters FOLDER --model MODEL"])
def test_an_unknown_flag_is_told_with_the_usage_of_its_command(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_command(*name.split(), "--bogus", capsys=capsys)
    assert code == 2
    assert err.startswith(f"usage: slora-jax {name.split()[0]} ")
    assert "error: unrecognized arguments: --bogus" in err


def test_help_and_version_do_not_wait_for_jax() -> None:
    code = "import sys; from slora_jax.cli import main; main.make_parser(); sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--version", capsys=capsys)[:2] == (0, f"slora-jax {slora_jax.__version__}\n")


def test_generate_prints_answers_in_order(
    tiny_model_dir: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("generate", str(tiny_model_dir), "--prompts", str(prompts), *ENGINE, "--temperature", "0")
    code, out, _ = run_command(*arguments, "--max-tokens", "4", "--n", "2", "--json", capsys=capsys)
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(a["prompt_index"], a["index"], a["prompt"]) for a in answers] == [
        (0, 0, [1, 2, 3]),
        (0, 1, [1, 2, 3]),
        (1, 0, [4, 5]),
        (1, 1, [4, 5]),
    ]
    assert all(len(a["token_ids"]) == 4 and a["finish_reason"] == "length" for a in answers)
    assert answers[0]["token_ids"] == answers[1]["token_ids"]

    code, out, _ = run_command(*arguments, "--max-tokens", "4", "--json", "--stream", capsys=capsys)
    streamed: dict[int, list[int]] = {0: [], 1: []}
    for line in out.splitlines():
        event: dict[str, Any] = json.loads(line)
        streamed[event["prompt_index"]] += event["token_ids"]
    assert streamed == {0: answers[0]["token_ids"], 1: answers[2]["token_ids"]}

    code, out, _ = run_command(*arguments, "--max-tokens", "4", capsys=capsys)
    assert out.splitlines()[::2] == ["--- base: [1, 2, 3]", "--- base: [4, 5]"]
    assert [int(t) for t in out.splitlines()[1].split()] == answers[0]["token_ids"]


def test_generate_answers_each_prompt_with_its_adapter(
    talking_model: Path, adapters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", str(talking_model), *ENGINE, "--temperature", "0", "--max-tokens", "8"]
    named = ["--adapter", f"a={adapters / 'attention'}", f"m={adapters / 'mlp'}"]
    mixed = ["--prompt", "Hi", "--prompt-for", "a", "Hi", "--prompt-for", "m", "Hi"]
    code, out, _ = run_command(*command, *named, *mixed, "--json", capsys=capsys)
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [a["adapter_id"] for a in answers] == [None, "a", "m"]
    assert len({a["text"] for a in answers}) == 3

    one = ("--prompt-for", "m", "Hi")
    assert run_command(*command, *named, *one, capsys=capsys)[1] == answers[2]["text"] + "\n"
    assert run_command(*command, *named, *one, "--stream", capsys=capsys)[1] == answers[2]["text"] + "\n"

    _, out, _ = run_command(*command, *named, *mixed, "--stream", capsys=capsys)
    assert sorted(line.split("'")[0] for line in out.splitlines()) == ["[a] ", "[base] ", "[m] "]

    _, out, _ = run_command(*command, "--prompt", "Hi", "--chat", "--json", capsys=capsys)
    assert json.loads(out)["text"] != answers[0]["text"]


def test_generate_takes_a_folder_of_adapters_and_reads_those_it_needs(
    talking_model: Path, adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(adapters, tmp_path / "many")
    (shutil.copytree(adapters / "mlp", folder / "unread") / "adapter_model.safetensors").write_bytes(b"?")
    command = ["generate", str(talking_model), *ENGINE, "--temperature", "0", "--max-tokens", "4", "--json"]
    prompts = ["--prompt-for", "mlp", "Hi"]
    named = ["--adapter", f"mlp={adapters / 'mlp'}"]
    _, out, _ = run_command(*command, *named, *prompts, capsys=capsys)
    directory = ["--adapters-dir", str(folder), "--lazy-adapters"]
    assert run_command(*command, *directory, *prompts, capsys=capsys)[:2] == (0, out)
    code, out, _ = run_command(*command, *directory, "--prompt-for", "unread", "Hi", capsys=capsys)
    answer = json.loads(out)
    assert (code, answer["finish_reason"]) == (1, "error")
    assert "adapter 'unread' could not be loaded" in answer["error"]
    assert "corrupt or cut short" in answer["error"]
    for form in ([], ["--stream"]):
        code, _, err = run_command(
            *command[:-1], *directory, "--prompt-for", "unread", "Hi", *form, capsys=capsys
        )
        assert (code, err.splitlines()[-1]) == (1, f"slora-jax: error: {answer['error']}")
    code, _, err = run_command(*command, *directory, *named, *prompts, capsys=capsys)
    assert code == 2
    assert "adapter 'mlp' is given twice" in err


def test_adapters_lists_a_folder_and_explains_what_is_refused(
    talking_model: Path, adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["adapters", str(adapters), "--model", str(talking_model), "--load-format", "dummy"]
    code, out, _ = run_command(*command, capsys=capsys)
    assert code == 0
    assert "q,v" in out
    assert "2 of 2 adapters" in out

    folder = shutil.copytree(adapters, tmp_path / "adapters")
    config = folder / "mlp" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    (folder / "pickled").mkdir()
    (folder / "pickled" / "adapter_model.bin").touch()
    (folder / "notes").mkdir()
    shutil.copytree(folder / "attention", folder / "a,b")
    command[1] = str(folder)
    code, out, _ = run_command(*command, "--json", capsys=capsys)
    comma, good, dora, pickled = map(json.loads, out.splitlines())
    assert code == 1
    assert "no comma" in comma["refused"]
    assert (good["name"], good["rank"], good["modules"]) == ("attention", 4, {"q_proj": 4, "v_proj": 4})
    assert good["refused"] is None
    assert good["bytes"] == good["pages"] * 2 * 2 * 2 * 16 * 4 * 16  # layers, bytes, K and V, tokens, heads
    assert "'use_dora'" in dora["refused"]
    assert dora["pages"] is None
    assert "pickled weights are never loaded" in pickled["refused"]
    code, out, _ = run_command(*command, capsys=capsys)
    assert code == 1
    assert "pickled: " in out
    assert "1 of 4 adapters" in out

    code, out, _ = run_command(*command[:1], str(folder / "attention"), *command[2:], capsys=capsys)
    assert (code, "1 of 1 adapters" in out) == (0, True)
    code, out, _ = run_command(*command, "--num-pages", "2", "--json", capsys=capsys)
    assert "raise --num-pages" in json.loads(out.splitlines()[1])["refused"]
    code, out, _ = run_command(*command, "--max-lora-rank", "3", capsys=capsys)
    assert "attention: " in out
    assert "rank 4 is above --max-lora-rank 3; raise it\n" in out
    code, _, err = run_command(*command[:1], str(folder / "notes"), *command[2:], capsys=capsys)
    assert code == 2
    assert "neither it nor a folder in it holds adapter_config.json" in err


def test_whatever_one_folder_raises_the_others_are_listed(
    talking_model: Path, adapters: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path, *rest: Any, **more: Any) -> Any:
        if path.name == "mlp":
            raise RecursionError("too deep")
        return read_adapter(path, *rest, **more)

    monkeypatch.setattr("slora_jax.lora.peft.read_adapter", read)
    command = ["adapters", str(adapters), "--model", str(talking_model), "--load-format", "dummy", "--json"]
    code, out, _ = run_command(*command, capsys=capsys)
    good, bad = map(json.loads, out.splitlines())
    assert (code, good["refused"], bad["refused"]) == (1, None, "RecursionError: too deep")


@pytest.mark.parametrize(
    "name", ["red\x1b[31m", "title\x9b2J", "two\nlines", os.fsdecode(b"latin-\xe9"), "a,b"]
)
def test_folders_whose_names_no_adapter_may_have(
    name: str, talking_model: Path, adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = shutil.copytree(adapters / "mlp", tmp_path / "all" / name).parent
    listing = ["adapters", str(folder), "--model", str(talking_model), "--load-format", "dummy"]
    monkeypatch.setattr("slora_jax.engine.load_checkpoint", None)  # weights are never reached
    generate = ["generate", str(talking_model), "--adapters-dir", str(folder), "--prompt", "x", *ENGINE]
    told = []
    for command, expected in ((listing, 1), ([*listing, "--json"], 1), (generate, 2)):
        code, out, err = run_command(*command, capsys=capsys)
        assert code == expected
        assert "no comma among them" in out + err
        assert all(c.isprintable() or c == "\n" for c in out + err)
        told.append(out + err)
    assert json.loads(told[1])["name"] == name
    assert f"adapters[{name!r}] = '{folder}" in told[2]


def test_demo_answers_every_question_with_every_adapter(
    talking_model: Path, adapters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["demo", "--model", str(talking_model), "--adapters-dir", str(adapters), *ENGINE]
    question = "Hi? " * 20  # of several pages, that the first run leaves in the prefix cache
    code, out, _ = run_command(*command, "--question", question, "--max-tokens", "4", capsys=capsys)
    assert code == 0
    answers = [line.split("]")[0] for line in out.splitlines() if line.startswith("[")]
    assert sorted(answers) == ["[attention r4", "[base", "[mlp r9"]
    summary = {line.split()[0]: line for line in out.splitlines() if line[:1].isalpha()}
    assert "12 tokens in" in summary["speed"]
    assert "(all compiled before)" in summary["speed"]
    assert "up to 2 sequences a step" in summary["batches"]
    assert "63 pages of 16 tokens" in summary["pool"]
    assert "2 of 2 resident" in summary["adapters"]


def test_the_demos_speed_leaves_out_the_steps_that_compiled(
    talking_model: Path,
    adapters: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("slora_jax.cli.demo._WARM_UPS", 0)
    command = ["demo", "--model", str(talking_model), "--adapters-dir", str(adapters), *ENGINE]
    code, out, _ = run_command(*command, "--question", "Hi?", "--max-tokens", "4", capsys=capsys)
    (speed,) = [line for line in out.splitlines() if line.startswith("speed")]
    found = re.search(r"(\d+) tokens in .*\(without (\d+) tokens in ([\d.]+) s of steps beside which", speed)
    assert found is not None
    timed, compiling, _ = found.groups()
    assert (code, int(timed) + int(compiling)) == (0, 3 * 4)
    assert "compiling included" in speed


def test_a_tally_counts_the_events_of_a_step_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    stats, times = simulated_engine(num_pages=60, max_batch_size=2).stats(), iter((0, 1, 1, 9, 9, 10, 11))
    monkeypatch.setattr("slora_jax.cli.demo.time", types.SimpleNamespace(monotonic=lambda: next(times)))
    tally = demo._Tally(stats, 5)
    event = StreamEvent("a", 0, 0, None, "", (1,))
    for step, compilations in ((1, 5), (1, 5), (2, 7), (2, 7), (3, 7), (4, 7)):
        tally.add(event, dataclasses.replace(stats, steps=step), compilations)
    assert (tally.tokens, tally.seconds, tally.rate) == (4, 3, 4 / 3)
    assert (tally.compiling_tokens, tally.compiling_seconds) == (2, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate MODEL", "give at least one --prompt"),
        ("generate MODEL --prompt x --n 99999999999", "--n must be in [1, 16384], got 99999999999"),
        ("generate MODEL --prompt x --top-p 2", "--top-p must be in (0, 1], got 2.0"),
        ("generate MODEL --prompt x --max-batch-size 0", "--max-batch-size must be in [1, 1048576], got 0"),
        ("generate MODEL --prompt-for a x", "add --adapter a=PATH"),
        ("generate MODEL --prompt x --adapter a=1 a=2", "adapter 'a' is given twice"),
        ("generate MODEL --prompt x --adapter a", "expected NAME=PATH, got 'a'"),
        ("generate MODEL --prompts /nowhere.jsonl", "/nowhere.jsonl"),
        ("generate ./nowhere --prompt x", "nowhere"),
        ("generate MODEL --prompt x --load-format dummy --dtype float32 --num-pages 64", "has no tokenizer"),
        (
            "generate MODEL --chat --prompt x --load-format dummy --dtype float32 --num-pages 64",
            "chat template",
        ),
        ("generate MODEL --adapter a=./nowhere --prompt x --load-format dummy --num-pages 64", "nowhere"),
        ("convert MODEL MODEL", "exists and is not an empty folder"),
        ("convert MODEL /proc/x --load-format dummy", "/proc/x: the result cannot be written there"),
        (
            "generate MODEL --prompt x --compile-cache-dir /dev/null",
            "--compile-cache-dir '/dev/null' cannot be",
        ),
        ("generate MODEL --prompt x --load-format dummy --num-pages 100000000000", "lower --num-pages"),
        ("generate MODEL --prompt x --max-model-len 1", "--max-model-len must be at least 2, got 1"),
        ("serve MODEL --drain-seconds nan", "--drain-seconds must be in [0, 1e+09], got nan"),
        ("serve MODEL --adapters a,b=./x", "--adapters: an adapter's name must have"),
        ("serve MODEL --adapters-dir ./nowhere", "--adapters-dir: no folder 'nowhere': give one that is"),
        ("serve MODEL --host=", "--host must not be empty"),
        ("serve MODEL --host=a..b --port 0", "check --host and --port"),
        ("serve MODEL --host=\udce9", "--host must be UTF-8"),
        ("serve MODEL --adapter-root=", "--adapter-root must not be empty; leave it out"),
        ("serve MODEL --adapter-root=LOOP", "--adapter-root 'LOOP'"),
        ("serve MODEL --tenant-limits a=max-queue:0", "and below 2^48, got 0"),
        (
            "generate MODEL --prompt x --compile-cache-dir=/tmp/\udce9",
            "--compile-cache-dir '/tmp/\\udce9' can",
        ),
        ("convert MODEL /tmp/\udce9 --load-format dummy", "Orbax takes paths in UTF-8 only"),
        ("adapters ./nowhere --model ./nowhere", "no folder 'nowhere'"),
        ("adapters /tmp --model=", "--model: a path must not be empty"),
        ("demo --model ./nowhere --adapters-dir MODEL", "neither it nor a folder in it holds"),
        ("serve MODEL --api-key k --admin-api-key k", "--admin-api-key must differ from --api-key"),
        ("demo --adapters-dir ./nowhere", "no folder 'nowhere': give one that is an adapter, or whose"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    arguments: str, message: str, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("LOOP").symlink_to("LOOP")
    argv = [str(tiny_model_dir) if word == "MODEL" else word for word in arguments.split()]
    code, out, err = run_command(*argv, capsys=capsys)
    assert code == 2
    assert out == ""
    line = err.splitlines()[-1]
    assert message in line
    assert line.startswith("slora-jax")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "serve MODEL --adapters q=ADAPTER --pinned-adapters q --pinned-adapters typo",
            "--pinned-adapters names 'typo', which is not among the adapters given: q",
        ),
        ("generate MODEL --prompt x --pinned-adapters q", "'q', which is not among the adapters given: none"),
        ("serve MODEL --adapters q=./nowhere", "--adapters: adapter 'q' is refused: no adapter at 'nowhere'"),
        ("serve MODEL --adapters q=./nowhere --lazy-adapters", "no adapter at 'nowhere'"),
        (
            "serve MODEL --adapters q=MODEL --lazy-adapters",
            "neither adapter_config.json nor adapter_model.safetensors is in this folder",
        ),
        ("generate MODEL --prompt x --adapter q=WEIGHTS --lazy-adapters", "adapter_config.json is missing"),
        (
            "serve MODEL --adapters q=ADAPTER --max-lora-rank 3",
            "rank 4 is above --max-lora-rank 3; raise it (at most",
        ),
        ("serve MODEL --adapters q=ADAPTER --served-model-name q", "adapter 'q' has the name of the base"),
        ("serve MODEL --adapters NAME=ADAPTER", "' has the name of the base model"),
        ("serve MODEL --tokenizer ./nowhere", "--tokenizer 'nowhere': no such path"),
        ("serve MODEL --kernel-backend mosaic", "--kernel-backend 'mosaic' needs a Hopper GPU"),
        ("serve MODEL --max-model-len 100000", "--max-model-len 100000 is above the model's"),
        ("serve MODEL --num-pages 3 --max-model-len 64", "--max-model-len 64 does not fit"),
        ("serve MODEL --num-pages 100000000000", "lower --num-pages"),
        ("serve MODEL --pool-bytes 100", "raise --pool-bytes"),
        ("serve MODEL --no-unified-memory --adapter-slots 9 --num-pages 64", "lower --adapter-slots"),
        ("generate MODEL --prompt x --logprobs 30", "--logprobs 30 is above the engine's --max-logprobs 20"),
        ("generate MODEL --prompt x --temperature warm", "--temperature: invalid float value: 'warm'"),
        ("generate MODEL --prompt x --stop-token-ids 9999", "--stop-token-ids names token 9999"),
        ("generate MODEL --prompt x --logit-bias 9999=1", "--logit-bias names token 9999"),
        ("generate MODEL --prompt x --stop x", "stop strings need a tokenizer, and this model has none"),
        ("generate MODEL --prompt x", "--prompt 'x': this model has no tokenizer"),
        ("generate MODEL --prompt x --chat", "--prompt 'x': a chat needs a tokenizer"),
        (
            "generate MODEL --prompt-for typo x",
            "--prompt-for typo 'x': 'typo' is not among the adapters given",
        ),
        ("generate MODEL --prompts PROMPTS", "a prompt is a string or a list of token ids"),
    ],
)
def test_a_mistake_is_told_before_weights_are_read(
    arguments: str,
    message: str,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("slora_jax.engine.load_checkpoint", lambda *_, **__: pytest.fail("weights are read"))
    write_peft_adapter(tmp_path / "q", ModelConfig.from_hf(TINY_CONFIG), {"q_proj": 4})
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "adapter_model.safetensors").touch()
    (tmp_path / "prompts").write_text('{"prompt": [1, "two"]}')
    words = {"MODEL": tiny_model_dir, "ADAPTER": tmp_path / "q", "PROMPTS": tmp_path / "prompts"}
    words["WEIGHTS"] = tmp_path / "weights"
    for word, path in (words | {"NAME": tiny_model_dir.name}).items():
        arguments = arguments.replace(word, str(path))
    port = ("--port", "0") if arguments.startswith("serve") else ()
    flags = ("--load-format", "dummy", "--dtype", "float32", *port)
    code, _, err = run_command(*arguments.split(), *flags, capsys=capsys)
    assert (code, "Traceback" in err) == (2, False)
    assert message in err.splitlines()[-1]


@pytest.mark.parametrize(
    "fields",
    [{}, {"unified_memory": False, "adapter_slots": 2, "max_lora_rank": 8}],
    ids=["unified", "slots"],
)
def test_what_is_known_before_weights_are_read_is_what_the_engine_goes_by(
    fields: dict[str, Any], tiny_model_dir: Path
) -> None:
    told: list[object] = []
    sizes: dict[str, Any] = {"max_batch_size": 2, "num_pages": 400, "max_model_len": 50}
    config = EngineConfig(dtype="float32", load_format="dummy", **sizes, **fields)
    engine = Engine.from_pretrained(
        tiny_model_dir, config=config, before_weights=lambda *given: told.extend(given)
    )
    limits = engine._intake._limits
    assert told == [engine.tokenizer, limits]
    assert (limits.usable_pages, limits.max_model_len) == (engine._pool.usable_for("kv"), 50)
    assert limits.unified_memory == engine._pool.unified


def test_traceback_shows_where_an_error_arose(tiny_model_dir: Path) -> None:
    with pytest.raises(InputError, match="give at least one") as caught:
        main(["generate", str(tiny_model_dir), "--traceback"])
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_of_a_running_batch_is_no_mistake_of_the_user(
    tiny_model_dir: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(runner: ModelRunner, plan: StepPlan) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(ModelRunner, "launch", fail)
    with pytest.raises(ValueError, match="a bug"):
        main(["generate", str(tiny_model_dir), "--prompts", str(prompts), *ENGINE])


def test_demo_finds_the_example_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "repository"
    monkeypatch.setattr(demo, "__file__", str(repository / "slora_jax" / "cli" / "demo.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="--adapters-dir"):
        demo.example_adapters()
    (repository / "examples" / "adapters").mkdir(parents=True)
    assert demo.example_adapters() == repository / "examples" / "adapters"
    (tmp_path / "examples" / "adapters").mkdir(parents=True)
    assert demo.example_adapters().resolve() == tmp_path / "examples" / "adapters"


def test_smollm2_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLORA_SMOLLM2_GGUF", str(tmp_path / "model.gguf"))
    with pytest.raises(FileNotFoundError, match="is no file"):
        smollm2.find_gguf()
    (tmp_path / "model.gguf").touch()
    assert smollm2.find_gguf() == tmp_path / "model.gguf"
