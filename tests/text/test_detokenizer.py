"""Incremental decoding: the pieces equal the whole, however the tokens are cut; stop strings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from slora_jax.text import IncrementalDetokenizer, Tokenizer

BYTES = ["<0x20>", "<0x41>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "<0xFF>"]
WORDS = ["a", "b", "▁", "▁a", "▁▁", "##a", "é", "", *BYTES]
DECODERS = {
    "llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "strip two": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(),
    "metaspace, never": decoders.Metaspace(prepend_scheme="never"),
    "metaspace and bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "wordpiece": decoders.WordPiece(),
    "none": None,
}


def word_tokenizer(decoder: decoders.Decoder | None) -> Tokenizer:
    """A vocabulary of WORDS, then a special token and one that is added but not special."""
    backend = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.add_tokens([AddedToken("<think>")])
    return Tokenizer(backend)


def chunks(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    """`ids` cut at `cuts`, which may repeat (an empty chunk) and lie past the end."""
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(bounds)]


def stream(detokenizer: IncrementalDetokenizer, pieces: Sequence[Sequence[int]]) -> list[str]:
    out = [detokenizer.append(piece) for piece in pieces]
    return [*out, detokenizer.append([], final=True)]


def assert_streams_exactly(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    deltas = stream(detokenizer, chunks(ids, cuts))
    assert "".join(deltas) == detokenizer.text == whole
    at_once = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    assert at_once.append(ids, final=True) == whole


CUTS = st.lists(st.integers(0, 20), max_size=20)


@given(
    ids=st.lists(
        st.one_of(
            st.integers(0, 49151),
            st.integers(0, 272),  # special tokens and single bytes
            st.just(10**6),  # not in the vocabulary
        ),
        max_size=20,
    ),
    cuts=CUTS,
    skip=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_random_ids_of_smollm2(smollm2: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    assert_streams_exactly(smollm2, ids, cuts, skip)


@given(
    text=st.text(st.sampled_from("a é日😀👩\u200d🏽\n<|im_end|>"), max_size=20), cuts=CUTS, skip=st.booleans()
)
@settings(deadline=None)
def test_texts_of_smollm2(smollm2: Tokenizer, text: str, cuts: list[int], skip: bool) -> None:
    assert_streams_exactly(smollm2, smollm2.encode(text), cuts, skip)


@given(ids=st.lists(st.integers(0, 260), max_size=12), cuts=CUTS, skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_random_bytes(byte_level: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    assert_streams_exactly(byte_level, ids, cuts, skip)


@pytest.mark.parametrize("name", DECODERS)
@given(ids=st.lists(st.integers(0, len(WORDS) + 2), max_size=12), cuts=CUTS, skip=st.booleans())
@settings(deadline=None)
def test_random_ids_of_other_decoders(name: str, ids: list[int], cuts: list[int], skip: bool) -> None:
    assert_streams_exactly(word_tokenizer(DECODERS[name]), ids, cuts, skip)


@given(text=st.text(st.sampled_from("the cat sat é日😀 \n"), max_size=20), cuts=CUTS)
@settings(deadline=None)
def test_texts_of_sentencepiece(sentencepiece: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = sentencepiece.encode(text)
    assert_streams_exactly(sentencepiece, ids, cuts, True)
    assert sentencepiece.decode(ids) == text


@pytest.mark.parametrize(
    ("steps", "decoder"),
    [
        ("CTC", decoders.CTC()),
        ("BPEDecoder", decoders.BPEDecoder()),
        ("Fuse [+] Replace", decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")])),
        ("Replace [+] Strip", decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])),
        ("Fuse [+] Strip", decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)])),
        (
            "Metaspace [+]",
            decoders.Sequence([decoders.Metaspace(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        ),
        ("changes plain letters", decoders.Sequence([decoders.Replace("a", "b"), decoders.Fuse()])),
    ],
)
def test_decoders_without_an_exact_stream_are_refused(steps: str, decoder: decoders.Decoder) -> None:
    with pytest.raises(ValueError, match=steps):
        word_tokenizer(decoder)


def test_half_a_character_is_held_back_and_a_whole_one_is_not(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    assert [detokenizer.append([byte]) for byte in "a😀b".encode()] == ["a", "", "", "", "😀", "b"]
    assert detokenizer.append([0xF0, 0x9F]) == ""
    assert detokenizer.append([], final=True) == "\ufffd"
    assert detokenizer.text == "a😀b\ufffd"
    with pytest.raises(ValueError, match="final"):
        detokenizer.append([97])


def text_of(tokenizer: Tokenizer, text: str, **options: object) -> tuple[list[str], IncrementalDetokenizer]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)  # type: ignore[arg-type]
    return stream(detokenizer, [[byte] for byte in text.encode()]), detokenizer


@pytest.mark.parametrize(
    ("stop", "text", "deltas", "reason"),
    [  # one byte a step, then the end
        (["END"], "aENb", ["a", "", "", "ENb", ""], None),
        (["END"], "aEND!", ["a", "", "", "", "", ""], "END"),
        (["END"], "aEN", ["a", "", "", "EN"], None),
        (["aab"], "aaab", ["", "", "a", "", ""], "aab"),
        (["abcd", "bc"], "abcd", ["", "", "a", "", ""], "bc"),  # "bc" is complete first
        (["bc", "abc"], "abc", ["", "", "", ""], "abc"),  # both end here: the longer one
        (["b", "bb"], "abb", ["a", "", "", ""], "b"),
        (["xyz", "yq"], "xyq", ["", "", "x", ""], "yq"),
        (["é"], "aéb", ["a", "", "", "", ""], "é"),
        (["\n\n"], "a\n\nb", ["a", "", "", "", ""], "\n\n"),
    ],
)
def test_stop_strings(
    byte_level: Tokenizer, stop: list[str], text: str, deltas: list[str], reason: str | None
) -> None:
    got, detokenizer = text_of(byte_level, text, stop=stop)
    assert got == deltas
    assert detokenizer.stop_reason == reason
    assert detokenizer.text == "".join(deltas)


def test_a_stop_string_may_stay_in_the_output(byte_level: Tokenizer) -> None:
    got, detokenizer = text_of(byte_level, "aEND!", stop=["END"], include_stop_str_in_output=True)
    assert got == ["a", "", "", "END", "", ""]
    assert (detokenizer.text, detokenizer.stop_reason) == ("aEND", "END")
    assert detokenizer.append([97], final=True) == ""


def test_a_stop_string_within_and_across_tokens(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("The answer is forty-two. Next question?")
    for chunk in (1, 2, len(ids)):
        detokenizer = IncrementalDetokenizer(smollm2, stop=["wo. N", "never"])
        deltas = [detokenizer.append(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
        assert "".join(deltas) == "The answer is forty-t"
        assert detokenizer.stop_reason == "wo. N"


def test_special_tokens_and_stop_strings(byte_level: Tokenizer) -> None:
    ids = [97, 260, 98]  # a<|im_end|>b
    shown = IncrementalDetokenizer(byte_level, skip_special_tokens=False, stop=["<|im_end|>"])
    assert shown.append(ids) == "a"
    assert shown.stop_reason == "<|im_end|>"
    skipped = IncrementalDetokenizer(byte_level, stop=["ab"])  # what the client would see
    assert skipped.append(ids) == ""
    assert skipped.stop_reason == "ab"


def test_the_text_of_the_first_tokens_is_not_matched(byte_level: Tokenizer) -> None:
    got, detokenizer = text_of(byte_level, "xaxbx", stop=["x", "ax"], min_tokens=3)
    assert got == ["x", "a", "x", "b", "", ""]
    assert (detokenizer.text, detokenizer.stop_reason) == ("xaxb", "x")
    at_once = IncrementalDetokenizer(byte_level, stop=["x", "ax"], min_tokens=3)
    assert at_once.append(list(b"xaxbx")) == "xaxb"


@given(
    text=st.text("ab", max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=CUTS,
    include=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_stop_strings_do_not_depend_on_chunks(
    byte_level: Tokenizer, text: str, stop: list[str], cuts: list[int], include: bool
) -> None:
    def first_match() -> tuple[str, str | None]:
        for end in range(len(text) + 1):  # letter by letter, the longest of those that end here
            matched = [s for s in stop if text[:end].endswith(s)]
            if matched:
                longest = max(matched, key=len)
                return text[: end if include else end - len(longest)], longest
        return text, None

    detokenizer = IncrementalDetokenizer(byte_level, stop=stop, include_stop_str_in_output=include)
    ids = list(text.encode())
    deltas = stream(detokenizer, chunks(ids, cuts))
    assert ("".join(deltas), detokenizer.stop_reason) == first_match()


@pytest.mark.parametrize("stop", ["END", ["a", ""]])
def test_malformed_stop(byte_level: Tokenizer, stop: Sequence[str]) -> None:
    with pytest.raises(ValueError, match="stop must be"):
        IncrementalDetokenizer(byte_level, stop=stop)


def test_a_token_is_decoded_once_however_long_the_text(
    sentencepiece: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, decoded = sentencepiece._streams, 0
    decode = streams._decode

    def counting(tokens: list[str]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return decode(tokens)

    monkeypatch.setattr(streams, "_decode", counting)
    ids = sentencepiece.encode("the cat 日本 sat", add_special_tokens=False) * 100
    detokenizer = IncrementalDetokenizer(sentencepiece, stop=["never"])
    text = "".join([detokenizer.append([i]) for i in ids]) + detokenizer.append([], final=True)
    assert text == sentencepiece.decode(ids)
    assert decoded <= 2 * len(ids)  # each once, in a run or by itself, and the anchor in front
