"""Requests on a real (tiny, random) model: what users may ask for, what is refused, tensor parallelism."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import slora_jax.runner
from slora_jax import AdapterExistsError, EngineConfig, PromptError, SamplingParams, UnknownAdapterError
from slora_jax.batch import PackedStep
from slora_jax.compile_cache import enable_compile_cache
from slora_jax.engine import Engine
from slora_jax.lora.transfer import AdapterTransfer
from slora_jax.programs import Program
from slora_jax.scheduling.scheduler import StepPlan
from slora_jax.step_shape import StepShape
from tests.engine.tiny_engine import ADAPTERS, GREEDY, PROMPTS, constrained, make_engine
from tests.lora.names import NO_NAMES
from tests.lora.peft_files import write_peft_adapter


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path, adapters: dict[str, Path]) -> Engine:
    return make_engine(tiny_model_dir, adapters)


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_meshes_give_the_same_tokens(
    engine: Engine, tiny_model_dir: Path, adapters: dict[str, Path], tp: int
) -> None:
    sharded = make_engine(tiny_model_dir, adapters, tensor_parallel_size=tp)
    names = [None, *ADAPTERS]
    want = [o.token_ids for o in engine.generate(PROMPTS, names, GREEDY)]
    assert [o.token_ids for o in sharded.generate(PROMPTS, names, GREEDY)] == want
    base = [o.token_ids for o in engine.generate(PROMPTS, None, GREEDY)]
    assert sum(a != b for a, b in zip(want, base, strict=True)) == len(ADAPTERS), "adapters change nothing"
    sharded.check_integrity()


def test_a_step_as_one_program_gives_the_same_tokens_as_one_a_layer(
    engine: Engine, tiny_model_dir: Path, adapters: dict[str, Path]
) -> None:
    """GPUs run whole steps, CPUs a layer at a time: the same functions, compiled differently."""
    whole = make_engine(tiny_model_dir, adapters)
    whole._runner._builder._layered = False
    names = [None, *ADAPTERS]
    want = [o.token_ids for o in engine.generate(PROMPTS, names, GREEDY)]
    assert [o.token_ids for o in whole.generate(PROMPTS, names, GREEDY)] == want


def test_a_request_s_result_does_not_depend_on_its_batch(engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, top_k=30, presence_penalty=0.5, seed=7)
    names = [None, *ADAPTERS]
    together = engine.generate(PROMPTS, names, params)
    for prompt, name, out in zip(PROMPTS, names, together, strict=True):
        assert engine.generate([prompt], name, params)[0].token_ids == out.token_ids


def test_n_gives_different_sequences_that_a_seed_fixes(engine: Engine) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.5, n=3, seed=1)
    first, second = engine.generate([[1, 2], [1, 2]], None, params)
    outputs = [o.token_ids for o in first.outputs]
    assert outputs == [o.token_ids for o in second.outputs]
    assert len({tuple(o) for o in outputs}) == 3
    assert [o.index for o in first.outputs] == [0, 1, 2]


def test_stop_token_ends_the_text_and_min_tokens_delays_it(engine: Engine) -> None:
    free = engine.generate([[1, 2, 3]], None, GREEDY)[0].token_ids
    stop = free[4]
    first = free.index(stop)
    params = dataclasses.replace(GREEDY, stop_token_ids=(stop,))
    out = engine.generate([[1, 2, 3]], None, params)[0]
    assert out.token_ids == free[: first + 1]
    assert (out.finish_reason, out.outputs[0].stop_reason) == ("stop", stop)
    late = engine.generate([[1, 2, 3]], None, dataclasses.replace(params, min_tokens=8))[0]
    assert stop not in late.token_ids[:8]
    assert len(late.token_ids) >= 8


def test_step_shapes_that_pack_into_as_many_words_are_different_programs(engine: Engine) -> None:
    shape = engine._runner.buckets.usual(())[0]
    longer = dataclasses.replace(shape, pages=shape.pages + 3 * 64 // shape.decode_rows)
    biased = dataclasses.replace(shape, bias=shape.bias + 64)
    assert longer.packed_size == biased.packed_size
    first, second = (engine._runner._builder.build(s) for s in (longer, biased))
    assert first.begin is not second.begin  # type: ignore[attr-defined]


def test_a_rehearsed_step_changes_nothing(engine: Engine) -> None:
    runner = engine._runner
    adapters = list(ADAPTERS)
    before = [out.token_ids for out in engine.generate(PROMPTS[:4], adapters, GREEDY)]
    state = [np.asarray(leaf) for leaf in jax.tree.leaves((runner.pool, runner._slots))]
    for shape in list(runner._programs):
        runner.rehearse(shape)
    for old, leaf in zip(state, jax.tree.leaves((runner.pool, runner._slots)), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), old)
    assert [out.token_ids for out in engine.generate(PROMPTS[:4], adapters, GREEDY)] == before


def test_numbers_beyond_int32_and_of_numpy(engine: Engine) -> None:
    params = SamplingParams(max_tokens=4, top_k=2**40, seed=7)
    want = engine.generate([[1, 2]], None, params)[0].token_ids
    params = dataclasses.replace(params, top_k=-1, seed=np.int64(7))  # type: ignore[arg-type]
    assert engine.generate([[1, 2]], None, params)[0].token_ids == want


def test_logit_bias_forces_and_bans(engine: Engine) -> None:
    out = engine.generate([[1, 2]], None, dataclasses.replace(GREEDY, logit_bias={77: 1000.0}))[0]
    assert set(out.token_ids) == {77}
    free = engine.generate([[1, 2]], None, GREEDY)[0].token_ids
    ban = dict.fromkeys(set(free), -math.inf)
    assert not set(
        engine.generate([[1, 2]], None, dataclasses.replace(GREEDY, logit_bias=ban))[0].token_ids
    ) & set(free)


def test_repetition_is_penalised_over_prompt_and_output_also_after_preemption(engine: Engine) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=60, frequency_penalty=2.0, repetition_penalty=5.0)
    prompts = [[1, 2, 3, 4], [2, 1, 4, 3], [3, 4, 1, 2], [4, 3, 2, 1]]
    want = [engine.generate([p], None, params)[0].token_ids for p in prompts]
    for out in want:
        assert len(set(out)) == len(out)
        assert not set(out) & {1, 2, 3, 4}
    before = engine.stats().preemptions
    with constrained(engine, free_pages=9):
        outs = engine.generate(prompts, None, params)
    assert engine.stats().preemptions > before
    assert [o.token_ids for o in outs] == want


def test_logprobs_are_the_model_s_own(tiny_model_dir: Path) -> None:
    engine = make_engine(tiny_model_dir, record_logits=True)
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, logprobs=5, logit_bias={3: 2.0})
    out = engine.generate([[4, 5, 6]], None, params)[0]
    assert out.logprobs is not None
    assert out.logits is not None
    exact = out.logits.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max(1, keepdims=True)).sum(1, keepdims=True)) + exact.max(
        1, keepdims=True
    )
    for step, (token, got) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
        best = np.argsort(-exact[step], kind="stable")[:5]
        assert list(got.top) == best.tolist()
        np.testing.assert_allclose(list(got.top.values()), exact[step][best], atol=1e-5)
        assert got.logprob == pytest.approx(exact[step][token], abs=1e-5)
        assert got.rank == 1 + int((exact[step] > exact[step][token]).sum())


def test_more_alternatives_than_tokens_may_be_allowed_and_asked_for(tiny_model_dir: Path) -> None:
    engine = make_engine(tiny_model_dir, max_logprobs=2**31 - 1)
    vocab = engine.model_config.vocab_size
    out = engine.generate([[4, 5]], None, SamplingParams(max_tokens=1, logprobs=vocab + 1))[0]
    assert out.logprobs is not None
    assert sorted(out.logprobs[0].top) == list(range(vocab))


def test_length_ends_at_the_model_s_limit(engine: Engine) -> None:
    out = engine.generate([[1] * 250], None, dataclasses.replace(GREEDY, max_tokens=None))[0]
    assert (len(out.token_ids), out.finish_reason) == (6, "length")


def test_streamed_events_add_up_to_the_whole(engine: Engine) -> None:
    whole = engine.generate(PROMPTS, [None, *ADAPTERS], GREEDY)
    got: dict[int, list[int]] = {i: [] for i in range(len(PROMPTS))}
    last: dict[int, int] = {}
    for event in engine.stream(PROMPTS, [None, *ADAPTERS], GREEDY):
        got[event.prompt_index] += event.token_ids
        last[event.prompt_index] = last.get(event.prompt_index, 0) + (event.finish_reason is not None)
    assert list(got.values()) == [o.token_ids for o in whole]
    assert set(last.values()) == {1}


def test_metrics_of_a_request(engine: Engine) -> None:
    metrics = engine.generate([[1, 2, 3]], None, GREEDY)[0].metrics
    assert (metrics.num_prompt_tokens, metrics.num_output_tokens) == (3, 12)
    times = (
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.finished_time,
    )
    assert all(t is not None for t in times)
    assert list(times) == sorted(t for t in times if t is not None)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "prompt is empty"),
        ([1, 384], GREEDY, r"token 1 is 384; token ids are integers in \[0, 384\)"),
        ([1, True], GREEDY, "token 1 is True"),
        ([1, 2.5], GREEDY, "token 1 is 2.5"),
        ([-1], GREEDY, "token 0 is -1"),
        ([1] * 256, GREEDY, "the prompt has 256 tokens; .* the limit is 255"),
        ("text", GREEDY, "has no tokenizer"),
        ([1], SamplingParams(stop=("x",)), "stop strings need a tokenizer"),
        ([1], SamplingParams(logprobs=21), "logprobs 21 is above"),
        ([1], SamplingParams(logit_bias={999: 1.0}), "logit_bias names token 999"),
        ([1], SamplingParams(stop_token_ids=(-4,)), "stop_token_ids names token -4"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(
    engine: Engine, prompt: Any, params: SamplingParams, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate([[1, 2], prompt], None, [GREEDY, params])
    assert not engine.has_unfinished()
    engine.check_integrity()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), "prompts must be a string, a list of token ids, or a list of these, got None"),
        ((5,), "prompts must be .*, got 5"),
        ((b"ab",), "prompts must be .*, got b'ab'"),
        (({1: 2},), "prompts must be .*, got {1: 2}"),
        ((np.array(3),), "prompts must be"),
        (([1.5],), "a prompt must be a string or a list of token ids, got 1.5"),
        (([1, [2]],), "a prompt must be a string or a list of token ids, got 1"),
        (([None],), "a prompt must be .*, got None"),
        (([b"ab"],), "a prompt must be .*, got b'ab'"),
        (([[1]], 5), "adapter_ids must be one str or a list of 1, one for each prompt, got 5"),
        (([[1]], [5]), "an adapter id must be a string or None, got 5"),
        (
            ([[1]], None, {"n": 1}),
            "sampling_params must be one SamplingParams or a list of 1, .*, got {'n': 1}",
        ),
        (([[1]], None, [{"n": 1}]), "sampling parameters must be a SamplingParams, got {'n': 1}"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(
    engine: Engine, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate(*arguments)
    with pytest.raises(ValueError, match="request_id must be a string, got 5"):
        engine.add_request([1], request_id=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="request_id must not be empty"):
        engine.add_request([1], request_id="")
    assert not engine.has_unfinished()


def test_token_ids_may_come_in_any_list(engine: Engine) -> None:
    want = [o.token_ids for o in engine.generate([[1, 2], [3, 4]], None, GREEDY)]
    for prompts in (np.array([[1, 2], [3, 4]]), ((1, 2), range(3, 5)), (iter(p) for p in ([1, 2], [3, 4]))):
        assert [o.token_ids for o in engine.generate(prompts, None, GREEDY)] == want  # type: ignore[arg-type]


def test_ids_that_the_engine_makes_avoid_those_of_callers(engine: Engine) -> None:
    made = int(engine.add_request([1]).removeprefix("request-"))
    taken = [engine.add_request([1], request_id=f"request-{made + i}") for i in (1, 3)]
    assert engine.add_request([1]) == f"request-{made + 2}"
    assert [o.request_id for o in engine.generate([[1]] * 2)] == [f"request-{made + i}" for i in (4, 5)]
    ended = []
    while engine.has_unfinished():
        ended += [e.request_id for e in engine.step() if e.finish_reason is not None]
    assert set(taken) <= set(ended)


def test_lists_must_match_the_prompts(engine: Engine) -> None:
    with pytest.raises(ValueError, match="adapter_ids must be one str or a list of 2"):
        engine.generate([[1], [2]], ["qv_r3"])
    with pytest.raises(ValueError, match="sampling_params must be one SamplingParams or a list of 2"):
        engine.generate([[1], [2]], None, [GREEDY])


@pytest.mark.parametrize("bad", [[], [9999], "no tokenizer", [1] * 5000], ids=["empty", "id", "text", "long"])
def test_an_error_of_one_of_several_prompts_says_which_and_queues_none(
    bad: str | list[int], engine: Engine
) -> None:
    for ask in (engine.generate, engine.stream):
        with pytest.raises(PromptError) as caught:
            ask([[1], [2], bad, [9999]], None, GREEDY)
        assert caught.value.prompt_index == 2
        assert str(caught.value) == f"prompts[2]: {caught.value.reason}"
    with pytest.raises(UnknownAdapterError) as unknown:
        engine.generate([[1], [2]], [None, "nobody"], GREEDY)
    assert unknown.value.__notes__ == ["of prompts[1]"]
    assert not engine.has_unfinished()


def test_adapter_names(engine: Engine, adapters: dict[str, Path]) -> None:
    with pytest.raises(UnknownAdapterError, match=r"'nobody' is not registered \(registered: "):
        engine.generate([[1]], "nobody")
    with pytest.raises(AdapterExistsError, match="'qv_r3' is already loaded"):
        engine.load_adapter("qv_r3", adapters["qv_r3"])
    with pytest.raises(UnknownAdapterError):
        engine.unload_adapter("nobody")
    for name in NO_NAMES:
        for enter in (engine.load_adapter, engine.register_adapter):
            with pytest.raises(ValueError, match="name must have 1 to 256 printable characters, no comma"):
                enter(name, adapters["qv_r3"])
    for name in ("sql/v2", "é", "two words", "../x", "x" * 256):
        assert engine.register_adapter(name, adapters["qv_r3"]).name == name
        engine.unload_adapter(name)
    with pytest.raises(ValueError, match="an adapter's name must be a string, got 5"):
        engine.load_adapter(5, adapters["qv_r3"])  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        engine.load_adapter("ghost", adapters["qv_r3"].parent / "ghost")


def test_an_adapter_that_no_pool_holds_is_refused_when_it_is_loaded(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    engine = make_engine(tiny_model_dir, num_pages=17)
    write_peft_adapter(tmp_path / "big", engine.model_config, {"gate_proj": 256})
    with pytest.raises(ValueError, match=r"adapter 'big' needs \d+ pages, the pool has 16"):
        engine.load_adapter("big", tmp_path / "big")
    assert engine.adapters() == []


def test_registering_reads_no_weights_and_answers_as_loading_does(
    engine: Engine, tiny_model_dir: Path, adapters: dict[str, Path]
) -> None:
    lazy = make_engine(tiny_model_dir, adapter_host_bytes=1)  # holds one copy at a time, at most
    for name, path in adapters.items():
        assert lazy.register_adapter(name, path).host_bytes == 0
    loaded = {info.name: info for info in engine.adapters()}
    for info in lazy.adapters():
        want = loaded[info.name]
        assert (info.rank, info.target_modules, info.pages) == (want.rank, want.target_modules, want.pages)
    names = [None, *ADAPTERS]
    want_tokens = [o.token_ids for o in engine.generate(PROMPTS, names, GREEDY)]
    for _ in range(2):
        assert [o.token_ids for o in lazy.generate(PROMPTS, names, GREEDY)] == want_tokens
    assert lazy.stats().loading.host_misses == len(ADAPTERS)
    lazy.check_integrity()


def test_copies_staged_in_pinned_memory_give_the_same_tokens(
    engine: Engine, tiny_model_dir: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does, on a CPU, whose devices have pinned host memory, too."""
    monkeypatch.setattr(slora_jax.runner, "AdapterTransfer", functools.partial(AdapterTransfer, staged=True))
    staging = make_engine(tiny_model_dir, tensor_parallel_size=2)
    for i, (name, path) in enumerate(adapters.items()):
        (staging.load_adapter if i % 2 else staging.register_adapter)(name, path)
    names = [None, *ADAPTERS]
    want = [o.token_ids for o in engine.generate(PROMPTS, names, GREEDY)]
    with constrained(staging, free_pages=159):
        assert [o.token_ids for o in staging.generate(PROMPTS, names, GREEDY)] == want
    assert staging.stats().adapter_loads >= len(ADAPTERS)


