"""The test that decides: mixed batches of real adapters on SmolLM2 equal transformers + PEFT, one by one, in
fp32.

Expected tokens and logits are recorded by `record_peft.py`. One engine serves all tests here (compiling is
what costs); smaller pools, other chunk sizes and shuffled pages are set on its scheduler and allocator, which
compiled steps know nothing of. On a GPU (`JAX_PLATFORMS=cuda python -m pytest tests/parity`) the engine
computes in bfloat16 with its kernels, and logits are compared to a tolerance while the tokens are the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import pytest

from slora_jax import RequestOutput, SamplingParams
from slora_jax.engine import Engine
from tests.engine.tiny_engine import constrained
from tests.parity.peft_cases import (
    BF16_TOLERANCE,
    CASES,
    GREEDY,
    N_TOKENS,
    assert_equal_to_peft,
    distance_to_peft,
    make_engine,
    run,
    write_peft_adapters,
)

EXACT = jax.default_backend() == "cpu"


@pytest.fixture(scope="module", autouse=True)
def compiled_as_for_users() -> Iterator[None]:
    quickly: bool = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", quickly)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_peft_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def engine(smollm2_gguf: Path, adapters: dict[str, str]) -> Engine:
    return make_engine(smollm2_gguf, adapters)


def assert_as_peft(order: Sequence[int], outs: Sequence[RequestOutput]) -> None:
    if EXACT:
        assert_equal_to_peft(order, outs)
    else:
        distance = distance_to_peft(order, outs)
        assert distance["worst_error"] < BF16_TOLERANCE, distance


def same_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are the same before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def test_there_is_enough_to_compare() -> None:
    names = {c["adapter"] for c in CASES}
    assert None in names
    assert len(names) >= 7
    assert N_TOKENS >= 48


def test_one_mixed_batch(engine: Engine) -> None:
    order = list(range(len(CASES)))
    assert_as_peft(order, run(engine, order))
    assert engine.stats().preemptions == 0


def test_small_shuffled_pool_with_preemption_and_chunks_of_seven(engine: Engine) -> None:
    before = engine.stats()
    order = list(range(len(CASES)))
    with constrained(engine, free_pages=150, chunk=7, seed=3):
        outs = run(engine, order)
    assert engine.stats().preemptions > before.preemptions
    assert engine.stats().adapter_evictions > before.adapter_evictions
    assert_as_peft(order, outs)


def test_adapters_loaded_and_unloaded_midway(engine: Engine, adapters: dict[str, str]) -> None:
    """Names come, go and change meaning while requests run; each request keeps the adapter it began with."""
    case_of = {c["adapter"]: i for i, c in enumerate(CASES)}
    first, second = [n for n in case_of if n is not None][:2]
    ids = {}
    for name in (first, second, None):
        case = CASES[case_of[name]]
        ids[engine.add_request(case["prompt_token_ids"], name, GREEDY)] = case
    got: dict[str, list[int]] = {request_id: [] for request_id in ids}

    def step() -> None:
        for event in engine.step():
            got[event.request_id] += event.token_ids

    for _ in range(9):
        step()
    engine.unload_adapter(first)
    engine.load_adapter(first, adapters[second])  # the other's weights under the first one's name
    engine.unload_adapter(second)
    late = engine.add_request(CASES[case_of[second]]["prompt_token_ids"], first, GREEDY)
    ids[late], got[late] = CASES[case_of[second]], []
    while engine.has_unfinished():
        step()
    for request_id, case in ids.items():
        if EXACT:
            assert got[request_id] == case["token_ids"], case["name"]
        assert max(CASES, key=lambda c: same_tokens(got[request_id], c["token_ids"])) is case, case["name"]
    engine.load_adapter(first, adapters[first], replace=True)
    engine.load_adapter(second, adapters[second])


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2, 3))])
def test_batch_mates_do_not_change_a_result(engine: Engine, seed: int) -> None:
    """Permuted and thinned batches."""
    order = random.Random(seed).sample(range(len(CASES)), k=7)
    assert_as_peft(order, run(engine, order))


@pytest.mark.skipif(not EXACT, reason="what a product rounds to may depend on how many rows it has")
@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2, 3))])
def test_batch_mates_do_not_change_what_is_sampled(engine: Engine, seed: int) -> None:
    order = random.Random(seed).sample(range(len(CASES)), k=7)
    params = [
        SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, top_k=40, seed=i) for i in range(len(CASES))
    ]

    def sampled(order: list[int]) -> dict[int, list[int]]:
        outs = engine.generate(
            [CASES[i]["prompt_token_ids"] for i in order],
            [CASES[i]["adapter"] for i in order],
            [params[i] for i in order],
        )
        return dict(zip(order, (o.token_ids for o in outs), strict=True))

    whole = sampled(list(range(len(CASES))))
    assert sampled(order) == {i: whole[i] for i in order}
