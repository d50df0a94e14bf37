"""The cases of `benchmarks.bench_kernels`, as far as they run without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import bench_kernels
from benchmarks.kernels import attention, common, lora, sampling

CEILINGS = common.Ceilings(copy=1e8, matmul=1e12)
DEFAULT_CASES = [*lora.CASES, *attention.CASES, *sampling.CASES]


def test_every_case_has_a_name_of_its_own_and_none_is_a_variant() -> None:
    names = [case.name for case in DEFAULT_CASES]
    assert len(set(names)) == len(names)
    assert not [name for name in names if "variant" in name]
    assert {case.bench for case in DEFAULT_CASES} == {
        "lora_decode",
        "lora_prefill",
        "paged_decode_attention",
        "prefill_attention",
        "rope_kv_write",
        "sampling",
    }


def test_lora_cases_tell_the_width_of_k_and_v_only_where_it_is_not_the_models() -> None:
    keys = ["tokens", "distinct", "ranks", "d_model", "modules"]
    for s, case in zip(lora.SETTINGS, lora.CASES, strict=True):
        assert list(case.case) == (keys if s.kv == s.d_model else [*keys, "kv"])
    assert [s.kv for s in lora.SETTINGS if s.kv != s.d_model] == [1024, 1024, 1024]
    o = lora.case(lora.decode(256, 1, (16,), modules="o"), split=2)
    assert o.bench == "lora_decode_variant"
    assert o.case["modules"] == "o"
    assert "kv" not in o.case


@pytest.mark.parametrize(
    "s",
    [
        lora.Setting(16, 3, (16, 8), 512, 256),
        lora.Setting(70, 5, (8, 32), 512, 512, prompt=True),
        lora.Setting(4, 1, (16,), 512, 512, modules="o"),
    ],
    ids=["decode", "prefill", "o"],
)
def test_xla_is_timed_on_what_the_kernels_compute(s: lora.Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "READ_BEFORE_AGAIN", 1_000_000)
    data, layer = lora.make(s), 1
    got = lora.apply_xla(s, layer, jnp.zeros_like(data.y), data.x, data.pool, lora.xla_blocks(s))
    assert common.relative_error(got, lora.reference(s, layer)) < 4e-3
    assert np.linalg.norm(np.asarray(lora.reference(s, layer))) > 1
    (y, x), args = (data.y, data.x), (data.pool, lora.xla_blocks(s))
    assert common.xla_seconds(lambda i, carry, *a: lora._xla_step(s, i, carry, *a), (y, x), *args) > 0


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0, 0, 1), (0.8, 0, 1), (0.8, 3, 1), (0.8, 20, 0.5)]
)
def test_sampling_is_timed_and_checked(
    temperature: float, top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "CALLS", 3)
    sampling.compiled.cache_clear()
    found = sampling.measure(CEILINGS, rows=9, vocab=384, temperature=temperature, top_k=top_k, top_p=top_p)
    assert found.value > 0
    assert found.extra["of_copy"] > 0
    sampling.compiled.cache_clear()


def test_calls_of_sampling_follow_on_each_other() -> None:
    """Each writes what the one before drew: none can be dropped."""
    args = sampling.make_args(4, 128, 0.8, 0, 1)
    tokens, logits = jnp.arange(4), sampling.make_logits(4, 128)
    for i in range(3):
        before = tokens
        tokens, logits = sampling._step(i, (tokens, logits), *args)
        assert logits[i % len(logits)][0, 0] == -100 - before[0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "token", "told"),
    [
        (0, 0, 1, 1, "1 of 1 greedy tokens are not the argmax"),
        (1, 2, 1, 2, "token 2 is none of the 2 that are kept"),
        (1, 0, 0.5, 1, "token 1 is none of the 1 that are kept"),
    ],
)
def test_a_token_that_cannot_be_drawn_is_refused(
    temperature: float, top_k: int, top_p: float, token: int, told: str
) -> None:
    logits = np.array([[3.0, 2.0, 1.0]], np.float32)
    sampling.check(np.array([0]), logits, temperature, top_k, top_p)
    with pytest.raises(AssertionError, match=told):
        sampling.check(np.array([token]), logits, temperature, top_k, top_p)


def test_only_the_cases_asked_for_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["bench_kernels", "--list", "--only", "sampling", "--only", "rope_kv_write"]
    )
    assert bench_kernels.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        case.name for case in DEFAULT_CASES if case.bench in ("sampling", "rope_kv_write")
    ]


def test_a_case_that_fails_leaves_the_others_their_lines(tmp_path: Path) -> None:
    def fail(ceilings: common.Ceilings) -> common.Measurement:
        raise AssertionError("wrong")

    cases = [
        common.Case("sampling", {"rows": 1}, "us", fail),
        common.Case("sampling", {"rows": 2}, "us", lambda _: common.Measurement(2.5, {"of_copy": 0.5})),
    ]
    assert common.run_cases(cases, tmp_path / "kernels.jsonl") == 1
    (line,) = map(json.loads, (tmp_path / "kernels.jsonl").read_text().splitlines())
    assert (line["bench"], line["case"], line["value"], line["of_copy"]) == (
        "sampling",
        {"rows": 2},
        2.5,
        0.5,
    )
