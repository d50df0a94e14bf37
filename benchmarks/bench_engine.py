"""The engine on dummy-weight Llama shapes: decode-step time against its byte floor, and offline throughput.

    python -m benchmarks.bench_engine decode --model llama-2-7b --batch 256 --context 400 --distinct 0 256
    --ranks 16 python -m benchmarks.bench_engine offline --model llama-2-7b --setting S2 --n 0 100 1000

Offline: requests submitted at once, input and output lengths uniform in [8, 512], output length forced,
adapter i of n drawn with P(i) proportional to 1 / (i + 1) ("zipf") or uniformly; LoRA on q, k, v, o; at most
256 sequences at a time; adapters registered in host memory and none resident at the start. Adapters of one
rank share their host copy (2000 of them would not fit otherwise); each is copied into the pool on its own.
Loads: adapters come in beside a full batch of decodes; step times alone and beside them are medians and p99.
One warm-up run of 300 requests compiles what the timed run needs. Results are appended to
benchmarks/results/engine.jsonl.
"""

from __future__ import annotations

import argparse
import glob
import json
import re
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import record
from slora_jax import EngineConfig, SamplingParams
from slora_jax.engine import Engine
from slora_jax.lora.loader import PreparedAdapter
from slora_jax.lora.packing import PackedAdapter

COPY_BANDWIDTH = 4.3e12  # bytes/s of one H200, measured by bench_kernels
MODELS: dict[str, dict[str, Any]] = {
    "llama-2-7b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                   "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000},
    "llama-3-8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                   "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
    "llama-2-13b": {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
                    "num_key_value_heads": 40, "intermediate_size": 13824, "vocab_size": 32000},
    "tiny": {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 512},
}  # fmt: skip
SETTINGS = {"none": (), "S1": (8,), "S2": (64, 32, 16, 8), "S4": (64, 32, 16)}
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
SHARES = {  # kernels of a profile by what they do
    "gemm": r"gemm|nvjet|cutlass|xmma|dot|cublas",
    "attention": r"attention|attend|prefill|merge",
    "lora": r"lora|shrink|expand",
}


def make_engine(model: str, *, max_batch: int, **fields: Any) -> Engine:
    """An engine of random weights in a model's shape."""
    shape = {"model_type": "llama", "max_position_embeddings": 8192, **MODELS[model]}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        config = EngineConfig(
            dtype="bfloat16",
            load_format="dummy",
            max_batch_size=max_batch,
            max_step_tokens=fields.pop("max_step_tokens", 2048),
            **fields,
        )
        return Engine.from_pretrained(folder, config=config)


def register_adapters(engine: Engine, ranks: Sequence[int], n: int) -> list[str]:
    """n random adapters on q, k, v, o whose ranks take turns."""
    layout, rng, prepared = engine._layout, np.random.default_rng(0), {}
    for rank in ranks if n else ():
        placed = layout.adapter(dict.fromkeys(MODULES, rank))
        pages = np.empty(
            (layout.n_layers, placed.num_pages, layout.tp * layout.page_elems), jnp.dtype(engine.config.dtype)
        )
        pages[...] = (0.02 * rng.standard_normal(pages.shape[1:], np.float32)).astype(pages.dtype)
        packed = PackedAdapter(pages=pages, layout=placed, rank=rank, target_modules=MODULES, features={})
        prepared[rank] = PreparedAdapter(f"random/rank{rank}", packed)
    names = [f"a{i}" for i in range(n)]
    for i, name in enumerate(names):
        engine.load_adapter(name, prepared[ranks[i % len(ranks)]])
    return names


def run_all(engine: Engine, requests: Iterable[tuple[list[int], str | None, int]]) -> int:
    """Submit (prompt, adapter, output length) all at once, run until all have ended; tokens put out."""
    for prompt, adapter, length in requests:
        engine.add_request(prompt, adapter, SamplingParams(max_tokens=length, temperature=0, ignore_eos=True))
    tokens = 0
    while engine.has_unfinished():
        tokens += sum(len(e.token_ids) for e in engine.step())
    return tokens