def test_weights_that_are_refused_when_they_are_needed_fail_their_own_requests(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    engine = make_engine(tiny_model_dir)
    for name in ("good", "bad"):
        write_peft_adapter(tmp_path / name, engine.model_config, {"q_proj": 4})
    weights = tmp_path / "bad" / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-9])
    for name in ("good", "bad"):
        engine.register_adapter(name, tmp_path / name)
    bad, good, base = engine.generate([[1, 2]] * 3, ["bad", "good", None], GREEDY)
    assert bad.finish_reason == "error"
    assert "adapter 'bad' could not be loaded: " in str(bad.outputs[0].error)
    assert "corrupt or cut short" in str(bad.outputs[0].error)
    assert (good.finish_reason, base.finish_reason) == ("length", "length")
    weights.write_bytes(whole)
    [changed] = engine.generate([[1, 2]], "bad", GREEDY)
    assert "load it in place" in str(changed.outputs[0].error)
    engine.register_adapter("bad", tmp_path / "bad", replace=True)
    assert engine.generate([[1, 2]], "bad", GREEDY)[0].token_ids == good.token_ids


def test_registering_refuses_what_the_config_shows(tiny_model_dir: Path, tmp_path: Path) -> None:
    engine = make_engine(tiny_model_dir, num_pages=17, max_lora_rank=64)
    shape = engine.model_config
    write_peft_adapter(tmp_path / "dora", shape, use_dora=True)
    write_peft_adapter(tmp_path / "head", shape, target_modules=["q_proj", "v_proj", "lm_head"])
    write_peft_adapter(tmp_path / "none", shape, target_modules=["c_attn"])
    write_peft_adapter(tmp_path / "high", shape, {"q_proj": 65})
    write_peft_adapter(tmp_path / "big", shape, dict.fromkeys(("gate_proj", "up_proj", "down_proj"), 64))
    for name, reason in (
        ("dora", "'use_dora'"),
        ("head", "LoRA on lm_head is not supported"),
        ("none", "matches no module of the base model"),
        ("high", "rank 65 is above max_lora_rank 64"),
        ("big", r"needs \d+ pages, the pool has 16"),
    ):
        with pytest.raises(ValueError, match=reason):
            engine.register_adapter(name, tmp_path / name)
    with pytest.raises(FileNotFoundError):
        engine.register_adapter("ghost", tmp_path / "ghost")
    assert engine.adapters() == []


