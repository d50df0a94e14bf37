"""The engine on dummy-weight Llama shapes: decode-step time against its byte floor, and offline throughput.

    python -m benchmarks.bench_engine decode --model llama-2-7b --batch 256 --distinct 0 256 --ranks 16
    python -m benchmarks.bench_engine mixed --model llama-2-7b --prompt-tokens 1792
    python -m benchmarks.bench_engine offline --model llama-2-7b --setting S2 --n 0 100 1000

Each is a module of benchmarks/engine, which says what it measures. On a GPU each also traces some steps and
says what share of them the GPU idles, and of its busy time the shares of GEMM, attention, LoRA and the rest
(engine/profile.py). Results are appended to benchmarks/results/engine.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Protocol

from benchmarks.arguments import add_xla_argument
from benchmarks.engine import decode, mixed, offline
from benchmarks.engine.models import MODELS, compiled_with
from slora_jax.engine import Engine


class Benchmark(Protocol):
    """A module that measures something: its arguments, and the measurement on the engine that is given."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace, engine: Engine | None) -> None: ...


BENCHMARKS: dict[str, tuple[Benchmark, str]] = {
    "offline": (offline, "requests/s of 1000 requests submitted at once"),
    "decode": (decode, "milliseconds of a steady decode step"),
    "mixed": (mixed, "milliseconds of a step of decodes and prompts"),
}


def main(argv: Sequence[str] | None = None, engine: Engine | None = None) -> None:
    """Parse and run one benchmark, on an engine of its own or on one that is shared."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(required=True)
    for name, (benchmark, summary) in BENCHMARKS.items():
        one = commands.add_parser(name, help=summary, description=benchmark.__doc__, formatter_class=raw)
        benchmark.add_arguments(one)
        add_xla_argument(one)
        one.add_argument("--model", choices=tuple(MODELS), default="llama-2-7b")
        one.set_defaults(run=benchmark.run)
    args = parser.parse_args(argv)
    if getattr(args, "context", 1) <= getattr(args, "steps", 0) // 2:
        parser.error("--context must be above half of --steps: the steps have this context in the mean")
    args.variant = {"xla": args.xla} if args.xla else {}  # of a case
    with compiled_with(args.xla, engine):
        args.run(args, engine)


if __name__ == "__main__":
    main()
