"""One token a row by Gumbel-max, among those that top_k, min_p and top_p keep, without a sort.

Alphabet: R rows, v vocabulary, B groups of neighbouring tokens, C candidates.

w = exp((x - max x) / temperature) are weights: 1 in every row, so nothing overflows, whatever the temperature
or bias; 0 is a token cut. The draw is argmax of w / E over the tokens kept, E exponential noise. That is
Gumbel-max: log w - log E = x / temperature + Gumbel noise + a constant of the row.

A filtered row is first drawn among C = 512 candidates, its 128 largest logits among them (not on a CPU,
which takes longer to compare them than to read the vocabulary some times). That settles it if the largest
logit left out is one that a filter cuts: top_k or more are above it, its weight is below min_p, or the
weights above it add up to top_p. Rows that are not settled (a nucleus or a top_k of more than about 128
tokens, or as many ties), and rows without filters, are drawn among all v: first with no filter but min_p,
then, while top_k or top_p cut what came, among the tokens likelier than that. A draw leaves of the weights
that are cut about half, so few rows are drawn a third time.

Which of the two draws a row is decided by its own logits and parameters. Both keep the same tokens and
compare the same w / E, but add weights up in different orders: where a nucleus ends, sums within float32's
rounding of top_p may go either way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry_2x32

from slora_jax.thresholds import kth_largest, ordered

# By platform. A CPU takes as long to compare candidates with each other as to search 100,000 tokens.
LOOKS_AMONG_CANDIDATES = {"cpu": False, "default": True}
_KEEP = 128  # groups kept of all, then of the smaller ones which these consist of
_LAST = 4  # tokens of the smallest group: _KEEP * _LAST candidates
_BESIDE = 64  # values in a row of `_others`
_MOST_GROUPS = 2048  # of a row: every two are compared
_BLOCK = 128  # columns reduced together where a row has no groups

Score = Callable[[jax.Array, jax.Array], jax.Array]  # of logits f32[R, n] and their tokens i32[R or 1, n]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How rows are drawn; rows that are greedy have temperature 1 and no filter."""

    temperature: jax.Array  # f32[R] > 0
    top_k: jax.Array  # i32[R] in 1..v; v: off
    top_p: jax.Array  # f32[R] in (0, 1]; 1: off
    min_p: jax.Array  # f32[R] in [0, 1]; 0: off
    words: jax.Array  # u32[R, 2], `noise_words`


