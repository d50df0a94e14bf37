"""Random operations on a real engine, scheduler, pool and adapter store, over a simulated device."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import slora_jax.engine
from slora_jax import EngineConfig, ModelConfig, SamplingParams, UnknownAdapterError
from slora_jax.engine import Engine
from slora_jax.outputs import StreamEvent
from slora_jax.sharding.mesh import make_mesh
from tests.engine.simulated_runner import (
    BASE,
    SimulatedInFlight,
    SimulatedRunner,
    expected_tokens,
    simulated_adapter,
)

VOCAB = 97
MODEL = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_position_embeddings=96,
)


_NO_ROOM = r"(request '\S+' needs|pinned adapters would take \d+ pages of \d+, and leave none)"


def simulated_engine(**fields: Any) -> Engine:
    """An engine of MODEL over a SimulatedRunner."""
    config = EngineConfig(dtype="float32", page_tokens=4, **fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slora_jax.engine, "ModelRunner", SimulatedRunner)
        return Engine(MODEL, {}, config, make_mesh(1))


def shared_prompts() -> st.SearchStrategy[list[int]]:
    """Prompts of 1 to 40 tokens that often begin alike, and part at any token."""
    stems = st.sampled_from([[1, 2, 3, 4] * 8, [1, 2, 3, 4, 5, 6, 7, 8] * 4, [9] * 32, []])
    tails = st.lists(st.integers(0, VOCAB - 1), max_size=8)
    return st.tuples(stems, st.integers(1, 32), tails).map(lambda t: (t[0][: t[1]] + t[2]) or [5])


class EngineMachine(RuleBasedStateMachine):
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
    ) -> None:
        self.engine = simulated_engine(
            num_pages=num_pages + self.slot_pages,
            max_batch_size=max_batch_size,
            max_step_tokens=max_step_tokens,
            prefill_chunk_tokens=chunk,
            enable_prefix_caching=caching,
            **self.fields,
        )
        self.prompts: dict[tuple[str, int], list[int]] = {}
        self.names: dict[str, str | None] = {}
        self.fingerprints = itertools.count(1)
        self.loaded: dict[str, int] = {}
        self.expected: dict[tuple[str, int], list[int]] = {}
        self.got: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[tuple[str, int], str] = {}
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
    )
    def add(self, prompts: list[list[int]], max_tokens: int, n: int, pick: int, stride: int) -> None:
        names = [None, *self.loaded]
        for i, prompt in enumerate(prompts):
            self.ask(prompt, max_tokens, n, names[(pick + stride * i) % len(names)])

    def ask(self, prompt: list[int], max_tokens: int, n: int, name: str | None) -> None:
        if len(self.expected) - len(self.ended) > 40:
            return
        params = SamplingParams(max_tokens=max_tokens, n=n)
        pages = -(-(len(prompt) + max_tokens) // 4)
        for adapter in () if self.slot_pages else self.engine.adapters():
            if adapter.pinned or (adapter.name == name and adapter.state != "draining"):
                pages += adapter.pages
        if pages > self.engine.stats().pages_total - self.slot_pages:
            with pytest.raises(ValueError, match="pages"):
                self.engine.add_request(prompt, name, params)
            return
        request_id = self.engine.add_request(prompt, name, params)
        fingerprint = BASE if name is None else self.loaded[name]
        self.names[request_id] = name
        for i in range(n):
            self.prompts[request_id, i] = prompt
            self.expected[request_id, i] = expected_tokens(prompt, fingerprint, max_tokens, VOCAB)

    @rule(pick=st.integers(0, 50), tail=st.lists(st.integers(0, VOCAB - 1), max_size=6), n=st.integers(1, 2))
    def follow_up(self, pick: int, tail: list[int], n: int) -> None:
        """The next turn of a conversation: a prompt that begins with an earlier one and its answer."""
        keys = sorted(self.got)
        if not keys:
            return
        key = keys[pick % len(keys)]
        name = self.names[key[0]]
        prompt = (self.prompts[key] + self.got[key] + tail)[:60]
        self.ask(prompt, 5, n, name if name in self.loaded else None)

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

    @rule(pick=st.integers(0, 50))
    def abort(self, pick: int) -> None:
        alive = sorted({r for r, _ in self.expected} - {r for r, _ in self.ended})
        if alive:
            self.take(self.engine.abort(alive[pick % len(alive)]))

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.take(self.engine.step())
            self.engine.check_integrity()

    def take(self, events: list[StreamEvent]) -> None:
        for event in events:
            key = event.request_id, event.index
            assert key not in self.ended, "an event after the last one"
            self.got.setdefault(key, []).extend(event.token_ids)
            if event.finish_reason is not None:
                self.ended[key] = event.finish_reason

    @invariant()
    def tokens_are_right(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        for key, tokens in self.got.items():
            assert tokens == self.expected[key][: len(tokens)], key

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if not self.engine.has_unfinished():
                break
            self.take(self.engine.step())
            self.engine.check_integrity()
        assert set(self.ended) == set(self.expected), "a sequence never ended"
        for key, reason in self.ended.items():
            assert reason in ("length", "abort")
            assert reason == "abort" or self.got[key] == self.expected[key]
        for name in list(self.loaded):
            self.engine.unload_adapter(name)
        self.engine.reset_prefix_cache()
        stats = self.engine.stats()
        assert stats.pages_free == stats.pages_total, "pages leaked"
        assert self.engine.adapters() == []


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_many_more_random_histories() -> None:
    run_state_machine_as_test(
        EngineMachine, settings=settings(max_examples=1500, stateful_step_count=80, deadline=None)
    )


def test_preemption_recomputes_and_changes_nothing() -> None:
    engine = simulated_engine(num_pages=24, max_batch_size=6, max_step_tokens=24)
    prompts = [[i] * (5 + i) for i in range(6)]
    outs = engine.generate(prompts, sampling_params=SamplingParams(max_tokens=40))
    assert engine.stats().preemptions > 0
    for prompt, out in zip(prompts, outs, strict=True):
        assert out.token_ids == expected_tokens(prompt, BASE, 40, VOCAB)


@pytest.mark.parametrize("place", ["launch", "fetch", "stage_adapters", "write_adapter"])
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_step_that_breaks_off_costs_others_nothing(place: str, nth: int) -> None:
    engine = simulated_engine(num_pages=90, max_batch_size=4, max_step_tokens=16)
    params = SamplingParams(max_tokens=9)
    names = [None, *(f"a{i}" for i in range(4))]
    for i, name in enumerate(names[1:], 1):
        assert name is not None
        engine.load_adapter(name, simulated_adapter(engine._runner.layout, i, 8))  # type: ignore[attr-defined]
    ids = [engine.add_request([i + 1] * 5, name, params) for i, name in enumerate(names)]
    owner: Any = SimulatedInFlight if place == "fetch" else SimulatedRunner
    whole, calls = getattr(owner, place), itertools.count(1)

    def interrupted(*args: Any) -> Any:
        if next(calls) == nth:
            raise KeyboardInterrupt
        return whole(*args)

    tokens: dict[str, list[int]] = {i: [] for i in ids}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[9, 9]] * 2, None, SamplingParams(max_tokens=90))
        engine.check_integrity()
        while engine.has_unfinished():
            for event in engine.step():
                if event.request_id in tokens:
                    tokens[event.request_id] += event.token_ids
            engine.check_integrity()
    want = [expected_tokens([i + 1] * 5, i or BASE, 9, VOCAB) for i in range(len(ids))]
    assert list(tokens.values()) == want


@pytest.mark.parametrize("chunk", [4, None])
def test_a_prompt_is_not_computed_in_vain(chunk: int | None) -> None:
    engine = simulated_engine(num_pages=24, max_batch_size=4, max_step_tokens=16, prefill_chunk_tokens=chunk)
    for prompt, max_tokens in (([1] * 4, 70), ([2] * 60, 20), ([3] * 30, 20)):
        engine.add_request(prompt, None, SamplingParams(max_tokens=max_tokens))
    while engine.has_unfinished():
        engine.step()
    stats = engine.stats()
    assert stats.preemptions <= 2
    assert stats.prompt_tokens <= 2 * (4 + 60 + 30)


def test_requests_run_in_order_of_arrival() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=1, max_step_tokens=16)
    ids = [engine.add_request([i, i], None, SamplingParams(max_tokens=3)) for i in range(5)]
    ended = []
    while engine.has_unfinished():
        ended += [e.request_id for e in engine.step() if e.finish_reason]
    assert ended == ids


def test_events_of_other_requests_survive_a_generate_call() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    other = engine.add_request([1, 2, 3], None, SamplingParams(max_tokens=4))
    engine.generate([[5, 6]], sampling_params=SamplingParams(max_tokens=20))
    tokens: list[int] = []
    while engine.has_unfinished():
        tokens += [t for e in engine.step() if e.request_id == other for t in e.token_ids]
    assert tokens == expected_tokens([1, 2, 3], BASE, 4, VOCAB)


def test_aborting_hands_out_first_what_another_stream_collected() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    other = engine.add_request([1, 2, 3], None, SamplingParams(max_tokens=30))
    engine.generate([[5, 6]], sampling_params=SamplingParams(max_tokens=10))
    events = engine.abort(other)
    assert [e.finish_reason for e in events[-2:]] == [None, "abort"]
    tokens = [t for e in events for t in e.token_ids]
    assert len(tokens) > 5
    assert tokens == expected_tokens([1, 2, 3], BASE, len(tokens), VOCAB)
    while engine.has_unfinished():
        assert not engine.step()


def test_closing_a_stream_frees_what_it_held() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    stream = engine.stream([[1] * 20, [2] * 9], sampling_params=SamplingParams(max_tokens=30))
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    assert engine.stats().pages_free + engine.stats().pages_cached == engine.stats().pages_total
    engine.check_integrity()


def test_two_streams_read_in_turn_or_one_after_the_other() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    params = SamplingParams(max_tokens=6)
    prompts = [[1, 2, 3], [4, 5]]

    def tokens(events: Iterable[StreamEvent]) -> list[int]:
        return [t for e in events for t in e.token_ids]

    want = [expected_tokens(p, BASE, 6, VOCAB) for p in prompts]
    pairs = list(zip(*(engine.stream([p], sampling_params=params) for p in prompts), strict=True))
    assert [tokens(column) for column in zip(*pairs, strict=True)] == want
    first, second = (engine.stream([p], sampling_params=params) for p in prompts)
    head = [next(second)]  # the rest of its events come from the first one's steps
    assert [tokens(first), tokens([*head, *second])] == want
    assert not engine.has_unfinished()


def test_closing_a_stream_keeps_the_events_of_others() -> None:
    engine = simulated_engine(num_pages=60, max_batch_size=4, max_step_tokens=16)
    stream = engine.stream([[7, 7]], sampling_params=SamplingParams(max_tokens=9))
    next(iter(stream))
    other = engine.add_request([1, 2, 3], None, SamplingParams(max_tokens=4))
    while not any(e.request_id == other for e in engine._undelivered):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    tokens: list[int] = []
    while engine.has_unfinished():
        tokens += [t for e in engine.step() if e.request_id == other for t in e.token_ids]
    assert tokens == expected_tokens([1, 2, 3], BASE, 4, VOCAB)


def test_without_max_tokens_an_output_may_fill_what_the_pool_holds_beside_the_adapter() -> None:
    engine = simulated_engine(num_pages=20, max_batch_size=2, max_step_tokens=16)
    adapter = simulated_adapter(engine._runner.layout, 7, 8)  # type: ignore[attr-defined]
    pages = engine.load_adapter("a", adapter).pages
    out = engine.generate([1, 2, 3], "a", SamplingParams(max_tokens=None))[0]
    assert out.finish_reason == "length"
    assert out.token_ids == expected_tokens([1, 2, 3], 7, (19 - pages) * 4 - 3, VOCAB)
    with pytest.raises(ValueError, match="shorten the prompt"):
        engine.generate([1] * ((19 - pages) * 4), "a", SamplingParams(max_tokens=None))
