"""Requests and their sequences as the host sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from slora_jax.checks import as_list
from slora_jax.lora.store import Adapter
from slora_jax.memory.prefix_cache import CachedPage
from slora_jax.outputs import FinishReason, RequestMetrics
from slora_jax.sampling_params import SamplingParams

BASE_GENERATION = 0  # of the base model; adapters' begin at 1

if TYPE_CHECKING:
    from slora_jax.text.detokenizer import IncrementalDetokenizer

DEFAULT_TENANT = "default"  # of requests that name none
MAX_PRIORITY = 100  # either way: no request may be put off, or preferred, without end


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
    """One prompt, how to continue it, and when; `request_id` must be unique among unfinished requests."""

    request_id: str
    prompt: str | Seq[int]
    adapter_id: str | None
    params: SamplingParams
    tenant: str = DEFAULT_TENANT
    priority: int = 0
    deadline_s: float | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """Requests whose client takes all of their answers or none, as the prompts of one HTTP request.

    Early-abort keeps or gives up all of them.
    """

    requests: list[Request]
    begun: bool = False  # one of their sequences was admitted

    @classmethod
    def of(cls, requests: list[Request]) -> Call:
        """Make these one call."""
        call = cls(requests)
        for request in requests:
            request.call = call
        return call


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """What a client asked for; `n` sequences answer it. Its `call` is its own, unless `Call.of` was asked."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_index: int
    adapter: Adapter | None
    params: SamplingParams
    metrics: RequestMetrics
    tenant: str = DEFAULT_TENANT
    priority: int = 0  # lower is earlier, as in vLLM
    deadline_s: float | None = None  # seconds after arrival by which it must have ended
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    call: Call = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.call = Call([self])

    @property
    def adapter_id(self) -> str | None:
        return None if self.adapter is None else self.adapter.name

    @property
    def finished(self) -> bool:
        return all(s.finish_reason is not None for s in self.sequences)


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """One output of a request, and what it holds.

    `tokens` are the known ones, prompt first. `pending` counts sampled tokens still on the device (at most
    two: the host runs one step ahead); the next token to compute may be one of them. `num_computed` tokens
    have their KV in `pages`; it began with `num_cached` that others had computed. The first pages are
    `cached`: shared, and never written again (PrefixCache's `record` replaces a page by an equal one that
    another sequence entered first). The scheduler owns `slot`, `pages`, `num_computed` and `pending`.
    """

    request: Request
    index: int
    seed: int
    tokens: list[int]
    prompt_len: int
    max_len: int  # prompt + output tokens at most
    stop_ids: frozenset[int]  # ids that end it, EOS included unless ignored
    detokenizer: IncrementalDetokenizer | None
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    cached: list[CachedPage] = dataclasses.field(default_factory=list)
    page_keys: list[bytes] = dataclasses.field(default_factory=list)  # of PrefixCache
    moved: int = 0  # how often `pages` changed otherwise than by more of them
    num_computed: int = 0
    num_cached: int = 0
    pending: int = 0
    scheduled_time: float | None = None  # when it first entered the batch
    first_token_time: float | None = None
    finish_reason: FinishReason | None = None
    rank: tuple[float, int] = (0.0, 0)  # its place in the queue, the waiting queue's to give
    generation: int = dataclasses.field(init=False)  # of its adapter, or the base's: what its KV belongs to

    def __post_init__(self) -> None:
        adapter = self.request.adapter
        self.generation = BASE_GENERATION if adapter is None else adapter.generation

    @property
    def num_tokens(self) -> int:
        """Tokens so far, those still on the device included."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Tokens whose KV is not computed yet."""
        return self.num_tokens - self.num_computed

    @property
    def adapter(self) -> Adapter | None:
        return self.request.adapter


def sequence_seed(seed: int, index: int) -> int:
    """The 64-bit seed of sequence `index`: the request's own for 0, a SplitMix64 step for others."""
    if index == 0:
        return seed % 2**64
    z = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def seed_words(seed: int) -> tuple[int, int]:
    """(high, low) 32-bit words of a seed, as the device takes them."""
    return (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF


def as_token_ids(prompt: object, vocab_size: int) -> list[int]:
    """A prompt given as token ids, checked. Raises ValueError naming the first id that is none."""
    ids = as_list("a prompt", prompt, "a string or a list of token ids")
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
            raise ValueError(
                f"prompt token {position} is {token!r}; token ids are integers in [0, {vocab_size})"
            )
    return [int(t) for t in ids]
