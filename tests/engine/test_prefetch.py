"""Adapters loaded before the turn of those who wait for them, and whom `cluster` prefers for it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from slora_jax import SamplingParams
from slora_jax.outputs import StreamEvent
from tests.engine.simulated_runner import simulated_adapter
from tests.engine.slow_loading import Bench, tokens, want

GREEDY = SamplingParams(max_tokens=6)


def test_waiting_requests_have_their_adapters_loaded_before_their_turn() -> None:
    bench = Bench(num_pages=90, max_batch_size=1, max_step_tokens=16)
    for i in range(1, 4):
        bench.register(f"a{i}", i)
    first = bench.engine.add_request([9], None, SamplingParams(max_tokens=30))
    later = [bench.engine.add_request([4], f"a{i}", GREEDY) for i in range(1, 4)]
    for _ in range(12):
        bench.executor.run()
        bench.engine.step()
    assert bench.engine.stats().adapters_resident == 3
    events = bench.run()
    assert [tokens(events[r]) for r in later] == [want([4], i, 6) for i in range(1, 4)]
    assert bench.engine.stats().loading.prefetches_useful == 3
    assert bench.engine.stats().loading.wait_seconds == 0
    assert events[first][-1].finish_reason == "length"


def test_a_prefetch_does_not_push_out_what_an_earlier_request_needs() -> None:
    bench = Bench(num_pages=31, max_batch_size=1, max_step_tokens=16)
    for i, name in enumerate("ab", 7):
        bench.engine.load_adapter(name, simulated_adapter(bench.engine._layout, i, 8))
    bench.engine.add_request([4], "a", GREEDY)
    bench.run()
    running = bench.engine.add_request([4], None, GREEDY)
    for name in "ab":
        bench.engine.add_request([4], name, GREEDY)
    events: list[StreamEvent] = []
    while not any(e.request_id == running and e.finish_reason for e in events):
        assert [a.name for a in bench.engine.adapters() if a.state == "resident"] == ["a"]
        events += bench.engine.step()
    bench.run()
    assert bench.engine.stats().adapter_loads == 2


def test_an_adapter_that_gave_way_comes_back_when_pages_are_free() -> None:
    sizes: dict[str, Any] = {"num_pages": 30, "max_batch_size": 2, "max_step_tokens": 32}
    bench = Bench(**sizes, prefetch_watermark=0.2, enable_prefix_caching=False)
    bench.register("a", 7)
    bench.engine.add_request([4], "a", GREEDY)
    bench.run()
    bench.engine.add_request([4] * 60, None, SamplingParams(max_tokens=56))  # needs every page
    bench.run()
    assert bench.engine.stats().adapter_evictions == 1
    bench.engine.add_request([4], None, SamplingParams(max_tokens=12))
    bench.run()
    assert [a.state for a in bench.engine.adapters()] == ["resident"]
    assert bench.engine.stats().loading.prefetches_useful == 0
    bench.engine.add_request([4], "a", GREEDY)
    bench.run()
    assert bench.engine.stats().loading.prefetches_useful == 1


@pytest.mark.parametrize(
    ("policy", "first"), [("fcfs", "b"), ("cluster", "a"), ("vtc+cluster", "a")], ids=str
)
def test_cluster_prefers_an_adapter_that_is_on_its_way_to_one_that_would_have_to_be_read(
    policy: str, first: str
) -> None:
    bench = Bench(
        num_pages=90, max_batch_size=1, max_step_tokens=16, adapter_prefetch=1, scheduling_policy=policy
    )
    bench.register("a", 7)
    bench.register("b", 8)
    bench.engine.add_request([9], None, SamplingParams(max_tokens=12))
    bench.engine.step()
    gone = bench.engine.add_request([1, 2], "a", GREEDY)
    asked = {bench.engine.add_request([1, 2], name, GREEDY): name for name in ("b", "a")}
    bench.engine.step()  # the one that is next has its adapter read
    assert bench.engine._adapters.get("a").state == "reading"
    bench.engine.abort(gone)
    bench.engine.step()
    assert bench.engine._adapters.get("b").state == ("reading" if first == "b" else "registered")
    ended = [request for request in bench.run() if request in asked]
    assert [asked[request] for request in ended] == [first, "ab".replace(first, "")]


def test_cluster_prefers_an_adapter_that_is_loaded_on_a_guess() -> None:
    sizes: dict[str, Any] = {"num_pages": 30, "max_batch_size": 1, "max_step_tokens": 32}
    fields: dict[str, Any] = {
        "adapter_prefetch": 1,
        "prefetch_watermark": 0.0,
        "enable_prefix_caching": False,
    }
    bench = Bench(**sizes, **fields, scheduling_policy="cluster")
    bench.register("a", 7)
    bench.register("b", 8)
    bench.engine.add_request([4], "a", GREEDY)
    bench.run()
    bench.engine.add_request([4] * 60, None, SamplingParams(max_tokens=56))  # needs every page
    bench.run()
    assert bench.engine.stats().adapters_resident == 0
    running, following = (bench.engine.add_request([9], None, GREEDY) for _ in range(2))
    second, first = (bench.engine.add_request([1, 2], name, GREEDY) for name in ("b", "a"))
    bench.engine.step()  # nobody but the next one has its adapter loaded, and that is the base's
    assert [info.state for info in bench.engine.adapters()] == ["staged", "registered"]
    with contextlib.closing(bench.engine._scheduler.waiting.candidates()) as candidates:
        assert [s.request.request_id for s in candidates] == [following, first, second]
    assert running in bench.run()


def guesses(bench: Bench) -> tuple[int, int, int]:
    """Those begun, those used, those lost."""
    loading = bench.engine.stats().loading
    return loading.guesses, loading.guesses_useful, loading.guesses_wasted


def guessed_bench(*, keep_host: bool = True) -> Bench:
    """A bench whose adapter "a" gave way, and which guesses it back in its next steps."""
    bench = Bench(num_pages=30, max_batch_size=2, max_step_tokens=32, enable_prefix_caching=False)
    bench.register("a", 7)
    bench.engine.add_request([4], "a", GREEDY)
    bench.run()
    bench.engine.add_request([4] * 60, None, SamplingParams(max_tokens=56))  # needs every page
    bench.run()
    assert guesses(bench) == (0, 0, 0)
    if not keep_host:
        bench.engine._adapters.host.drop(bench.engine._adapters.get("a"))
    return bench


@pytest.mark.parametrize("keep_host", [True, False])
def test_a_guess_is_useful_once_a_sequence_runs_on_it(keep_host: bool) -> None:
    bench = guessed_bench(keep_host=keep_host)
    bench.engine.add_request([4], None, SamplingParams(max_tokens=12))
    bench.run()
    assert guesses(bench) == (1, 0, 0)
    bench.engine.abort(bench.engine.add_request([4], "a", GREEDY))  # which never ran on it
    assert guesses(bench) == (1, 0, 0)
    for _ in range(2):
        bench.engine.add_request([4], "a", GREEDY)
        bench.run()
        assert guesses(bench) == (1, 1, 0)


def test_a_guess_that_gives_way_is_not_made_again_until_a_request_has_used_its_adapter() -> None:
    bench = guessed_bench()

    def guesses_after(*prompts: tuple[list[int], str | None, int]) -> tuple[int, int, int]:
        for prompt, name, max_tokens in prompts:
            bench.engine.add_request(prompt, name, SamplingParams(max_tokens=max_tokens))
            bench.run()
        return guesses(bench)

    small, all_pages = ([4], None, 12), ([4] * 60, None, 56)
    assert guesses_after(small) == (1, 0, 0)
    assert guesses_after(all_pages, small, all_pages, small) == (1, 0, 1)
    assert guesses_after(([4], "a", 6), all_pages, small) == (2, 0, 1)


def test_a_guess_that_is_unloaded_was_wasted() -> None:
    bench = guessed_bench()
    bench.engine.add_request([4], None, SamplingParams(max_tokens=12))
    bench.run()
    bench.register("a", 8)  # in its place
    assert guesses(bench) == (1, 0, 1)
    bench.engine.check_integrity()


def test_a_guess_that_got_no_pages_is_wasted_once_its_host_copy_goes() -> None:
    bench = guessed_bench(keep_host=False)
    adapter = bench.engine._adapters.get("a")
    bench.engine.add_request([4], None, SamplingParams(max_tokens=3))
    while adapter.state != "reading":
        bench.engine.step()
    bench.engine.add_request([4] * 60, None, SamplingParams(max_tokens=56))  # needs every page
    while bench.engine.stats().pages_free >= adapter.num_pages:
        bench.engine.step()
    bench.executor.run()
    bench.engine.step()
    assert (adapter.state, adapter.host is not None, guesses(bench)) == ("registered", True, (1, 0, 0))
    host = bench.engine._adapters.host
    assert host.make_room(host.budget)  # as for the read of another
    assert guesses(bench) == (1, 0, 1)
    bench.engine.check_integrity()


@pytest.mark.parametrize("fails", ["read", "copy"])
def test_a_guess_that_fails_was_wasted_and_is_not_made_again(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = guessed_bench(keep_host=fails == "copy")
    if fails == "read":
        del bench.disk.folders["/disk/7"]
    else:
        monkeypatch.setattr(bench.engine._runner, "stage_adapters", lambda *_: 1 / 0)
    bench.engine.add_request([4], None, SamplingParams(max_tokens=12))
    bench.run()
    assert guesses(bench) == (1, 0, 1)
    assert bench.engine.stats().loading.failures == 1
