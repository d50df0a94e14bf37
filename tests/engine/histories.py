"""Random histories of what users do to an engine, as state machines of hypothesis."""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from slora_jax import LimitExceededError, SamplingParams, UnknownAdapterError
from slora_jax.engine import Engine
from slora_jax.outputs import StreamEvent
from tests.engine.policy_server import POLICIES
from tests.engine.simulated_engine import VOCAB, simulated_engine
from tests.engine.simulated_runner import BASE, expected_tokens, simulated_adapter
from tests.engine.virtual_time import VirtualClock, virtual_time

_NO_ROOM = r"(request '\S+' needs|pinned adapters would take \d+ pages of \d+, and leave none)"


def shared_prompts() -> st.SearchStrategy[list[int]]:
    """Prompts of 1 to 40 tokens that often begin alike, and part at any token."""
    stems = st.sampled_from([[1, 2, 3, 4] * 8, [1, 2, 3, 4, 5, 6, 7, 8] * 4, [9] * 32, []])
    tails = st.lists(st.integers(0, VOCAB - 1), max_size=8)
    return st.tuples(stems, st.integers(1, 32), tails).map(lambda t: (t[0][: t[1]] + t[2]) or [5])


STEP_S = 0.02

type Who = tuple[str, int, float | None]  # tenant, priority, seconds of the deadline
NOBODY: Who = "a", 0, None


def askers() -> st.SearchStrategy[Who]:
    return st.tuples(st.sampled_from("abc"), st.integers(-2, 2), st.sampled_from([None, None, None, 0.5]))


def scheduling(policies: tuple[str, ...] = POLICIES) -> st.SearchStrategy[dict[str, Any]]:
    """Fields of EngineConfig: who is next, and limits, mostly none."""
    limits = {f"{kind}_{what}": most for kind in ("tenant", "adapter") for what, most in _LIMITS.items()}
    return st.fixed_dictionaries(
        {
            "scheduling_policy": st.sampled_from(policies),
            "cluster_max_passes": st.integers(0, 4),
            "ttft_target_s": st.sampled_from([0.3, 1e6]),
        },
        optional={name: st.integers(1, most) for name, most in limits.items()},
    ).map(lambda fields: fields | _NAMED)


_NAMED: dict[str, Any] = {
    "tenant_weights": {"a": 3.0},
    "tenant_limits": {"c": {"max_concurrency": 2, "max_queue": None}},
    "adapter_limits": {"a": {"max_concurrency": 1}},
}
_LIMITS = {"max_concurrency": 3, "tokens_per_minute": 3000, "max_queue": 8}


class History(RuleBasedStateMachine):
    """What was asked of an engine and what came: every sequence must end once, and rightly.

    A subclass makes `engine` when it starts, and keeps `loaded` true. A step takes STEP_S seconds of `clock`.
    """

    engine: Engine
    loads_fail = False

    def __init__(self) -> None:
        super().__init__()
        self.fingerprints = itertools.count(1)
        self.loaded: dict[str, int] = {}  # fingerprints by name
        self.asked: dict[str, tuple[list[int], str | None]] = {}  # prompt and adapter of a request
        self.expected: dict[tuple[str, int], list[int]] = {}  # tokens of each sequence of a request
        self.got: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[tuple[str, int], StreamEvent] = {}
        self.left: set[str] = set()  # requests whose users went
        self.clock = VirtualClock()
        self._patched = contextlib.ExitStack()
        self._patched.enter_context(virtual_time(self.clock))

    def ask(self, prompt: list[int], max_tokens: int, n: int, name: str | None, who: Who = NOBODY) -> None:
        """Ask, and perhaps be refused by a limit."""
        tenant, priority, deadline_s = who
        try:
            request_id = self.engine.add_request(
                prompt,
                name,
                self.params(max_tokens, n),
                tenant=tenant,
                priority=priority,
                deadline_s=deadline_s,
            )
        except (LimitExceededError, ValueError) as error:
            if not re.search("_max_queue|_tokens_per_minute", str(error)):
                raise
            return
        fingerprint = BASE if name is None else self.loaded[name]
        self.asked[request_id] = prompt, name
        for i in range(n):
            self.expected[request_id, i] = expected_tokens(prompt, fingerprint, max_tokens, VOCAB)

    def params(self, max_tokens: int, n: int) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, n=n)

    @rule(pick=st.integers(0, 50))
    def abort(self, pick: int) -> None:
        alive = sorted({r for r, _ in self.expected} - {r for r, _ in self.ended})
        if alive:
            self.left.add(alive[pick % len(alive)])
            self.take(self.engine.abort(alive[pick % len(alive)]))

    def take_step(self) -> None:
        self.clock.now += STEP_S
        self.take(self.engine.step())
        self.engine.check_integrity()

    def go_on(self) -> None:
        """Bring requests nearer to their ends."""
        self.take_step()

    def take(self, events: list[StreamEvent]) -> None:
        for event in events:
            key = event.request_id, event.index
            assert key not in self.ended, "an event after the last one"
            self.got.setdefault(key, []).extend(event.token_ids)
            if event.finish_reason is not None:
                self.ended[key] = event

    @invariant()
    def nothing_is_wrong(self) -> None:
        self.engine.check_integrity()
        for key, tokens in self.got.items():
            assert tokens == self.expected[key][: len(tokens)], key

    def teardown(self) -> None:
        with self._patched:
            if hasattr(self, "engine"):
                self.check_end()

    def check_end(self) -> None:
        """All that was asked ends; nothing is left once everything is unloaded."""
        for _ in range(5000):
            if not self.engine.has_unfinished():
                break
            self.go_on()
        assert set(self.ended) == set(self.expected), "a sequence never ended"
        for key, event in self.ended.items():
            if self.loads_fail and event.finish_reason == "error":
                assert "could not be loaded" in str(event.error)  # after a preemption, even late
            elif event.finish_reason == "abort":
                told = str(event.error)
                assert key[0] in self.left or "its deadline_s" in told or "given up after" in told
            else:
                assert event.finish_reason == "length"
                assert self.got[key] == self.expected[key]
        for name in self.loaded:
            self.engine.unload_adapter(name)
        self.engine.reset_prefix_cache()
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats.pages_free == stats.pages_total, "pages leaked"
        assert self.engine.adapters() == []


