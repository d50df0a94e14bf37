"""What a step and its statistics cost does not grow with the adapters that are registered."""

from __future__ import annotations

import contextlib
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from slora_jax import SamplingParams
from tests.engine.simulated_runner import simulated_adapter
from tests.engine.slow_loading import Bench

FEW, MANY = 300, 30_000


def bench_with(registered: int, policy: str) -> Bench:
    """One with so many adapters, three of which are asked for; more than the pool has room for at once."""
    bench = Bench(num_pages=36, max_batch_size=2, max_step_tokens=16, scheduling_policy=policy)
    shape = simulated_adapter(bench.engine._layout, 1, 8).packed.shape
    for i in range(registered):
        path = f"/disk/{i}"
        bench.disk.folders[path] = i + 1, 8
        bench.engine._registry.enter(f"a{i}", path, shape, bench.disk.stamp(path), None, replace=False)
    for i in (7, 8, 9):
        bench.engine.add_request([1, 2], f"a{i}", SamplingParams(max_tokens=6))
    return bench


def serve_all(bench: Bench) -> None:
    while bench.engine.has_unfinished():
        bench.executor.run()
        bench.engine.step()
        bench.engine.stats()


@contextlib.contextmanager
def counting_instructions() -> Iterator[list[int]]:
    """Of Python's byte code, in all threads; the count is there at the end."""
    monitoring: Any = sys.monitoring
    tool, event, counted = monitoring.PROFILER_ID, monitoring.events.INSTRUCTION, [0]

    def count(*_: object) -> None:
        counted[0] += 1

    monitoring.use_tool_id(tool, "test_step_cost")
    try:
        monitoring.register_callback(tool, event, count)
        monitoring.set_events(tool, event)
        yield counted
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)


@pytest.mark.parametrize("policy", ["fcfs", "vtc+cluster"])
def test_as_many_instructions_and_bytes_with_30000_adapters_as_with_300(policy: str) -> None:
    instructions, peaks = [], []
    for registered in (FEW, FEW, MANY):  # the first fills caches
        bench = bench_with(registered, policy)
        with counting_instructions() as counted:
            serve_all(bench)
        assert bench.engine.stats().adapters_registered == registered
        assert bench.engine.stats().adapter_evictions > 0
        instructions.append(counted[0])
        bench = bench_with(registered, policy)
        tracemalloc.start()
        serve_all(bench)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    _, few, many = instructions
    assert many == pytest.approx(few, rel=0.02)
    assert peaks[2] - peaks[1] < 4 * MANY, "a copy of the table's pointers alone takes 8 bytes an adapter"
