"""Measurements as JSON lines in benchmarks/results/: what, on which machine, commit and command."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "slora-jax")


def commit() -> str:
    """The checked-out commit, "+changes" where files differ from it (results aside); "unknown" outside a git
    checkout.

    $SLORA_COMMIT overrides it, for machines that get a copy of the files only.
    """
    if named := os.environ.get("SLORA_COMMIT"):
        return named
    folder = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno", "--", ":/", ":(exclude,top)benchmarks/results"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changed else "")


def cpu_name() -> str:
    """The processor as the kernel names it, and how many cores this process may use."""
    cores = len(os.sched_getaffinity(0))
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, {cores} cores"
    return f"{platform.processor() or platform.machine()}, {cores} cores"


def gpu_name() -> str | None:
    """The accelerator's name; None on a CPU."""
    device = jax.devices()[0]
    return None if device.platform == "cpu" else device.device_kind


def json_line(line: Mapping[str, Any]) -> str:
    """A line of results; raises ValueError, which shows it, for what is no JSON: NaN or infinity."""
    try:
        return json.dumps(line, allow_nan=False) + "\n"
    except ValueError as error:
        raise ValueError(f"nothing was measured, or nothing that JSON has ({error}): {line}") from None


def record(
    file: str,
    bench: str,
    case: Mapping[str, Any],
    value: float,
    unit: str,
    *,
    gpu: str | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """Append one measurement to `benchmarks/results/<file>.jsonl` and return it; ValueError for what is no
    JSON.

    Later lines supersede earlier ones of the same bench and case. `gpu` is None for the CPU, which is then
    named.
    """
    line = {
        "bench": bench,
        "case": dict(case),
        "value": value,
        "unit": unit,
        "gpu": gpu,
        "cpu": cpu_name(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in _PACKAGES},
        "command": shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        **extra,
    }
    text = json_line(line)
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{file}.jsonl").open("a") as out:
        out.write(text)
    return line
