"""Seconds until an engine can answer: weights made, all usual steps compiled; a first start, and a second.

    python -m benchmarks.bench_start --model llama-2-7b

Each start is a process of its own; both share one `compile_cache_dir`, empty at first. The weights are
random, so what it takes to read them is not part of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks.engine.models import MAX_MODEL_LEN, MODELS, make_engine
from benchmarks.engine.random_adapters import attention_groups
from benchmarks.record import gpu_name, record


def start(model: str, max_batch: int, folder: str) -> None:
    """Start an engine and print what it took as JSON."""
    began = time.perf_counter()
    engine = make_engine(model, max_batch=max_batch, max_model_len=MAX_MODEL_LEN, compile_cache_dir=folder)
    made = time.perf_counter()
    engine._runner.warmup(attention_groups())
    seconds = {"engine_seconds": made - began, "warmup_seconds": time.perf_counter() - made}
    print(json.dumps({"steps": engine.num_compilations, **seconds}))


def main(argv: Sequence[str] | None = None) -> None:
    """Start twice and record both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="llama-2-7b")
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--cache", help=argparse.SUPPRESS)  # of the processes that are timed
    args = parser.parse_args(argv)
    if args.cache is not None:
        start(args.model, args.max_batch, args.cache)
        return
    with tempfile.TemporaryDirectory() as folder:
        for nth in ("first", "second"):
            command = [sys.executable, "-m", "benchmarks.bench_start", "--model", args.model]
            command += ["--max-batch", str(args.max_batch), "--cache", folder]
            began = time.perf_counter()
            told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            seconds = time.perf_counter() - began
            extra = {k: round(v, 1) for k, v in json.loads(told.splitlines()[-1]).items()}
            case = {"model": args.model, "batch": args.max_batch, "start": nth}
            record("engine", "engine_start", case, round(seconds, 1), "s", gpu=gpu_name(), **extra)
            print(f"engine_start {case}: {seconds:.1f} s, {extra}", flush=True)


if __name__ == "__main__":
    main()
