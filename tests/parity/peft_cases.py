"""What transformers + PEFT say of SmolLM2 with random adapters (`record_peft.py`), and an engine for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from slora_jax import EngineConfig, RequestOutput, SamplingParams
from slora_jax.engine import Engine
from tests.parity.random_adapters import write_adapters

HERE = Path(__file__).parent
CASES: list[dict[str, Any]] = json.loads((HERE / "expected.json").read_text())["cases"]
EXPECTED = np.load(HERE / "expected.npz")
N_TOKENS = len(CASES[0]["token_ids"])
GREEDY = SamplingParams(max_tokens=N_TOKENS, temperature=0, ignore_eos=True)
BF16_TOLERANCE = 0.1  # relative error of a request's logits, while its tokens are PEFT's


def write_peft_adapters(folder: Path) -> dict[str, str]:
    """The adapters' folders by name."""
    return {name: str(path) for name, path in write_adapters(folder).items()}


def make_engine(gguf: Path, adapters: dict[str, str]) -> Engine:
    """In float32, as PEFT computed; on an accelerator in bfloat16, with the kernels made for it."""
    config = EngineConfig(
        dtype="float32" if jax.default_backend() == "cpu" else "bfloat16",
        max_batch_size=16,
        max_step_tokens=128,
        max_model_len=256,
        num_pages=700,
        record_logits=True,
    )
    return Engine.from_pretrained(gguf, adapters, config)


def run(engine: Engine, order: Sequence[int]) -> list[RequestOutput]:
    """Greedy answers to these cases in one batch."""
    return engine.generate(
        [CASES[i]["prompt_token_ids"] for i in order], [CASES[i]["adapter"] for i in order], GREEDY
    )


def assert_equal_to_peft(order: Sequence[int], outs: Sequence[RequestOutput]) -> None:
    """Token for token, and every step's logits to 1e-3 of their scale: in float32."""
    for i, out in zip(order, outs, strict=True):
        assert out.token_ids == CASES[i]["token_ids"], CASES[i]["name"]
        logits = out.logits
        assert logits is not None
        scale = np.abs(EXPECTED["logits"][i]).max(axis=1, keepdims=True)
        error = np.abs(logits[:, EXPECTED["vocabulary_ids"]] - EXPECTED["logits"][i]) / scale
        assert error.max() < 1e-3, (CASES[i]["name"], error.max())
        np.testing.assert_allclose(logits.max(axis=1), EXPECTED["max"][i], rtol=1e-3)
        np.testing.assert_allclose(np.linalg.norm(logits, axis=1), EXPECTED["norm"][i], rtol=1e-3)


def distance_to_peft(order: Sequence[int], outs: Sequence[RequestOutput]) -> dict[str, float]:
    """`worst_error` and `mean_error` of the requests' logits (2-norm over the recorded ones, relative) up to
    the first token that differs, and `agreement`, the share of all tokens before it.
    """
    errors, same = [], 0
    for i, out in zip(order, outs, strict=True):
        assert out.logits is not None
        differs = np.flatnonzero(np.array(out.token_ids) != np.array(CASES[i]["token_ids"]))
        agree = int(differs[0]) if len(differs) else N_TOKENS
        n, want = min(agree + 1, N_TOKENS), EXPECTED["logits"][i]
        got = out.logits[:n, EXPECTED["vocabulary_ids"]].astype(np.float32)
        errors.append(float(np.linalg.norm(got - want[:n]) / np.linalg.norm(want[:n])))
        same += agree
    return {
        "worst_error": max(errors),
        "mean_error": float(np.mean(errors)),
        "agreement": same / (N_TOKENS * len(outs)),
    }


def next_token_agreement(engine: Engine) -> float:
    """How often the next token is PEFT's, each time after the tokens that PEFT gave; a share of all."""
    steps = [(case, n) for case in CASES for n in range(N_TOKENS)]
    outs = engine.generate(
        [case["prompt_token_ids"] + case["token_ids"][:n] for case, n in steps],
        [case["adapter"] for case, _ in steps],
        SamplingParams(max_tokens=1, temperature=0, ignore_eos=True),
    )
    same = sum(out.token_ids == [case["token_ids"][n]] for out, (case, n) in zip(outs, steps, strict=True))
    return same / len(steps)
