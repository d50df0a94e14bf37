"""The numbers that README.md and docs/numbers.md quote, from the recorded measurements.

    python -m benchmarks.tables            # write README.md's blocks and docs/numbers.md
    python -m benchmarks.tables --check    # say what differs from the results; 1 where something does

`benchmarks/published/` says what is in the tables. Of lines of the same bench and case the last one counts.
A README block is what stands between `<!-- numbers: NAME -->` and `<!-- /numbers -->`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.published import adapters, engine, kernels, references, simulated
from benchmarks.published.table import Case, Column, Row, Table

ROOT = Path(__file__).parents[1]
RESULTS, README, PAGE = Path("benchmarks", "results"), Path("README.md"), Path("docs", "numbers.md")
BLOCK = re.compile(r"<!-- numbers: (\S+) -->\n(.*?)<!-- /numbers -->", re.DOTALL)

IN_README: tuple[Table, ...] = (
    engine.OFFLINE,
    engine.OFFLINE_MORE,
    engine.DECODE,
    kernels.LORA.first(6),
    kernels.DECODE_ATTENTION.first(2, labels=3),
    kernels.PREFILL_ATTENTION.first(2, labels=2),
    adapters.THRASH,
    adapters.LOADS,
    adapters.ONLINE.first(4, columns=4),
    adapters.VTC_GAP.first(3, columns=2),
    references.CPU,
)
ON_PAGE: Mapping[str, tuple[Table, ...]] = {
    "Offline throughput": (engine.OFFLINE_ZIPF, engine.OFFLINE_UNIFORM),
    "Steps of the engine": engine.DECODES,
    "Kernels": (
        kernels.LORA,
        kernels.LORA_SHAPES,
        kernels.DECODE_ATTENTION,
        kernels.PREFILL_ATTENTION,
        kernels.ROPE_KV_WRITE,
        kernels.SAMPLING,
    ),
    "Adapters that come and go": (
        adapters.THRASH_LINES,
        adapters.LOAD_BANDWIDTH,
        adapters.COLD,
        adapters.CLUSTER,
    ),
    "Overload and fairness": (adapters.ONLINE, adapters.VTC_GAP),
    "Agreement": (references.AGREEMENT, references.AGREEMENT_PEFT, references.NEXT_TOKEN),
    "On a CPU, against PEFT": (references.CPU, references.CPU_SPEEDUP),
    "Simulated": (
        simulated.SCHEDULE_STEP,
        simulated.EARLY_ABORT,
        simulated.CLUSTER,
        simulated.VTC_GAP,
        simulated.GUESSES,
    ),
}
PREAMBLE = """\
# Numbers

