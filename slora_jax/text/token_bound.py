"""How many tokens a text has at least, without tokenizing it: what is far too long is refused at once.

A token of BPE covers no more of a text than its spelling is long, in bytes where BPE is byte-level, else in
characters. So a text has at least its length over that of the longest token. It also has at least its ASCII
letters and digits over the most that one token has of these, which is more for words: the longest tokens are
runs of spaces, dashes and the like.

Both are true only where all of the text is tokenized: nothing before BPE removes or contracts any of it, and
no run of it, of any length, is one token. Of a tokenizer for which that is not sure nothing is said. Bytes
that byte-level BPE does not know, and therefore skips, are not counted.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import models

from slora_jax.text.streaming import BYTE_OF_CHAR

_LETTERS = (string.ascii_letters + string.digits).encode()
_OTHERS = bytes(byte for byte in range(256) if byte not in _LETTERS)
_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}


class TokenBound:
    """Counts by the rules of one tokenizer as it is now. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        before = list(_steps(backend.pre_tokenizer, "pretokenizers"))
        self._byte_level = any(step["type"] == "ByteLevel" for step in before)
        model_takes_all = _takes_bytes if self._byte_level else _takes_characters
        self._known = _keeps_all(backend, before) and model_takes_all(backend, before)
        tokens = backend.get_vocab(with_added_tokens=False)
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        if backend.normalizer is not None:  # in a normalized text, tokens are looked for as it spells them
            added += [backend.normalizer.normalize_str(token) for token in added]
        self._longest = max([1, *map(len, tokens), *(len(_utf8(token)) for token in added)])
        self._most_letters = max([1, *map(_letters, tokens), *map(_letters, added)])
        self._skipped = b""
        if self._byte_level:
            self._skipped = bytes(byte for char, byte in BYTE_OF_CHAR.items() if char not in tokens)

    def __call__(self, text: str) -> int:
        """No more than the tokens of `text`, whether special ones are added or not; 0 where nothing is sure.

        A few passes over the bytes of the text, as fast as memory.
        """
        if not self._known:
            return 0
        utf8 = _utf8(text).translate(None, self._skipped)
        length = len(utf8) if self._byte_level else len(text)
        letters = len(utf8.translate(None, _OTHERS))
        return max(-(-length // self._longest), -(-letters // self._most_letters))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _letters(text: str) -> int:
    return len(_utf8(text).translate(None, _OTHERS))


def _steps(part: Any, inner: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or post-processor; `inner` is what a sequence calls them."""
    return _flat(None if part is None else json.loads(part.__getstate__()), inner)


def _flat(spec: dict[str, Any] | None, inner: str) -> Iterator[dict[str, Any]]:
    if spec is None:
        return
    if spec["type"] != "Sequence":
        yield spec
        return
    for step in spec[inner]:
        yield from _flat(step, inner)


def _keeps_all(backend: tokenizers.Tokenizer, before: list[dict[str, Any]]) -> bool:
    """Whether BPE gets every character of a text that is in no added token, or something longer for it, and
    all that it makes of these is in the output.
    """
    strips = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    return (
        not strips
        and all(_lengthens(step) for step in _steps(backend.normalizer, "normalizers"))
        and all(_cuts(step) for step in before)
        and all(_adds(step) for step in _steps(backend.post_processor, "processors"))
    )


def _lengthens(step: dict[str, Any]) -> bool:
    """Whether a normalizer leaves as many characters and letters, or more."""
    if step["type"] == "Prepend":
        return True
    pattern, new = step.get("pattern", {}).get("String"), step.get("content", "")
    if step["type"] != "Replace" or not pattern:
        return False
    return len(new) >= len(pattern) and _letters(new) >= _letters(pattern)


def _cuts(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer cuts a text, and leaves nothing of it out."""
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in ("ByteLevel", "Digits", "Metaspace")


def _adds(step: dict[str, Any]) -> bool:
    """Whether a post-processor keeps all tokens of the text."""
    if step["type"] == "TemplateProcessing":
        return any("Sequence" in piece for piece in step["single"])
    return step["type"] in ("ByteLevel", "BertProcessing", "RobertaProcessing")


def _takes_bytes(backend: tokenizers.Tokenizer, before: list[dict[str, Any]]) -> bool:
    """Whether byte-level BPE gets the bytes of the text as it is, each as one character."""
    spelled = [step["type"] for step in before if step["type"] in ("ByteLevel", "Metaspace")]
    return _is_plain_bpe(backend.model) and backend.normalizer is None and spelled == ["ByteLevel"]


def _takes_characters(backend: tokenizers.Tokenizer, before: list[dict[str, Any]]) -> bool:
    """Whether BPE has a token for every character: its bytes, where it has no other."""
    tokens = backend.get_vocab(with_added_tokens=False)
    has_bytes = tokens.keys() >= _BYTE_TOKENS
    return _is_plain_bpe(backend.model) and bool(backend.model.byte_fallback) and has_bytes


def _is_plain_bpe(model: Any) -> bool:
    """Whether tokens are spelled as in the text, wherever in a word they are."""
    return isinstance(model, models.BPE) and not (model.continuing_subword_prefix or model.end_of_word_suffix)
