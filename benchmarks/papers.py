"""Experiments of S-LoRA (MLSys 2024) and VTC (OSDI 2024): requests, policies, and how these are judged.

Shared by those on a virtual clock (`sim_scheduler`) and those on the engine.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

SHORTEST, LONGEST = 8, 512  # tokens of a prompt or an output, uniform
FAIR_BATCH, FAIR_LONGEST = 16, 64  # for which VTC's bound is well below what some seconds serve
# S-LoRA's ablation of clustering (benchmarks/paper/ablation_cluster of its repository): a pool of so many
# tokens and adapters of setting S2, at two requests a second, which it does not quite serve, for 120 s.
CLUSTER_TOKENS, CLUSTER_ADAPTERS = 14_500, 32
# As in its bursts: 25 to 45 waited on average at cv 4 to 8, 8 at cv 1, as their mean first token came after
# 12.7 to 22.4, and 4.2 s.
CLUSTER_WAITING = 40
POLICIES = ("fcfs", "cluster", "vtc", "early-abort", "vtc+cluster+early-abort")


def gamma_arrivals(rate: float, cv: float, seconds: float, rng: np.random.Generator) -> Iterator[float]:
    """Times of a gamma process: `rate` a second, coefficient of variation `cv` of the gaps (S-LoRA)."""
    now = 0.0
    while (now := now + rng.gamma(1 / cv**2, cv**2 / rate)) < seconds:
        yield now


def by_popularity(kind: str | float, n: int) -> Callable[[np.random.Generator], int]:
    """Draws adapters of n: "zipf" with P(i) proportional to 1 / (i + 1), "uniform"; a number is S-LoRA's
    alpha, floor(n * u^(1/alpha)): 1 is uniform, less is skewed.

    Raises ValueError where it is none of these.
    """
    if kind not in ("zipf", "uniform"):
        try:
            alpha = float(kind)
        except ValueError:
            alpha = 0.0
        if not 0 < alpha < math.inf:
            raise ValueError(f"'{kind}' must be zipf, uniform, or S-LoRA's alpha: a number above 0")
        return lambda rng: int(n * rng.power(alpha))
    weights = 1 / np.arange(1, n + 1) if kind == "zipf" else np.ones(n)
    cumulative = np.cumsum(weights / weights.sum())
    return lambda rng: min(n - 1, int(np.searchsorted(cumulative, rng.random(), side="right")))


def satisfaction(first_token: np.ndarray, target_s: float) -> np.ndarray:
    """S-LoRA's reward f64[n] of first tokens after seconds f64[n]: 1 at once, 0 from the target on."""
    return np.where(first_token < target_s, 1 - (np.minimum(first_token, target_s) / target_s) ** 2, 0)


def vtc_bound(batch: int, longest: int) -> float:
    """What services of two tenants that always wait may differ by under VTC, in priced tokens.

    2 max(w_p L_in, w_q M), the bound of VTC's paper (Sheng et al., OSDI 2024): w_p = 1 a prompt's token,
    w_q = 2 an output's; L_in = `longest`; M = 2 * batch * longest, the tokens of a batch of the longest
    prompts and outputs.
    """
    return 2 * max(1.0 * longest, 2.0 * batch * 2 * longest)


def most_overtaken(started: Iterable[int], waiting: Iterable[int]) -> int:
    """How many later requests went before one, at most: those that `started`, in this order, are numbered as
    they came, and so are those that still wait.
    """
    before: list[int] = []  # that have started, sorted
    most = 0
    for number in (*started, *sorted(waiting)):
        most = max(most, len(before) - bisect.bisect(before, number))
        bisect.insort(before, number)
    return most
