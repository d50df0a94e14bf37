"""Write sentencepiece.json: a small SentencePiece BPE vocabulary of Llama's kind, and the ids of texts.

Run by hand with `pip install sentencepiece` (0.2.3 was used) from anywhere; the tests only read the result.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import gguf
import sentencepiece  # type: ignore[import-not-found,import-untyped,unused-ignore]

CORPUS = [
    "The cat sat on the mat, and the other cats sat on other mats.",
    "bananas aaa aaaa banana ban an ana 123 4567 naïve café",
    "def f(x):\n    return x + 1  # the end",
    "when the rain in Spain stays mainly in the plain, the plane stays on the ground",
]
TEXTS = [
    "",
    " ",
    "  two spaces",
    "the cat sat",
    " the  cats   on mats ",
    "banananana aaaaaaa",
    "12 345\n\n6",
    "naïve café, crème brûlée",
    "日本 😀 привет",
    "\tdef f(x):\n    return x",
    "<0x41> is not a byte",
]
USER_DEFINED = "<|im_start|>"


def token_type(model: Any, i: int) -> gguf.TokenType:
    if model.is_unknown(i):
        return gguf.TokenType.UNKNOWN
    if model.is_control(i):
        return gguf.TokenType.CONTROL
    if model.is_byte(i):
        return gguf.TokenType.BYTE
    return gguf.TokenType.USER_DEFINED if model.id_to_piece(i) == USER_DEFINED else gguf.TokenType.NORMAL


def main() -> None:
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_writer=trained,
        vocab_size=380,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        user_defined_symbols=[USER_DEFINED],
        num_threads=1,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    ids = range(model.get_piece_size())
    document = {
        "tokens": [model.id_to_piece(i) for i in ids],
        "scores": [model.get_score(i) for i in ids],
        "types": [int(token_type(model, i)) for i in ids],
        "strings": [{"text": text, "token_ids": model.encode(text)} for text in TEXTS],
        "decoded": [model.decode(model.encode(text)) for text in TEXTS],
    }
    path = Path(__file__).with_name("sentencepiece.json")
    path.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
