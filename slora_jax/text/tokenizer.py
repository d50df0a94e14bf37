"""`Tokenizer`: text to token ids and back, chat templates, end-of-text ids; from an HF folder or a GGUF."""

from __future__ import annotations

import functools
import json
import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from slora_jax.text import gguf_vocab
from slora_jax.text.chat import DEFAULT, END_OF_TURN_TOKENS, ChatTemplate
from slora_jax.text.streaming import StreamFactory, TextStream
from slora_jax.text.token_bound import TokenBound

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer. Thread-safe: nothing changes after construction but caches that only grow.

    Make one with `from_folder`, `from_gguf` or `load_tokenizer`. The constructor raises ValueError for a
    decoder whose text cannot be streamed.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        chat: ChatTemplate | None = None,
    ) -> None:
        backend.no_truncation()  # a tokenizer.json may carry the settings of its training
        backend.no_padding()
        self._backend = backend
        self._streams = StreamFactory(backend)
        self._bound = TokenBound(backend)
        self._chat = chat
        self._bos_token_id = bos_token_id
        self._eos_token_ids = frozenset(eos_token_ids) | self._end_of_turn_ids()

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a Hugging Face model folder: `tokenizer.json` and what lies beside it.

        Read are `tokenizer_config.json` (BOS/EOS to add, added tokens, chat template), its older form
        `special_tokens_map.json`, `chat_template.jinja` or `chat_template.json` (which go before the template
        in the config), `additional_chat_templates/`, `generation_config.json` and `config.json` (EOS ids).
        Raises ValueError where tokenizer.json is missing or a file cannot be read.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            hint = " (only a SentencePiece tokenizer.model: convert it with transformers)" * bool(
                list(folder.glob("tokenizer.model"))
            )
            raise ValueError(f"{folder}: no tokenizer.json{hint}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # `tokenizers` raises bare Exception
            raise ValueError(f"{file}: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        special = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        _add_missing_tokens(backend, config, file)
        _apply_added_ends(backend, config, special)
        templates = _chat_templates(folder, config)
        eos = [backend.token_to_id(special["eos_token"])] if "eos_token" in special else []
        for name in ("generation_config.json", "config.json"):
            declared = _read_json(folder / name).get("eos_token_id")
            eos += declared if isinstance(declared, list) else [declared]
        return cls(
            backend,
            bos_token_id=backend.token_to_id(special["bos_token"]) if "bos_token" in special else None,
            eos_token_ids=[int(i) for i in eos if i is not None],
            chat=ChatTemplate(templates, special) if templates else None,
        )

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer in a GGUF file. Raises ValueError for one that is not supported (`gguf_vocab`)."""
        vocab = gguf_vocab.read_gguf(path)
        return cls(
            vocab.backend,
            bos_token_id=vocab.bos_token_id,
            eos_token_ids=vocab.eos_token_ids,
            chat=ChatTemplate(vocab.chat_templates, vocab.special_tokens) if vocab.chat_templates else None,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised.

        `add_special_tokens` puts BOS (and EOS) where the model wants them: true for plain prompts, false for
        the output of `apply_chat_template`, which writes its own. Raises ValueError for text that is not
        valid Unicode.
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:  # a lone surrogate, which JSON can spell
            raise ValueError("text must be a string of valid Unicode (it holds a lone surrogate?)") from error

    def fewest_tokens(self, text: str) -> int:
        """No more than `encode(text)` has, found without encoding it; 0 where that cannot be said of this
        tokenizer.
        """
        return self._bound(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, spaces as they are; bytes that are not UTF-8 become U+FFFD, unknown ids ""."""
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise ValueError("token ids must not be negative or above 32 bits") from error

    def text_stream(self, skip_special_tokens: bool = True) -> TextStream:
        """Decoding of one sequence token by token, equal to `decode` in total."""
        return self._streams.stream(skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for a conversation in OpenAI's form; `kwargs` are further variables of the template.

        Raises ValueError where the model has no template, for messages that are malformed or hold anything
        but text, and with the template's own words where it refuses them.
        """
        if self._chat is None:
            raise ValueError(
                "this model has no chat template: use plain completions, or put a chat_template.jinja beside "
                "its tokenizer.json"
            )
        return self._chat.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=kwargs
        )

    def id_to_token(self, token_id: int) -> str | None:
        """The token's spelling in the vocabulary; None for an id that it lacks."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a generation: all that the model declares, and its chat template's end of turn."""
        return self._eos_token_ids

    @property
    def bos_token_id(self) -> int | None:
        return self._bos_token_id

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included. The model's embedding may be larger."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template used without tools."""
        return None if self._chat is None else self._chat.text

    def _end_of_turn_ids(self) -> frozenset[int]:
        if self._chat is None:
            return frozenset()
        added = {token.content: i for i, token in self._backend.get_added_tokens_decoder().items()}
        return frozenset(added[t] for t in END_OF_TURN_TOKENS if t in added and self._chat.mentions(t))


def load_tokenizer(path: str | os.PathLike[str] | None) -> Tokenizer | None:
    """The tokenizer at `path`: a GGUF file, a folder with tokenizer.json, or a folder with one GGUF model.

    None for None (a model served by token ids alone). Raises ValueError where the path holds no tokenizer.
    """
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"tokenizer must be a path or None, got {reprlib.repr(path)}")
    path = Path(path)
    try:
        exists = path.exists()
        is_gguf = path.is_file() and path.suffix == ".gguf"
        is_folder = (path / "tokenizer.json").is_file()
    except OSError as error:
        raise ValueError(f"tokenizer {reprlib.repr(str(path))} cannot be read: {error.strerror}") from error
    if is_gguf:
        return Tokenizer.from_gguf(path)
    if is_folder:
        return Tokenizer.from_folder(path)
    models = [f for f in sorted(path.glob("*.gguf")) if "-of-" not in f.stem or "-00001-of-" in f.stem]
    if len(models) == 1:
        return Tokenizer.from_gguf(models[0])
    found = (
        f"{len(models)} GGUF models: name one of them" if models else "neither tokenizer.json nor a GGUF file"
    )
    raise ValueError(f"tokenizer '{path}': {found if exists else 'no such path'}")


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a file; {} where there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # JSON or UTF-8
        raise ValueError(f"{file}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: must hold a JSON object")
    return value


def _special_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """Tokens by role ("eos_token"), some of which are objects; tokenizer_config.json goes first."""
    merged = {role: config.get(role) or special_map.get(role) for role in _ROLES}
    return {
        role: token["content"] if isinstance(token, Mapping) else str(token)
        for role, token in merged.items()
        if token
    }


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], file: Path) -> None:
    """Add what tokenizer_config.json declares and tokenizer.json lacks (fine-tunes with new tokens)."""
    declared = sorted((int(i), token) for i, token in (config.get("added_tokens_decoder") or {}).items())
    for i, token in declared:
        if backend.token_to_id(token["content"]) is None:
            flags = {
                k: token.get(k, False) for k in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            backend.add_tokens([AddedToken(token["content"], **flags)])
        actual = backend.token_to_id(token["content"])
        if actual != i:
            raise ValueError(
                f"{file}: token {token['content']!r} has id {actual} here and {i} in tokenizer_config.json; "
                "the two files belong to different models"
            )


def _apply_added_ends(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """Where tokenizer_config.json says whether BOS or EOS are added, it wins (as in transformers)."""
    if config.get("add_bos_token") is None and config.get("add_eos_token") is None:
        return
    bos = special.get("bos_token") if config.get("add_bos_token") else None
    eos = special.get("eos_token") if config.get("add_eos_token") else None
    gguf_vocab.set_added_ends(backend, bos, eos)


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; a file of its own wins over tokenizer_config.json, and .jinja over .json."""
    templates = {}
    declared = config.get("chat_template")
    if isinstance(declared, list):
        templates = {entry["name"]: entry["template"] for entry in declared}
    elif declared:
        templates = {DEFAULT: str(declared)}
    if from_json := _read_json(folder / "chat_template.json").get("chat_template"):
        templates[DEFAULT] = str(from_json)
    if (file := folder / "chat_template.jinja").is_file():
        templates[DEFAULT] = file.read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates
