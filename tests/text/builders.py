"""Small tokenizers for tests: GGUF files and Hugging Face folders, written as the converters write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from slora_jax.text.streaming import BYTE_OF_CHAR

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (int(t) for t in gguf.TokenType)
SENTENCEPIECE: dict[str, Any] = json.loads(
    Path(__file__).with_name("sentencepiece.json").read_text(encoding="utf-8")
)
CHATML = (
    "{% for message in messages %}\n"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_vocab(*more: str) -> list[str]:
    """The 256 bytes as GPT-2 spells them, in byte order, then `more`."""
    chars = {byte: char for char, byte in BYTE_OF_CHAR.items()}
    return [*(chars[b] for b in range(256)), *more]


def write_gguf(
    path: Path,
    *,
    model: str = "gpt2",
    pre: str | None = "gpt-2",
    tokens: Sequence[str] | None = None,
    types: Sequence[int] | None = None,
    merges: Sequence[str] = ("Ġ a", "a b"),
    scores: Sequence[float] | None = None,
    metadata: Mapping[str, int | bool | str] | None = None,
) -> Path:
    """A GGUF file with a tokenizer and no tensors; by default the bytes and two merges."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    tokens = byte_vocab("Ġa", "ab") if tokens is None else tokens
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types) if types is not None else [NORMAL] * len(tokens))
    if merges:
        writer.add_token_merges(list(merges))
    if scores is not None:
        writer.add_token_scores(list(scores))
    for name, value in (metadata or {}).items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.{name}", value)
        else:
            writer.add_string(f"tokenizer.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sentencepiece_gguf(path: Path, **metadata: int | bool | str) -> Path:
    """The recorded SentencePiece vocabulary; keyword names take the place of the "ggml." keys."""
    ids: dict[str, int | bool | str] = {
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }
    return write_gguf(
        path,
        model="llama",
        pre="default",
        tokens=SENTENCEPIECE["tokens"],
        types=SENTENCEPIECE["types"],
        scores=SENTENCEPIECE["scores"],
        merges=(),
        metadata=ids | {f"ggml.{name}": value for name, value in metadata.items()},
    )


def byte_level_backend(
    special: Sequence[str] = ("<|bos|>", "<|im_start|>", "<|im_end|>"),
) -> tokenizers.Tokenizer:
    """Byte-level BPE with a few merges; ids 258, ... are the special tokens."""
    vocab = {token: i for i, token in enumerate(byte_vocab("Ġa", "ab"))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "a"), ("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    return backend


def write_folder(folder: Path, files: Mapping[str, Any], backend: tokenizers.Tokenizer | None = None) -> Path:
    """A Hugging Face folder: tokenizer.json and `files` (text as it is, anything else as JSON)."""
    folder.mkdir(parents=True, exist_ok=True)
    (backend or byte_level_backend()).save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder
