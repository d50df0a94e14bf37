"""Tokenizers from the metadata of a GGUF file, which names the parts that a `tokenizer.json` would spell out.

`tokenizer.ggml.model` is "gpt2" (byte-level BPE, cut into words as `tokenizer.ggml.pre` says) or "llama"
(SentencePiece BPE with byte fallback). The rules are those of the models' own `tokenizer.json`, which
llama.cpp's names stand for; transformers 5.24 differs for "smollm", where it leaves out the digits rule.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from slora_jax.weights import gguf as weights_gguf

_PREFIX = "tokenizer."
_SPACE = "▁"  # SentencePiece's spelling of a space
_ISOLATED = "isolated"

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """What a name in `tokenizer.ggml.pre` stands for.

    Text is cut by each of `splits` in turn; `digits` first puts every digit by itself. `ignore_merges` takes
    a word that is in the vocabulary whole; `nfc` normalizes; `add_bos` holds where the file does not say.
    """

    splits: tuple[str, ...]
    digits: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False


_LLAMA3 = PreTokenizer((_LLAMA3_SPLIT,), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_QWEN2_SPLIT,), nfc=True)
_GPT2 = PreTokenizer((_GPT2_SPLIT,))
_SMOLLM = PreTokenizer((_GPT2_SPLIT,), digits=True)
_DEFAULT = PreTokenizer(
    (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]")
)  # llama.cpp's own rule

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
}


@dataclasses.dataclass(frozen=True)
class GgufVocab:
    """A tokenizer built from a GGUF file, and what the file says about its use (None where nothing)."""

    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # end of text, of turn, of message, as declared
    special_tokens: Mapping[str, str]  # "bos_token", ... -> token, for chat templates
    chat_templates: Mapping[str, str]  # name -> source; may be empty


def read_gguf(path: str | os.PathLike[str]) -> GgufVocab:
    """The tokenizer of a GGUF file. Raises ValueError for other files and unsupported tokenizers."""
    return build(read_metadata(path), os.fspath(path))


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The file's `tokenizer.*` entries, without that prefix."""
    fields = weights_gguf.read_gguf(Path(path), whole=True).fields.items()
    return {name.removeprefix(_PREFIX): f.contents() for name, f in fields if name.startswith(_PREFIX)}


def build(metadata: Mapping[str, Any], source: str) -> GgufVocab:
    """The tokenizer that `tokenizer.*` entries (without that prefix) describe; `source` is for messages."""
    tokens: list[str] = metadata.get("ggml.tokens") or []
    kind = metadata.get("ggml.model")
    if not tokens or kind is None:
        raise ValueError(
            f"{source}: the file holds no tokenizer; give one with tokenizer=<folder with tokenizer.json>"
        )
    types = metadata.get("ggml.token_type") or [gguf.TokenType.NORMAL] * len(tokens)
    # UNUSED tokens fill the vocabulary up to the size of the embedding; no text has them.
    vocab = {
        t: i for i, (t, kind_) in enumerate(zip(tokens, types, strict=True)) if kind_ != gguf.TokenType.UNUSED
    }
    try:
        if kind == "gpt2":
            pre = _pre_tokenizer(metadata, source)
            backend, add_bos = _byte_level(vocab, _merges(metadata, source), pre), pre.add_bos
        elif kind == "llama":
            backend, add_bos = _sentencepiece(metadata, vocab, types, source), True
        else:
            raise ValueError(
                f"{source}: tokenizer.ggml.model '{kind}' is not supported; supported: gpt2, llama"
            )
    except ValueError:
        raise
    except (
        Exception
    ) as error:  # `tokenizers` raises bare Exception, e.g. for a merge that is not in the vocabulary
        raise ValueError(f"{source}: tokenizer: {error}") from error
    named = _named_ids(metadata, len(tokens), source)
    _add_tokens(backend, tokens, types, named.values())
    special = {
        f"{name}_token": tokens[i] for name, i in named.items() if name in ("bos", "eos", "unk", "pad")
    }
    bos = special.get("bos_token") if metadata.get("ggml.add_bos_token", add_bos) else None
    eos = special.get("eos_token") if metadata.get("ggml.add_eos_token", False) else None
    set_added_ends(backend, bos, eos)
    templates = {"default": metadata["chat_template"]} if "chat_template" in metadata else {}
    for name in metadata.get("chat_templates") or ():
        templates[name] = metadata[f"chat_template.{name}"]
    ends = tuple(dict.fromkeys(named[name] for name in ("eos", "eot", "eom") if name in named))
    return GgufVocab(backend, named.get("bos"), ends, special, templates)


