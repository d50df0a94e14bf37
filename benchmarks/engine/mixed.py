"""A step that decodes for nearly a full batch and computes so many prompt tokens (`mixed_step`)."""

from __future__ import annotations

import argparse
import itertools
import time

import numpy as np

from benchmarks.arguments import COUNT, COUNT_OR_NONE
from benchmarks.engine.models import MAX_MODEL_LEN, make_engine
from benchmarks.engine.profile import profile
from benchmarks.engine.random_adapters import random_adapters, ranks_of, register_adapters
from benchmarks.engine.steps import fill_randomly, report_step, seconds_a_step, start_decoding
from slora_jax import SamplingParams
from slora_jax.engine import Engine

BATCH, DECODES = 256, 240
PROMPT = 224  # tokens of a prompt, nearly
FIRST_STEPS, PROFILED = 4, 4  # steps before and behind the timed ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of this benchmark alone."""
    parser.add_argument("--context", type=COUNT, default=400)
    parser.add_argument("--prompt-tokens", type=COUNT_OR_NONE, nargs="+", default=[1792], help="of each step")
    parser.add_argument(
        "--distinct", type=COUNT_OR_NONE, default=0, help="adapters that sequences take in turn"
    )
    parser.add_argument("--ranks", default="16", help="of the adapters, in turn: 16, 64/32/16/8")
    parser.add_argument("--steps", type=COUNT, default=20)


def run(args: argparse.Namespace, engine: Engine | None) -> None:
    """Milliseconds of such a step, for each of `--prompt-tokens`."""
    if engine is not None:
        raise SystemExit("mixed: prompts must not gather, which needs an engine of its own")
    ranks = ranks_of(args.ranks)
    engine = make_engine(args.model, max_batch=BATCH, max_model_len=MAX_MODEL_LEN, prefill_delay_steps=0)
    runner = engine._runner
    runner._pool = fill_randomly(runner.pool)
    names = register_adapters(engine, random_adapters(engine, ranks), args.distinct)
    start_decoding(engine, DECODES, args.context, names)
    turns = itertools.cycle(names or [None])
    rng = np.random.default_rng(0)

    def ask(prompt_tokens: int) -> None:
        """Queue prompts of so many tokens together, which the next step computes and which end with it."""
        prompts = max(1, round(prompt_tokens / PROMPT)) if prompt_tokens else 0
        for i in range(prompts):
            size = prompt_tokens * (i + 1) // prompts - prompt_tokens * i // prompts
            prompt = rng.integers(0, engine.model_config.vocab_size, size).tolist()
            sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
            engine.add_request(prompt, next(turns), sampling)

    for prompt_tokens in args.prompt_tokens:

        def run_steps(steps: int, prompt_tokens: int = prompt_tokens) -> float:
            return seconds_a_step(engine, steps, lambda: ask(prompt_tokens))

        started = time.perf_counter()
        run_steps(FIRST_STEPS)
        first_steps = time.perf_counter() - started
        milliseconds = 1e3 * run_steps(args.steps)
        computed = engine.stats().last_step_tokens
        profiled = profile(run_steps, PROFILED)
        case = {"model": args.model, "decodes": DECODES, "context": args.context}
        case["prompt_tokens"] = prompt_tokens
        case |= {"distinct": args.distinct, "ranks": args.ranks} if names else {}
        case |= args.variant
        extra = {"tokens_of_last_step": computed, **profiled, "backend": runner.backend.name}
        report_step("mixed_step", case, milliseconds, first_steps, extra)