def test_a_request_that_can_never_fit_is_refused(tiny_model_dir: Path, adapters: dict[str, Path]) -> None:
    engine = make_engine(tiny_model_dir, num_pages=18)
    engine.load_adapter("a", adapters["qv_r3"])
    with pytest.raises(
        ValueError, match=r"needs up to \d+ pages \(256 tokens and adapter 'a'\), the pool has 17"
    ):
        engine.generate([[1, 2]], "a", SamplingParams(max_tokens=254))


def test_logits_that_are_not_finite_fail_their_own_request_only(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_peft_adapter(tmp_path / "huge", engine.model_config, {"up_proj": 8, "down_proj": 8}, std=1e19)
    engine.load_adapter("huge", tmp_path / "huge")
    bad, good = engine.generate([[1, 2, 3], [1, 2, 3]], ["huge", None], GREEDY)
    engine.unload_adapter("huge")
    assert bad.finish_reason == "error"
    told = f"request '{bad.request_id}': the logits of adapter 'huge' were not finite (NaN or infinity)"
    assert str(bad.outputs[0].error).startswith(told)
    assert [(r.levelname, r.getMessage()) for r in caplog.records if "finite" in r.getMessage()] == [
        ("WARNING", bad.outputs[0].error)
    ]
    assert good.token_ids == engine.generate([[1, 2, 3]], None, GREEDY)[0].token_ids
    assert engine.stats().requests_failed == 1


def test_what_is_under_way_names_the_steps_shape_and_the_requests(engine: Engine) -> None:
    engine.add_request([1, 2, 3], None, GREEDY, "mine")
    engine.step()
    told = engine.under_way()
    assert "has 0 decodes and 1 chunks of prompts, 3 tokens (shape: StepShape(decode_rows=" in told
    assert "of requests mine; 1 requests have not ended: mine; adapters in transfer: none" in told
    engine.abort("mine")
    while engine.has_unfinished():
        engine.step()


def test_the_shape_of_another_step_is_never_told_as_the_planned_ones(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine._runner
    told: list[tuple[StepShape | None, str]] = []
    build, program = runner._batches.build, runner.program

    def building(plan: StepPlan) -> PackedStep:
        told.append((None, engine.under_way()))
        return build(plan)

    def running(shape: StepShape) -> Program:
        told.append((shape, engine.under_way()))
        return program(shape)

    monkeypatch.setattr(runner._batches, "build", building)
    monkeypatch.setattr(runner, "program", running)
    engine.generate([[1] * 20], None, GREEDY)
    assert len({shape for shape, _ in told}) >= 3  # none yet, a prompt's, a decode's
    for shape, text in told:
        assert (f"tokens (shape: {shape}), of" if shape else "tokens, of requests") in text


@pytest.mark.parametrize(
    ("adapters", "reason"),
    [
        (["a"], "adapters must map names to PEFT folders, got list"),
        ({"a,b": "x"}, r"adapters\['a,b'\] = 'x': an adapter's name must have"),
        ({5: "x"}, r"adapters\[5\] = 'x': an adapter's name must be a string"),
        ({"x": None}, r"adapters\['x'\] = None: an adapter's path must be a string or a Path"),
        ({"x": 5}, r"adapters\['x'\] = 5: an adapter's path must be"),
    ],
)
def test_what_is_no_mapping_of_adapters_is_refused_before_weights_load(
    adapters: Any, reason: str, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slora_jax.engine.load_checkpoint", None)
    with pytest.raises(ValueError, match=reason):
        Engine.from_pretrained(tiny_model_dir, adapters, EngineConfig())


@pytest.mark.parametrize("path", [None, 5, b"bytes", ["a"], "x" * 5000, "\0", ""])
def test_what_is_no_path_of_an_adapter(path: Any, engine: Engine) -> None:
    for load in (engine.load_adapter, engine.register_adapter):
        with pytest.raises(
            (ValueError, FileNotFoundError), match=r"path must|cannot be read|no adapter|missing"
        ):
            load("x", path)


@pytest.mark.parametrize("folder", ["/proc/x", "/dev/null", "/dev/null/x", "x" * 5000, "~no-such-user/x"])
def test_a_compile_cache_that_cannot_be(folder: str, tiny_model_dir: Path) -> None:
    config = EngineConfig(compile_cache_dir=folder)
    with pytest.raises(ValueError, match=r"compile_cache_dir '.*' cannot be made: .*; name another folder"):
        Engine.from_pretrained(tiny_model_dir, None, config)


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("XDG_CACHE_HOME", "/dev/null", "'/dev/null/slora-jax/xla' (environment variable XDG_CACHE_HOME)"),
        ("HOME", "/dev/null", "'~/.cache/slora-jax/xla' (the default)"),
        ("HOME", "~", "'~/.cache/slora-jax/xla' (the default)"),  # nobody's
    ],
)
def test_a_compile_cache_that_nobody_named_and_cannot_be(
    variable: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv(variable, value)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        with pytest.raises(ValueError, match=f"the compile cache {re.escape(told)} cannot be made: .*; name"):
            enable_compile_cache(None)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_weights_that_changed_behind_their_old_size_and_time_are_refused(
    engine: Engine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """As `cp -p` or `rsync -t` leave them: another read must not give another adapter."""
    folder = tmp_path / "a"
    shutil.copytree(next(iter(adapters.values())), folder)
    engine.register_adapter("copied", folder)
    first = engine.generate([PROMPTS[0]], "copied", GREEDY)[0]
    assert first.finish_reason == "length"
    adapter, file = engine._adapters.get("copied"), folder / "adapter_model.safetensors"
    before = file.stat()
    tensors = {name: -t if "lora_B" in name else t for name, t in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    engine._adapters._evict(adapter)
    engine._adapters.host.drop(adapter)
    second = engine.generate([PROMPTS[0]], "copied", GREEDY)[0]
    assert second.finish_reason == "error"
    assert "its files have changed" in str(second.outputs[0].error)
    engine.load_adapter("copied", folder, replace=True)
    assert engine.generate([PROMPTS[0]], "copied", GREEDY)[0].token_ids != first.token_ids
    engine.unload_adapter("copied")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"page_tokens": 8}, "engine of another model"), ({"max_lora_rank": 8}, "max_lora_rank is 8: raise it")],
)
def test_an_adapter_that_another_engine_prepared_must_fit(
    engine: Engine, adapters: dict[str, Path], tiny_model_dir: Path, fields: dict[str, int], reason: str
) -> None:
    prepared = engine.prepare_adapter(adapters["one_layer_r40"])
    other = make_engine(tiny_model_dir, {}, **fields)
    with pytest.raises(ValueError, match=reason):
        other.load_adapter("a", prepared)
    assert not other.adapters()
