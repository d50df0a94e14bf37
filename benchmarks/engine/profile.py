"""What the kernels of a step do with the GPU: JAX's profile of a few steps, by kind of kernel."""

from __future__ import annotations

import glob
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax

SHARES = {  # kernels of a profile by what they do
    "lora": r"lora",
    "attention": r"decode_mosaic|prefill",
    "gemm": r"gemm|nvjet|cutlass|xmma|dot|cublas",
}


def profile(run: Callable[[int], object], steps: int, milliseconds: float) -> dict[str, Any]:
    """`read_profile` of `run(steps)`."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(steps)
        return read_profile(folder, steps, milliseconds)


def read_profile(folder: str, steps: int, milliseconds: float) -> dict[str, Any]:
    """Share of a step that the GPU idles, and the shares of its busy time by kind of kernel.

    `idle_share` is of a step of so many milliseconds as timed without the profiler, which holds the host up:
    what the traced steps' kernels do not fill of it, between steps or between kernels. `busy_ms` is a traced
    step's time in kernels, `kernels_ms` that of the longest by name, `longest_gaps_us` what lay between two
    kernels. Without a GPU `idle_share` is None, and the rest absent.
    """
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
    shares = {k: round(v / sum(total.values()), 3) for k, v in sorted(total.items())}
    top: dict[str, float] = {}
    for start, stop, name in spans:
        top[name] = top.get(name, 0.0) + (stop - start) / (steps * 1e6)
    largest = dict(sorted(((n[:60], round(v, 3)) for n, v in top.items()), key=lambda p: -p[1])[:12])
    return {
        "idle_share": round(max(0.0, 1 - busy / steps / 1e6 / milliseconds), 4),
        "busy_ms": round(busy / steps / 1e6, 3),
        "longest_gaps_us": gaps(spans),
        "shares": shares,
        "kernels_ms": largest,
    }


def gaps(spans: list[tuple[float, float, str]]) -> list[float]:
    """The ten longest times, in microseconds, in which nothing ran."""
    found, end = [], spans[0][0]
    for start, stop, _ in spans:
        found.append(start - end)
        end = max(end, stop)
    return [round(g / 1e3, 1) for g in sorted(found, reverse=True)[:10]]