def set_added_ends(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `encode` put these tokens of the vocabulary before and after the text, and nothing else."""
    single: list[str] = ["$A"]
    ends = []
    # Under names of our own: in a template, the text of a token must not hold spaces or colons.
    for name, token, place in (("bos", bos, 0), ("eos", eos, len(single) + 1)):
        if token is not None:
            single.insert(place, name)
            ends.append({"id": name, "ids": [backend.token_to_id(token)], "tokens": [token]})
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=ends
    )


def _pre_tokenizer(metadata: Mapping[str, Any], source: str) -> PreTokenizer:
    name: str | None = metadata.get("ggml.pre")
    if name is not None and name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    what = (
        "names no pre-tokenizer"
        if name is None
        else f"has the pre-tokenizer '{name}', which is not supported"
    )
    raise ValueError(
        f"{source}: the file {what} (tokenizer.ggml.pre); supported: {', '.join(sorted(PRE_TOKENIZERS))}. "
        "Give the model's own tokenizer with tokenizer=<folder with tokenizer.json>"
    )


def _merges(metadata: Mapping[str, Any], source: str) -> list[tuple[str, str]]:
    pairs = [tuple(merge.split(" ")) for merge in metadata.get("ggml.merges") or ()]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(
            f"{source}: tokenizer.ggml.merges is missing or holds an entry that is not two tokens"
        )
    return [(pair[0], pair[1]) for pair in pairs]


def _byte_level(
    vocab: dict[str, int], merges: list[tuple[str, str]], pre: PreTokenizer
) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(tokenizers.Regex(split), _ISOLATED) for split in pre.splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    metadata: Mapping[str, Any], vocab: dict[str, int], types: Sequence[int], source: str
) -> tokenizers.Tokenizer:
    """Llama's SentencePiece BPE: pieces become merges in order of their scores, as in HF's conversion.

    A space goes in front of every stretch of text between special tokens, as in llama.cpp and Llama 2's own
    tokenizer.json.
    """
    scores = metadata.get("ggml.scores")
    if not scores:
        raise ValueError(f"{source}: tokenizer.ggml.scores is missing")
    if metadata.get("ggml.remove_extra_whitespaces"):
        raise ValueError(
            f"{source}: SentencePiece tokenizers that remove extra whitespace are not supported; give the "
            "model's own with tokenizer=<folder with tokenizer.json>"
        )
    user_defined = [t for t, i in vocab.items() if types[i] == gguf.TokenType.USER_DEFINED]
    if any(_SPACE in t for t in user_defined):
        raise ValueError(
            f"{source}: user-defined SentencePiece tokens with spaces are not supported; give the model's "
            "own tokenizer with tokenizer=<folder with tokenizer.json>"
        )
    unknown = metadata.get("ggml.unknown_token_id", 0)
    unk_token = next((t for t, i in vocab.items() if i == unknown), None)
    merges = _merges_by_score(
        {t: scores[i] for t, i in vocab.items() if types[i] == gguf.TokenType.NORMAL}, vocab
    )
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    )
    prefix = bool(metadata.get("ggml.add_space_prefix", True))
    to_pieces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    to_text: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        to_pieces.insert(0, normalizers.Prepend(_SPACE))
        to_text.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(to_pieces)
    backend.decoder = decoders.Sequence(to_text)
    return backend


def _merges_by_score(scores: Mapping[str, float], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best score first; equals: the longer left part first."""
    ranked = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, -cut, left, right))
    ranked.sort(key=lambda entry: entry[:2])
    return [(left, right) for _, _, left, right in ranked]


def _named_ids(metadata: Mapping[str, Any], num_tokens: int, source: str) -> dict[str, int]:
    """Token ids that the file names, by short name. Raises ValueError for one past the vocabulary."""
    keys = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
    ids = {name: metadata.get(f"ggml.{key}_token_id") for name, key in keys.items()}
    for name, i in ids.items():
        if i is not None and not 0 <= i < num_tokens:
            raise ValueError(f"{source}: the {name} token id {i} is not in the vocabulary of {num_tokens}")
    return {name: i for name, i in ids.items() if i is not None}


def _add_tokens(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int], named: Iterable[int]
) -> None:
    """Make control tokens (and those with a role) special, user-defined ones whole; ids stay as they are."""
    control = {i for i, kind in enumerate(types) if kind == gguf.TokenType.CONTROL} | set(named)
    user_defined = (t for t, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.USER_DEFINED)
    backend.add_special_tokens(
        [AddedToken(tokens[i], normalized=False, special=True) for i in sorted(control)]
    )
    backend.add_tokens([AddedToken(token, normalized=False) for token in user_defined])
