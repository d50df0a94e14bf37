"""Who runs in the next step: continuous batching with ragged chunked prefill, over one budget of pages.

A sequence begins behind the longest cached prefix of its tokens. A step takes every running sequence's
decode, then prefill chunks of running sequences, then admits waiting ones in the order that the policy says
(`waiting.py`), but for those whose adapters are still being loaded, within `max_step_tokens`. When pages
run out, idle adapters and cached prefixes give way first (`memory/reclaim.py`), then adapters that the next
ones wait for or that are on their way, then the sequence that was admitted last is preempted: it gives its
pages back, and is the first to come back. The one admitted first can always take what it needs (admission
checks that one request fits the pool), so something always moves; and as admissions stop while the next one
in order does not fit, everybody's turn comes. Costs O(running) a step, whatever waits or is registered.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import operator
import time
from collections.abc import Callable, Iterator

from slora_jax.config import EngineConfig
from slora_jax.lora.loader import AdapterLoader
from slora_jax.lora.store import Adapter, AdapterStore
from slora_jax.memory.prefix_cache import CachedPage, PrefixCache
from slora_jax.memory.reclaim import Reclaimer
from slora_jax.request import Sequence
from slora_jax.scheduling.waiting import WaitingQueue

NEARLY_FULL = 0.9  # of max_batch_size
_generation = operator.attrgetter("sequence.generation")  # of a Chunk


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


@dataclasses.dataclass
class _Promised:
    """Pages that the next in order leaves to others; `generations`: whose adapters are among them."""

    kv: int
    adapter: int = 0
    generations: set[int] = dataclasses.field(default_factory=set)

    def add(self, kv: int, adapter: Adapter | None, adapter_pages: int) -> None:
        """So many more, for a sequence and for its adapter."""
        self.kv += kv
        if adapter is not None and adapter.generation not in self.generations:
            self.generations.add(adapter.generation)
            self.adapter += adapter_pages


@dataclasses.dataclass(frozen=True)
class SchedulerLimits:
    """Sizes in tokens, sequences and pages; from EngineConfig."""

    max_batch_size: int
    max_step_tokens: int
    max_mixed_prompt_tokens: int  # in a step with decodes
    max_chunk_tokens: int
    max_prefill_seqs: int
    page_tokens: int
    prefill_delay_steps: int
    lookahead: int  # waiting sequences whose adapters are loaded before their turn
    one_adapter: bool = False  # in the batch, at a time
    guess_watermark: float = 1.0  # share of the pool that guesses leave free; with 1.0 there are none

    @classmethod
    def of(
        cls, config: EngineConfig, *, max_mixed_prompt_tokens: int, max_prefill_seqs: int
    ) -> SchedulerLimits:
        """A config's limits, beside those of the compiled steps."""
        return cls(
            max_batch_size=config.max_batch_size,
            max_step_tokens=config.max_step_tokens,
            max_mixed_prompt_tokens=max_mixed_prompt_tokens,
            max_chunk_tokens=min(
                config.prefill_chunk_tokens or config.max_step_tokens, config.max_step_tokens
            ),
            max_prefill_seqs=max_prefill_seqs,
            page_tokens=config.page_tokens,
            prefill_delay_steps=config.prefill_delay_steps,
            lookahead=max(1, config.adapter_prefetch),
            one_adapter=config.lora_mode == "merge",
            guess_watermark=config.prefetch_watermark if config.adapter_prefetch else 1.0,
        )


