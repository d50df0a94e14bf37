"""Requests in a steady state, and a closed loop of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.engine.steps import clear
from benchmarks.papers import SHORTEST
from slora_jax import SamplingParams
from slora_jax.engine import Engine

_WINDOWS = 20  # tries to measure one in which nothing is compiled


@dataclasses.dataclass(frozen=True)
class Draw:
    """A request to come."""

    prompt: list[int]
    adapter: str
    output_len: int


class Workload:
    """Requests without end: prompts and outputs of SHORTEST to `longest` tokens (uniform), adapters by
    `pick(rng)`.
    """

    def __init__(
        self,
        names: Sequence[str],
        pick: Callable[[np.random.Generator], int],
        longest: int,
        vocab: int,
        seed: int = 42,
    ) -> None:
        self._names, self._pick, self._longest, self._vocab = names, pick, longest, vocab
        self._rng = np.random.default_rng(seed)

    def draw(self) -> Draw:
        """The next one that arrives."""
        prompt, output = self._rng.integers(SHORTEST, self._longest + 1, 2)
        return self._draw(int(prompt), int(output))

    def begun(self) -> Draw:
        """One that runs in a steady state: what it has put out belongs to its prompt."""
        prompt, age, output = (int(x[0]) for x in running_lengths(1, self._longest, self._rng))
        return self._draw(prompt + age, output - age)

    def _draw(self, prompt: int, output: int) -> Draw:
        tokens = self._rng.integers(0, self._vocab, prompt).tolist()
        return Draw(tokens, self._names[self._pick(self._rng)], output)


def running_lengths(n: int, longest: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Prompt, tokens put out so far, and output of n sequences that run in a steady state, i64[n] each.

    An output of twice the length runs twice as long, so it is met twice as often, at any age alike.
    """
    lengths = np.arange(SHORTEST, longest + 1)
    output = rng.choice(lengths, n, p=lengths / lengths.sum())
    return rng.integers(SHORTEST, longest + 1, n), (rng.random(n) * output).astype(np.int64), output


def mean_kv(batch: int, longest: int, page_tokens: int) -> int:
    """Pages of the KV of a full batch in a steady state, on average."""
    return round(float(_kv_pages(batch, longest, page_tokens).mean()))


def kv_room(batch: int, longest: int, page_tokens: int) -> int:
    """Pages that the KV of a full batch seldom exceeds (99.9th percentile in a steady state), and one a
    sequence for its next tokens, which admission keeps free.
    """
    return int(np.percentile(_kv_pages(batch, longest, page_tokens), 99.9)) + batch


def _kv_pages(batch: int, longest: int, page_tokens: int) -> np.ndarray:
    """Of 2000 full batches in a steady state."""
    prompt, age, _ = running_lengths(2000 * batch, longest, np.random.default_rng(0))
    pages = -(-(prompt + age) // page_tokens)
    batches: np.ndarray = pages.reshape(2000, batch).sum(axis=1)
    return batches


def add(engine: Engine, draw: Draw, **fields: Any) -> str:
    """Queue a request whose output length is forced; its id."""
    sampling = SamplingParams(max_tokens=draw.output_len, temperature=0, ignore_eos=True)
    return engine.add_request(draw.prompt, draw.adapter, sampling, **fields)


@dataclasses.dataclass(frozen=True)
class Window:
    """What a closed loop did in some seconds."""

    seconds: float
    tokens: int  # put out
    finished: int  # requests
    gaps: np.ndarray  # f64[n] seconds between two tokens of a sequence, preemptions included
    loads: int
    preemptions: int
    held: np.ndarray  # f64[2] sequences that run and adapters that are resident, means over steps


def closed_loop(engine: Engine, work: Workload, seconds: float) -> Window:
    """Keep a quarter more requests than slots under way, from a steady state on; measure `seconds` of it."""
    batch = engine.config.max_batch_size
    last: dict[str, float] = {}  # request -> when its latest token came
    for i in range(batch + batch // 4):
        add(engine, work.begun() if i < batch else work.draw())
    gaps: list[float] = []
    tokens = finished = 0

    def step() -> None:
        nonlocal tokens, finished
        events, now = engine.step(), time.perf_counter()
        for event in events:
            tokens += len(event.token_ids)
            before = last.pop(event.request_id, None)
            if before is not None:
                gaps.append(now - before)
            if event.finish_reason is None:
                last[event.request_id] = now
                continue
            if event.finish_reason != "length":
                raise RuntimeError(f"a request ended by {event.finish_reason}: {event.error}")
            finished += 1
            add(engine, work.draw())

    while tokens < 3 * batch:
        step()
    for _ in range(_WINDOWS):
        gaps, tokens, finished = [], 0, 0
        compiled, before, started = engine.num_compilations, engine.stats(), time.perf_counter()
        held: list[tuple[int, int]] = []  # sequences that run, adapters that are resident
        while (passed := time.perf_counter() - started) < seconds and engine.num_compilations == compiled:
            step()
            held.append((len(engine._scheduler.running), len(engine._adapters.resident)))
        after = engine.stats()
        if engine.num_compilations == compiled:
            clear(engine)
            return Window(
                seconds=passed,
                tokens=tokens,
                finished=finished,
                gaps=np.array(gaps),
                loads=after.adapter_loads - before.adapter_loads,
                preemptions=after.preemptions - before.preemptions,
                held=np.mean(held, axis=0),
            )
        print("a step was compiled: measured again", flush=True)
    raise RuntimeError(f"steps were compiled in each of {_WINDOWS} windows of {seconds} s")
