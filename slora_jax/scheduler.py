"""Who runs in the next step: continuous batching with ragged chunked prefill, over one budget of pages.

First come, first served, but for those whose adapters are still being loaded. A step takes every running
sequence's decode, then prefill chunks of running sequences, then admits waiting ones, within
`max_step_tokens`. When pages run out, idle adapters give way first, then the youngest running sequence is
preempted: it gives its pages back and recomputes later. The oldest sequence can always take what it needs
(admission checks that one request fits the pool), so something always moves.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Iterator

from slora_jax.lora.loader import AdapterLoader
from slora_jax.lora.store import AdapterStore
from slora_jax.memory.page_pool import PagePool
from slora_jax.request import Sequence


@dataclasses.dataclass(frozen=True)
class Chunk:
    """`count` tokens of a sequence from position `start`; `samples`: its next token is drawn after them."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One step's work: single tokens (`decodes`) and longer chunks (`prefills`)."""

    decodes: list[Chunk]
    prefills: list[Chunk]

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(c.count for c in self.prefills)

    def __iter__(self) -> Iterator[Chunk]:
        yield from self.decodes
        yield from self.prefills

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)


@dataclasses.dataclass(frozen=True)
class SchedulerLimits:
    """Sizes in tokens, sequences and pages; from EngineConfig."""

    max_batch_size: int
    max_step_tokens: int
    max_chunk_tokens: int
    max_prefill_seqs: int
    page_tokens: int
    lookahead: int  # waiting sequences whose adapters are loaded before their turn


