"""What tests of the sampler share: rows, random cases, and a float64 reference that sorts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

from slora_jax.sampling import PROMPT_BIT, SampleResult, SamplingRows, sample

Array = np.ndarray[Any, np.dtype[Any]]

ROWS, SLOTS, VOCAB, BIASES, LOGPROBS = 8, 5, 257, 64, 6
DEFAULTS = {
    "temperature": np.float32(0),
    "top_k": np.int32(0),
    "top_p": np.float32(1),
    "min_p": np.float32(0),
    "repetition_penalty": np.float32(1),
    "presence_penalty": np.float32(0),
    "frequency_penalty": np.float32(0),
    "position": np.int32(0),
    "num_logprobs": np.int32(-1),
}
RESULTS = [field.name for field in dataclasses.fields(SampleResult)]

draw = jax.jit(sample, static_argnames="max_logprobs")


def make_rows(
    num: int = ROWS, bias: list[tuple[int, int, float]] | None = None, seed: Any = 0, **fields: Any
) -> SamplingRows:
    """Rows whose fields are scalars or one value a row; `bias` as (row, token, value), `seed` 64-bit."""
    arrays: dict[str, Any] = {
        k: np.broadcast_to(np.asarray(fields.get(k, v), v.dtype), num) for k, v in DEFAULTS.items()
    }
    assert fields.keys() <= arrays.keys()
    seeds = np.broadcast_to(np.asarray(seed, np.uint64), num)
    packed = (bias or []) + [(num, 0, 0.0)] * (BIASES - len(bias or []))
    arrays["seed"] = np.stack([seeds >> np.uint64(32), seeds & np.uint64(2**32 - 1)], axis=1).astype(
        np.uint32
    )
    for name, column in zip(("row", "token", "value"), zip(*packed, strict=True), strict=True):
        arrays[f"bias_{name}"] = np.array(column, np.float32 if name == "value" else np.int32)
    return SamplingRows(**arrays)


def take(rows: SamplingRows, index: Array) -> SamplingRows:
    """The given rows, without bias."""
    arrays: dict[str, Any] = {k: np.asarray(getattr(rows, k))[index] for k in (*DEFAULTS, "seed")}
    arrays["bias_row"] = np.full(BIASES, len(index), np.int32)
    arrays["bias_token"] = np.zeros(BIASES, np.int32)
    arrays["bias_value"] = np.zeros(BIASES, np.float32)
    return SamplingRows(**arrays)


def run(
    logits: Array,
    rows: SamplingRows,
    counts: Array | None = None,
    slot: Array | None = None,
    width: int = LOGPROBS,
) -> SampleResult:
    counts = np.zeros((SLOTS, logits.shape[1]), np.int32) if counts is None else counts
    slot = np.zeros(len(logits), np.int32) if slot is None else slot
    result: SampleResult = draw(logits, rows, counts, slot, max_logprobs=width)
    host: SampleResult = jax.tree.map(np.asarray, result)
    return host


def threefry(key: Array, counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32, 20 rounds (Salmon et al. 2011), on Python integers."""
    mask = 0xFFFFFFFF
    schedule = [int(key[0]), int(key[1]), int(key[0]) ^ int(key[1]) ^ 0x1BD11BDA]
    a, b = (counter[0] + schedule[0]) & mask, (counter[1] + schedule[1]) & mask
    for block in range(5):
        for r in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            a = (a + b) & mask
            b = (((b << r) | (b >> (32 - r))) & mask) ^ a
        a = (a + schedule[(block + 1) % 3]) & mask
        b = (b + schedule[(block + 2) % 3] + block + 1) & mask
    return a, b


def reference_noise(seed: Array, position: int, vocab: int) -> Array:
    def mix(x: Array) -> Array:  # lowbias32 on uint64
        x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & np.uint64(0xFFFFFFFF)
        x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B)) & np.uint64(0xFFFFFFFF)
        return np.asarray(x ^ (x >> np.uint64(16)))

    a, b = threefry(seed, (position, 0))
    bits = mix((mix(np.arange(vocab, dtype=np.uint64) ^ np.uint64(a)) + np.uint64(b)) & np.uint64(0xFFFFFFFF))
    return np.asarray(-np.log1p(-(bits.astype(np.float64) + 0.5) / 2.0**32))


