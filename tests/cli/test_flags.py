"""Flags agree with the dataclasses that they are made from."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest

from slora_jax.cli.flags import (
    SAMPLING_HELP,
    SAMPLING_SKIP,
    add_flags,
    from_flags,
    in_flags,
    name_and_path,
    unique_adapters,
)
from slora_jax.cli.main import make_parser
from slora_jax.config import EngineConfig
from slora_jax.sampling_params import SamplingParams

EMPTY_MEANS_NONE, REFUSED_LATER = "compile_cache_dir", "adapter_root"


def _parser(cls: type[Any], **options: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_flags(parser, cls, **options)
    return parser


def _sampling_parser() -> argparse.ArgumentParser:
    return _parser(SamplingParams, help_texts=SAMPLING_HELP, skip=SAMPLING_SKIP)


def test_no_flags_give_the_default_configuration() -> None:
    assert from_flags(EngineConfig, _parser(EngineConfig).parse_args([])) == EngineConfig()
    args = _sampling_parser().parse_args([])
    assert from_flags(SamplingParams, args, SAMPLING_SKIP) == SamplingParams()


def test_every_field_has_a_flag_and_a_help_text() -> None:
    for parser, cls, skip in (
        (_parser(EngineConfig), EngineConfig, ()),
        (_sampling_parser(), SamplingParams, SAMPLING_SKIP),
    ):
        actions = {action.dest: action for action in parser._actions if action.dest != "help"}
        assert sorted(actions) == sorted(f.name for f in dataclasses.fields(cls) if f.name not in skip)
        assert all(action.help for action in actions.values())
        parser.format_help()
    assert set(SAMPLING_HELP) == {f.name for f in dataclasses.fields(SamplingParams)} - {*SAMPLING_SKIP}


def test_engine_flags_reach_their_fields() -> None:
    flags = "--dtype float32 --max-batch-size 4 --pool-bytes 1.5G --memory-fraction 0.5 "
    flags += "--kernel-backend xla --warmup --no-record-logits --compile-cache-dir /tmp/c --seed 7"
    config = from_flags(EngineConfig, _parser(EngineConfig).parse_args(flags.split()))
    assert config == EngineConfig(
        dtype="float32",
        max_batch_size=4,
        pool_bytes=3 << 29,
        memory_fraction=0.5,
        kernel_backend="xla",
        warmup=True,
        compile_cache_dir="/tmp/c",
        seed=7,
    )


def test_scheduling_flags_reach_their_fields() -> None:
    flags = ["--scheduling-policy", "vtc+cluster", "--tenant-weights", "a=b=2", "--tenant-weights", "c=0.5"]
    flags += ["--adapter-max-queue", "9", "--ttft-target-s", "2.5"]
    config = from_flags(EngineConfig, _parser(EngineConfig).parse_args(flags))
    assert config.policies == {"vtc", "cluster"}
    assert config.tenant_weights == {"a=b": 2.0, "c": 0.5}
    assert (config.adapter_max_queue, config.ttft_target_s) == (9, 2.5)
    assert from_flags(EngineConfig, _parser(EngineConfig).parse_args([])) == EngineConfig()


def test_limits_by_name_reach_their_fields() -> None:
    flags = ["--tenant-limits", "a=b=max-concurrency:8,max-queue:none", "--tenant-limits", "c=max_queue:5"]
    flags += ["--adapter-limits", "org/x:1=tokens-per-minute:60000", "--tenant-max-queue", "3"]
    config = from_flags(EngineConfig, _parser(EngineConfig).parse_args(flags))
    assert config.tenant_limits == {"a=b": {"max_concurrency": 8, "max_queue": None}, "c": {"max_queue": 5}}
    assert config.adapter_limits == {"org/x:1": {"tokens_per_minute": 60000}}
    assert config.tenant_max_queue == 3


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--tenant-weights", ["a=1", "a=2"]),
        ("--tenant-limits", ["a=max-queue:1", "a=max-concurrency:1"]),
        ("--adapter-limits", ["a=max-queue:1", "b=max-queue:1", "a=max-queue:1"]),
    ],
)
def test_a_name_that_is_given_twice_is_refused(flag: str, values: list[str]) -> None:
    args = _parser(EngineConfig).parse_args([part for value in values for part in (flag, value)])
    with pytest.raises(ValueError, match=f"{flag}: 'a' is given twice"):
        from_flags(EngineConfig, args)


def test_sampling_flags_reach_their_fields() -> None:
    flags = [
        "--temperature",
        "0",
        "--stop",
        "a b",
        "--stop",
        "\n",
        "--stop-token-ids",
        "5",
        "--logit-bias",
        "3=-1.5",
    ]
    params = from_flags(
        SamplingParams, _sampling_parser().parse_args([*flags, "--ignore-eos"]), SAMPLING_SKIP
    )
    assert params == SamplingParams(
        temperature=0, stop=("a b", "\n"), stop_token_ids=(5,), logit_bias={3: -1.5}, ignore_eos=True
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-batch-size", "many"], "invalid int value"),
        (["--dtype", "float8"], "invalid choice"),
        (["--pool-bytes", "lots"], "expected bytes such as"),
        (["--tenant-weights", "acme"], "expected NAME=X"),
        (["--tenant-weights", "acme=much"], "expected NAME=X"),
        *(
            (["--tenant-limits", text], "--tenant-limits: expected NAME=LIMIT:N,... such as acme=max-concurr")
            for text in (
                "acme",
                "acme=",
                "acme=8",
                "=max-queue:8",
                "acme=max-queue:",
                "acme=max-queue:few",
                "acme=max-queue:1.5",
                "acme=queue:8",
                "acme=max-queue:8,",
                "acme=max-queue:8,max-queue:9",
            )
        ),
    ],
)
def test_a_malformed_value_names_its_flag(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _parser(EngineConfig).parse_args(flags)
    error = capsys.readouterr().err
    assert flags[0] in error
    assert message in error


def test_a_commands_own_defaults_show_in_its_help() -> None:
    parser = _parser(EngineConfig, defaults={"max_model_len": 77})
    assert parser.parse_args([]).max_model_len == 77
    assert "(77)" in parser.format_help()


def test_adapters_are_names_and_paths() -> None:
    assert name_and_path("sql=/a=b") == ("sql", "/a=b")
    assert unique_adapters([("a", "x"), ("b", "y")]) == {"a": "x", "b": "y"}
    with pytest.raises(ValueError, match="adapter 'a' is given twice"):
        unique_adapters([("a", "x"), ("a", "y")])
    for text in ("sql", "=path", "sql="):
        with pytest.raises(argparse.ArgumentTypeError, match="NAME=PATH"):
            name_and_path(text)


def _wrong_values() -> dict[str, list[str]]:
    """For fields of EngineConfig that refuse a value that the parser takes, a command line that gives it."""
    own = {
        "pinned_adapters": "a,b",
        "scheduling_policy": "lifo",
        "tenant_weights": "acme=0",
        "tenant_limits": "acme=max-queue:0",
        "adapter_limits": "a,b=max-queue:1",
        "adapter_slots": "2",  # beside unified memory
    }
    wrong = {}
    for field in dataclasses.fields(EngineConfig):
        if field.name in own or field.metadata.get("limits") is not None:
            value = own.get(field.name, "0" if field.name.endswith("_bytes") else "-7")
            wrong[field.name] = [f"--{field.name.replace('_', '-')}={value}"]
    return wrong


@pytest.mark.parametrize("field", _wrong_values())
def test_a_wrong_value_is_told_by_the_flag_that_gave_it(field: str) -> None:
    flags = _wrong_values()[field]
    args = _parser(EngineConfig).parse_args(flags)
    with pytest.raises(ValueError, match=field) as caught:
        from_flags(EngineConfig, args)
    told = in_flags(str(caught.value), vars(args))
    assert flags[0].partition("=")[0] in told
    assert not [name for name in vars(args) if "_" in name and name in told]
    assert "EngineConfig" not in told
    assert "None" not in told or field == "adapter_slots"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("EngineConfig: seed must be in [0, 1], got 2", "--seed must be in [0, 1], got 2"),
        ("raise num_pages or leave it None.", "raise --num-pages or leave it out."),
        ("lower num_pages, or leave num_pages None", "lower --num-pages, or leave --num-pages out"),
        ("the engine's num_pages, adapters' num_pages", "the engine's --num-pages, adapters' --num-pages"),
        ("--prompt 'say num_pages': num_pages 3", "--prompt 'say num_pages': --num-pages 3"),
        ('line 1: {"num_pages": 1}, "num_pages or None"', 'line 1: {"num_pages": 1}, "num_pages or None"'),
        ("/m/num_pages/x: num_pages.json, num_pages_2", "/m/num_pages/x: num_pages.json, num_pages_2"),
        ("the seed of target_modules", "the seed of target_modules"),
        ("seed '7' is none; num_pages '8'", "--seed '7' is none; --num-pages '8'"),
        ("num_pages must be 1, or None, got 0", "--num-pages must be 1, got 0"),
        ("seed 7 is none", "--seed 7 is none"),
        ("model 'x' does not exist", "model 'x' does not exist"),
    ],
)  # fmt: skip
def test_only_the_fields_of_flags_are_named_as_flags(text: str, told: str) -> None:
    assert in_flags(text, {"num_pages", "seed"}) == told


def test_no_path_of_a_command_is_the_working_directory_for_want_of_a_value() -> None:
    commands = next(a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    paths = [
        (name, action)
        for name, parser in commands.items()
        for action in parser._actions
        if action.metavar in ("DIR", "FOLDER", "MODEL", "OUT")
        and action.dest not in (EMPTY_MEANS_NONE, REFUSED_LATER)
    ]
    assert len(paths) > 9
    for name, action in paths:
        assert callable(action.type), (name, action.dest)
        with pytest.raises(argparse.ArgumentTypeError, match="must not be empty"):
            action.type("")
