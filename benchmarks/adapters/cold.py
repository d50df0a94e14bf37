"""The first token where the adapter is not resident (`cold_first_token`).

Requests one at a time, each for an adapter that is not resident, then again for the same one that now is.
The penalty is the difference of the medians.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from benchmarks.adapters.workbench import Workbench, pinned_copy_bandwidth
from benchmarks.engine.random_adapters import MODULES, register_adapters
from slora_jax import SamplingParams
from slora_jax.engine import Engine
from slora_jax.step_shape import StepShape
from tests.lora.peft_files import write_peft_adapter


def shapes(bench: Workbench, args: argparse.Namespace) -> list[StepShape]:
    """Steps to compile before `run`."""
    buckets, pages = bench.runner.buckets, -(-(args.prompt + 1) // bench.page_tokens)
    plain = buckets.fit(decodes=0, prefill_tokens=args.prompt, prefill_seqs=1, pages=pages, bias=0)
    return [buckets.with_lora(plain, (n,), bench.lora_groups) for n in (1, 256)]


def run(bench: Workbench, args: argparse.Namespace) -> None:
    """Milliseconds that a request's first token takes longer where its adapter must be brought in."""
    for rank in args.load_ranks:
        engine, prepared = bench.engine(), bench.adapters((rank,))
        nbytes = prepared[rank].packed.nbytes
        bandwidth = pinned_copy_bandwidth(nbytes, 1)
        rng = np.random.default_rng(0)

        def first_token(name: str, engine: Engine = engine, rng: np.random.Generator = rng) -> float:
            prompt = rng.integers(0, engine.model_config.vocab_size, args.prompt).tolist()
            started = time.perf_counter()
            engine.add_request(prompt, name, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
            while not (events := engine.step()):
                pass
            if not events[0].token_ids:
                raise RuntimeError(f"a request ended by {events[0].finish_reason}: {events[0].error}")
            return 1e3 * (time.perf_counter() - started)

        with tempfile.TemporaryDirectory() as folder:
            ranks, dtype = dict.fromkeys(MODULES, rank), jnp.dtype(engine.config.dtype)
            write_peft_adapter(Path(folder), engine.model_config, ranks, alpha=rank, std=0.02, dtype=dtype)
            hosts = register_adapters(engine, prepared, args.repeats + 2)
            disks = [f"disk{i}" for i in range(max(3, args.repeats // 3) + 2)]
            for name in disks:
                engine.register_adapter(name, folder)
            for source, names in (("host", hosts), ("disk", disks)):
                for name in names[:2] * 2:  # what is compiled is compiled here
                    first_token(name)
                compiled = bench.runner.compilations
                first = np.array([(first_token(n), first_token(n)) for n in names[2:]])
                assert bench.runner.compilations == compiled, "a timed step was compiled"
                come, there = np.median(first, axis=0).tolist()
                transfer = 1e3 * nbytes / bandwidth
                case = {"model": args.model, "rank": rank, "source": source, "prompt_tokens": args.prompt}
                extra = {
                    "cold_ms": round(come, 3),
                    "cold_p90_ms": round(float(np.percentile(first[:, 0], 90)), 3),
                    "resident_ms": round(there, 3),
                    "transfer_ms": round(transfer, 3),
                    "limit_ms": round(transfer + 5, 3),
                    "adapter_bytes": nbytes,
                    "pinned_copy_bytes_per_s": round(bandwidth),
                    "requests": len(first),
                }
                bench.report("cold_first_token", case, round(come - there, 3), "ms", **extra)
