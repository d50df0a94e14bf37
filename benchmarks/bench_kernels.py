"""The GPU kernels alone: microseconds, TB/s or TFLOP/s, and their share of what the chip copies or
multiplies.

    python benchmarks/bench_kernels.py                      # every case
    # cases whose name contains a word; may be repeated
    python benchmarks/bench_kernels.py --only lora_decode
    python benchmarks/bench_kernels.py --list

Each case checks its kernel against a float32 reference before it is timed. Results are appended to
benchmarks/results/kernels.jsonl, one JSON line a measurement.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from kernels import common


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="cases whose name has it")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--results", type=Path, default=common.RESULTS, help="JSON lines are appended to it")
    parser.add_argument("--commit", default=None, help="recorded commit (default: this checkout's)")
    args = parser.parse_args()
    from kernels import attention, lora

    cases = [*lora.CASES, *attention.CASES]
    if args.only:
        cases = [c for c in cases if any(word in c.name for word in args.only)]
    if args.list:
        print(*(c.name for c in cases), sep="\n")
        return 0
    return min(1, common.run_cases(cases, args.results, args.commit or common.current_commit()))


if __name__ == "__main__":
    sys.exit(main())
