"""Sequences that decode as if they had run for long, and their steps: timed, told, ended."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.engine.random_adapters import make_resident
from benchmarks.record import gpu_name, record
from slora_jax import SamplingParams
from slora_jax.engine import Engine
from slora_jax.scheduling.scheduler import StepPlan

RUNS = 3  # tries to measure one in which nothing is compiled


@functools.partial(jax.jit, donate_argnums=0)
def fill_randomly(pool: jax.Array) -> jax.Array:
    """64 random pages over and over, in place: zeros would be read and multiplied faster than data.

    The reserved page stays zero.
    """
    pages = jax.random.normal(jax.random.key(1), (64, pool.shape[2]), pool.dtype)
    layer = pages[jnp.arange(pool.shape[1]) % 64].at[0].set(0)[None]
    filled: jax.Array = lax.fori_loop(
        0, pool.shape[0], lambda i, p: lax.dynamic_update_slice(p, layer, (i, 0, 0)), pool
    )
    return filled


def start_decoding(engine: Engine, batch: int, context: int, names: Sequence[str]) -> None:
    """Sequences whose `context` tokens lie in the pool already (whatever it holds), one to go for each."""
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    scheduler = engine._scheduler
    for i in range(batch):
        prompt = rng.integers(0, engine.model_config.vocab_size, context).tolist()
        engine.add_request(prompt, names[i % len(names)] if names else None, sampling)
    make_resident(engine, names)
    for sequence in list(scheduler.waiting):
        scheduler._start(sequence, time.monotonic())
        assert scheduler._ensure_pages(StepPlan([], []), sequence, context)
        sequence.num_computed = context - 1


def seconds_a_step(engine: Engine, steps: int, before_each: Callable[[], None] = lambda: None) -> float:
    """Mean of so many steps, the device's work and what is called before each one included."""
    jax.block_until_ready(engine._runner.pool)
    started = time.perf_counter()
    for _ in range(steps):
        before_each()
        engine.step()
    jax.block_until_ready(engine._runner.pool)
    return (time.perf_counter() - started) / steps


def report_step(
    bench: str, case: dict[str, Any], milliseconds: float, first_steps: float, extra: dict[str, Any]
) -> None:
    """Append one line of results, and print it; `first_steps` are seconds of those that are not timed."""
    record("engine", bench, case, round(milliseconds, 3), "ms", gpu=gpu_name(), **extra)
    print(f"{bench} {case}: {milliseconds:.2f} ms (first steps {first_steps:.2f} s), {extra}", flush=True)


def clear(engine: Engine) -> None:
    """End whatever it runs."""
    for request in list(engine.requests):
        engine.abort(request)
    while engine.has_unfinished():
        engine.step()
