"""From what a caller asks to a Request: prompts to token ids, all of it checked before any is queued."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from slora_jax.checks import as_kind, as_list, as_tenant
from slora_jax.config import EngineConfig, ModelConfig
from slora_jax.errors import PromptError, UnknownAdapterError
from slora_jax.lora.store import Adapter, AdapterStore
from slora_jax.memory.sizing import PoolSize
from slora_jax.outputs import RequestMetrics
from slora_jax.request import (
    DEFAULT_TENANT,
    MAX_PRIORITY,
    GenerateRequest,
    Request,
    Sequence,
    as_token_ids,
    sequence_seed,
)
from slora_jax.sampling_params import SamplingParams
from slora_jax.text import IncrementalDetokenizer, Tokenizer

Prompt = str | Seq[int]


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """What one request may ask of an engine; sizes in tokens and pages."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    page_tokens: int
    usable_pages: int  # by KV
    unified_memory: bool  # so adapters take from usable_pages

    @classmethod
    def of(cls, model_config: ModelConfig, config: EngineConfig, size: PoolSize) -> RequestLimits:
        """Those of an engine whose pool has this size."""
        return cls(
            vocab_size=model_config.vocab_size,
            max_model_len=size.max_model_len,
            max_logprobs=config.max_logprobs,
            page_tokens=config.page_tokens,
            usable_pages=size.usable_by_kv,
            unified_memory=size.adapter_pages is None,
        )

    def check_prompt(self, tokens: Seq[int]) -> None:
        """Raise ValueError for a prompt that leaves no room for output, or has no token."""
        if not tokens:
            raise ValueError("the prompt is empty; it must have at least one token")
        self._check_length(len(tokens), str(len(tokens)))

    def check_text(self, text: str, tokenizer: Tokenizer) -> None:
        """Raise ValueError for the text of a prompt that is surely too long; it takes no time to speak of."""
        fewest = tokenizer.fewest_tokens(text)
        self._check_length(fewest, f"at least {fewest}")

    def _check_length(self, num_tokens: int, told: str) -> None:
        if num_tokens >= self.max_model_len:
            raise ValueError(
                f"the prompt has {told} tokens; with at least one token of output the limit is "
                f"{self.max_model_len - 1} (max_model_len {self.max_model_len}): shorten it, or raise "
                "max_model_len where the model and the pool allow it"
            )

    def check_params(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        """Raise ValueError naming the parameter that asks for more than the model or its engine has."""
        for field, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            bad = [t for t in ids if not 0 <= t < self.vocab_size]
            if bad:
                raise ValueError(
                    f"{field} names token {bad[0]}; token ids are integers in [0, {self.vocab_size})"
                )
        if params.stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        if (params.logprobs or 0) > self.max_logprobs:
            raise ValueError(
                f"logprobs {params.logprobs} is above the engine's max_logprobs {self.max_logprobs}: lower "
                "the one or raise the other"
            )


def token_ids(prompt: Prompt, tokenizer: Tokenizer | None, limits: RequestLimits) -> list[int]:
    """A prompt's tokens, within the limits. Raises ValueError for what they refuse, for ids outside the
    vocabulary, for text that is no Unicode, and for text where there is no tokenizer.
    """
    if not isinstance(prompt, str):
        tokens = as_token_ids(prompt, limits.vocab_size)
    elif tokenizer is None:
        raise ValueError("this model has no tokenizer: give prompts as lists of token ids")
    else:
        limits.check_text(prompt, tokenizer)
        tokens = tokenizer.encode(prompt)
    limits.check_prompt(tokens)
    return tokens


class RequestIntake:
    """Makes Requests; owns their ids and the seeds of those that name none."""

    def __init__(
        self,
        limits: RequestLimits,
        adapters: AdapterStore,
        tokenizer: Tokenizer | None,
        eos: frozenset[int],
        seed: int,
        is_taken: Callable[[str], bool] = lambda request_id: False,
    ) -> None:
        self._limits, self._adapters = limits, adapters
        self._tokenizer, self._eos = tokenizer, eos
        self._is_taken, self._numbers = is_taken, itertools.count()
        self._seeds = np.random.default_rng(seed)

    def many(
        self,
        prompts: Prompt | Seq[Prompt],
        adapter_ids: str | Seq[str | None] | None,
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        *,
        tenant: str = DEFAULT_TENANT,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> list[Request]:
        """A Request for each prompt; raises PromptError, or UnknownAdapterError with the prompt as a note."""
        every = _prompts(prompts)
        names = _one_each(
            "adapter_ids", str, [None] * len(every) if adapter_ids is None else adapter_ids, len(every)
        )
        params = _one_each(
            "sampling_params",
            SamplingParams,
            SamplingParams() if sampling_params is None else sampling_params,
            len(every),
        )
        requests: list[Request] = []
        try:
            for i, prompt in enumerate(every):
                asked = GenerateRequest(
                    self.new_id(), prompt, names[i], params[i], tenant, priority, deadline_s
                )
                requests.append(self.one(asked, prompt_index=i))
        except UnknownAdapterError as error:
            error.add_note(f"of prompts[{len(requests)}]")
            raise
        except ValueError as error:
            raise PromptError(len(requests), str(error)) from error
        return requests

    def new_id(self) -> str:
        """A request id that nobody uses."""
        while self._is_taken(name := f"request-{next(self._numbers)}"):
            pass
        return name

    def one(self, asked: GenerateRequest, prompt_index: int = 0) -> Request:
        """A Request and its `params.n` sequences, not yet queued.

        Raises UnknownAdapterError, or ValueError naming the prompt's token, the parameter or the limit.
        """
        params = asked.params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling parameters must be a SamplingParams, got {params!r}")
        if not as_kind("request_id", asked.request_id, str):
            raise ValueError("request_id must not be empty; None has the engine choose one")
        adapter = None
        if asked.adapter_id is not None:
            adapter = self._adapters.get(as_kind("an adapter id", asked.adapter_id, str, " or None"))
        tokens = token_ids(asked.prompt, self._tokenizer, self._limits)
        self._limits.check_params(params, self._tokenizer)
        self._check_room(max(self._length(tokens, params, adapter), len(tokens) + 1), adapter)
        request = Request(
            request_id=asked.request_id,
            prompt=asked.prompt if isinstance(asked.prompt, str) else None,
            prompt_token_ids=tokens,
            prompt_index=prompt_index,
            adapter=adapter,
            params=params,
            tenant=as_tenant("tenant", asked.tenant),
            priority=_priority(asked.priority),
            deadline_s=_deadline(asked.deadline_s),
            metrics=RequestMetrics(arrival_time=time.monotonic(), num_prompt_tokens=len(tokens)),
        )
        seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
        request.sequences = [
            Sequence(
                request=request,
                index=i,
                seed=sequence_seed(seed, i),
                tokens=list(tokens),
                prompt_len=len(tokens),
                max_len=self._length(tokens, params, adapter),
                stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos),
                detokenizer=self._detokenizer(params),
            )
            for i in range(params.n)
        ]
        return request

    def _detokenizer(self, params: SamplingParams) -> IncrementalDetokenizer | None:
        if self._tokenizer is None:
            return None
        return IncrementalDetokenizer(
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _length(self, tokens: list[int], params: SamplingParams, adapter: Adapter | None) -> int:
        """Tokens of prompt and output at most; without max_tokens, what the pool holds beside the adapter."""
        limits = self._limits
        if params.max_tokens is not None:
            return min(len(tokens) + params.max_tokens, limits.max_model_len)
        room = limits.usable_pages - self._adapter_pages(adapter)
        return min(room * limits.page_tokens, limits.max_model_len)

    def _adapter_pages(self, adapter: Adapter | None) -> int:
        """Pages that KV cannot have: of a request's own adapter, and of those that are pinned."""
        own, pinned = self._beside_kv(adapter)
        return own + pinned

    def _beside_kv(self, adapter: Adapter | None) -> tuple[int, int]:
        if not self._limits.unified_memory:
            return 0, 0
        return 0 if adapter is None else adapter.num_pages, self._adapters.pinned_pages(beside=adapter)

    def check_can_queue(self, requests: Seq[Request]) -> None:
        """Raise ValueError where requests that were made cannot be queued together: an id is in use, or comes
        twice, or adapters that were pinned since left no room.
        """
        ids: set[str] = set()
        for request in requests:
            if self._is_taken(request.request_id) or request.request_id in ids:
                raise ValueError(
                    f"request id '{request.request_id}' is in use; ids must differ among requests that have "
                    "not ended, have events that were not handed out, or a stream that was not closed"
                )
            ids.add(request.request_id)
            self._check_room(max(s.max_len for s in request.sequences), request.adapter)

    def _check_room(self, length: int, adapter: Adapter | None) -> None:
        limits = self._limits
        own, pinned = self._beside_kv(adapter)
        need = -(-length // limits.page_tokens) + own
        if need > limits.usable_pages - pinned:
            raise ValueError(
                f"the request needs up to {need} pages ({length} tokens"
                f"{f' and adapter {adapter.name!r}' if adapter and own else ''}), the pool has "
                f"{limits.usable_pages}{f' less {pinned} of pinned adapters' if pinned else ''}: shorten the "
                "prompt, lower max_tokens or raise num_pages"
            )


def _priority(priority: object) -> int:
    value = int(as_kind("priority", priority, int))
    if not -MAX_PRIORITY <= value <= MAX_PRIORITY:
        raise ValueError(f"priority must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}], got {value}")
    return value


def _deadline(deadline_s: object) -> float | None:
    if deadline_s is None:
        return None
    value = float(as_kind("deadline_s", deadline_s, float, " or None"))
    if not 0 < value < math.inf:
        raise ValueError(f"deadline_s must be above 0 seconds, got {value}")
    return value


def _prompts(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt or many: a string or a list of ids is one."""
    if isinstance(prompts, str):
        return [prompts]
    many = as_list("prompts", prompts, "a string, a list of token ids, or a list of these")
    if many and all(isinstance(p, int | np.integer) for p in many):
        return [many]
    return many


def _one_each[T](name: str, kind: type[T], value: object, n: int) -> list[T]:
    """`value` for each of n prompts: one for all, or a list of n."""
    if isinstance(value, kind):
        return [value] * n
    want = f"one {kind.__name__} or a list of {n}, one for each prompt"
    many = as_list(name, value, want)
    if len(many) != n:
        raise ValueError(f"{name} must be {want}; got {len(many)} values")
    return many
