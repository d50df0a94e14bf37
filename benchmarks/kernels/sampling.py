"""Cases of the sampler over big vocabularies: a token for each row of float32 logits in memory.

Compiled as the engine compiles its steps, which hold every way to sample: what the rows ask for decides at
run time what is done, and one executable serves all cases of a vocabulary. `of_copy` is the share of the
copy bandwidth at which the time would have read the logits once, the least that any sampler does
(slora_jax/sampling.py counts the passes). `launch_us` is the host's time, which an engine hides. Calls take
turns with logits of together 256 MB and more, so that none lie in the L2; a store of 4 bytes that ties a call
to the one before is part of its time.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.common import Case, Ceilings, Chain, Measurement
from slora_jax.sampling import SamplingRows, sample

MAX_LOGPROBS = 20  # room for them, as in the engine's steps
CALLS = 8
CHECKED = 8  # rows of a batch whose tokens are compared with those that the filters keep
ROUNDING = 1e-4  # of a nucleus' mass, summed in float32

Carry = tuple[jax.Array, list[jax.Array]]  # the tokens drawn last; several logits [R, v]


def sampling_rows(rows: int, temperature: float, top_k: int, top_p: float) -> SamplingRows:
    """All alike, but for their seeds."""
    full = functools.partial(jnp.full, rows)
    zeros = full(0, jnp.float32)
    return SamplingRows(
        temperature=full(temperature, jnp.float32),
        top_k=full(top_k, jnp.int32),
        top_p=full(top_p, jnp.float32),
        min_p=zeros,
        repetition_penalty=full(1, jnp.float32),
        presence_penalty=zeros,
        frequency_penalty=zeros,
        seed=jnp.stack([jnp.zeros(rows, jnp.uint32), jnp.arange(rows, dtype=jnp.uint32)], axis=1),
        position=full(0, jnp.int32),
        num_logprobs=full(-1, jnp.int32),
        bias_row=full(rows, jnp.int32),  # none
        bias_token=full(0, jnp.int32),
        bias_value=zeros,
    )


def make_logits(rows: int, vocab: int) -> list[jax.Array]:
    """Random ones, so many that a call finds none in the L2."""
    count = min(8, max(2, -(-256_000_000 // (4 * rows * vocab))))
    keys = jax.random.split(jax.random.key(0), count)
    return [4 * jax.random.normal(key, (rows, vocab), jnp.float32) for key in keys]


def _step(i: int, carry: Carry, rows: SamplingRows, counts: jax.Array, slot: jax.Array) -> Carry:
    """Sample, with the tokens drawn last in a logit that is never the largest: calls cannot overlap, nor be
    dropped.
    """
    tokens, logits = carry
    at = i % len(logits)
    tied = logits[at].at[0, 0].set(-100 - tokens[0].astype(jnp.float32))
    drawn = sample(tied, rows, counts, slot, max_logprobs=MAX_LOGPROBS)
    return drawn.tokens, [*logits[:at], tied, *logits[at + 1 :]]


def make_carry(rows: int, vocab: int) -> Carry:
    return jnp.zeros(rows, jnp.int32), make_logits(rows, vocab)


def make_args(
    rows: int, vocab: int, temperature: float, top_k: int, top_p: float
) -> tuple[SamplingRows, jax.Array, jax.Array]:
    """Rows as `sampling_rows` has them, counts i32[S, v], and slots i32[R]: the batch's rows in order."""
    how = sampling_rows(rows, temperature, top_k, top_p)
    return how, jnp.zeros((rows, vocab), jnp.int32), jnp.arange(rows, dtype=jnp.int32)


@functools.lru_cache(maxsize=1)
def compiled(rows: int, vocab: int) -> Chain:
    carry, args = make_carry(rows, vocab), make_args(rows, vocab, 0, 0, 1)
    return Chain.compile(_step, carry, *args, calls=CALLS, as_the_engine=True)


def check(tokens: np.ndarray, logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> None:
    """AssertionError where a token is not NumPy's argmax (temperature 0), or one that the filters cut."""
    if temperature == 0:
        wrong = int((tokens != logits.argmax(axis=1)).sum())
        assert not wrong, f"{wrong} of {len(tokens)} greedy tokens are not the argmax"
        return
    for token, row in zip(tokens[:CHECKED], logits[:CHECKED].astype(np.float64), strict=True):
        order = np.argsort(-row)[: top_k or None]
        weight = np.exp((row[order] - row[order[0]]) / temperature)
        before = np.cumsum(weight) - weight  # of more likely ones
        kept = order[before < (top_p + ROUNDING) * weight.sum()]
        assert token in kept, f"token {token} is none of the {len(kept)} that are kept"


def measure(
    ceilings: Ceilings, *, rows: int, vocab: int, temperature: float, top_k: int = 0, top_p: float = 1
) -> Measurement:
    chain, args = compiled(rows, vocab), make_args(rows, vocab, temperature, top_k, top_p)
    tokens, logits = chain.compiled(make_carry(rows, vocab), *args)
    last = np.asarray(logits[(CALLS - 1) % len(logits)])
    check(np.asarray(tokens), last, temperature, top_k, top_p)
    seconds, launch = chain.device_seconds((tokens, logits), *args)
    of_copy = last.nbytes / seconds / ceilings.copy
    extra = {
        "of_copy": round(of_copy, 3),
        "mb": round(last.nbytes / 1e6, 1),
        "launch_us": round(launch * 1e6, 1),
    }
    return Measurement(round(seconds * 1e6, 2), extra)


def case(**case: Any) -> Case:
    return Case("sampling", case, "us", functools.partial(measure, **case))


CASES = [
    case(rows=256, vocab=vocab, **how)
    for vocab in (128256, 32000)
    for how in (
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
        {"temperature": 0.6, "top_p": 0.95},  # nuclei of 2 to 85 tokens: among candidates
        {"temperature": 0.8, "top_p": 0.95},  # some of 536, too many for candidates
        {"temperature": 5, "top_p": 0.95},  # of most of the vocabulary
    )
]