def group_size(vocab: int) -> int:
    """Tokens of a group: the largest power of two in 16..1024 that divides v into 256 to 2048; 0: none."""
    sizes = [size for size in (1024, 512, 256, 128, 64, 32, 16) if vocab % size == 0]
    return max((s for s in sizes if 2 * _KEEP <= vocab // s <= _MOST_GROUPS), default=0)


def maxima(x: jax.Array) -> jax.Array:
    """f32[R, B]: the largest of each group of x f32[R, v]; one pass."""
    return jnp.max(_blocks(x), axis=2)


def argmax(x: jax.Array, best: jax.Array, score: Score = lambda x, token: x) -> jax.Array:
    """i32[R]: the token of x f32[R, v] with the largest score, the first on ties.

    `best` f32[R, B] is `maxima` of the scores; only the winning group's are computed again.
    """
    blocks = _blocks(x)
    size = blocks.shape[2]
    group = jnp.argmax(best, axis=1).astype(jnp.int32)[:, None]
    token = group * size + lax.iota(jnp.int32, size)
    winner = jnp.take_along_axis(blocks, group[:, :, None], axis=1)[:, 0]
    return group[:, 0] * size + jnp.argmax(score(winner, token), axis=1).astype(jnp.int32)


def draw(x: jax.Array, groups: jax.Array, rule: Rule, sampled: jax.Array) -> jax.Array:
    """i32[R]: a token for each row of x f32[R, v] where sampled bool[R]; `groups` is `maxima(x)`."""
    largest = jnp.max(groups, axis=1)
    ranked = sampled & ((rule.top_k < x.shape[1]) | (rule.top_p < 1))
    filtered = ranked | (sampled & (rule.min_p > 0))
    none = jnp.zeros_like(rule.top_k), jnp.zeros_like(filtered)

    def look() -> tuple[jax.Array, jax.Array]:
        found = lax.cond(jnp.any(filtered), lambda: _draw_candidates(x, groups, largest, rule), lambda: none)
        return found[0], found[1] & filtered

    looks = {on: look if wanted else lambda: none for on, wanted in LOOKS_AMONG_CANDIDATES.items()}
    token, settled = lax.platform_dependent(**looks) if group_size(x.shape[1]) else none
    return _draw_all(x, largest, rule, token, sampled & ~settled, ranked & ~settled)


def _draw_all(
    x: jax.Array, largest: jax.Array, rule: Rule, token: jax.Array, drawn: jax.Array, ranked: jax.Array
) -> jax.Array:
    """i32[R]: token i32[R], but in rows `drawn` bool[R] one of all v; top_k, top_p cut in `ranked` ones.

    The token of the largest w / E may be cut. Then so is every token no likelier than it, and the row is
    drawn anew, with the same E, among the likelier ones: the first not cut is the argmax of all kept.
    """
    goal = _goal(x, largest, rule, drawn & ranked & (rule.top_p < 1))

    def again(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        token, cut, drawn = state

        def score(x: jax.Array, token: jax.Array) -> jax.Array:
            weight = _weight(x, largest, rule)
            return _score(weight, (x > cut[:, None]) & (weight >= rule.min_p[:, None]), rule, token)

        every = lax.broadcasted_iota(jnp.int32, (1, x.shape[1]), 1)
        new = argmax(x, maxima(score(x, every)), score)
        value = jnp.take_along_axis(x, new[:, None], axis=1, mode="clip")

        def too_unlikely() -> jax.Array:
            larger = x > value
            mass = jnp.sum(jnp.where(larger, _weight(x, largest, rule), 0.0), axis=1)
            number = jnp.sum(larger, axis=1, dtype=jnp.int32)
            # In a row of NaN nothing is larger than the cut: it ends with what came.
            return drawn & ranked & (value[:, 0] > cut) & ((mass >= goal) | (number >= rule.top_k))

        token = jnp.where(drawn, new, token)
        drawn = lax.cond(jnp.any(drawn & ranked), too_unlikely, lambda: jnp.zeros_like(drawn))
        return token, jnp.where(drawn, value[:, 0], cut), drawn

    start = token, jnp.full_like(largest, -jnp.inf), drawn
    token, _, _ = lax.while_loop(lambda state: jnp.any(state[2]), again, start)
    return token


def _goal(x: jax.Array, largest: jax.Array, rule: Rule, by_p: jax.Array) -> jax.Array:
    """f32[R]: in rows by_p bool[R] top_p of the weights that top_k and min_p keep; +inf in the others."""

    def goal() -> jax.Array:
        by_k = by_p & (rule.top_k < x.shape[1])
        low = jnp.full_like(largest, -jnp.inf)
        cut = lax.cond(
            jnp.any(by_k),
            lambda: jnp.where(by_k, kth_largest(x, largest, rule.top_k), low),
            lambda: low,
        )
        weight = _weight(x, largest, rule)
        kept = (x >= cut[:, None]) & (weight >= rule.min_p[:, None])
        mass = jnp.sum(jnp.where(kept, weight, 0.0), axis=1)
        return jnp.where(by_p, rule.top_p * mass, jnp.inf)

    out: jax.Array = lax.cond(jnp.any(by_p), goal, lambda: jnp.full_like(largest, jnp.inf))
    return out


def _draw_candidates(
    x: jax.Array, groups: jax.Array, largest: jax.Array, rule: Rule
) -> tuple[jax.Array, jax.Array]:
    """Each row's token i32[R] among its candidates; bool[R], whether none but candidates are kept.

    No threshold is searched: a token is among the k largest if fewer than k are larger, and in the nucleus if
    the larger weights fall short of top_p.
    """
    token, left_out = _candidates(x, groups)
    value = jnp.take_along_axis(x, token, axis=1, mode="clip")
    weight, weight_out = _weight(value, largest, rule), _weight(left_out[:, None], largest, rule)[:, 0]
    larger = jnp.sum(_others(value) > value[:, :, None, None], axis=(2, 3), dtype=jnp.int32)
    kept = (larger < rule.top_k[:, None]) & (weight >= rule.min_p[:, None])
    weight = lax.optimization_barrier(jnp.where(kept, weight, 0.0))  # computed once, so equal to itself
    above = jnp.sum(value > left_out[:, None], axis=1, dtype=jnp.int32)
    inside = (weight_out == 0) | (weight_out < rule.min_p) | (above >= rule.top_k)

    by_p = rule.top_p < 1
    outside = by_p & ~inside & (rule.top_k == x.shape[1])  # where top_p itself may settle the row
    goal = rule.top_p * _mass(x, largest, rule, weight, outside)
    others = _others(weight)
    larger_mass = jnp.sum(jnp.where(others > weight[:, :, None, None], others, 0.0), axis=(2, 3))
    mass_above = jnp.sum(jnp.where(weight > weight_out[:, None], weight, 0.0), axis=1)

    scores = _score(weight, ~by_p[:, None] | (larger_mass < goal[:, None]), rule, token)
    best = jnp.max(scores, axis=1, keepdims=True)
    first = jnp.min(jnp.where(scores == best, token, x.shape[1] - 1), axis=1)
    return first, inside | (outside & (mass_above >= goal))


def _candidates(x: jax.Array, groups: jax.Array) -> tuple[jax.Array, jax.Array]:
    """i32[R, C]: tokens, the 128 largest logits' among them; f32[R]: the largest logit of the others.

    The 128 groups of largest maxima hold the 128 largest logits, or others that equal these. Their quarters
    (of 8 tokens their halves) are the groups of the next round, until the groups kept have four tokens.
    """
    size = group_size(x.shape[1])
    groups = jnp.pad(groups, ((0, 0), (0, -groups.shape[1] % _BESIDE)), constant_values=-jnp.inf)
    start = size * lax.broadcasted_iota(jnp.int32, groups.shape, 1)  # each group's first token
    left_out = jnp.full_like(groups, -jnp.inf, shape=len(groups))
    while True:
        place = _places(groups)
        left_out = jnp.maximum(left_out, jnp.max(jnp.where(place >= _KEEP, groups, -jnp.inf), axis=1))
        at = place[:, None, :] == lax.iota(jnp.int32, _KEEP)[:, None]
        start = jnp.sum(jnp.where(at, start[:, None, :], 0), axis=2)  # i32[R, 128]
        if size == _LAST:
            return _spread(start, 1, _LAST), left_out
        smaller = max(_LAST, size // 4)
        members = x.reshape(len(x), -1, size)
        members = jnp.take_along_axis(
            members, lax.div(start, jnp.int32(size))[:, :, None], axis=1, mode="clip"
        )
        groups = jnp.max(members.reshape(len(x), -1, smaller), axis=2)
        start, size = _spread(start, smaller, size // smaller), smaller


def _spread(start: jax.Array, step: int, number: int) -> jax.Array:
    """i32[R, n * number]: start, start + step, ... for each of start i32[R, n]."""
    return (start[:, :, None] + step * lax.iota(jnp.int32, number)).reshape(len(start), -1)


def _places(x: jax.Array) -> jax.Array:
    """i32[R, n]: how many of its row come before each of x f32[R, n], the largest first, then by index."""
    image, index = ordered(x), lax.broadcasted_iota(jnp.int32, (1, x.shape[1]), 1)
    first = (_others(index) < index[:, :, None, None]).astype(jnp.int32)  # i32[1, n, n / 64, 64]: wins a tie
    return jnp.sum(_others(image) + first > image[:, :, None, None], axis=(2, 3), dtype=jnp.int32)


def _others(x: jax.Array) -> jax.Array:
    """[R, 1, n / 64, 64]: x [R, n], to be compared with each of x[:, :, None, None].

    Two axes, because of sums over a single one XLA makes Triton kernels of n * n tiles: a minute to compile.
    """
    return x.reshape(len(x), 1, -1, _BESIDE)


def _weight(x: jax.Array, largest: jax.Array, rule: Rule) -> jax.Array:
    """f32[R, n]: w of logits x f32[R, n] beside the row's largest."""
    weight = jnp.exp((x - largest[:, None]) / rule.temperature[:, None])
    return jnp.where(x == largest[:, None], 1.0, weight)  # also where both are infinite


def _mass(x: jax.Array, largest: jax.Array, rule: Rule, weight: jax.Array, outside: jax.Array) -> jax.Array:
    """f32[R]: the sum of the candidates' weights f32[R, C]; in rows `outside` of all that min_p keeps."""
    mass = jnp.sum(weight, axis=1)

    def of_all() -> jax.Array:
        weight = _weight(x, largest, rule)
        return jnp.sum(jnp.where(weight >= rule.min_p[:, None], weight, 0.0), axis=1)

    out: jax.Array = lax.cond(jnp.any(outside), lambda: jnp.where(outside, of_all(), mass), lambda: mass)
    return out


def _score(weight: jax.Array, kept: jax.Array, rule: Rule, token: jax.Array) -> jax.Array:
    """f32[R, n]: w / E of the tokens kept, -1 of others."""
    return jnp.where(kept & (weight > 0), weight / _noise(rule.words, token), -1.0)


def noise_words(seed: jax.Array, position: jax.Array) -> jax.Array:
    """u32[R, 2]: Threefry of each row's (seed u32[R, 2], position i32[R])."""

    def words(seed: jax.Array, position: jax.Array) -> jax.Array:
        counter = jnp.stack([position, jnp.zeros_like(position)]).astype(jnp.uint32)
        row: jax.Array = threefry_2x32(seed, counter)
        return row

    return jax.vmap(words)(seed, position)


def _noise(words: jax.Array, token: jax.Array) -> jax.Array:
    """f32[R, n] in [1e-10, inf]: exponential noise, a function of (seed, position, token) alone.

    A row's words and the token id, mixed by the multiply-xorshift `lowbias32` of Wellons' hash prospector,
    twice, give 32 bits a token. -log1p(-u) keeps full precision near 0, where the winner of 128k tokens lies;
    u = 0 does not occur, and u = 1 gives inf: never drawn unless alone.
    """
    bits = _mix(_mix(token.astype(jnp.uint32) ^ words[:, :1]) + words[:, 1:])
    return -jnp.log1p(-((bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32)))


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _blocks(x: jax.Array) -> jax.Array:
    """f32[R, B, size]: x f32[R, v] by groups; by 128 columns, or as one, where v has no groups."""
    vocab = x.shape[1]
    return x.reshape(len(x), -1, group_size(vocab) or (vocab if vocab % _BLOCK else _BLOCK))
