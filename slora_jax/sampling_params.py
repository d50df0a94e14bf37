"""`SamplingParams`: what a request asks of the sampler, in the names and limits of vLLM and OpenAI."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Mapping, Sized
from typing import Any

from slora_jax.checks import as_kind, as_list, check_fields

MAX_N = 16384  # each is a sequence in the queue at once; OpenAI allows 128
MAX_LOGIT_BIAS = 1024  # entries of one request; OpenAI allows 300
MAX_STOP_STRINGS = 128  # the engine looks for each of them in every token's text; OpenAI allows 4
MAX_STOP_CHARACTERS = 1024  # of each
MAX_STOP_TOKEN_IDS = 128
_INT32_MAX = 2**31 - 1  # what the device's arrays hold
_FLOAT32_MIN, _FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens of one request are drawn and when it ends. `temperature=0` is greedy.

    Order on the logits: logit_bias and min_tokens, then penalties, temperature, min_p, top_k, top_p. `seed`
    fixes the output of a request whatever else is in the batch. `stop` strings (128 at most, of 1024
    characters) end a request before the text that matches (kept with `include_stop_str_in_output`).
    `logprobs=k` returns the k most likely tokens of each step, with the log-softmax of the model's own
    logits. Output ends at `max_tokens` or at the model's own limit, whichever comes first. Raises ValueError
    for values out of range.
    """

    n: int = 1
    max_tokens: int | None = 16  # None: up to the model's length
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        stop = [self.stop] if isinstance(self.stop, str) else _listed("stop", self.stop, "strings")
        ids = _listed("stop_token_ids", self.stop_token_ids, "a list of token ids")
        _check_count("stop", stop, MAX_STOP_STRINGS)
        _check_count("stop_token_ids", ids, MAX_STOP_TOKEN_IDS)
        if not isinstance(self.logit_bias, Mapping | None):
            raise ValueError(f"logit_bias must map token ids to numbers, got {reprlib.repr(self.logit_bias)}")
        _check_count("logit_bias", self.logit_bias or {}, MAX_LOGIT_BIAS)
        bias = {
            as_kind("a token id in logit_bias", t, int): as_kind(f"logit_bias of token {t}", b, float)
            for t, b in (self.logit_bias or {}).items()
        }
        object.__setattr__(self, "stop", tuple(as_kind("stop", s, str) for s in stop))
        object.__setattr__(self, "stop_token_ids", tuple(as_kind("stop_token_ids", t, int) for t in ids))
        object.__setattr__(self, "top_k", min(max(0, self.top_k), _INT32_MAX))
        object.__setattr__(self, "logit_bias", bias)
        self._check_ranges()

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change what is drawn."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    def _check_ranges(self) -> None:
        for name, ok, want in (
            ("n", 1 <= self.n <= MAX_N, f"in [1, {MAX_N}]"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("min_tokens", self.min_tokens >= 0, "not negative"),
            (
                "temperature",
                0 <= self.temperature <= _FLOAT32_MAX,
                "a number not below 0 that float32 holds",
            ),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            (
                "repetition_penalty",
                _FLOAT32_MIN <= self.repetition_penalty <= _FLOAT32_MAX,
                "a number above 0 that float32 holds",
            ),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "not negative"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "a 64-bit integer"),
        ):
            if not ok:
                raise ValueError(f"{name} must be {want}, got {getattr(self, name)}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} must not be above max_tokens {self.max_tokens}")
        if any(s == "" for s in self.stop):
            raise ValueError("stop must not hold an empty string")
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_CHARACTERS:
            raise ValueError(
                f"stop may have strings of at most {MAX_STOP_CHARACTERS} characters, got one of {longest}"
            )
        for token, bias in self.logit_bias.items():
            if math.isnan(bias) or _FLOAT32_MAX < abs(bias) < math.inf:
                raise ValueError(f"logit_bias of token {token} must be a number of float32, got {bias}")


def _check_count(name: str, entries: Sized, limit: int) -> None:
    if len(entries) > limit:
        raise ValueError(f"{name} may have at most {limit} entries, got {len(entries)}")


def _listed(name: str, value: object, want: str) -> list[Any]:
    return [] if value is None else as_list(name, value, want)