class EngineMachine(History):
    """Users add, abort, load, reload and unload at any moment; every sequence must end once, and rightly."""

    fields: ClassVar[dict[str, Any]] = {}  # of EngineConfig
    slot_pages = 0  # beside num_pages, for adapters alone

    @initialize(
        num_pages=st.integers(25, 80),
        max_batch_size=st.integers(1, 6),
        max_step_tokens=st.integers(6, 40),
        chunk=st.sampled_from([None, 1, 3, 7]),
        caching=st.sampled_from([True, True, True, False]),
        adapters=st.integers(0, 3),
        load=st.sampled_from([0, 8, 16]),
        order=scheduling(),
    )
    def start(
        self,
        num_pages: int,
        max_batch_size: int,
        max_step_tokens: int,
        chunk: int | None,
        caching: bool,
        adapters: int,
        load: int,
        order: dict[str, Any],
    ) -> None:
        if self.fields.get("lora_mode") == "merge":  # which clusters already
            order |= {"scheduling_policy": order["scheduling_policy"].replace("cluster", "fcfs")}
        self.engine = simulated_engine(
            num_pages=num_pages + self.slot_pages,
            max_batch_size=max_batch_size,
            max_step_tokens=max_step_tokens,
            prefill_chunk_tokens=chunk,
            enable_prefix_caching=caching,
            **(order | self.fields),
        )
        for name in "abc"[:adapters]:
            self.load(name, 8)
        for i in range(load):  # enough to fill slots and pages from the start
            self.add([[1, 2, 3, 4] * (1 + i % 6) + [i]], 24, 1 + i % 3, i, 0)

    @rule(
        prompts=st.lists(shared_prompts(), min_size=1, max_size=6),
        max_tokens=st.integers(1, 40),
        n=st.integers(1, 3),
        pick=st.integers(0, 9),
        stride=st.integers(0, 1),
        who=askers(),
    )
    def add(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        n: int,
        pick: int,
        stride: int,
        who: Who = NOBODY,
    ) -> None:
        names = [None, *self.loaded]
        for i, prompt in enumerate(prompts):
            self.ask_what_fits(prompt, max_tokens, n, names[(pick + stride * i) % len(names)], who)

    def ask_what_fits(
        self, prompt: list[int], max_tokens: int, n: int, name: str | None, who: Who = NOBODY
    ) -> None:
        """Ask, and be refused where the pool could never hold it."""
        if len(self.expected) - len(self.ended) > 40:
            return
        pages = -(-(len(prompt) + max_tokens) // 4)
        for adapter in () if self.slot_pages else self.engine.adapters():
            if adapter.pinned or (adapter.name == name and adapter.state != "draining"):
                pages += adapter.pages
        if pages > self.engine.stats().pages_total - self.slot_pages:
            with pytest.raises(ValueError, match="pages"):
                self.ask(prompt, max_tokens, n, name, who)
        else:
            self.ask(prompt, max_tokens, n, name, who)

    @rule(pick=st.integers(0, 50), tail=st.lists(st.integers(0, VOCAB - 1), max_size=6), n=st.integers(1, 2))
    def follow_up(self, pick: int, tail: list[int], n: int) -> None:
        """The next turn of a conversation: a prompt that begins with an earlier one and its answer."""
        keys = sorted(self.got)
        if not keys:
            return
        key = keys[pick % len(keys)]
        asked, name = self.asked[key[0]]
        prompt = (asked + self.got[key] + tail)[:60]
        self.ask_what_fits(prompt, 5, n, name if name in self.loaded else None)

    @rule(name=st.sampled_from("abcdef"), rank=st.sampled_from([3, 8, 20]))
    def load(self, name: str, rank: int) -> None:
        fingerprint = next(self.fingerprints)
        prepared = simulated_adapter(self.engine._runner.layout, fingerprint, rank)  # type: ignore[attr-defined]
        if prepared.packed.layout.num_pages >= self.engine.stats().pages_total:
            with pytest.raises(ValueError, match="pages"):
                self.engine.load_adapter(name, prepared, replace=True)
            return
        try:
            self.engine.load_adapter(name, prepared, replace=True)
        except ValueError as error:
            if not re.match(f"adapter '{name}' is pinned: {_NO_ROOM}", str(error)):
                raise
            return
        self.loaded[name] = fingerprint

    @rule(name=st.sampled_from("abcdef"), pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        if name in self.loaded:
            try:
                (self.engine.pin_adapter if pinned else self.engine.unpin_adapter)(name)
            except ValueError as error:
                if not re.match(f"adapter '{name}' cannot be pinned: {_NO_ROOM}", str(error)):
                    raise

    @rule(name=st.sampled_from("abcdef"))
    def unload(self, name: str) -> None:
        if name in self.loaded:
            self.engine.unload_adapter(name)
            del self.loaded[name]
        else:
            with pytest.raises(UnknownAdapterError):
                self.engine.unload_adapter(name)

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.take_step()