Written by `python -m benchmarks.tables` from [benchmarks/results](../benchmarks/results), and not to be
edited. Each row has the commits, dates and machines of those of our lines that it quotes; the lines have
versions and the command too. Random weights in bfloat16, LoRA on q, k, v and o, unless a table says
otherwise. Machines of one kind differ by some percent, and lines of different commits may be of different
ones. vLLM was measured on the same kind of GPU ([peers.jsonl](../benchmarks/results/peers.jsonl) says how
and when).
"""

type Line = Mapping[str, Any]


class _NotMeasured:
    """What a cell shows for a number that no line has, whatever its pattern."""

    def __format__(self, spec: str) -> str:
        return "not measured"


class Results:
    """The recorded lines by bench and case, each in the order of its file."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._lines: dict[tuple[str, str], list[Line]] = {}
        for line in lines:
            self._lines.setdefault(_key(line["bench"], line["case"]), []).append(line)

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Those of all files in a folder."""
        files = sorted(folder.glob("*.jsonl"))
        return cls(json.loads(line) for file in files for line in file.read_text().splitlines())

    def latest(self, bench: str, case: Case, has: str = "value") -> Line | None:
        """The last line of a case that has such a field, as all have a value."""
        lines = self._lines.get(_key(bench, case), ())
        return next((line for line in reversed(lines) if has in line), None)


def _key(bench: str, case: Case) -> tuple[str, str]:
    return bench, json.dumps(case, sort_keys=True)


def look_up(results: Results, row: Row, column: Column) -> tuple[str, list[Line]]:
    """A cell, and our lines that it quotes."""
    bench, case = column.bench or row.bench, {**row.case, **column.case}
    values, quoted = list[Any](), list[Line]()
    for field in column.fields.split():
        line, value = _find(results, bench, case, field)
        values.append(_NotMeasured() if value is None else value)
        if line is not None and line["bench"] == bench:
            quoted.append(line)
    if all(isinstance(value, _NotMeasured) for value in values):
        return f"{values[0]}", quoted
    return column.show.format(*values), quoted


def _find(results: Results, bench: str, case: Case, field: str) -> tuple[Line | None, Any]:
    """The line that a field of a `Column` is of, and its value there; None where there is none."""
    name, _, item = field.removeprefix("vllm.").removeprefix("earlier.").partition(".")
    if field.startswith("vllm."):
        line = results.latest(f"vllm_{bench}", case)
    elif field.startswith("earlier."):
        line = results.latest(bench, case, has=name)
    else:
        line = results.latest(bench, case)
    value = line.get(name) if line else None
    return line, value[int(item)] if item and value is not None else value


def markdown(results: Results, table: Table, *, origins: bool) -> str:
    """The table; `origins`: with the commits, dates and machines of the lines that each row quotes."""
    ends = ["commit", "date", "machine"] if origins else []
    heads = [*table.labels, *(column.head for column in table.columns), *ends]
    lines = [heads, ["---"] * len(heads)]
    for row in table.rows:
        cells = [look_up(results, row, column) for column in table.columns]
        quoted = [line for _, some in cells for line in some]
        lines.append([*row.labels, *(text for text, _ in cells), *(_origins(quoted) if origins else ())])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _origins(lines: Sequence[Line]) -> list[str]:
    """Commits, dates and machines of lines, each once."""
    commits = [re.sub(r"^([0-9a-f]{7})[0-9a-f]*", r"\1", line["commit"]) for line in lines]
    dates = [line["date"][:10] for line in lines]
    machines = [line["gpu"] or line["cpu"] for line in lines]
    return [", ".join(dict.fromkeys(found)) for found in (commits, dates, machines)]


def page(results: Results) -> str:
    """docs/numbers.md."""
    parts = [PREAMBLE]
    for section, tables in ON_PAGE.items():
        parts.append(f"\n## {section}\n")
        for table in tables:
            parts.append(f"\n### {table.title}\n\n")
            parts += [f"{_wrapped(table.text)}\n\n"] if table.text else []
            parts.append(markdown(results, table, origins=True))
    return "".join(parts)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False)


def filled(text: str, results: Results, tables: Sequence[Table] = IN_README) -> str:
    """A text with its blocks written anew; ValueError where these are not the tables, each once."""
    known = {table.name: table for table in tables}
    found = [name for name, _ in BLOCK.findall(text)]
    if sorted(found) != sorted(known) or text.count("<!-- numbers:") != len(found):
        raise ValueError(f"the blocks {found} should be {list(known)}, each once and closed")
    return BLOCK.sub(
        lambda block: (
            f"<!-- numbers: {block[1]} -->\n\n"
            f"{markdown(results, known[block[1]], origins=False)}\n<!-- /numbers -->"
        ),
        text,
    )


def differences(old: str, new: str) -> list[str]:
    """The lines that go (-) and come (+)."""
    diff = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
    return [line for line in list(diff)[2:] if not line.startswith("@@")]


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write the tables, or check them; 1 where the check finds a difference."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    args = parser.parse_args(argv)
    results = Results.read(root / RESULTS)
    wrong = 0
    for path in (README, PAGE):
        old = (root / path).read_text() if (root / path).exists() else ""
        new = page(results) if path == PAGE else filled(old, results)
        if old == new:
            continue
        wrong += 1
        if args.check:
            print(f"{path} differs from {RESULTS} (python -m benchmarks.tables writes it):")
        else:
            (root / path).write_text(new)
            print(f"{path}:")
        print(*differences(old, new), sep="\n")
    return int(args.check and wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
