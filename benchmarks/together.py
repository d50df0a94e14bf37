"""Several benchmarks of one model in one process, on one engine: what compiles for minutes compiles once.

    python -m benchmarks.together llama-2-7b "bench_adapters loads" "bench_engine decode --distinct 256"

Each command is as it would be alone, without `--model`; one that wants another engine (`mixed`,
`offline --lora-mode ..`) ends with a message. One that fails does not keep the others from running, nor
leaves them anything; the exit status then is 1. decode's `--memory-fraction` wants one, too.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Sequence

from benchmarks import bench_adapters, bench_engine
from benchmarks.engine.models import MAX_MODEL_LEN, MODELS, make_engine
from benchmarks.engine.steps import clear
from slora_jax import EngineConfig
from slora_jax.engine import Engine

COMMANDS: dict[str, Callable[[Sequence[str], Engine], None]] = {
    "bench_engine": bench_engine.main,
    "bench_adapters": bench_adapters.main,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the commands one after the other; SystemExit where one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=tuple(MODELS))
    parser.add_argument(
        "commands", nargs="+", metavar="COMMAND", help='"bench_engine offline --setting S2 --n 100"'
    )
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN)
    parser.add_argument("--max-lora-rank", type=int, default=64)
    parser.add_argument("--memory-fraction", type=float, default=EngineConfig.memory_fraction)
    args = parser.parse_args(argv)
    commands = [command.split() for command in args.commands]
    for command in commands:
        if not command or command[0] not in COMMANDS:
            parser.error(f"'{' '.join(command)}' begins with none of {', '.join(COMMANDS)}")
    engine = make_engine(
        args.model,
        max_batch=args.max_batch,
        max_model_len=args.max_model_len,
        max_lora_rank=args.max_lora_rank,
        memory_fraction=args.memory_fraction,
    )
    started, failed = time.perf_counter(), []
    for name, *rest in commands:
        try:
            COMMANDS[name]([*rest, "--model", args.model], engine)
        except (Exception, SystemExit):
            traceback.print_exc()
            clear(engine)
            for adapter in engine.adapters():
                engine.unload_adapter(adapter.name)
            failed.append(" ".join((name, *rest)))
        print(f"{name} {' '.join(rest)}: over after {time.perf_counter() - started:.0f} s", flush=True)
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