class Scheduler:
    """Owns the queue, the slots and sequences' pages.

    `clock` gives the seconds that `RequestMetrics` are in.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        reclaim: Reclaimer,
        adapters: AdapterStore,
        loader: AdapterLoader,
        prefixes: PrefixCache,
        waiting: WaitingQueue,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._pool, self._reclaim = reclaim.pool, reclaim
        self._adapters, self._loader, self._prefixes = adapters, loader, prefixes
        self.waiting = waiting
        self._clock = clock
        self.running: dict[Sequence, None] = {}  # an ordered set, first admitted first
        self.preemptions = 0
        self._delayed = 0  # steps in a row in which prompts had slots, and none was taken
        self._slots = list(range(limits.max_batch_size - 1, -1, -1))

    def pages_for(self, tokens: int) -> int:
        """Pages that hold the KV of so many tokens."""
        return -(-tokens // self._limits.page_tokens)

    def schedule(self) -> StepPlan:
        """The next step; advances `num_computed` and `pending` of what it takes. Empty: nothing can run."""
        plan = StepPlan([], [])
        self._prefixes.record_all(self.running)  # what they have computed was launched since
        longer = self._take_decodes(plan)  # those first: a long prompt never stalls them
        delayed = self._delays_prompts(plan, longer)
        self._delayed = self._delayed + 1 if longer or self._next_joins() else 0  # until `_take` takes one
        for sequence in longer:
            if sequence.slot is not None and not delayed:
                self._take(plan, sequence)
        self._adapters.touch_anew()
        if self.waiting:
            self._admit_waiting(plan, longer, delayed)
        return self._commit(plan)

    def guess(self) -> None:
        """Load an adapter that will probably be asked for, into pages above the watermark that are free."""
        floor = int(self._limits.guess_watermark * self._pool.usable_for("adapter"))
        guess = self._loader.guess(self._pool.free_for("adapter") - floor)
        if guess is not None:
            self.waiting.came_near(guess)

    def finish(self, sequence: Sequence) -> None:
        """Give back what a sequence holds; it is never scheduled again."""
        if sequence.slot is not None:
            self._prefixes.record(sequence)
            self._stop_running(sequence)
        self.waiting.ended(sequence)

    def preempt_all(self) -> None:
        """Send every running sequence back to the queue, in order, to be computed anew, all of it. None
        counts as preempted, since pages are not lacking.
        """
        while self.running:
            self._send_back(next(reversed(self.running)))
        self._prefixes.clear()

    def check_integrity(self) -> None:
        """Pages, slots and uses of adapters add up; raises AssertionError saying what does not."""
        self._pool.check_integrity(
            [*(s.pages for s in self.running), self._prefixes.pages()],
            [a.pages for a in self._adapters if a.pages is not None],
        )
        self._prefixes.check_integrity(list(self.running))
        slots = [s.slot for s in self.running if s.slot is not None]
        assert sorted([*slots, *self._slots]) == list(range(self._limits.max_batch_size)), f"slots {slots}"
        assert all(s.slot is None and not s.pages for s in self.waiting), "a waiting sequence holds pages"
        in_use = collections.Counter(id(s.adapter) for s in self.running if s.adapter is not None)
        for adapter in self._adapters:
            assert adapter.in_use == in_use[id(adapter)], (
                f"adapter '{adapter.name}' is in use {adapter.in_use} times"
            )
        self._adapters.check_integrity()
        self._loader.check_integrity()
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

    def _delays_prompts(self, plan: StepPlan, begun: list[Sequence]) -> bool:
        """Whether a nearly full batch lets prompts gather, for some steps, until they fill one.

        Sequences end one by one. A prefill for each as its slot falls free would read the weights and pad the
        step for a few tokens every time; eight together cost little more than one. The rest of a prompt whose
        beginning filled a step (one of those `begun`) gathers with them. Those that wait for an adapter, or
        behind one that lacks pages, could not run anyway, and what is cached of a prompt is no work.
        """
        limits = self._limits
        if (
            len(plan.decodes) < NEARLY_FULL * limits.max_batch_size
            or self._delayed >= limits.prefill_delay_steps
        ):
            return False
        full = min(self._room(plan), limits.max_chunk_tokens)
        tokens, prompts = sum(s.remaining for s in begun), len(begun)
        promised = _Promised(self._lacking_pages(begun))
        with contextlib.closing(self.waiting.candidates()) as candidates:
            for sequence in itertools.islice(candidates, len(self._slots)):
                adapter, prefix = sequence.adapter, self._prefixes.match(sequence)
                if not self._joins(sequence):
                    if prompts == len(begun):
                        return False  # the batch drains: nobody joins it any more
                    break
                kv, adapter_pages = self._need(sequence, prefix, promised)
                promised.add(kv, adapter, adapter_pages)
                if sequence.pending or not self._reclaim.fits(kv=promised.kv, adapter=promised.adapter):
                    break
                if adapter is None or adapter.resident:
                    tokens += sequence.remaining - len(prefix) * limits.page_tokens
                    prompts += 1
                if tokens >= full or prompts >= limits.max_prefill_seqs:
                    break
        return 0 < tokens < full and prompts < limits.max_prefill_seqs

    def _next_joins(self) -> bool:
        """Whether somebody would be let in, but for pages, an adapter or the delay."""
        sequence = self.waiting.head() if self._slots else None
        return sequence is not None and self._joins(sequence)

    def _joins(self, sequence: Sequence) -> bool:
        """Whether a sequence may be in the batch, beside those of the one adapter that it has at a time."""
        first = next(iter(self.running), sequence)
        return not self._limits.one_adapter or sequence.adapter is first.adapter

    def _room(self, plan: StepPlan) -> int:
        """Tokens that chunks of prompts may still bring into a plan."""
        limits = self._limits
        room = limits.max_step_tokens - plan.num_tokens
        if plan.decodes:
            room = min(room, limits.max_mixed_prompt_tokens - sum(c.count for c in plan.prefills))
        return room

    def _has_budget(self, plan: StepPlan) -> bool:
        return self._room(plan) > 0 and len(plan.prefills) < self._limits.max_prefill_seqs

    def _take(self, plan: StepPlan, sequence: Sequence) -> None:
        """Put as much of a running sequence into the plan as budget and pages allow."""
        one = sequence.remaining == 1
        room = self._limits.max_step_tokens - plan.num_tokens if one else self._room(plan)
        count = min(sequence.remaining, self._limits.max_chunk_tokens, room)
        if count > 1 and len(plan.prefills) >= self._limits.max_prefill_seqs:
            return
        if count < 1 or not self._ensure_pages(plan, sequence, sequence.num_computed + count):
            return
        chunk = Chunk(sequence, sequence.num_computed, count, samples=count == sequence.remaining)
        (plan.decodes if count == 1 else plan.prefills).append(chunk)
        self._delayed = 0

    def _ensure_pages(self, plan: StepPlan, sequence: Sequence, tokens: int) -> bool:
        """Grow a running sequence to `tokens`; preempts younger sequences, at last itself (then False)."""
        need = self.pages_for(tokens) - len(sequence.pages)
        while need > 0 and not self._adapters.make_room(need, "kv"):
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
        self._send_back(sequence)
        sequence.request.metrics.num_preemptions += 1
        self.preemptions += 1

    def _send_back(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        sequence.num_computed = 0
        self.waiting.preempted(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        del self.running[sequence]
        self._slots.append(sequence.slot)
        sequence.slot = None
        self._prefixes.release(sequence)
        if sequence.adapter is not None:
            self._adapters.end_use(sequence.adapter)

    def _admit_waiting(self, plan: StepPlan, begun: list[Sequence], delayed: bool) -> None:
        """Let waiting sequences in, in their order, as budget, slots and pages allow; none where `delayed`.

        One whose adapter is not resident yet is passed over while it is loaded, but those behind it are let
        in only beside the room that it will need: nobody is overtaken for good. One that lacks room stops all
        behind it. The first `lookahead` have their adapters loaded even where they cannot run yet. With
        `one_adapter`, the first one of another than the batch's stops all behind it, too.
        """
        limits = self._limits
        promised = _Promised(self._lacking_pages(begun))
        blocked = False
        turn = next(iter(self.running), None)  # with one_adapter: whose adapter the batch has
        now = self._clock()
        with contextlib.closing(self.waiting.candidates()) as candidates:
            window = itertools.islice(candidates, limits.max_batch_size + limits.lookahead)
            for index, sequence in enumerate(window):
                turn = turn or sequence
                delayed |= limits.one_adapter and sequence.adapter is not turn.adapter
                can_run = bool(self._slots) and self._has_budget(plan) and not (blocked or delayed)
                if sequence.pending or (not can_run and index >= limits.lookahead):
                    break
                adapter = sequence.adapter
                alone = not self.running and not promised.kv  # intake saw to it that it fits
                blocked = blocked or not (alone or self._fits(sequence, promised))
                can_run = can_run and not blocked
                absent = adapter is not None and not adapter.resident
                ready = adapter is None or self._seek(adapter, room=not blocked, waits=can_run)
                if absent and ready:  # at once; the room for it may have been its own prefix
                    can_run = can_run and (alone or self._fits(sequence, promised))
                if ready and can_run:
                    self._start(sequence, now)
                    self._take(plan, sequence)
                    promised.kv += self._lacking(sequence)
                    continue
                coming = adapter.num_pages if adapter is not None and adapter.pages is None else 0
                promised.add(self.pages_for(sequence.num_tokens), adapter, coming)
                if adapter is not None:
                    self._adapters.touch(adapter)

    def _seek(self, adapter: Adapter, *, room: bool, waits: bool) -> bool:
        """`AdapterLoader.seek`; all orders, those of other tenants too, are told of one that comes."""
        near = adapter.near
        ready = self._loader.seek(adapter, room=room, waits=waits)
        if adapter.near and not near:
            self.waiting.came_near(adapter)
        return ready

    def _fits(self, sequence: Sequence, promised: _Promised) -> bool:
        """Whether a waiting sequence could be let in beside what is promised to others.

        All of its prompt, beside what running ones lack of theirs and a page for their next tokens: who is
        let in for less is preempted before it samples, and computes its prompt in vain.
        """
        kv, adapter = self._need(sequence, self._prefixes.match(sequence), promised)
        return self._reclaim.fits(kv=promised.kv + kv, adapter=promised.adapter + adapter)

    def _need(self, sequence: Sequence, prefix: list[CachedPage], promised: _Promised) -> tuple[int, int]:
        """Free or idle pages that a waiting sequence would take: for KV behind its cached prefix, and for its
        adapter where these are not promised yet.
        """
        adapter, adapter_pages = sequence.adapter, 0
        if (
            adapter is not None
            and adapter.generation not in promised.generations
            and (adapter.pages is None or self._adapters.is_idle(adapter))
        ):
            adapter_pages = adapter.num_pages
        in_use = sum(node.users > 0 for node in prefix)
        return self.pages_for(sequence.num_tokens) - in_use, adapter_pages

    def _lacking_pages(self, begun: list[Sequence]) -> int:
        """`_lacking` of all that run: one each, and more of those whose prompts have only `begun`."""
        return len(self.running) + sum(self._lacking(s) - 1 for s in begun if s.slot is not None)

    def _lacking(self, sequence: Sequence) -> int:
        """Pages that a running sequence lacks of its prompt, and one for its next tokens."""
        return max(1, self.pages_for(sequence.num_tokens) - len(sequence.pages))

    def _start(self, sequence: Sequence, now: float) -> None:
        """From the queue to the running ones, behind the longest cached prefix; its adapter is resident."""
        self._reclaim.admitted()
        self._prefixes.take(sequence, self._prefixes.match(sequence))
        if sequence.adapter is not None:
            self._adapters.begin_use(sequence.adapter)
        self.waiting.admitted(sequence)
        sequence.slot = self._slots.pop()
        self.running[sequence] = None
        metrics = sequence.request.metrics
        if sequence.scheduled_time is None:
            sequence.scheduled_time = now
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = now
        if metrics.num_cached_tokens is None:
            metrics.num_cached_tokens = sequence.num_cached

    def _commit(self, plan: StepPlan) -> StepPlan:
        for chunks in (plan.decodes, plan.prefills):
            # An adapter's tokens lie side by side, so that kernels read its weights once.
            chunks.sort(key=_generation)
            for chunk in chunks:
                sequence = chunk.sequence
                sequence.num_computed += chunk.count
                sequence.pending += chunk.samples
        return plan
