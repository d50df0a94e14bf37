"""What a step's packed input is made of that was kept from the steps before it."""

from __future__ import annotations

import collections
import random
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings

from slora_jax import SamplingParams
from slora_jax.batch import BatchBuilder, PackedStep
from slora_jax.memory.layout import MODULES
from slora_jax.pallas_kernels.backend import XLA
from slora_jax.pallas_kernels.mosaic_backend import MOSAIC
from slora_jax.pallas_kernels.padded_bmm import with_padded_bmm
from slora_jax.scheduling.scheduler import StepPlan
from slora_jax.step_shape import ShapeBuckets
from tests.engine.histories import EngineMachine
from tests.engine.simulated_engine import VOCAB, engine_with, simulated_engine
from tests.engine.simulated_runner import (
    BASE,
    SimulatedInFlight,
    SimulatedRunner,
    expected_tokens,
    simulated_adapter,
)

BACKENDS = XLA, MOSAIC, with_padded_bmm(XLA)
PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.5, "top_k": 7, "seed": -3},
    {"logit_bias": {5: 1.5, 3: -100.0}, "presence_penalty": 0.1, "frequency_penalty": -0.2},
    {"top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.25, "seed": 1 << 63},
)


class PackingRunner(SimulatedRunner):
    """Packs each plan as well: with what was kept from the steps before, and from nothing."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept = [self.builder(backend) for backend in BACKENDS]
        self.output: jax.Array = jnp.zeros(())

    def builder(self, backend: Any) -> BatchBuilder:
        buckets: Any = ShapeBuckets.for_engine(
            self.layout,
            backend,
            max_batch_size=self.buckets.max_batch_size,
            max_step_tokens=self.max_step_tokens,
            max_model_len=self.buckets.pages[-1] * self.layout.page_tokens,
            ratio=4,
        )
        return BatchBuilder(self.layout, backend, buckets)

    def launch(self, plan: StepPlan) -> SimulatedInFlight:
        for backend, kept in zip(BACKENDS, self.kept, strict=True):
            step, fresh = kept.build(plan), self.builder(backend)
            fresh.expect(step.shape.lora_groups)
            self.compare(step, fresh.build(plan))
            kept.launched(step, self.output)
        return super().launch(plan)

    def compare(self, step: PackedStep, want: PackedStep) -> None:
        assert step.shape == want.shape
        for name, array in want.view.items():
            np.testing.assert_array_equal(step.view[name], array, err_msg=name)


class PackingMachine(EngineMachine):
    """Preemption, aborts, slots used again, shared prefixes, adapters that come and go."""

    fields: ClassVar[dict[str, Any]] = {"runner": PackingRunner}

    def params(self, max_tokens: int, n: int) -> SamplingParams:
        kind = PARAMS[len(self.asked) % len(PARAMS)]
        return SamplingParams(
            max_tokens=max_tokens, n=n, min_tokens=max_tokens, stop_token_ids=(1, 2), **kind
        )


TestPacking = PackingMachine.TestCase
TestPacking.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)


def test_what_is_kept_is_what_would_be_packed_anew_over_preemptions_and_shared_prefixes() -> None:
    engine = simulated_engine(PackingRunner, num_pages=24, max_batch_size=6, max_step_tokens=24)
    prompts = [[1, 2, 3, 4] * 4 + [i] for i in range(9)]
    for kind in PARAMS:
        engine.generate(prompts, sampling_params=SamplingParams(max_tokens=20, **kind))
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_hit_tokens > 0


def test_a_sequence_that_comes_back_to_its_slot_with_other_pages_is_packed_with_those() -> None:
    engine = simulated_engine(PackingRunner, num_pages=40, max_batch_size=1, max_step_tokens=24)
    engine.add_request([1, 2, 3, 4, 5], None, SamplingParams(max_tokens=20))
    engine.step()
    [sequence] = engine._scheduler.running
    slot, pages = sequence.slot, sequence.pages
    engine._loop.rewind()
    engine._pool.allocate(len(pages), "kv")
    engine.step()
    assert sequence.slot == slot
    assert len(sequence.pages) == len(pages)
    assert sequence.pages != pages


@pytest.mark.parametrize("seed", range(4))
def test_adapters_of_other_modules_that_come_back_to_other_pages_are_packed_with_those(seed: int) -> None:
    """Some of them beneath a generation that runs on, in slots that it had before."""
    rng = random.Random(seed)
    engine = simulated_engine(
        PackingRunner, num_pages=48, max_batch_size=3, max_step_tokens=16, adapter_prefetch=rng.choice([0, 4])
    )
    places: collections.defaultdict[tuple[int, int | None], set[tuple[int, ...]]]
    places = collections.defaultdict(set)
    for i in range(1, 7):
        modules = rng.sample(MODULES, rng.randint(1, 4))
        adapter = simulated_adapter(engine._layout, i, rng.choice([3, 8]), modules)
        engine.load_adapter(f"a{i}", adapter)
    for _ in range(12):
        names = [rng.choice([None, *(f"a{i}" for i in range(1, 7))]) for _ in range(5)]
        ids = {}
        for name in names:
            prompt = [rng.randrange(3)] * rng.randint(1, 12)
            request = engine.add_request(prompt, name, SamplingParams(max_tokens=rng.randint(1, 16)))
            ids[request] = expected_tokens(prompt, int(name[1:]) if name else BASE, 16, VOCAB), list[int]()
        while engine.has_unfinished():
            for event in engine.step():
                ids[event.request_id][1].extend(event.token_ids)
            for sequence in engine._scheduler.running:
                if sequence.adapter is not None:
                    pages = tuple(sequence.adapter.weight_pages)
                    places[sequence.generation, sequence.slot].add(pages)
        assert all(got == want[: len(got)] for want, got in ids.values())
    assert engine.stats().adapter_evictions > 0
    assert max(map(len, places.values())) > 1


def test_steps_of_the_same_sequences_share_a_work_list_and_memory() -> None:
    engine = engine_with(8, 16, runner=PackingRunner, num_pages=200)
    runner: Any = engine._runner
    steps: list[PackedStep] = []
    runner.compare = lambda step, want: steps.append(step)
    for name in ("a0", "a1"):
        engine.add_request([1, 2, 3], name, SamplingParams(max_tokens=12))
    while engine.has_unfinished():
        engine.step()
    mosaic = [step for step in steps[1 :: len(BACKENDS)] if not step.shape.prefill_tokens]
    assert len({id(step.lora) for step in mosaic}) == 1
    assert len({id(step) for step in mosaic}) == 1  # each is done before the next is packed


def test_memory_is_written_again_once_the_step_that_read_it_is_done() -> None:
    class Output:
        ready = False

        def is_ready(self) -> bool:
            return self.ready

    builder = engine_with(8, runner=PackingRunner)._runner.kept[0]  # type: ignore[attr-defined]
    shape = builder._buckets.usual(())[0]
    steps, outputs = builder._buffers, [Output(), Output()]
    first, second = steps.take(shape), steps.take(shape)
    steps.give(first, outputs[0])
    steps.give(second, outputs[1])
    outputs[1].ready = True
    assert steps.take(shape) not in (first, second)
    outputs[0].ready = True
    assert steps.take(shape) is first
    assert steps.take(shape) is second
    assert steps.take(shape) not in (first, second)  # those were not launched since