def offline(args: argparse.Namespace) -> None:
    """Requests/s of the workload for each n."""
    ranks = SETTINGS[args.setting]
    engine = make_engine(args.model, max_batch=256, max_model_len=1040)
    vocab = engine.model_config.vocab_size
    for n in args.n:
        rng = np.random.default_rng(42)
        names = register_adapters(engine, ranks, n)
        weights = 1 / np.arange(1, n + 1) if args.popularity == "zipf" else np.ones(max(n, 1))
        requests: list[tuple[list[int], str | None, int]] = []
        for _ in range(args.requests):
            length_in, length_out = rng.integers(8, 513, 2)
            name = names[rng.choice(n, p=weights / weights.sum())] if n else None
            requests.append((rng.integers(0, vocab, length_in).tolist(), name, int(length_out)))
        before = engine._runner.compilations
        run_all(engine, requests[:300])
        warm = engine._runner.compilations
        loads, started = engine.stats().adapter_loads, time.perf_counter()
        tokens = run_all(engine, requests)
        seconds = time.perf_counter() - started
        stats = engine.stats()
        case = {"model": args.model, "setting": args.setting, "n": n, "popularity": args.popularity}
        extra = {
            "seconds": round(seconds, 2),
            "output_tokens_per_s": round(tokens / seconds, 1),
            "requests": args.requests,
            "adapter_loads": stats.adapter_loads - loads,
            "preemptions": stats.preemptions,
            "compilations": {"before": warm - before, "while_timed": engine._runner.compilations - warm},
            "backend": engine._runner.backend.name,
        }
        value = round(args.requests / seconds, 2)
        record("engine", "offline_throughput", case, value, "requests/s", gpu=gpu_name(), **extra)
        print(f"offline {case}: {value} requests/s, {extra}", flush=True)
        for name in names:
            engine.unload_adapter(name)


def decode(args: argparse.Namespace) -> None:
    """Milliseconds of a steady decode step, against the bytes it must read."""
    engine = make_engine(
        args.model, max_batch=args.batch, max_model_len=args.context + 400, max_step_tokens=8192
    )
    vocab, layout = engine.model_config.vocab_size, engine._layout
    params = sum(leaf.nbytes for leaf in engine._runner.parameters())
    for distinct in args.distinct:
        rng = np.random.default_rng(0)
        names = register_adapters(engine, args.ranks, distinct)
        for i in range(args.batch):
            prompt = rng.integers(0, vocab, args.context - args.steps).tolist()
            sampling = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
            engine.add_request(prompt, names[i % distinct] if distinct else None, sampling)
        while engine.stats().num_waiting or any(s.remaining > 1 for s in engine._scheduler.running):
            engine.step()
        for _ in range(5):
            engine.step()
        jax.block_until_ready(engine._runner.pool)
        with tempfile.TemporaryDirectory() as trace:
            started = time.perf_counter()
            for _ in range(args.steps - 10):
                engine.step()
            jax.block_until_ready(engine._runner.pool)
            milliseconds = (time.perf_counter() - started) / (args.steps - 10) * 1e3
            jax.profiler.start_trace(trace)
            for _ in range(5):
                engine.step()
            jax.block_until_ready(engine._runner.pool)
            jax.profiler.stop_trace()
            profile = read_profile(trace)
        tokens = sum(s.num_computed for s in engine._scheduler.running)
        kv = tokens * layout.n_layers * layout.page_elems * layout.tp / layout.page_tokens * 2
        adapters = sum(
            sum(a.shape.layout.rank_blocks[m] * 8 * (layout.in_dims[m] + layout.out_dims[m]) for m in MODULES)
            for a in engine._adapters.resident
            if a.pins
        )
        floor = (params + kv + adapters * layout.n_layers * 2) / COPY_BANDWIDTH * 1e3
        for request in list(engine._requests):
            engine.abort(request)
        while engine.has_unfinished():
            engine.step()
        case = {"model": args.model, "batch": args.batch, "context": args.context}
        case |= {"distinct": distinct, "ranks": args.ranks if distinct else []}
        extra = {
            "floor_ms": round(floor, 3),
            "mean_context": tokens / args.batch,
            **profile,
            "backend": engine._runner.backend.name,
        }
        record("engine", "decode_step", case, round(milliseconds, 3), "ms", gpu=gpu_name(), **extra)
        print(f"decode_step {case}: {milliseconds:.2f} ms, {extra}", flush=True)
        for name in names:
            engine.unload_adapter(name)


