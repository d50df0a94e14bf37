"""KV, cached prefixes and idle adapters over one pool: who gives way to whom, and what a pin keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from slora_jax import EngineConfig, SamplingParams, UnknownAdapterError
from slora_jax.engine import Engine
from slora_jax.memory.reclaim import HolderKind, PageCosts
from slora_jax.weights import load_model_config, resolve_model
from tests.engine.simulated_engine import VOCAB, ask, engine_with, load, resident, simulated_engine
from tests.engine.simulated_runner import BASE, expected_tokens
from tests.lora.peft_files import write_peft_adapter

FOUR = SamplingParams(max_tokens=4)


def test_each_kind_gives_way_to_the_others() -> None:
    engine = engine_with(8, 8, 8, num_pages=70)
    for i in range(12):
        ask(engine, [i] * 40)
    stats = engine.stats()
    assert stats.pages_free < 11
    assert stats.prefix_evictions > 0, "cached prefixes to KV"
    before = stats.prefix_evictions
    for name in ("a0", "a1", "a2"):
        ask(engine, [1] * 5, name)
    assert len(resident(engine)) == 3
    assert engine.stats().prefix_evictions > before, "cached prefixes to adapters"
    for i in range(36):
        ask(engine, [50 + i // 3] * 40)  # each used more often than an adapter was
    assert engine.stats().adapter_evictions > 0, "adapters to KV"
    for _ in range(9):  # often enough to outlive what was asked once
        ask(engine, [77] * 40)
    hits = engine.stats().prefix_hit_tokens
    for name in ("a0", "a1", "a2"):
        ask(engine, [1] * 5, name)
    ask(engine, [77] * 40)
    assert engine.stats().prefix_hit_tokens - hits >= 36, "a popular prefix outlives an adapter of one use"


def test_what_costs_less_to_bring_back_is_given_up_first() -> None:
    kinds: list[HolderKind] = ["adapter", "prefix"]
    for kind, other in zip(kinds, reversed(kinds), strict=True):
        engine = engine_with(8, 8, num_pages=40)
        PageCosts.measured(engine._reclaim.costs, kind, 1, 1e-6)
        PageCosts.measured(engine._reclaim.costs, other, 1, 10.0)
        ask(engine, [1] * 20, "a0")
        ask(engine, [3] * 40)
        ask(engine, [2] * 5, "a1")
        evictions = {"adapter": engine.stats().adapter_evictions, "prefix": engine.stats().prefix_evictions}
        assert evictions[kind] > 0
        assert evictions[other] == 0


def test_a_pinned_adapter_stays_while_others_come_and_go() -> None:
    engine = engine_with(8, 8, 8, 8, num_pages=50)
    assert engine.pin_adapter("a1").pinned
    ask(engine, [1] * 5, "a1")
    for turn in range(3):
        for i in (0, 2, 3):
            ask(engine, [turn] * 30, f"a{i}")
            assert "a1" in resident(engine)
    assert not engine.unpin_adapter("a1").pinned
    for turn in range(3):
        for i in (0, 2, 3):
            ask(engine, [turn] * 60, f"a{i}")
    assert "a1" not in resident(engine)
    with pytest.raises(UnknownAdapterError):
        engine.pin_adapter("nobody")


def test_a_pin_is_the_name_s_and_ends_with_it() -> None:
    engine = engine_with(8, num_pages=50)
    engine.pin_adapter("a0")
    load(engine, "a0", 1)
    assert [a.pinned for a in engine.adapters()] == [True]
    engine.unload_adapter("a0")
    load(engine, "a0", 1)
    assert [a.pinned for a in engine.adapters()] == [False]


def test_names_in_the_config_are_pinned_from_the_start(tiny_model_dir: Path, tmp_path: Path) -> None:
    shape = load_model_config(resolve_model(tiny_model_dir, "dummy"))
    write_peft_adapter(tmp_path / "a", shape, {"q_proj": 8})
    folders = dict.fromkeys(("a", "b"), tmp_path / "a")

    def start(*names: str) -> Engine:
        config = EngineConfig(dtype="float32", load_format="dummy", num_pages=60, pinned_adapters=names)
        return Engine.from_pretrained(tiny_model_dir, folders, config)

    assert {a.name: a.pinned for a in start("b").adapters()} == {"a": False, "b": True}
    with pytest.raises(UnknownAdapterError, match=r"pinned_adapters names 'c', .*: a, b"):
        start("b", "c")
    with pytest.raises(ValueError, match="pinned_adapters must be a list of adapters' names, got 'b'"):
        EngineConfig(pinned_adapters="b")  # type: ignore[arg-type]
    for name in ("", "a,b", " a", "a\n", "x" * 257):
        with pytest.raises(ValueError, match="a name in pinned_adapters must have 1 to 256 printable"):
            EngineConfig(pinned_adapters=("a", name))


def test_pins_leave_room_for_every_request_that_was_accepted() -> None:
    engine = engine_with(8, 8, num_pages=30)
    pages = engine.adapters()[0].pages
    long = SamplingParams(max_tokens=(29 - pages) * 4 - 8)
    request = engine.add_request([1] * 8, "a1", long)
    message = rf"adapter 'a0' cannot be pinned: request '{request}' needs up to {29 + pages} pages .* has 29"
    with pytest.raises(ValueError, match=message):
        engine.pin_adapter("a0")
    engine.pin_adapter("a1")  # its own pages are not counted twice
    with pytest.raises(ValueError, match="adapter 'a1' is pinned: request"):
        load(engine, "a1", 9)  # both generations would be needed until the request ends
    engine.abort(request)
    with pytest.raises(ValueError, match=f"the pool has 29 less {pages} of pinned adapters"):
        engine.add_request([1] * 8, None, SamplingParams(max_tokens=80))
    out = engine.generate([1] * 8, None, SamplingParams(max_tokens=None))[0]
    assert len(out.token_ids) == (29 - pages) * 4 - 8
    engine.unload_adapter("a1")
    out = engine.generate([1] * 8, None, SamplingParams(max_tokens=80))[0]
    assert out.token_ids == expected_tokens([1] * 8, BASE, 80, VOCAB)
    engine.check_integrity()


def test_preempted_sequences_find_what_they_had_computed() -> None:
    engine = simulated_engine(num_pages=24, max_batch_size=6, max_step_tokens=24)
    plain = simulated_engine(num_pages=24, max_batch_size=6, max_step_tokens=24, enable_prefix_caching=False)
    prompts = [[i] * (5 + i) for i in range(6)]
    params = SamplingParams(max_tokens=40)
    for e in (engine, plain):
        for prompt, out in zip(prompts, e.generate(prompts, sampling_params=params), strict=True):
            assert out.token_ids == expected_tokens(prompt, BASE, 40, VOCAB)
        assert e.stats().preemptions > 0
    assert engine.stats().prefix_hit_tokens > 0
    assert engine.stats().prefilled_tokens < plain.stats().prefilled_tokens
    assert engine.stats().prompt_tokens == plain.stats().prompt_tokens == sum(map(len, prompts))


def test_a_pin_between_the_check_of_a_request_and_its_start_is_told_not_run_into() -> None:
    engine = engine_with(8, num_pages=30)
    ask(engine, [1, 2], "a0")
    stream = engine.stream([[7] * 5], None, SamplingParams(max_tokens=None))  # all that the pool holds
    engine.pin_adapter("a0")
    with pytest.raises(ValueError, match=r"less \d+ of pinned adapters"):
        next(stream)
    engine.check_integrity()
    assert not engine.has_unfinished()


def test_pins_that_would_leave_no_page_for_requests_are_refused() -> None:
    engine = engine_with(*[8] * 5, num_pages=30)
    fit = 28 // engine.adapters()[0].pages
    for i in range(fit):
        engine.pin_adapter(f"a{i}")
    with pytest.raises(ValueError, match="leave none for requests"):
        engine.pin_adapter(f"a{fit}")
    assert sum(a.pinned for a in engine.adapters()) == fit
    ask(engine, [3], max_tokens=2)
