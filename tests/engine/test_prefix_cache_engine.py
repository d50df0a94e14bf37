"""The prefix cache in a real engine: its answers are those without it, and what begins alike is shared."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slora_jax.engine import Engine
from slora_jax.weights import load_model_config, resolve_model
from tests.conftest import TINY_CONFIG
from tests.engine.tiny_engine import GREEDY, constrained, make_engine
from tests.lora.peft_files import write_peft_adapter

SYSTEM = [(7 * i) % 300 for i in range(50)]  # three full pages of 16 tokens, and two tokens
PROMPTS = [[*SYSTEM, 1], [*SYSTEM, 2, 3], SYSTEM, SYSTEM[:48], [*SYSTEM[:40], 9], [*SYSTEM] * 2]
NAMES = [None, "one", None, "two", "one", None]


@pytest.fixture(scope="module")
def folders(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shape = load_model_config(resolve_model(tiny_model_dir, "dummy"))
    folder = tmp_path_factory.mktemp("peft")
    for seed, name in enumerate(("one", "two")):
        write_peft_adapter(folder / name, shape, {"k_proj": 8, "v_proj": 8}, seed=seed, std=0.3)
    return {name: folder / name for name in ("one", "two")}


@pytest.fixture(scope="module")
def plain(tiny_model_dir: Path, folders: dict[str, Path]) -> Engine:
    return make_engine(tiny_model_dir, folders, enable_prefix_caching=False, record_logits=True)


@pytest.fixture(scope="module")
def cached(tiny_model_dir: Path, folders: dict[str, Path]) -> Engine:
    return make_engine(tiny_model_dir, folders, record_logits=True)


def test_logits_and_tokens_are_those_without_the_cache(plain: Engine, cached: Engine) -> None:
    want = plain.generate(PROMPTS, NAMES, GREEDY)
    assert plain.stats().pages_cached == plain.stats().prefix_lookups == 0
    for _ in range(2):  # the second time it finds everything
        hits = cached.stats().prefix_hit_tokens
        got = cached.generate(PROMPTS, NAMES, GREEDY)
        cached.check_integrity()
        for a, b in zip(want, got, strict=True):
            assert a.token_ids == b.token_ids
            assert a.logits is not None
            assert b.logits is not None
            np.testing.assert_allclose(a.logits, b.logits, rtol=1e-4, atol=1e-4)
    # The fourth computes its last token, the fifth parts within its third page, the sixth is twice as long.
    assert cached.stats().prefix_hit_tokens - hits == 48 + 48 + 48 + 32 + 32 + 96
    assert got[0].metrics.num_cached_tokens == 48
    costs = cached._reclaim.costs
    assert costs.seconds("prefix") is not None
    assert costs.seconds("adapter") is not None


@pytest.mark.parametrize("chunk", [5, 16, None])
def test_it_changes_nothing_under_preemption_and_chunked_prefill(
    plain: Engine, cached: Engine, chunk: int | None
) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=70)
    want = [o.token_ids for o in plain.generate(PROMPTS, NAMES, params)]
    before = cached.stats()
    with constrained(cached, free_pages=29, chunk=chunk):
        assert [o.token_ids for o in cached.generate(PROMPTS, NAMES, params)] == want
    after = cached.stats()
    assert after.preemptions > before.preemptions
    assert after.prefix_evictions > before.prefix_evictions
    assert after.prefix_hit_tokens > before.prefix_hit_tokens


def test_penalties_count_the_tokens_of_a_cached_prefix_and_no_others(plain: Engine, cached: Engine) -> None:
    soil = dataclasses.replace(GREEDY, repetition_penalty=3.0)
    cached.generate([[5] * 60] * 4, None, soil)  # slots that others have counted in
    cases: list[dict[str, Any]] = [
        {"repetition_penalty": 1.7},
        {"frequency_penalty": 1.0},
        {"presence_penalty": -1.5},
        {"repetition_penalty": 1.2, "frequency_penalty": -0.5, "n": 3, "temperature": 0.9, "seed": 4},
    ]
    for fields in cases:
        params = dataclasses.replace(GREEDY, max_tokens=40, **fields)
        first = plain.generate([SYSTEM], None, params)[0]
        follow_up = SYSTEM + first.token_ids + [8]
        for prompt in (SYSTEM, follow_up):
            want = [o.token_ids for o in plain.generate([prompt], None, params)[0].outputs]
            for _ in range(2):
                hits = cached.stats().prefix_hit_tokens
                got = [o.token_ids for o in cached.generate([prompt], None, params)[0].outputs]
                assert got == want, fields
            assert cached.stats().prefix_hit_tokens > hits


def test_a_reloaded_adapter_does_not_meet_its_predecessor_s_cache(
    plain: Engine, cached: Engine, folders: dict[str, Path]
) -> None:
    want = {n: plain.generate([SYSTEM], n, GREEDY)[0].token_ids for n in ("one", "two")}
    assert want["one"] != want["two"]
    assert cached.generate([SYSTEM], "one", GREEDY)[0].token_ids == want["one"]
    cached.load_adapter("one", folders["two"], replace=True)
    out = cached.generate([SYSTEM], "one", GREEDY)[0]
    assert (out.token_ids, out.metrics.num_cached_tokens) == (want["two"], 0)
    cached.load_adapter("one", folders["one"], replace=True)
    assert cached.generate([SYSTEM], "one", GREEDY)[0].token_ids == want["one"]
    before = cached.stats().pages_cached
    cached.unload_adapter("one")
    assert cached.stats().pages_cached < before
    cached.load_adapter("one", folders["one"])
    cached.check_integrity()


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 64,
            "factor": 4.0,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_prompts_rotated_by_their_own_length_are_not_shared(tmp_path: Path, scaling: dict[str, Any]) -> None:
    longest = 64 if scaling["rope_type"] == "dynamic" else 256  # dynamic stretches it by its factor
    config = TINY_CONFIG | {"rope_scaling": scaling, "max_position_embeddings": longest}
    scaling["short_factor"], scaling["long_factor"] = ([factor] * 8 for factor in (1.0, 4.0))
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain, cached = (make_engine(tmp_path, enable_prefix_caching=on) for on in (False, True))
    params = dataclasses.replace(GREEDY, max_tokens=40)
    prompt = [(5 * i) % 300 for i in range(120)]
    for n, hits in ((40, 0), (60, 32), (100, 0), (100, 0), (120, 0), (60, 48)):
        out = cached.generate([prompt[:n]], None, params)[0]
        assert out.token_ids == plain.generate([prompt[:n]], None, params)[0].token_ids
        assert out.metrics.num_cached_tokens == hits


def test_sequences_of_one_request_share_its_prompt(cached: Engine) -> None:
    cached.reset_prefix_cache()
    params = dataclasses.replace(GREEDY, n=4, temperature=1.0, seed=3)
    cached.add_request(SYSTEM * 4, None, params)
    for _ in range(8):
        cached.step()
    tables = [s.pages[:12] for s in cached._scheduler.running]
    assert len(tables) == 4
    assert all(t == tables[0] for t in tables), "the prompt's KV is there more than once"
    for _ in itertools.takewhile(lambda _: cached.has_unfinished(), itertools.count()):
        cached.step()
    cached.check_integrity()


def test_penalties_behind_a_cached_prefix_under_tensor_parallelism(
    plain: Engine, tiny_model_dir: Path
) -> None:
    params = dataclasses.replace(GREEDY, repetition_penalty=1.7, frequency_penalty=0.5)
    sharded = make_engine(tiny_model_dir, tensor_parallel_size=2)
    want = plain.generate([SYSTEM], None, params)[0].token_ids
    for hits in (0, 48):
        out = sharded.generate([SYSTEM], None, params)[0]
        assert (out.token_ids, out.metrics.num_cached_tokens) == (want, hits)
