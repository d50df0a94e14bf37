"""`Tokenizer.fewest_tokens`: never more than the tokens there are, and far too long texts are known by it."""

from __future__ import annotations

import functools
import json
import string
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from slora_jax.text import Tokenizer
from slora_jax.text.streaming import BYTE_OF_CHAR
from tests.text.builders import byte_vocab

NAMES = ("smollm2", "sentencepiece", "byte_level", "metaspace")
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [*"helo ▁", "he", "ll", "hell", "hello", "▁hello", "▁▁", "▁▁▁▁"]
LONGEST = 6  # characters of a token
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "▁"), ("▁▁", "▁▁")]


def bpe(*, fallback: bool = True, **parts: Any) -> tokenizers.Tokenizer:
    """BPE over WORDS and, as `fallback`, all bytes; `parts` are those of a tokenizer, or the model's."""
    options = {name: parts.pop(name) for name in ("unk_token", "fuse_unk") if name in parts}
    tokens = ["<unk>", *BYTE_TOKENS[: 256 if fallback else 0], *WORDS]
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)}, merges=MERGES, byte_fallback=fallback, **options
    )
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


@pytest.fixture(params=NAMES, scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "metaspace":
        metaspace = pre_tokenizers.Metaspace(prepend_scheme="first")
        return Tokenizer(bpe(pre_tokenizer=metaspace, unk_token="<unk>", fuse_unk=True))
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found


@functools.cache
def spellings(tokenizer: Tokenizer) -> list[str]:
    """What the longest tokens of a vocabulary, and those with most letters, stand for; and added tokens."""
    vocab = tokenizer._backend.get_vocab()
    letters = {token: sum(c in string.ascii_letters for c in token) for token in vocab}
    longest = [*sorted(vocab, key=len)[-20:], *sorted(vocab, key=lambda token: letters[token])[-20:]]
    added = [token.content for token in tokenizer._backend.get_added_tokens_decoder().values()]
    return [*(tokenizer.decode([vocab[token]], False) for token in longest), *added]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_there_are_never_fewer_tokens(data: st.DataObject, tokenizer: Tokenizer) -> None:
    pieces = st.sampled_from([*spellings(tokenizer), "hello", " ", "\x04", "\xf1"]) | st.text(max_size=20)
    text = "".join(data.draw(st.lists(pieces, max_size=8))) * data.draw(st.integers(1, 5))
    fewest, tokens = tokenizer.fewest_tokens(text), tokenizer.encode(text, add_special_tokens=False)
    assert fewest <= len(tokens)
    assert fewest or not tokens or not tokenizer.decode(tokens, skip_special_tokens=False)


def test_the_bound_is_tight_where_a_text_is_of_the_longest_tokens(tokenizer: Tokenizer) -> None:
    counts = []
    for text in (text * 100 for text in spellings(tokenizer)[:40]):
        counts.append((tokenizer.fewest_tokens(text), len(tokenizer.encode(text, False))))
    assert all(0 <= fewest <= count for fewest, count in counts)
    assert any(0 < fewest == count for fewest, count in counts)  # not all: some repeats are spelt otherwise
    words = "How much wood would a woodchuck chuck if it could? " * 100
    assert tokenizer.fewest_tokens(words) >= len(words) / 40


def test_a_text_of_bytes_that_are_no_tokens_has_none(smollm2: Tokenizer) -> None:
    assert smollm2.encode("\x04" * 10_000, False) == []
    assert smollm2.fewest_tokens("\x04" * 10_000) == 0


def test_lone_surrogates_are_left_to_the_tokenizer(tokenizer: Tokenizer) -> None:
    assert tokenizer.fewest_tokens("\ud800") <= 3


STRIPPING = AddedToken("<s>", lstrip=True, normalized=False)
WITHOUT_A_BOUND: dict[str, tuple[dict[str, Any], str]] = {
    # tokenizer -> a long text of few tokens
    "contracts: a replaced word": ({"normalizer": normalizers.Replace("hellohello", "o")}, "hellohello"),
    "contracts: a replaced pattern": (
        {"normalizer": normalizers.Replace(tokenizers.Regex("(?:hello)+"), "o")},
        "hello",
    ),
    "contracts: in a sequence": (
        {"normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace("ll", "")])},
        "ll",
    ),
    "contracts: strips": ({"normalizer": normalizers.Strip()}, " "),
    "removes: spaces": ({"pre_tokenizer": pre_tokenizers.WhitespaceSplit()}, " "),
    "removes: a split": ({"pre_tokenizer": pre_tokenizers.Split("hello", "removed")}, "hello"),
    "removes: punctuation": ({"pre_tokenizer": pre_tokenizers.Punctuation("removed")}, "."),
    "removes: in a sequence": (
        {
            "pre_tokenizer": pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(), pre_tokenizers.CharDelimiterSplit("l")]
            )
        },
        "l",
    ),
    "one unknown token": ({"fallback": False, "unk_token": "<unk>", "fuse_unk": True}, "é"),
    "skips what it does not know": ({"fallback": False}, "é"),
    "writes nothing of the text": (
        {
            "post_processor": processors.TemplateProcessing(
                single=["</s>"], special_tokens=[{"id": "</s>", "ids": [1], "tokens": ["</s>"]}]
            )
        },
        "hello",
    ),
}