def reference_edit(logits: Array, rows: SamplingRows, i: int, history: Array) -> Array:
    x = logits.astype(np.float64)
    for row, token, value in zip(rows.bias_row, rows.bias_token, rows.bias_value, strict=True):
        if row == i:
            x[token] += value
    output = history & (PROMPT_BIT - 1)
    seen = history != 0
    penalty = float(rows.repetition_penalty[i])
    x[seen] = np.where(x[seen] > 0, x[seen] / penalty, x[seen] * penalty)
    presence, frequency = float(rows.presence_penalty[i]), float(rows.frequency_penalty[i])
    return np.asarray(x - frequency * output - presence * (output > 0))


def reference_kept(x: Array, rows: SamplingRows, i: int, slack: float = 0.0) -> Array:
    """bool[v]: tokens that survive min_p, top_k, top_p; `slack` moves p by rounding's worth."""
    k, p = int(rows.top_k[i]), float(rows.top_p[i])
    weight = np.exp((x - x.max()) / float(rows.temperature[i]))
    keep = weight >= min(1.0, float(rows.min_p[i]) * (1 - slack))
    if 0 < k < len(x):
        keep &= x >= np.sort(x)[-k]
    weight = np.where(keep, weight / weight[keep].sum(), 0)
    if p < 1:
        order = np.sort(weight)[::-1]
        last = min(int(np.searchsorted(np.cumsum(order), p + slack)), len(x) - 1)
        keep &= weight >= order[last] * (1 - 1e-9)
    return np.asarray(keep)


def reference_tokens(logits: Array, rows: SamplingRows, i: int, history: Array) -> set[int]:
    """The token that must be drawn; both where the choice between two lies within rounding."""
    x = reference_edit(logits, rows, i, history)
    if rows.temperature[i] == 0:
        # float32 edits may round two float64 values together: then the first is right, too.
        return {int(t) for t in np.flatnonzero(x >= x.max() - 1e-6 * max(1, abs(x.max())))}
    noise = reference_noise(np.asarray(rows.seed[i]), int(rows.position[i]), len(x))
    out: set[int] = set()
    for slack in (-1e-5, 0.0, 1e-5):
        keep = reference_kept(x, rows, i, slack)
        score = np.where(keep, (x - x.max()) / float(rows.temperature[i]) - np.log(noise), -np.inf)
        rounding = 1e-4 + 1e-6 * abs(x.max()) / float(rows.temperature[i])
        out |= {int(t) for t in np.flatnonzero(score >= score.max() - rounding)}
    return out


def random_case(rng: np.random.Generator, vocab: int = VOCAB) -> tuple[Array, SamplingRows, Array, Array]:
    """Logits (every other row on a coarse grid, so full of ties), rows of all kinds, histories, slots.

    Penalties are dyadic, so that float32 and float64 agree on which edited logits tie.
    """
    logits = rng.normal(size=(ROWS, vocab)).astype(np.float32) * rng.choice([0.3, 3, 10], (ROWS, 1))
    logits[::2] = np.round(logits[::2])
    logits[rng.random(logits.shape) < 0.02] = -np.inf
    logits = logits.astype(np.float32)
    counts = np.where(rng.random((SLOTS, vocab)) < 0.2, rng.integers(0, 4, (SLOTS, vocab)), 0)
    counts = (counts + np.where(rng.random((SLOTS, vocab)) < 0.2, PROMPT_BIT, 0)).astype(np.int32)
    values = [100.0, -100.0, 1.5, -np.inf]
    used = rng.choice(ROWS * vocab, BIASES // 2, replace=False)
    bias = [(int(u) // vocab, int(u) % vocab, float(rng.choice(values))) for u in used]
    rows = make_rows(
        bias=bias,
        seed=rng.integers(0, 2**64, ROWS, dtype=np.uint64),
        temperature=rng.choice([0, 0.01, 0.7, 1, 5], ROWS),
        top_k=rng.choice([0, 1, 2, 40, vocab - 1, vocab, vocab + 9], ROWS),
        top_p=rng.choice([1e-6, 0.3, 0.9, 0.999, 1], ROWS),
        min_p=rng.choice([0, 0, 0.05, 1], ROWS),
        repetition_penalty=rng.choice([1, 2, 0.5], ROWS),
        presence_penalty=rng.choice([0, 1, -0.5], ROWS),
        frequency_penalty=rng.choice([0, 0.75, -0.25], ROWS),
        position=rng.integers(0, 1000, ROWS),
        num_logprobs=rng.integers(-1, LOGPROBS + 1, ROWS),
    )
    return logits, rows, counts, rng.integers(0, SLOTS, ROWS).astype(np.int32)


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: isinstance(p, core.Jaxpr | core.ClosedJaxpr)
        ):
            if isinstance(inner, core.ClosedJaxpr):
                yield from equations(inner.jaxpr)
            elif isinstance(inner, core.Jaxpr):
                yield from equations(inner)
