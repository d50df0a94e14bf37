"""Tokenizers from GGUF files: against Hugging Face's and SentencePiece's own ids, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from slora_jax.text import Tokenizer, gguf_vocab
from tests.text import builders
from tests.text.builders import CONTROL, NORMAL, SENTENCEPIECE, UNUSED, USER_DEFINED

PARITY: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "parity" / "tokenizer.json").read_text(encoding="utf-8")
)
_METADATA = {"ggml.model": "gpt2", "ggml.tokens": builders.byte_vocab("Ġa"), "ggml.merges": ["Ġ a"]}


@pytest.mark.parametrize("case", PARITY["strings"], ids=lambda case: repr(case["text"][:20]))
def test_smollm2_has_the_ids_of_its_own_tokenizer(smollm2: Tokenizer, case: dict[str, Any]) -> None:
    ids = smollm2.encode(case["text"])
    assert ids == case["smollm_token_ids"]
    assert smollm2.decode(ids, skip_special_tokens=False) == case["decoded"]


@pytest.mark.parametrize("case", PARITY["chats"], ids=lambda case: str(case["name"]))
def test_smollm2_renders_and_encodes_chats_as_transformers(smollm2: Tokenizer, case: dict[str, Any]) -> None:
    prompt = smollm2.apply_chat_template(case["messages"])
    assert prompt == case["rendered"]
    assert smollm2.encode(prompt, add_special_tokens=False) == case["token_ids"]


def test_smollm2_facts(smollm2: Tokenizer) -> None:
    assert smollm2.eos_token_ids == {PARITY["eos_token_id"]}
    assert smollm2.bos_token_id == 1
    assert smollm2.vocab_size == 49152
    assert smollm2.id_to_token(2) == "<|im_end|>"
    assert smollm2.id_to_token(49152) is None
    assert smollm2.chat_template is not None


@given(st.text(st.sampled_from("aZé½²٣Ⅳ012 \n\t\u3000'.!日😀"), max_size=20))
def test_smollm_rule_is_digits_then_gpt2(text: str) -> None:
    built = gguf_vocab.build(_METADATA | {"ggml.pre": "smollm"}, "test").backend.pre_tokenizer
    own = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert built is not None
    assert [w for w, _ in built.pre_tokenize_str(text)] == [w for w, _ in own.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "words"),
    [  # of "I'LL x12345  6=7\n\n a"; "Ġ" is a space, "Ċ" a newline
        ("gpt-2", ["I", "'", "LL", "Ġx", "12345", "Ġ", "Ġ6", "=", "7", "ĊĊ", "Ġa"]),
        ("smollm", ["I", "'", "LL", "Ġx", "1", "2", "3", "4", "5", "ĠĠ", "6", "=", "7", "ĊĊ", "Ġa"]),
        ("llama-bpe", ["I", "'LL", "Ġx", "123", "45", "Ġ", "Ġ", "6", "=", "7", "ĊĊ", "Ġa"]),
        ("qwen2", ["I", "'LL", "Ġx", "1", "2", "3", "4", "5", "Ġ", "Ġ", "6", "=", "7", "ĊĊ", "Ġa"]),
        ("default", ["I", "'", "LL", "Ġx", "123", "45", "Ġ", "Ġ", "6", "=", "7", "ĊĊ", "Ġa"]),
    ],
)
def test_words_of_each_pre_tokenizer(pre: str, words: list[str]) -> None:
    built = gguf_vocab.build(_METADATA | {"ggml.pre": pre}, "test").backend.pre_tokenizer
    assert built is not None
    assert [w for w, _ in built.pre_tokenize_str("I'LL x12345  6=7\n\n a")] == words


def test_qwen2_normalizes_and_llama3_takes_known_words_whole(tmp_path: Path) -> None:
    qwen2 = Tokenizer.from_gguf(builders.write_gguf(tmp_path / "q.gguf", pre="qwen2"))
    assert qwen2.decode(qwen2.encode("e\u0301")) == "é"
    # "abc" is in the vocabulary, but no merge makes it
    tokens = builders.byte_vocab("ab", "abc")
    for pre, length in (("llama-bpe", 1), ("gpt-2", 2)):
        file = builders.write_gguf(tmp_path / f"{pre}.gguf", pre=pre, tokens=tokens, merges=["a b"])
        assert len(Tokenizer.from_gguf(file).encode("abc")) == length


@pytest.mark.parametrize(
    ("pre", "metadata", "ends"),
    [
        ("llama-bpe", {}, ([256], [])),
        ("llama-bpe", {"ggml.add_bos_token": False}, ([], [])),
        ("gpt-2", {}, ([], [])),
        ("gpt-2", {"ggml.add_bos_token": True, "ggml.add_eos_token": True}, ([256], [257])),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(
    tmp_path: Path, pre: str, metadata: dict[str, int | bool | str], ends: tuple[list[int], list[int]]
) -> None:
    file = builders.write_gguf(
        tmp_path / "m.gguf",
        pre=pre,
        tokens=builders.byte_vocab("<s a:1>", "</s>", "ab"),  # space and colon mean something in templates
        types=[NORMAL] * 256 + [CONTROL, CONTROL, NORMAL],
        merges=["a b"],
        metadata={"ggml.bos_token_id": 256, "ggml.eos_token_id": 257} | metadata,
    )
    tokenizer = Tokenizer.from_gguf(file)
    assert tokenizer.encode("ab") == [*ends[0], 258, *ends[1]]
    assert tokenizer.encode("ab", add_special_tokens=False) == [258]


def test_control_and_user_defined_tokens_are_whole_and_unused_ones_absent(tmp_path: Path) -> None:
    file = builders.write_gguf(
        tmp_path / "m.gguf",
        tokens=builders.byte_vocab("<｜end▁of▁turn｜>", "<think>", "ab", "[PAD0]"),
        types=[NORMAL] * 256 + [CONTROL, USER_DEFINED, NORMAL, UNUSED],
        merges=["a b"],
    )
    tokenizer = Tokenizer.from_gguf(file)
    ids = tokenizer.encode("ab<think>ab<｜end▁of▁turn｜>")
    assert ids == [258, 257, 258, 256]
    assert tokenizer.decode(ids) == "ab<think>ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab<think>ab<｜end▁of▁turn｜>"
    assert tokenizer.vocab_size == 259
    assert tokenizer.decode([259]) == ""


def test_eos_ids_are_the_declared_ones_and_the_templates_end_of_turn(tmp_path: Path) -> None:
    named = ("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")
    file = builders.write_gguf(
        tmp_path / "m.gguf",
        tokens=builders.byte_vocab("ab", *named),
        types=[NORMAL] * 257 + [CONTROL] * 4,
        merges=["a b"],
        metadata={"ggml.eos_token_id": 257, "ggml.eom_token_id": 259, "chat_template": "{{ '<|eot_id|>' }}"},
    )
    assert Tokenizer.from_gguf(file).eos_token_ids == {257, 258, 259}


def test_named_templates(tmp_path: Path) -> None:
    metadata = _METADATA | {
        "ggml.pre": "gpt-2",
        "chat_template": "plain",
        "chat_templates": ["tool_use"],
        "chat_template.tool_use": "with tools",
    }
    assert gguf_vocab.build(metadata, "t").chat_templates == {"default": "plain", "tool_use": "with tools"}


@pytest.mark.parametrize("case", SENTENCEPIECE["strings"], ids=lambda case: repr(case["text"][:20]))
def test_sentencepiece_has_the_ids_of_the_library(sentencepiece: Tokenizer, case: dict[str, Any]) -> None:
    assert sentencepiece.encode(case["text"], add_special_tokens=False) == case["token_ids"]
    assert sentencepiece.decode(case["token_ids"]) == case["text"]


def test_sentencepiece_adds_bos_and_the_first_space(sentencepiece: Tokenizer, tmp_path: Path) -> None:
    assert sentencepiece.encode("the cat")[0] == sentencepiece.bos_token_id == 1
    assert sentencepiece.eos_token_ids == {2}
    # As in llama.cpp and Llama 2's tokenizer.json, every stretch of text between special tokens gets one.
    the_cat = sentencepiece.encode("the cat", add_special_tokens=False)
    start = SENTENCEPIECE["tokens"].index("<|im_start|>")
    ids = sentencepiece.encode("<|im_start|>the cat<|im_start|>the cat", add_special_tokens=False)
    assert ids == [start, *the_cat, start, *the_cat]
    bare = Tokenizer.from_gguf(
        builders.sentencepiece_gguf(tmp_path / "m.gguf", add_space_prefix=False, add_bos_token=False)
    )
    assert bare.encode(" the cat") == sentencepiece.encode("the cat")[1:]
    assert bare.decode(bare.encode("the cat")) == "the cat"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml.pre": "bloom"}, "pre-tokenizer 'bloom', which is not supported.*tokenizer.ggml.pre.*smollm"),
        ({"ggml.pre": None}, "names no pre-tokenizer"),
        ({"ggml.model": "bert"}, "'bert' is not supported; supported: gpt2, llama"),
        ({"ggml.model": "llama"}, "scores is missing"),
        ({"ggml.tokens": []}, "holds no tokenizer"),
        ({"ggml.merges": ["a"]}, "not two tokens"),
        ({"ggml.merges": ["a zz"]}, "zz"),
        ({"ggml.eos_token_id": 1000}, "eos token id 1000 is not in the vocabulary of 257"),
    ],
)
def test_unsupported_metadata_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)a.gguf.*{message}"):
        gguf_vocab.build(_METADATA | {"ggml.pre": "gpt-2"} | change, "a.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml.remove_extra_whitespaces": True}, "extra whitespace"),
        (
            {"ggml.token_type": [USER_DEFINED if "▁" in t else NORMAL for t in SENTENCEPIECE["tokens"]]},
            "spaces",
        ),
    ],
)
def test_unsupported_sentencepiece_is_refused(change: dict[str, Any], message: str) -> None:
    metadata = {
        "ggml.model": "llama",
        "ggml.tokens": SENTENCEPIECE["tokens"],
        "ggml.scores": SENTENCEPIECE["scores"],
        "ggml.token_type": SENTENCEPIECE["types"],
    }
    with pytest.raises(ValueError, match=message):
        gguf_vocab.build(metadata | change, "a.gguf")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 40, b"PK\x03\x04" * 20])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(file))):
        Tokenizer.from_gguf(file)
