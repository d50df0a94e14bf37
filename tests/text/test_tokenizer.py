"""`Tokenizer.from_folder`, `load_tokenizer`, and what every tokenizer does."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from slora_jax.text import Tokenizer, load_tokenizer
from tests.text import builders
from tests.text.builders import byte_level_backend, write_folder

BOS, IM_START, IM_END = 258, 259, 260


def test_a_folder_with_tokenizer_json_alone(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {}))
    ids = tokenizer.encode("ab a<|im_end|>")
    assert ids == [257, 256, IM_END]
    assert tokenizer.decode(ids) == "ab a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab a<|im_end|>"
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == (frozenset(), None)
    assert (tokenizer.chat_template, tokenizer.vocab_size) == (None, 261)
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({"config.json": {"eos_token_id": 7}}, {7}),
        ({"config.json": {"eos_token_id": 7}, "generation_config.json": {"eos_token_id": [8, 9]}}, {7, 8, 9}),
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}}, {IM_END}),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>", "special": True}}}, {IM_END}),
        ({"special_tokens_map.json": {"eos_token": {"content": "<|im_end|>"}}}, {IM_END}),
        (
            {"tokenizer_config.json": {"eos_token": "<|bos|>", "chat_template": builders.CHATML}},
            {BOS, IM_END},
        ),
        ({"config.json": {"eos_token_id": None}}, set()),
    ],
)
def test_eos_ids_of_all_files(tmp_path: Path, files: dict[str, Any], eos: set[int]) -> None:
    assert Tokenizer.from_folder(write_folder(tmp_path, files)).eos_token_ids == eos


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({"bos_token": "<|bos|>"}, [257]),
        ({"bos_token": "<|bos|>", "add_bos_token": True}, [BOS, 257]),
        ({"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "add_eos_token": True}, [257, IM_END]),
        ({"add_bos_token": True}, [257]),
    ],
)
def test_added_ends(tmp_path: Path, config: dict[str, Any], ids: list[int]) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {"tokenizer_config.json": config}))
    assert tokenizer.encode("ab") == ids
    assert tokenizer.encode("ab", add_special_tokens=False) == [257]


def test_tokens_that_only_the_config_declares_are_added(tmp_path: Path) -> None:
    config = {
        "added_tokens_decoder": {
            "260": {"content": "<|im_end|>"},
            "261": {"content": "<new>", "special": True},
        }
    }
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path / "a", {"tokenizer_config.json": config}))
    assert tokenizer.encode("ab<new>") == [257, 261]
    assert tokenizer.decode([257, 261]) == "ab"
    wrong = {"added_tokens_decoder": {"300": {"content": "<new>"}}}
    with pytest.raises(ValueError, match="'<new>' has id 261 here and 300"):
        Tokenizer.from_folder(write_folder(tmp_path / "b", {"tokenizer_config.json": wrong}))


def test_truncation_and_padding_of_the_training_are_off(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=4)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {}, backend))
    assert len(tokenizer.encode("x")) == 1
    assert len(tokenizer.encode("xxxxxx")) == 6


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"tokenizer_config.json": {"chat_template": "config"}}, "config"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "list"}]}}, "list"),
        ({"chat_template.json": {"chat_template": "json"}}, "json"),
        ({"tokenizer_config.json": {"chat_template": "config"}, "chat_template.jinja": "jinja"}, "jinja"),
    ],
)
def test_where_the_chat_template_is_found(tmp_path: Path, files: dict[str, Any], template: str) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, files))
    assert tokenizer.chat_template == template
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == template


def test_additional_chat_templates(tmp_path: Path) -> None:
    files = {"additional_chat_templates/tool_use.jinja": "tools", "chat_template.jinja": "plain"}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, files))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "plain"
    assert tokenizer.apply_chat_template(messages, tools=[{"type": "function"}]) == "tools"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_broken_files_are_named(tmp_path: Path, name: str, content: str) -> None:
    write_folder(tmp_path, {})
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name):
        Tokenizer.from_folder(tmp_path)


def test_a_decoder_that_cannot_be_streamed_is_refused() -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.decoder = decoders.CTC()
    with pytest.raises(ValueError, match="CTC cannot be streamed"):
        Tokenizer(backend)


def test_text_and_ids_out_of_range(byte_level: Tokenizer) -> None:
    with pytest.raises(ValueError, match="valid Unicode"):
        byte_level.encode("\ud800")
    with pytest.raises(ValueError, match="negative"):
        byte_level.decode([-1])
    assert byte_level.decode([9999, 257]) == "ab"
    assert byte_level.id_to_token(-1) is None
    assert byte_level.encode("") == []
    assert byte_level.decode([]) == ""


def test_threads_may_share_a_tokenizer(smollm2: Tokenizer) -> None:
    texts = [f"{i} threads, " * (i % 5 + 1) + "naïve 😀" for i in range(64)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(smollm2.encode, texts))
        assert list(pool.map(smollm2.decode, ids)) == texts


def test_load_tokenizer_picks_by_what_is_there(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", {})
    file = builders.write_gguf(tmp_path / "m.gguf")
    for path in (folder, str(folder), file, str(file), tmp_path):
        loaded = load_tokenizer(path)
        assert loaded is not None
        assert loaded.encode("ab") == [257]
    assert load_tokenizer(None) is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "neither tokenizer.json nor a GGUF file"),
        (["a.gguf", "b.gguf"], "2 GGUF models: name one of them"),
        (["model.safetensors"], "neither"),
    ],
)
def test_load_tokenizer_says_why_there_is_none(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="no such path"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize("path", [5, b"bytes", ["a"], "x" * 5000])
def test_what_is_no_tokenizer_s_path(path: Any) -> None:
    with pytest.raises(
        ValueError, match=r"tokenizer (must be a path|'x+\.\.\.x+' cannot be read: File name too long)"
    ):
        load_tokenizer(path)


def test_from_folder_with_only_a_sentencepiece_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no tokenizer.json \(only a SentencePiece"):
        Tokenizer.from_folder(tmp_path)
