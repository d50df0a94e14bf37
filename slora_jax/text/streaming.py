"""From token ids to text, one token at a time, so that the pieces together equal the decoding of the whole.

A decoder of the `tokenizers` library sees all tokens at once. Two kinds allow an exact stream, O(1) a token:
- byte-level BPE: a token is bytes, and the text is their UTF-8 with U+FFFD for what is not (`_Utf8Stream`);
- decoders that turn each token into text by itself, but for the first one and for runs of byte tokens
  `<0xNN>` (`_ChunkStream`): Llama's SentencePiece decoder, Metaspace, WordPiece.
Others (CTC, BPEDecoder, regular expressions over the whole text) look ahead without bound and are refused.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tokenizers

ANCHOR = "a"  # a token in front, so that the one after it is decoded as one that is not the first
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextStream(Protocol):
    """One sequence's decoding state."""

    def push(self, token_id: int) -> str:
        """Text that is final once this token is known; "" where it must wait for more."""

    def finish(self) -> str:
        """What was held back, as the decoder shows it at the end of the sequence."""


class StreamFactory:
    """Makes `TextStream`s for one tokenizer and holds what they share: the text of each token, filled as met.

    Raises ValueError for a decoder that has no exact stream. Thread-safe: the shared dictionaries only grow,
    and every writer of a key writes the same value.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
        self._tokens: dict[int, str | None] = {}
        self._bytes: dict[str, bytes] = {}
        self._texts: dict[str, str] = {}
        decoder = backend.decoder
        spec = None if decoder is None else json.loads(decoder.__getstate__())
        steps = _steps(spec)
        self._byte_level = [s["type"] for s in steps if s["type"] != "Fuse"] == ["ByteLevel"]
        self._decode: Callable[[list[str]], str] = " ".join if decoder is None else decoder.decode
        self._strip: tuple[str, int] | None = None
        self._byte_fallback = False
        if not self._byte_level:
            self._strip, self._byte_fallback = _check_per_token(steps)
            if self._decode([ANCHOR]) != ANCHOR:
                raise ValueError(
                    f"tokenizer: decoder {_name(spec)} changes plain letters and cannot be streamed"
                )

    def stream(self, skip_special_tokens: bool) -> TextStream:
        """A new stream at the start of a text."""
        token = self._visible_token if skip_special_tokens else self._token
        if self._byte_level:
            return _Utf8Stream(lambda i: self._token_bytes(token(i)))
        byte_token = _BYTE_TOKEN if self._byte_fallback else None
        return _ChunkStream(token, self._text, self._decode, byte_token, self._strip)

    def _token(self, token_id: int) -> str | None:
        """The token's spelling; None for an id that the vocabulary lacks (decoders skip it)."""
        try:
            return self._tokens[token_id]
        except KeyError:
            token = self._backend.id_to_token(token_id)
            self._tokens[token_id] = token
            return token

    def _visible_token(self, token_id: int) -> str | None:
        token = self._token(token_id)
        return None if token in self._special else token

    def _token_bytes(self, token: str | None) -> bytes:
        if token is None:
            return b""
        data = self._bytes.get(token)
        if data is None:
            data = self._bytes[token] = token_bytes(token)
        return data

    def _text(self, token: str) -> str:
        """Text of a token that is not the first."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._decode([ANCHOR, token])[len(ANCHOR) :]
        return text


class _Utf8Stream:
    """Byte-level BPE. An unfinished UTF-8 sequence waits; Python and Rust replace broken ones alike."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _ChunkStream:
    """Decoders that act token by token.

    A run of byte tokens waits for its end: `ByteFallback` shows the whole run as U+FFFD when any part of it
    is not UTF-8, so its first characters are not final before its last.
    """

    def __init__(
        self,
        token: Callable[[int], str | None],
        text: Callable[[str], str],
        decode: Callable[[list[str]], str],
        byte_token: re.Pattern[str] | None,
        strip: tuple[str, int] | None,
    ) -> None:
        self._token, self._text, self._decode = token, text, decode
        self._byte_token = byte_token
        self._strip_content, self._strip_left = strip or ("", 0)
        self._strips_text = strip is not None
        self._first = True
        self._run: list[str] = []

    def push(self, token_id: int) -> str:
        token = self._token(token_id)
        if token is None:
            return ""
        if self._byte_token is not None and self._byte_token.fullmatch(token):
            self._run.append(token)
            return ""
        return self._end_run() + self._emit([token])

    def finish(self) -> str:
        return self._end_run()

    def _end_run(self) -> str:
        run, self._run = self._run, []
        return self._emit(run) if run else ""

    def _emit(self, tokens: list[str]) -> str:
        """Text of the next tokens (one, or a whole run)."""
        first, self._first = self._first, False
        if first and not self._strips_text:
            return self._decode(tokens)
        text = self._text(tokens[0]) if len(tokens) == 1 else self._decode([ANCHOR, *tokens])[len(ANCHOR) :]
        while text and self._strip_left:
            if not text.startswith(self._strip_content):
                self._strip_left = 0
            else:
                text, self._strip_left = text[1:], self._strip_left - 1
        return text


def token_bytes(token: str) -> bytes:
    """Bytes of a byte-level BPE token; one with characters outside that alphabet is its own UTF-8."""
    try:
        return bytes(BYTE_OF_CHAR[c] for c in token)
    except KeyError:
        return token.encode("utf-8", "surrogatepass")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the others as U+0100, U+0101, ... in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF_CHAR: Mapping[str, int] = _byte_alphabet()


def _steps(spec: dict[str, Any] | None) -> list[dict[str, Any]]:
    if spec is None:
        return []
    if spec["type"] != "Sequence":
        return [spec]
    return [step for inner in spec["decoders"] for step in _steps(inner)]


def _check_per_token(steps: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, int] | None, bool]:
    """Check that steps act token by token but for a last Strip; return (its content and count, fallback?)."""
    names = [step["type"] for step in steps]
    fused = steps[names.index("Fuse") + 1 :] if "Fuse" in names else []
    before = names[: names.index("Fuse")] if "Fuse" in names else names
    unknown = set(before) - {"Replace", "ByteFallback", "Metaspace", "WordPiece"}
    strip = fused[0] if fused and fused[0]["type"] == "Strip" and not fused[0]["stop"] else None
    if strip is not None:  # these treat the first token by themselves; no model has both
        unknown |= set(before) & {"Metaspace", "WordPiece"}
    if unknown or len(fused) != (strip is not None):
        raise ValueError(
            f"tokenizer: decoder {' + '.join(names)} cannot be streamed exactly; supported are ByteLevel and "
            "sequences of Replace, ByteFallback, Metaspace, WordPiece, then Fuse and a left Strip"
        )
    return (None if strip is None else (strip["content"], strip["start"])), "ByteFallback" in before


def _name(spec: Mapping[str, Any] | None) -> str:
    return "None" if spec is None else str(spec["type"])