@pytest.mark.parametrize("name", WITHOUT_A_BOUND)
def test_nothing_is_said_where_much_text_may_be_few_tokens(name: str) -> None:
    parts, text = WITHOUT_A_BOUND[name]
    tokenizer = Tokenizer(bpe(**parts))
    assert tokenizer.fewest_tokens(text * 1000) == 0
    assert len(tokenizer.encode(text * 1000)) < len(text * 1000) / LONGEST


def test_nothing_is_said_where_characters_are_composed() -> None:
    assert Tokenizer(bpe(normalizer=normalizers.NFC())).fewest_tokens("e\u0301" * 1000) == 0


def test_nothing_is_said_of_other_models_and_of_tokens_that_take_spaces() -> None:
    backend = bpe()
    backend.add_tokens([STRIPPING])
    tokenizer = Tokenizer(backend)
    assert len(tokenizer.encode(" " * 10_000 + "<s>")) == 1
    assert tokenizer.fewest_tokens(" " * 10_000 + "<s>") == 0
    words = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")))
    assert len(words.encode("b" * 10_000)) == 1
    assert words.fewest_tokens("b" * 10_000) == 0


@pytest.mark.parametrize(
    "more", [{"normalizer": normalizers.Replace(" ", "▁")}, {"metaspace": True}], ids=str
)
def test_nothing_is_said_of_bytes_that_are_not_those_of_the_text(more: dict[str, Any]) -> None:
    """A byte-level model without a byte of the new spelling skips what the text spelled with known ones."""
    vocab = [char for char in byte_vocab() if BYTE_OF_CHAR[char] not in "▁".encode()]
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(vocab)}, merges=[]))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = byte_level
    if "metaspace" in more:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), byte_level])
    else:
        backend.normalizer = more["normalizer"]
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    assert len(tokenizer.encode(" " * 10_000)) <= 1
    assert tokenizer.fewest_tokens(" " * 10_000) == 0


def test_the_parts_of_models_in_use_are_known() -> None:
    """As their tokenizer.json spells them: Llama 2 and TinyLlama, Llama 3, SmolLM2."""
    llama2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    assert Tokenizer(bpe(normalizer=llama2, unk_token="<unk>", fuse_unk=True)).fewest_tokens("hello" * 10)
    vocab = {char: i for i, char in enumerate(byte_vocab())}
    split = pre_tokenizers.Split(tokenizers.Regex(r"\p{N}{1,3}| ?\p{L}+|\s+"), "isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for steps in ([split, last], [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]):
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        backend.decoder = decoders.ByteLevel()
        backend.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[]),
            ]
        )
        saved = tokenizers.Tokenizer.from_str(json.dumps(json.loads(backend.to_str())))
        assert Tokenizer(saved).fewest_tokens("abc") == 3
