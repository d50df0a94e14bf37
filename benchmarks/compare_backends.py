"""Does a backend compute what plain JAX in float32 computes? Logits and greedy tokens of mixed batches.

    python -m benchmarks.compare_backends            # every backend this device can have
    python -m benchmarks.compare_backends --peft     # SmolLM2, mixed adapters, against PEFT in float32

Random weights in two shapes (head dim 64 and 128, grouped heads), adapters of mixed ranks and modules,
prompts longer and shorter than a tile, chunked prefill. Reported for each backend: the relative error of the
logits over the steps up to the first token that differs (the two then see different inputs), and how many
tokens agree. With --peft the answers are those that transformers + PEFT gave in float32 (tests/parity), and
the engine is the one of those tests: on a GPU in bfloat16. Then also how often the next token agrees where
both have seen the same.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.arguments import add_xla_argument
from benchmarks.engine.models import compiled_with, random_engine
from benchmarks.record import gpu_name, record
from slora_jax import EngineConfig, ModelConfig, SamplingParams
from slora_jax.cli import smollm2
from slora_jax.lora.loader import PreparedAdapter
from slora_jax.lora.packing import pack_adapter
from slora_jax.lora.peft import LoraAdapter, LoraWeights, module_features
from tests.engine.tiny_engine import constrained
from tests.parity import peft_cases

SHAPES = {
    "e64": ModelConfig(1024, 576, 3, 9, 3, 64, 1536, 2048),
    "e128": ModelConfig(1024, 1024, 3, 8, 2, 128, 2048, 2048),
}
RANKS: list[dict[str, int]] = [
    {"q_proj": 8, "v_proj": 8},
    {"q_proj": 16, "k_proj": 16, "v_proj": 16, "o_proj": 16},
    {"gate_proj": 5, "up_proj": 5, "down_proj": 5},
    {"q_proj": 64, "down_proj": 33, "k_proj": 3},
]
LENGTHS = (3, 17, 64, 65, 130, 300, 1, 40, 90, 200, 33, 16)


def random_adapter(config: ModelConfig, ranks: dict[str, int], seed: int) -> LoraAdapter:
    """An adapter whose effect on the hidden states is a good part of the base model's."""
    rng, features = np.random.default_rng(seed), module_features(config)
    weights = {}
    for layer in range(config.num_hidden_layers):
        for module, rank in ranks.items():
            n_in, n_out = features[module]
            a = rng.standard_normal((rank, n_in), np.float32) * 0.05
            b = rng.standard_normal((n_out, rank), np.float32) * 0.05
            weights[layer, module] = LoraWeights(a, b, 0.5)
    return LoraAdapter(
        path=Path(f"random/{seed}"),
        base_model=None,
        rank=max(ranks.values()),
        target_modules=tuple(ranks),
        ranks=ranks,
        weights=weights,
    )


