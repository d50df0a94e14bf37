"""Who runs in the next step: continuous batching with ragged chunked prefill, over one budget of pages.

A step takes every running sequence's decode, then prefill chunks of running sequences, then admits waiting
ones in the order that the policy says (`waiting.py`), within `max_step_tokens`. When pages run out, idle
adapters give way first, then the sequence that was admitted last is preempted: it gives its pages back, and
recomputes before anybody new is admitted. The one admitted first can always take what it needs (admission
checks that one request fits the pool), so something always moves; and as admissions stop while the next one
in order does not fit, everybody's turn comes. Costs O(running) a step, whatever waits or is registered.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

from slora_jax.lora.store import Adapter, AdapterStore
from slora_jax.memory.page_pool import PagePool
from slora_jax.request import Sequence
from slora_jax.waiting import WaitingQueue


@dataclasses.dataclass(slots=True, eq=False)  # frozen ones take three times as long to make
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


class Scheduler:
    """Owns the queue, the slots and sequences' pages. `load(adapter)` must write a newly resident adapter.

    `clock` gives the seconds that `RequestMetrics` are in.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: PagePool,
        adapters: AdapterStore,
        load: Callable[[Adapter], None],
        waiting: WaitingQueue,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._adapters = adapters
        self._load = load
        self.waiting = waiting
        self._clock = clock
        self.running: dict[Sequence, None] = {}  # an ordered set, first admitted first
        self.preemptions = 0
        self._slots = list(range(limits.max_batch_size - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold the KV of so many tokens."""
        return -(-tokens // self._limits.page_tokens)

    def schedule(self) -> StepPlan:
        """The next step; advances `num_computed` and `pending` of what it takes. Empty: nothing can run."""
        plan = StepPlan([], [])
        for sequence in self._take_decodes(plan):  # those first: a long prompt never stalls them
            if sequence.slot is not None:
                self._take(plan, sequence)
        self._admit_waiting(plan)
        return self._commit(plan)

    def finish(self, sequence: Sequence) -> None:
        """Give back what a sequence holds; it is never scheduled again."""
        if sequence.slot is not None:
            self._stop_running(sequence)
        self.waiting.ended(sequence)

    def preempt_all(self) -> None:
        """Send every running sequence back to the queue, in order, to be computed anew."""
        while self.running:
            self._preempt(StepPlan([], []), next(reversed(self.running)))

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
            assert not adapter.pins or adapter.pages is not None, (
                f"adapter '{adapter.name}' runs without pages"
            )
        for s in self.running:
            assert len(s.pages) >= self.pages_for(s.num_computed), f"{s.request.request_id} lacks pages"
        self.waiting.check_integrity(self.running)

    def _take_decodes(self, plan: StepPlan) -> list[Sequence]:
        """Put the running sequences that lack one token into the plan; the others that lack some."""
        longer = []
        size = self._limits.page_tokens
        for sequence in list(self.running):  # hundreds, each step: no properties, no calls
            if sequence.slot is None:
                continue  # preempted for one before it
            length, computed = len(sequence.tokens) + sequence.pending, sequence.num_computed
            if length - computed > 1:
                longer.append(sequence)
            elif (
                length - computed == 1
                and length < sequence.max_len
                and (computed < len(sequence.pages) * size or self._ensure_pages(plan, sequence, length))
            ):
                plan.decodes.append(Chunk(sequence, computed, 1, True))
        return longer

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
            victim = next(reversed(self.running))
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
        self.waiting.preempted(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        del self.running[sequence]
        self._slots.append(sequence.slot)
        sequence.slot = None
        self._pool.release(sequence.pages)
        sequence.pages = []
        if sequence.adapter is not None:
            self._adapters.unpin(sequence.adapter)

    def _admit_waiting(self, plan: StepPlan) -> None:
        """Admit who is next while budget, slots and pages allow."""
        if not self._slots or not self.waiting:
            return
        now = self._clock()
        lacking = sum(map(self._lacking, self.running))
        with contextlib.closing(self.waiting.candidates()) as candidates:
            for sequence in candidates:
                if not self._has_budget(plan) or not self._admit(sequence, lacking):
                    return
                metrics = sequence.request.metrics
                if metrics.first_scheduled_time is None:
                    metrics.first_scheduled_time = now
                self._take(plan, sequence)
                lacking += self._lacking(sequence)

    def _lacking(self, sequence: Sequence) -> int:
        """Pages that a running sequence lacks of its prompt, and one for its next tokens."""
        return max(1, self.pages_for(sequence.num_tokens) - len(sequence.pages))

    def _admit(self, sequence: Sequence, lacking: int) -> bool:
        """Move the head of the queue to the running ones, with its adapter resident, if all of it fits now
        beside the `lacking` pages of running ones.

        A preempted sequence waits until the tokens it had sampled have come back from the device.
        """
        if not self._slots or sequence.pending:
            return False
        adapter = sequence.adapter
        absent = adapter if adapter is not None and adapter.pages is None else None
        # All of its prompt, beside what running ones lack of theirs and a page for their next tokens: a
        # sequence that is let in for less is preempted before it samples, and computes its prompt in vain.
        need = self.pages_for(sequence.remaining) + lacking + (absent.num_pages if absent else 0)
        if self.running and not self._adapters.can_make_room(need, keep=adapter):
            return False
        if absent is not None:
            self._adapters.make_resident(absent, self._load)
        if adapter is not None:
            self._adapters.pin(adapter)
        self.waiting.admitted(sequence)
        sequence.slot = self._slots.pop()
        self.running[sequence] = None
        return True

    def _commit(self, plan: StepPlan) -> StepPlan:
        for chunks in (plan.decodes, plan.prefills):
            # An adapter's tokens lie side by side, so that kernels read its weights once.
            chunks.sort(key=_generation)
        for chunk in plan:
            chunk.sequence.num_computed += chunk.count
            chunk.sequence.pending += chunk.samples
        return plan


def _generation(chunk: Chunk) -> int:
    adapter = chunk.sequence.request.adapter
    return 0 if adapter is None else adapter.generation
