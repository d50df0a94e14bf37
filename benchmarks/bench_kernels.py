"""The GPU kernels alone: microseconds, TB/s or TFLOP/s, and the share of what the chip can copy or multiply.

    python -m benchmarks.bench_kernels                       # every case
    python -m benchmarks.bench_kernels --only lora_decode    # cases whose name has this word; may be repeated
    python -m benchmarks.bench_kernels --list

Each case checks its kernel against a float32 reference before it is timed. Results are appended to
benchmarks/results/kernels.jsonl, one JSON line a measurement.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.kernels import common


def main() -> int:
    """Run the cases asked for; 1 where one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="cases whose name has it")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--results", type=Path, default=common.RESULTS, help="JSON lines are appended to it")
    args = parser.parse_args()
    from benchmarks.kernels import attention, lora, sampling

    cases = [*lora.CASES, *attention.CASES, *sampling.CASES]
    if args.only:
        cases = [c for c in cases if any(word in c.name for word in args.only)]
    if args.list:
        print(*(c.name for c in cases), sep="\n")
        return 0
    return int(common.run_cases(cases, args.results) > 0)


if __name__ == "__main__":
    sys.exit(main())
