"""What the kernels of a step do with the GPU: JAX's profile of a few steps, by kind of kernel."""

from __future__ import annotations

import glob
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax

SHARES = {  # kernels of a profile by what they do
    "lora": r"lora",
    "attention": r"decode_mosaic|prefill",
    "gemm": r"gemm|nvjet|cutlass|xmma|dot|cublas",
}


COPIES = re.compile(r"memcpy(h2d|d2h)", re.I)  # by the copy engines, beside the kernels or before them

Span = tuple[float, float, str]  # begin and end in nanoseconds, name


def profile(run: Callable[[int], object], steps: int) -> dict[str, Any]:
    """`read_profile` of `run(steps)`, which ends when the device has done all of them."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would hold the host up in every call of a function
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run(steps)
        return read_profile(folder, steps)


def read_profile(folder: str, steps: int) -> dict[str, Any]:
    """`summary` of what ran on the GPUs in a trace."""
    files = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    spans: list[Span] = []
    for plane in jax.profiler.ProfileData.from_file(files[0]).planes if files else ():
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    spans += [(e.start_ns, e.start_ns + e.duration_ns, e.name) for e in line.events]
    return summary(spans, steps)


def summary(spans: Sequence[Span], steps: int) -> dict[str, Any]:
    """Share of a traced step that the GPU idles, and the shares of its busy time by kind of kernel.

    `idle_share` is what kernels do not fill of the time from the first one to the end of the last, between
    steps or between kernels; a GPU that waits for a copy from or to the host idles. It is an upper bound:
    tracing can only add to what lies between two kernels. (Lines before 2026-12-01, commit 66f9e2d, of
    `decode_step` and `mixed_step` compare the traced kernels with a step that was not traced, in which they
    take less: some are below 0.) `traced_ms` is that time a step, `busy_ms` what kernels fill of it,
    `kernels_ms` that of the longest by name, `longest_gaps_us` what lay between two kernels. Without
    kernels `idle_share` and `shares` are None, and the rest absent.
    """
    spans = sorted(span for span in spans if not COPIES.match(span[2]))
    if not spans:
        return {"idle_share": None, "shares": None}
    busy, end = 0.0, spans[0][0]
    total: dict[str, float] = {}
    top: dict[str, float] = {}
    for start, stop, name in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        kind = next((k for k, pattern in SHARES.items() if re.search(pattern, name, re.I)), "other")
        total[kind] = total.get(kind, 0.0) + stop - start
        top[name] = top.get(name, 0.0) + (stop - start) / (steps * 1e6)
    busy_ms = busy / steps / 1e6
    traced_ms = (end - spans[0][0]) / steps / 1e6
    return {
        "idle_share": round(1 - busy_ms / traced_ms, 4),
        "traced_ms": round(traced_ms, 3),
        "busy_ms": round(busy_ms, 3),
        "longest_gaps_us": gaps(spans),
        "shares": {k: round(v / sum(total.values()), 3) for k, v in sorted(total.items())},
        "kernels_ms": {n[:60]: round(v, 3) for n, v in sorted(top.items(), key=lambda p: -p[1])[:12]},
    }


def gaps(spans: Sequence[Span]) -> list[float]:
    """The ten longest times, in microseconds, in which nothing ran."""
    found, end = [], spans[0][0]
    for start, stop, _ in spans:
        found.append(start - end)
        end = max(end, stop)
    return [round(g / 1e3, 1) for g in sorted(found, reverse=True)[:10]]