def loads(args: argparse.Namespace) -> None:
    """Bytes/s of adapters that are prefetched beside a full batch of decodes, and what those steps then take.

    Requests for adapters wait behind the full batch, so their adapters come in while it decodes.
    """
    engine = make_engine(
        args.model,
        max_batch=args.batch,
        max_model_len=args.context + 2 * args.steps + 1000,
        max_step_tokens=8192,
        adapter_prefetch=args.adapters,
    )
    rng, vocab = np.random.default_rng(0), engine.model_config.vocab_size
    names = register_adapters(engine, (args.rank,), args.adapters)
    for _ in range(args.batch):
        engine.add_request(
            rng.integers(0, vocab, args.context).tolist(),
            None,
            SamplingParams(max_tokens=None, temperature=0, ignore_eos=True),
        )
    while engine.stats().num_waiting or any(s.remaining > 1 for s in engine._scheduler.running):
        engine.step()

    def step_seconds() -> float:
        started = time.perf_counter()
        engine.step()
        return time.perf_counter() - started

    alone = [step_seconds() for _ in range(args.steps)][10:]
    host = engine._adapters.get(names[0])
    assert host.host is not None
    copied = []
    for _ in range(5):  # the copy by itself
        started = time.perf_counter()
        for staged in engine._runner.stage_adapters([host.host] * 8, [list(range(host.num_pages))] * 8):
            staged.wait()
        copied.append(8 * host.host_bytes / (time.perf_counter() - started))
    for name in names:
        engine.add_request([1], name, SamplingParams(max_tokens=1))
    started, beside = time.perf_counter(), []
    while engine.stats().adapters_resident < len(names):
        beside.append(step_seconds())
    rate = len(names) * host.host_bytes / (time.perf_counter() - started)
    case = {"model": args.model, "batch": args.batch, "rank": args.rank, "adapters": args.adapters}
    extra = {
        "copy_bytes_per_s": round(max(copied)),
        "adapter_bytes": host.host_bytes,
        "step_ms_alone": [round(float(np.percentile(alone, p)) * 1e3, 3) for p in (50, 99)],
        "step_ms_beside_loads": [round(float(np.percentile(beside, p)) * 1e3, 3) for p in (50, 99)],
        "steps": len(beside),
    }
    record("engine", "load_bandwidth", case, round(rate), "bytes/s", gpu=gpu_name(), **extra)
    print(f"load_bandwidth {case}: {rate / 1e9:.2f} GB/s, {extra}", flush=True)


def read_profile(folder: str) -> dict[str, Any]:
    """Share of the traced time that the GPU idles, and the shares of its busy time by kind of kernel."""
    files = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    spans: list[tuple[float, float, str]] = []
    for plane in jax.profiler.ProfileData.from_file(files[0]).planes if files else ():
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    spans += [(e.start_ns, e.start_ns + e.duration_ns, e.name) for e in line.events]
    if not spans:
        return {"idle_share": None, "shares": None}
    spans.sort()
    busy, end = 0.0, spans[0][0]
    total: dict[str, float] = {}
    for start, stop, name in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        kind = next((k for k, pattern in SHARES.items() if re.search(pattern, name, re.I)), "other")
        total[kind] = total.get(kind, 0.0) + stop - start
    wall = end - spans[0][0]
    shares = {k: round(v / sum(total.values()), 3) for k, v in sorted(total.items())}
    top: dict[str, float] = {}
    for start, stop, name in spans:
        top[name] = top.get(name, 0.0) + (stop - start) / 5e6
    largest = dict(sorted(((n[:60], round(v, 3)) for n, v in top.items()), key=lambda p: -p[1])[:12])
    return {"idle_share": round(1 - busy / wall, 4), "shares": shares, "kernels_ms": largest}


def gpu_name() -> str | None:
    """The accelerator's name; None on a CPU."""
    device = jax.devices()[0]
    return None if device.platform == "cpu" else device.device_kind


def main() -> None:
    """Parse and run one benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("offline", help="requests/s of 1000 requests submitted at once")
    command.add_argument("--setting", choices=tuple(SETTINGS), default="none")
    command.add_argument(
        "--n", type=int, nargs="+", default=[0], help="registered adapters; several: several runs"
    )
    command.add_argument("--popularity", choices=("zipf", "uniform"), default="zipf")
    command.add_argument("--requests", type=int, default=1000)
    command.set_defaults(run=offline)
    step = commands.add_parser("decode", help="milliseconds of a steady decode step")
    step.add_argument("--batch", type=int, default=256)
    step.add_argument("--context", type=int, default=400)
    step.add_argument("--distinct", type=int, nargs="+", default=[0], help="distinct adapters in the batch")
    step.add_argument("--ranks", type=int, nargs="+", default=[16])
    step.add_argument("--steps", type=int, default=60)
    step.set_defaults(run=decode)
    load = commands.add_parser("loads", help="bandwidth of loads beside decodes, and what they cost these")
    load.add_argument("--batch", type=int, default=128)
    load.add_argument("--context", type=int, default=400)
    load.add_argument("--adapters", type=int, default=400)
    load.add_argument("--rank", type=int, default=32)
    load.add_argument("--steps", type=int, default=60)
    load.set_defaults(run=loads)
    for one in (command, step, load):
        one.add_argument("--model", choices=tuple(MODELS), default="llama-2-7b")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