class Scheduler:
    """Owns the queue, the slots and sequences' pages."""

    def __init__(
        self, limits: SchedulerLimits, pool: PagePool, adapters: AdapterStore, loader: AdapterLoader
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._adapters = adapters
        self._loader = loader
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []  # oldest first
        self.preemptions = 0
        self._slots = list(range(limits.max_batch_size - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold the KV of so many tokens."""
        return -(-tokens // self._limits.page_tokens)

    def schedule(self) -> StepPlan:
        """The next step; advances `num_computed` and `pending` of what it takes. Empty: nothing can run."""
        plan = StepPlan([], [])
        for sequence in list(self.running):  # decodes first: a long prompt never stalls them
            if sequence.slot is not None and sequence.remaining == 1 and not sequence.complete:
                self._take(plan, sequence)
        for sequence in list(self.running):
            if sequence.slot is not None and sequence.remaining > 1:
                self._take(plan, sequence)
        if self.waiting:
            self._admit_waiting(plan)
        return self._commit(plan)

    def finish(self, sequence: Sequence) -> None:
        """Give back what a sequence holds; it is never scheduled again."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._stop_running(sequence)

    def preempt_all(self) -> None:
        """Send every running sequence back to the queue, in order, to be computed anew."""
        while self.running:
            self._preempt(StepPlan([], []), self.running[-1])

    def check_integrity(self) -> None:
        """Pages, slots and pins add up; raises AssertionError saying what does not."""
        self._pool.check_integrity(
            [s.pages for s in self.running], [a.pages for a in self._adapters if a.pages is not None]
        )
        slots = [s.slot for s in self.running if s.slot is not None]
        assert sorted([*slots, *self._slots]) == list(range(self._limits.max_batch_size)), f"slots {slots}"
        assert all(s.slot is None and not s.pages for s in self.waiting), "a waiting sequence holds pages"
        pins = collections.Counter(id(s.adapter) for s in self.running if s.adapter is not None)
        for adapter in self._adapters:
            assert adapter.pins == pins[id(adapter)], f"adapter '{adapter.name}' has {adapter.pins} pins"
        self._adapters.check_integrity()
        self._loader.check_integrity()
        for s in self.running:
            assert len(s.pages) >= self.pages_for(s.num_computed), f"{s.request.request_id} lacks pages"

    def _has_budget(self, plan: StepPlan) -> bool:
        return (
            plan.num_tokens < self._limits.max_step_tokens
            and len(plan.prefills) < self._limits.max_prefill_seqs
        )

    def _take(self, plan: StepPlan, sequence: Sequence) -> None:
        """Put as much of a running sequence into the plan as budget and pages allow."""
        count = min(
            sequence.remaining, self._limits.max_chunk_tokens, self._limits.max_step_tokens - plan.num_tokens
        )
        if count > 1 and len(plan.prefills) >= self._limits.max_prefill_seqs:
            return
        if count < 1 or not self._ensure_pages(plan, sequence, sequence.num_computed + count):
            return
        chunk = Chunk(sequence, sequence.num_computed, count, samples=count == sequence.remaining)
        (plan.decodes if count == 1 else plan.prefills).append(chunk)

    def _ensure_pages(self, plan: StepPlan, sequence: Sequence, tokens: int) -> bool:
        """Grow a running sequence to `tokens`; preempts younger sequences, at last itself (then False)."""
        need = self.pages_for(tokens) - len(sequence.pages)
        while need > 0 and not self._adapters.make_room(need):
            victim = self.running[-1]
            self._preempt(plan, victim)
            if victim is sequence:
                return False
        if need > 0:
            pages = self._pool.allocate(need, "kv")
            assert pages is not None
            sequence.pages += pages
        return True

    def _preempt(self, plan: StepPlan, sequence: Sequence) -> None:
        for chunks in (plan.decodes, plan.prefills):
            chunks[:] = [c for c in chunks if c.sequence is not sequence]
        self._stop_running(sequence)
        sequence.num_computed = 0
        sequence.request.metrics.num_preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.running.remove(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = None
        self._pool.release(sequence.pages)
        sequence.pages = []
        if sequence.adapter is not None:
            self._adapters.unpin(sequence.adapter)

    def _admit_waiting(self, plan: StepPlan) -> None:
        """Let waiting sequences in, in their order, as budget, slots and pages allow.

        One whose adapter is not resident yet is passed over while it is loaded, but those behind it are let
        in only beside the room that it will need: nobody is overtaken for good. One that lacks room stops all
        behind it. The first `lookahead` have their adapters loaded even where they cannot run yet.
        """
        limits = self._limits
        lacking = sum(self._lacking(s) for s in self.running)
        ahead = 0  # pages that those passed over will need
        counted: set[int] = set()  # generations whose pages are in `ahead`
        blocked = False
        window = itertools.islice(self.waiting, limits.max_batch_size + limits.lookahead)
        for index, sequence in enumerate(list(window)):
            can_run = bool(self._slots) and self._has_budget(plan) and not blocked
            if sequence.pending or (not can_run and index >= limits.lookahead):
                break
            # All of its prompt, beside what running ones lack of theirs and a page for their next tokens:
            # who is let in for less is preempted before it samples, and computes its prompt in vain.
            prompt = self.pages_for(sequence.remaining)
            adapter = sequence.adapter
            known = adapter is None or adapter.generation in counted
            absent = adapter.num_pages if adapter is not None and adapter.pages is None and not known else 0
            alone = not self.running and not ahead  # intake saw to it that it fits
            blocked |= not alone and not self._adapters.can_make_room(
                lacking + ahead + prompt + absent, keep=None if known else adapter
            )
            can_run = can_run and not blocked
            ready = adapter is None or self._loader.seek(adapter, room=not blocked, waits=can_run)
            if ready and can_run:
                self._start(sequence)
                self._take(plan, sequence)
                lacking += self._lacking(sequence)
                continue
            ahead += prompt
            if adapter is not None and not known:
                counted.add(adapter.generation)
                self._adapters.touch(adapter)
                if not adapter.pins and adapter.state != "staged":  # it needs pages, or could lose them
                    ahead += adapter.num_pages

    def _lacking(self, sequence: Sequence) -> int:
        """Pages that a running sequence still needs for its tokens so far, or for its next one."""
        return max(1, self.pages_for(sequence.num_tokens) - len(sequence.pages))

    def _start(self, sequence: Sequence) -> None:
        if sequence.adapter is not None:
            self._adapters.pin(sequence.adapter)
        self.waiting.remove(sequence)
        sequence.slot = self._slots.pop()
        self.running.append(sequence)

    def _commit(self, plan: StepPlan) -> StepPlan:
        for chunks in (plan.decodes, plan.prefills):
            # An adapter's tokens lie side by side, so that kernels read its weights once.
            chunks.sort(key=lambda c: 0 if c.sequence.adapter is None else c.sequence.adapter.generation)
        now = time.monotonic()
        for chunk in plan:
            if chunk.sequence.request.metrics.first_scheduled_time is None:
                chunk.sequence.request.metrics.first_scheduled_time = now
            chunk.sequence.num_computed += chunk.count
            chunk.sequence.pending += chunk.samples
        return plan
