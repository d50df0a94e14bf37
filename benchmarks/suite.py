"""All figures of one GPU that the project publishes, as the commands that measure them, in parts.

    python -m benchmarks.suite                      # the parts: what each runs, and how long it takes
    python -m benchmarks.suite tests kernels 7b     # these, one after the other
    make bench-gpu ARGS="tests kernels 7b"

Each command is a process of its own, since an engine takes the GPU's memory. One that fails does not keep the
others from running; the exit status then is 1. What is measured is appended to benchmarks/results/ as it
becomes known (`benchmarks.tables` makes the published tables of it).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

MIXES = "--ranks 16 64/32/16/8"
NS = "--n 5 100 1000 2000"


@dataclasses.dataclass(frozen=True)
class Part:
    """Commands of Python modules, what they are for, and the minutes that they took on an H200 or should."""

    what: str
    minutes: float
    commands: tuple[tuple[str, ...], ...]


def together(model: str, *commands: str, options: str = "") -> tuple[str, ...]:
    """Benchmarks that share an engine of this shape."""
    return ("benchmarks.together", model, *shlex.split(options), *commands)


PARTS = {
    "tests": Part(
        "kernels against float32 references; whole engines against XLA in float32 and against PEFT",
        6,
        (
            ("pytest", "-q", "-m", "gpu", "tests/kernels"),
            ("benchmarks.compare_backends",),
            ("benchmarks.compare_backends", "--peft"),
        ),
    ),
    "kernels": Part("each kernel alone, beside XLA's", 10, (("benchmarks.bench_kernels",),)),
    "7b": Part(
        "Llama-2-7B: decode steps, loads, cold adapters, offline throughput",
        12,
        (
            together(
                "llama-2-7b",
                f"bench_engine decode --batch 256 --distinct 0 1 32 256 {MIXES}",
                f"bench_engine decode --batch 64 16 1 --distinct 0 1 32 {MIXES}",
                "bench_adapters loads cold --load-ranks 64 16 8",
                "bench_engine offline --setting none",
                f"bench_engine offline --setting S1 S2 {NS}",
            ),
        ),
    ),
    "7b-uniform": Part(
        "offline throughput where all adapters are equally popular",
        7,
        (together("llama-2-7b", f"bench_engine offline --setting S1 S2 {NS} --popularity uniform"),),
    ),
    "7b-pressure": Part(
        "working sets that do not fit, more requests than can be served, fairness, clustering",
        12,
        (
            together(
                "llama-2-7b",
                "bench_adapters thrash fairness --no-unified-memory --seconds 8 --fair-seconds 8",
                "bench_adapters online cluster",
            ),
        ),
    ),
    "8b": Part(
        "Llama-3-8B: decode steps, loads, cold adapters, offline throughput of both popularities",
        12,
        (
            together(
                "llama-3-8b",
                f"bench_engine decode --batch 256 --distinct 0 1 32 256 {MIXES}",
                f"bench_engine decode --batch 64 16 1 --distinct 0 1 32 {MIXES}",
                "bench_adapters loads cold --load-ranks 64 16 8",
                "bench_engine offline --setting none",
                f"bench_engine offline --setting S2 {NS}",
                f"bench_engine offline --setting S2 {NS} --popularity uniform",
            ),
        ),
    ),
    "13b": Part(
        "Llama-2-13B: decode steps, offline throughput",
        12,
        (
            together(
                "llama-2-13b",
                f"bench_engine decode --batch 256 64 16 1 --distinct 0 1 32 {MIXES}",
                "bench_engine decode --batch 256 --distinct 256 --ranks 16",
                "bench_engine offline --setting none",
                f"bench_engine offline --setting S4 {NS}",
                options="--memory-fraction 0.96",
            ),
        ),
    ),
    "ablation": Part(
        "what serving costs without gathered kernels, and without mixed batches",
        5,
        tuple(
            ("benchmarks.bench_engine", "offline", "--setting", "S1", "--n", "5", "--lora-mode", mode)
            for mode in ("padded-bmm", "merge")
        ),
    ),
    "start": Part("a first start and a second", 4, (("benchmarks.bench_start",),)),
}


def main(argv: Sequence[str] | None = None) -> None:
    """List the parts, or run some; SystemExit where a command failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parts = parser.parse_args(argv).parts
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"{', '.join(unknown)}: no such part; there are {', '.join(PARTS)}")
    if not parts:
        print("\n".join(map(_described, PARTS)))
    failed = [shlex.join(c) for part in parts for c in PARTS[part].commands if not _runs(c)]
    if failed:
        raise SystemExit("failed:\n" + "\n".join(f"  python -m {command}" for command in failed))


def _described(name: str) -> str:
    part = PARTS[name]
    commands = "".join(f"\n    python -m {shlex.join(command)}" for command in part.commands)
    return f"{name}: {part.what} (about {part.minutes:g} minutes on an H200){commands}"


def _runs(command: Sequence[str]) -> bool:
    print(f"python -m {shlex.join(command)}", flush=True)
    started = time.perf_counter()
    environment = {"JAX_PLATFORMS": "cuda"} | os.environ  # else pytest's default is the CPU
    status = subprocess.run([sys.executable, "-m", *command], env=environment, check=False).returncode
    print(f"exit status {status} after {time.perf_counter() - started:.0f} s", flush=True)
    return status == 0


if __name__ == "__main__":
    main()