def run(
    config: ModelConfig, dtype: str, backend: str, *, step_tokens: int, tokens: int
) -> list[tuple[list[int], np.ndarray]]:
    """Tokens and logits of the batch."""
    engine = random_engine(
        config.to_hf(),
        EngineConfig(
            dtype=dtype,  # type: ignore[arg-type]
            enable_prefix_caching=False,
            kernel_backend=backend,  # type: ignore[arg-type]
            load_format="dummy",
            max_batch_size=16,
            max_step_tokens=step_tokens,
            max_model_len=512,
            num_pages=2000,
            record_logits=True,
        ),
    )
    for i, ranks in enumerate(RANKS):
        adapter = random_adapter(config, ranks, i)
        packed = pack_adapter(adapter, engine._layout, jax.numpy.dtype(dtype))
        engine.load_adapter(f"a{i}", PreparedAdapter(str(adapter.path), packed))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, config.vocab_size, n).tolist() for n in LENGTHS]
    names = [None if i % 5 == 4 else f"a{i % 5}" for i in range(len(LENGTHS))]
    outs = engine.generate(prompts, names, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
    engine.check_integrity()
    results = []
    for out in outs:
        assert out.logits is not None
        results.append((out.token_ids, out.logits))
    return results


def compare(
    want: list[tuple[list[int], np.ndarray]], got: list[tuple[list[int], np.ndarray]]
) -> dict[str, Any]:
    """Relative error (worst request, mean) and agreement."""
    errors, same, whole = [], 0, 0
    for (tokens, logits), (other_tokens, other_logits) in zip(want, got, strict=True):
        agree = next(
            (i for i, (a, b) in enumerate(zip(tokens, other_tokens, strict=True)) if a != b), len(tokens)
        )
        n = min(agree + 1, len(tokens))
        errors.append(np.linalg.norm(other_logits[:n] - logits[:n]) / np.linalg.norm(logits[:n]))
        same += agree
        whole += len(tokens)
    return {
        "worst_error": float(max(errors)),
        "mean_error": float(np.mean(errors)),
        "agreement": same / whole,
    }


def compare_with_peft(variant: dict[str, Any]) -> None:
    """All cases in one batch; then in few shuffled pages, with preemption, in chunks of seven tokens.

    Raises SystemExit where the logits are not near PEFT's.
    """
    with tempfile.TemporaryDirectory() as folder:
        engine = peft_cases.make_engine(smollm2.find_gguf(), peft_cases.write_peft_adapters(Path(folder)))
        what = {"model": "SmolLM2-135M-Instruct", "against": "PEFT float32"}
        what |= {"backend": engine._runner.backend.name, "dtype": engine.config.dtype, **variant}
        order, far = range(len(peft_cases.CASES)), []
        for pool, limits in (
            ("ample", contextlib.nullcontext()),
            ("150 shuffled pages, chunks of 7", constrained(engine, free_pages=150, chunk=7, seed=3)),
        ):
            with limits:
                result = peft_cases.distance_to_peft(order, peft_cases.run(engine, order))
            case = what | {"pool": pool}
            print(f"{case}: {result}", flush=True)
            agreement = result.pop("agreement")
            extra = {**result, "tolerance": peft_cases.BF16_TOLERANCE, "requests": len(order)}
            record("engine", "greedy_agreement", case, agreement, "of tokens", gpu=gpu_name(), **extra)
            if result["worst_error"] >= peft_cases.BF16_TOLERANCE:
                far.append(pool)
        value = peft_cases.next_token_agreement(engine)
        print(f"next token, {what}: {value}", flush=True)
        record("engine", "next_token_agreement", what, value, "of tokens", gpu=gpu_name())
    if far:
        raise SystemExit(f"not within {peft_cases.BF16_TOLERANCE} of PEFT's logits: {'; '.join(far)}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run every shape on every backend against xla in float32, or the model of the tests against PEFT."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES))
    parser.add_argument("--step-tokens", type=int, default=256, help="longest step; prompts are cut to it")
    parser.add_argument("--tokens", type=int, default=24, help="output tokens of each request")
    parser.add_argument("--peft", action="store_true", help="SmolLM2 against PEFT's answers")
    add_xla_argument(parser)
    args = parser.parse_args(argv)
    alone = parser.parse_args(["--peft"])
    if args.peft and vars(args) != vars(alone) | {"xla": args.xla}:
        parser.error("--peft goes alone: its model, batches and lengths are those of tests/parity")
    variant = {"xla": args.xla} if args.xla else {}
    if not args.peft:
        compare_shapes(args, variant)
        return
    with compiled_with(args.xla, None):
        compare_with_peft(variant)


def compare_shapes(args: argparse.Namespace, variant: dict[str, Any]) -> None:
    """Every shape on every backend that this device can have; `--xla` is of these, not of the reference."""
    sizes = {"step_tokens": args.step_tokens, "tokens": args.tokens}
    for name in args.shapes:
        want = run(SHAPES[name], "float32", "xla", **sizes)
        for backend in ("xla", "mosaic") if gpu_name() else ("xla",):
            with compiled_with(args.xla, None):
                result = compare(want, run(SHAPES[name], "bfloat16", backend, **sizes))
            print(f"{name} {backend} bfloat16: {result}", flush=True)
            case = {"shape": name, "backend": backend, "dtype": "bfloat16", **sizes, **variant}
            agreement = result.pop("agreement")
            record("engine", "greedy_agreement", case, agreement, "of tokens", gpu=gpu_name(), **result)


if __name__ == "__main__":
    main()
