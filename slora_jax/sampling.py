"""The device sampler: one token a row from logits, without sorting the vocabulary.

Pure functions for the engine's jitted step. Alphabet: R rows, v vocabulary, S slots of penalty history.
A row's token depends on its own logits, parameters, history, seed and position alone, never on R, on its
index or on the other rows; a row of NaN spoils only itself.

Order, as in vLLM V1: logit_bias and min_tokens, then repetition, frequency and presence penalties, then
temperature, min_p, top_k, top_p, and the draw. Every filter is a threshold on a row (`x >= t`), so tokens
that tie at a threshold stay or go together: all that equal the k-th largest logit are kept, and all whose
probability (in float32) equals that of the last token of the nucleus. min_p is relative to the largest
probability; top_p is of what min_p and top_k left, renormalised.

Passes over the [R, v] logits (reads unless said otherwise), each part taken only if a live row asks for it:
    every batch      1, the maxima of groups of tokens, of which greedy rows need no more
    bias, penalties  copy + scatter; gather of the history, read, write
    temperature      1: draw
    filters          a quarter of one, and comparisons of 512 candidates with each other (drawing.py)
    top_p            1: sum, unless top_k or min_p leave only candidates
    where candidates are not enough (a vocabulary that `drawing.group_size` does not divide; a nucleus or
    top_k of more than about 128 tokens, or as many ties):
        min_p        1: draw
        top_k, top_p 2 a round: draw, and what is above it; rounds until no row's token is cut (mostly 2 to 4)
        top_p        1: sum of what is kept; with top_k, too, 11 of counts, each of 3 bits of a float32
                     threshold (on a CPU 32 of one bit)
    logprobs         3, + 1 for each of the most alternatives that a row of the batch asked for
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slora_jax import drawing

PROMPT_BIT = 1 << 30  # of a count: the token occurs in the prompt; the bits below count it in the output
_MAX = float(np.finfo(np.float32).max)
_TINY = float(np.finfo(np.float32).tiny)  # devices take what is smaller for 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """How each of R rows is drawn, in the meaning of `SamplingParams`. Padding rows may hold anything finite.

    `bias_*` is one packed list for the batch: `bias_value[i]` is added to the logit of `bias_token[i]` in row
    `bias_row[i]`; row == R is padding. It holds logit_bias, and -inf for the tokens that min_tokens bans
    (which wins over any bias). Tokens must lie in [0, v).
    """

    temperature: jax.Array  # f32[R]; 0: greedy
    top_k: jax.Array  # i32[R]; 0 (or >= v): off
    top_p: jax.Array  # f32[R] in [0, 1]; 1: off; 0, as float32 has the smallest: the likeliest token
    min_p: jax.Array  # f32[R] in [0, 1]; 0: off
    repetition_penalty: jax.Array  # f32[R] > 0; 1: off
    presence_penalty: jax.Array  # f32[R]; 0: off
    frequency_penalty: jax.Array  # f32[R]; 0: off
    seed: jax.Array  # u32[R, 2], both halves of a 64-bit seed
    position: jax.Array  # i32[R], output tokens of the sequence drawn before this one
    num_logprobs: jax.Array  # i32[R]; -1: none, 0: only the chosen token's, n: and the n most likely
    bias_row: jax.Array  # i32[K]
    bias_token: jax.Array  # i32[K]
    bias_value: jax.Array  # f32[K]; -inf and +inf are allowed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampleResult:
    """Tokens, and log-softmax of the logits as the model gave them (vLLM's raw_logprobs).

    `rank` is the number of tokens whose logit is at least the chosen one's (vLLM's count): 1 for the single
    most likely, 2 for either of two that tie there. `top_tokens` come best first, ties by token id. A row
    that asked for nothing has logprob 0 and rank 0; alternatives that it did not ask for, or whose logit is
    -inf, are token -1 with -inf.
    """

    tokens: jax.Array  # i32[R]
    logprob: jax.Array  # f32[R]
    rank: jax.Array  # i32[R]
    top_tokens: jax.Array  # i32[R, max_logprobs]
    top_logprobs: jax.Array  # f32[R, max_logprobs]


def update_token_counts(
    counts: jax.Array, slot: jax.Array, token: jax.Array, is_prompt: jax.Array, reset_slot: jax.Array
) -> jax.Array:
    """Zero `counts[reset_slot]`, then enter each (slot, token); in place where `counts` is donated.

    `counts` i32[S, v]: bit 30 is set for a token of the prompt, the low bits count it in the output.
    `slot`, `token` i32[T], `is_prompt` bool[T]; slot == S: dropped. `reset_slot` i32[N]; S: none. Prompt and
    output tokens may come in any order and repeat. Cost: T scattered words, and rows of v up to the last one
    that is reset.
    """
    slots = counts.shape[0]
    resets = jnp.max(jnp.where(reset_slot < slots, jnp.arange(1, reset_slot.shape[0] + 1), 0), initial=0)
    counts = lax.fori_loop(0, resets, lambda i, c: c.at[reset_slot[i]].set(0, mode="drop"), counts)
    prompt_slot = jnp.where(is_prompt, slot, slots)
    marked = counts.at[slot, token].get(mode="clip") | PROMPT_BIT  # repeats write the same word
    counts = counts.at[prompt_slot, token].set(marked, mode="drop")
    return counts.at[jnp.where(is_prompt, slots, slot), token].add(1, mode="drop")


def finite_rows(logits: jax.Array) -> jax.Array:
    """bool[R]: the rows of logits f32[R, v] without NaN and +inf that have a token above -inf; one pass."""
    # Not isfinite of the maximum: XLA's of a CPU passes over NaN.
    return jnp.all(logits < jnp.inf, axis=1) & jnp.any(logits > -jnp.inf, axis=1)


def sample(
    logits: jax.Array, rows: SamplingRows, counts: jax.Array, slot: jax.Array, *, max_logprobs: int
) -> SampleResult:
    """Draw one token a row: argmax of the edited logits at temperature 0, else Gumbel-max of those kept.

    `logits` f32[R, v]; `counts` i32[S, v] as `update_token_counts` keeps it; `slot` i32[R], the row's history
    (S: a padding row, which turns no part on and whose results mean nothing; rows without penalties may name
    any slot). `max_logprobs` is the static width of the alternatives. A row with every token at -inf draws
    any token; one with NaN gives some valid token. Raises ValueError where the shapes do not fit.
    """
    num_rows, vocab = logits.shape
    if rows.temperature.shape != (num_rows,) or counts.shape[1] != vocab:
        raise ValueError(
            f"logits {logits.shape} need {num_rows} sampling rows and counts of {vocab} columns, "
            f"got {rows.temperature.shape} and {counts.shape}"
        )
    live = slot < counts.shape[0]
    sampled = live & (rows.temperature > 0)
    biased = jnp.any(rows.bias_row < num_rows)
    penalised = jnp.any(
        live & ((rows.repetition_penalty != 1) | (rows.presence_penalty != 0) | (rows.frequency_penalty != 0))
    )

    # A conditional that returned [R, v] would copy the logits for batches without edits, too.
    tokens = lax.cond(
        biased | penalised,
        lambda: _choose(_edit(logits, rows, counts, slot, penalised), rows, sampled),
        lambda: _choose(logits, rows, sampled),
    )
    logprob, rank, top_tokens, top_logprobs = _logprobs(
        logits, tokens, jnp.where(live, jnp.minimum(rows.num_logprobs, max_logprobs), -1), max_logprobs
    )
    return SampleResult(tokens, logprob, rank, top_tokens, top_logprobs)


def _choose(x: jax.Array, rows: SamplingRows, sampled: jax.Array) -> jax.Array:
    """i32[R]: the argmax of edited logits x f32[R, v], or what is drawn where sampled bool[R]."""
    groups = drawing.maxima(x)
    greedy = drawing.argmax(x, groups)

    def draw() -> jax.Array:
        by_k = sampled & (rows.top_k > 0) & (rows.top_k < x.shape[1])
        rule = drawing.Rule(
            temperature=jnp.where(sampled, rows.temperature, 1.0),
            top_k=jnp.where(by_k, rows.top_k, x.shape[1]),
            top_p=jnp.where(sampled, jnp.maximum(rows.top_p, _TINY), 1.0),
            min_p=jnp.where(sampled, rows.min_p, 0.0),
            words=drawing.noise_words(rows.seed, rows.position),
        )
        return jnp.where(sampled, drawing.draw(x, groups, rule, sampled), greedy)

    tokens: jax.Array = lax.cond(jnp.any(sampled), draw, lambda: greedy)
    return tokens


def _edit(
    x: jax.Array, rows: SamplingRows, counts: jax.Array, slot: jax.Array, penalised: jax.Array
) -> jax.Array:
    """f32[R, v]: x with bias and, where a row asks for any, with penalties."""
    edited: jax.Array = lax.cond(
        penalised,
        lambda: _penalise(_add_bias(x, rows), rows, counts, slot),
        lambda: _add_bias(x, rows),
    )
    return edited


def _add_bias(x: jax.Array, rows: SamplingRows) -> jax.Array:
    # Finite from above, so that a ban (-inf) beats a bias of +inf instead of making NaN.
    value = jnp.minimum(rows.bias_value, _MAX)
    return x.at[rows.bias_row, rows.bias_token].add(value, mode="drop")


def _penalise(x: jax.Array, rows: SamplingRows, counts: jax.Array, slot: jax.Array) -> jax.Array:
    """Repetition as HF's (in prompt or output: x / p above 0, else x * p); the others as OpenAI's."""
    history = counts.at[slot].get(mode="clip")  # i32[R, v]
    output = (history & (PROMPT_BIT - 1)).astype(jnp.float32)
    repetition = rows.repetition_penalty[:, None]
    x = jnp.where(history != 0, jnp.where(x > 0, x / repetition, x * repetition), x)
    return x - rows.frequency_penalty[:, None] * output - rows.presence_penalty[:, None] * (output > 0)


type _Logprobs = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _logprobs(logits: jax.Array, tokens: jax.Array, wanted: jax.Array, width: int) -> _Logprobs:
    """The last four fields of `SampleResult`; `wanted` i32[R] <= width, below 0: none."""
    rows = logits.shape[0]
    fill = (
        jnp.zeros_like(logits, shape=(rows,)),
        jnp.zeros_like(tokens),
        jnp.full_like(tokens, -1, shape=(rows, width)),
        jnp.full_like(logits, -jnp.inf, shape=(rows, width)),
    )

    def compute() -> _Logprobs:
        largest = jnp.max(logits, axis=1, keepdims=True)
        log_sum = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=1, keepdims=True))
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
        rank = jnp.sum(logits >= chosen, axis=1, dtype=jnp.int32)
        top_tokens, top_values = _top(logits, wanted, fill[2], fill[3])
        asked = wanted >= 0
        return (
            jnp.where(asked, (chosen - largest - log_sum)[:, 0], 0.0),
            jnp.where(asked, rank, 0),
            top_tokens,
            jnp.where(top_tokens >= 0, top_values - largest - log_sum, -jnp.inf),
        )

    out: _Logprobs = lax.cond(jnp.any(wanted >= 0), compute, lambda: fill)
    return out


def _top(
    logits: jax.Array, wanted: jax.Array, tokens: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Fill column i of `tokens`, `values` [R, width] with the i-th best token and logit of rows that want it.

    Each column is one pass: the best of what comes after the column before it, by logit, then by token id.
    """
    if not tokens.shape[1]:
        return tokens, values
    column = lax.broadcasted_iota(jnp.int32, logits.shape, 1)

    def next_best(i: jax.Array, state: _Logprobs) -> _Logprobs:
        token, value, tokens, values = state
        after = (logits < value[:, None]) | ((logits == value[:, None]) & (column > token[:, None]))
        rest = jnp.where(after, logits, -jnp.inf)
        token = drawing.argmax(rest, drawing.maxima(rest))
        value = jnp.max(rest, axis=1)
        there = (i < wanted) & (value > -jnp.inf)
        tokens = tokens.at[:, i].set(jnp.where(there, token, -1))
        values = values.at[:, i].set(jnp.where(there, value, -jnp.inf))
        return token, value, tokens, values

    start = (jnp.full_like(wanted, -1), jnp.full_like(logits, jnp.inf, shape=wanted.shape), tokens, values)
    _, _, tokens, values = lax.fori_loop(0, jnp.max(wanted), next_best, start)
    return tokens, values
