"""Regexes from adapter configs: those in use are taken, those that would stop the process are refused."""

from __future__ import annotations

import re
import time

import pytest

from slora_jax.lora.module_regex import check_module_regex

PATHS = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 17, 126)
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
]

# By PEFT's documentation and tests, and by trainers that write a regex: unsloth, ms-swift, LLaMA-Factory.
IN_USE = [
    "q_proj",
    r".*\.(q|v)_proj",
    r".*\.(q_proj|v_proj)$",
    r"^model\.layers\.\d+\.self_attn\.(q_proj|v_proj)",
    r"model\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj",
    r"^model\.layers\.([0-9]|1[0-9]|2[0-3])\.self_attn\.(q|v)_proj$",
    r"model\.layers\.(?:1|2|3|10|11)\..*(?:q_proj|k_proj)",
    r"(.*\.)?layers\.[0-9]{1,3}\..*_proj",
    r".*(self_attn|mlp).*(q|k|v|o|up|down|gate)_proj.*",
    r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$",
    r"^(?!.*(lm_head|embed)).*_proj$",
    r"^(language_model|aligner)(?=\.).*\.(q_proj|v_proj)$",
    r"(?i).*\.(Q|K|V)_proj",
    r"(?:[a-z]+_)?proj\d*",
    r"(?:q_proj|v_proj)\d+",
    r"model\.layers\.(\d{2})+\.mlp\.(gate|up|down)_proj",
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\."
    r"(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))",
    "|".join(path.replace(".", r"\.") for path in PATHS),
    "|".join(f"model.layers.{i}.self_attn.q_proj" for i in range(128)),
]

REFUSED = [
    "(.+)+X",
    "(.*)*X",
    "(a*)*b",
    r"(\w+\.?)+X",
    r"([a-z._]+|\d)+X",
    "(a|a)*X",
    "(m|mo|[a-z]|.)+X",
    "(?:model|mode|l|.)*X",
    "(?i)(?:ab|AB|.)+X",
    "(.?){40}X",
    "((.{0,9}){0,9}){0,9}X",
    "(?=(.+)+X)",
    "(?!(.+)+X).*",
    r"(.+)(\1+)+X",
    ".*" * 12 + "X",
    ".*?" * 12 + "X",
    "[a-z._0-9]{1,}" * 12 + "X",
    "(?:(?:(?:){1000}){1000}){1000}",
    "(?:){4000000000}",
    "(" + "q?" * 40 + ")X",
    "a" * 10_001,
]


@pytest.mark.parametrize("regex", IN_USE, ids=lambda regex: regex[:40])
def test_regexes_in_use_are_taken(regex: str) -> None:
    check_module_regex(regex)


@pytest.mark.parametrize("key", IN_USE[:12], ids=lambda regex: regex[:40])
def test_keys_of_patterns_in_use_are_taken(key: str) -> None:
    check_module_regex(rf"(.*\.)?({key})$")


@pytest.mark.parametrize("regex", REFUSED, ids=lambda regex: regex[:40])
def test_regexes_that_stop_the_process_are_refused_at_once(regex: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=r"could take too long to match|characters"):
        check_module_regex(regex)
    assert time.process_time() - began < 1


@pytest.mark.parametrize("regex", ["(", "[a", "*", "a{99999999999999}", "(" * 4000 + ")" * 4000, r"\2"])
def test_what_is_no_regex(regex: str) -> None:
    with pytest.raises(ValueError, match="is not a valid regular expression"):
        check_module_regex(regex)


@pytest.mark.parametrize(
    "regex",
    [".*.*.*.*X", "(?:[a-z._0-9]?){18}X", r".*\d*\w*X", "(?:ab|ba)*.*X", "(?:){300000}X", *IN_USE],
    ids=lambda regex: regex[:40],
)
def test_what_is_taken_is_matched_in_no_time(regex: str) -> None:
    check_module_regex(regex)
    for path in PATHS:
        began = time.process_time()
        re.fullmatch(regex, path)
        assert time.process_time() - began < 0.5
