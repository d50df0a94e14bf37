"""Timing and recording for bench_kernels.py: what every kernel benchmark shares.

A case measures one shape of one kernel. `lora.py`, `attention.py` and `sampling.py` each export `CASES`;
bench_kernels.py runs those asked for and appends one JSON line a measurement.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.record import commit, json_line
from slora_jax.programs import GPU_OPTIONS

RESULTS = Path(__file__).parents[1] / "results" / "kernels.jsonl"
AGAINST_XLA = not os.environ.get("SLORA_BENCH_NO_XLA")  # `xla_us`, beside some cases


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What this GPU reached in the same run: bytes/s read plus written by a large copy, bf16 FLOP/s."""

    copy: float
    matmul: float


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One result: `value` in the case's unit; `extra` goes into the JSON line beside it (us, TB/s, error)."""

    value: float
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Case:
    """A measurement by name: `run` builds its data, checks the kernel against a reference, then times it.

    It raises AssertionError where the kernel is wrong, so that no wrong kernel gets a time.
    """

    bench: str
    case: dict[str, Any]
    unit: str
    run: Callable[[Ceilings], Measurement]

    @property
    def name(self) -> str:
        return f"{self.bench} " + " ".join(f"{k}={v}" for k, v in self.case.items())


@dataclasses.dataclass(frozen=True)
class Chain:
    """`calls` of a step back to back in one executable (a CUDA graph); the carry is donated."""

    compiled: Callable[..., Any]
    calls: int

    @classmethod
    def compile(
        cls, step: Callable[..., Any], carry: Any, *args: Any, calls: int, as_the_engine: bool = False
    ) -> Chain:
        """Of `carry = step(i, carry, *args)`.

        `carry` (a pytree) is threaded through, so that no call can be dropped or overlap the one before it;
        `i` is a Python int: rotate over layers, pages or buffers with it, so that what a call reads is not
        still in the L2. `as_the_engine`: with its options for a GPU, which keep loops and conditionals in the
        graph.
        """

        def chain(carry: Any, *args: Any) -> Any:
            for i in range(calls):
                carry = step(i, carry, *args)
            return carry

        options = GPU_OPTIONS if as_the_engine and jax.default_backend() == "gpu" else None
        return cls(jax.jit(chain, donate_argnums=0).lower(carry, *args).compile(options), calls)

    def seconds(self, carry: Any, *args: Any, repeats: int = 7, runs: int = 4) -> float:
        """Median of a call. One repeat enqueues `runs` executables and then waits."""
        carry = jax.block_until_ready(self.compiled(self.compiled(carry, *args), *args))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(runs):
                carry = self.compiled(carry, *args)
            jax.block_until_ready(carry)
            times.append((time.perf_counter() - start) / (runs * self.calls))
        return statistics.median(times)

    def device_seconds(self, carry: Any, *args: Any, repeats: int = 7, runs: int = 2) -> tuple[float, float]:
        """Medians of a call: what the device takes, and what the host takes to launch it.

        The host takes longer to launch a graph of many conditionals than the device to run the few that are
        taken. In an engine it is a step ahead. Here copies run while it launches, whose time is subtracted.
        """
        carry = jax.block_until_ready(self.compiled(self.compiled(carry, *args), *args))
        start = time.perf_counter()
        carry = self.compiled(carry, *args)
        launch = time.perf_counter() - start
        number = min(60, 4 + int(1500 * runs * launch))  # of about a millisecond each
        copies, ballast = Chain.compile(_copy, _ballast(), calls=number), _ballast()
        samples: list[tuple[float, float]] = []  # seconds of all calls, of launching them
        for _ in range(1 + repeats):  # the first is warming up
            jax.block_until_ready((ballast, carry))
            start = time.perf_counter()
            ballast = jax.block_until_ready(copies.compiled(ballast))
            alone = time.perf_counter() - start
            ballast = copies.compiled(ballast)
            begin = time.perf_counter()
            for _ in range(runs):
                carry = self.compiled(carry, *args)
            launched = time.perf_counter()
            jax.block_until_ready(carry)
            samples.append((time.perf_counter() - start - 2 * alone, launched - begin))
        device, host = (statistics.median(s) / (runs * self.calls) for s in zip(*samples[1:], strict=True))
        return device, host


def seconds_per_call(
    step: Callable[..., Any], carry: Any, *args: Any, calls: int = 32, repeats: int = 7, runs: int = 4
) -> float:
    """Median seconds of a call in a `Chain`."""
    return Chain.compile(step, carry, *args, calls=calls).seconds(carry, *args, repeats=repeats, runs=runs)


def xla_seconds(step: Callable[..., Any], carry: Any, *args: Any, calls: int = 1) -> float:
    """The same of what the backend `xla` does, compiled as the engine does; in few calls, which are slow."""
    chain = Chain.compile(step, carry, *args, calls=calls, as_the_engine=True)
    return chain.seconds(carry, *args, repeats=3, runs=2)


def _ballast() -> jax.Array:
    """2 GiB on a GPU, which copies that in a millisecond."""
    return jnp.arange(2**29 if jax.default_backend() == "gpu" else 2**20, dtype=jnp.uint32)


def _copy(i: int, x: jax.Array) -> jax.Array:
    once: Any = jax.lax.optimization_barrier  # each call its own pass over memory
    copied: jax.Array = once(x ^ jnp.uint32(i + 1))
    return copied


def measure_ceilings() -> Ceilings:
    """A copy of 2 GiB and an 8192-cubed matrix product of random bf16."""
    once: Any = jax.lax.optimization_barrier  # each call its own pass over memory
    big = _ballast()
    copy = seconds_per_call(_copy, big, calls=8, repeats=5, runs=1)
    n = 8192 if jax.default_backend() == "gpu" else 256
    a, b = (jax.random.normal(jax.random.key(s), (n, n), jnp.bfloat16) for s in (0, 1))
    small = b * jnp.bfloat16(n**-0.5)
    matmul = seconds_per_call(lambda i, x, w: once(x @ w), a, small, calls=8, repeats=5, runs=1)
    return Ceilings(copy=2 * big.nbytes / copy, matmul=2 * n**3 / matmul)


def relative_error(out: jax.Array, reference: jax.Array) -> float:
    """Norm of the difference over the norm of the reference, in float32; NaN wherever either has one."""
    out, reference = out.astype(jnp.float32), reference.astype(jnp.float32)
    return float(jnp.linalg.norm((out - reference).ravel()) / jnp.linalg.norm(reference.ravel()))


def versions() -> dict[str, str]:
    """Versions that a time depends on."""
    import jaxlib

    found = {"python": sys.version.split()[0], "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        found["driver"] = "none"
    return found


def run_cases(cases: Sequence[Case], results: Path) -> int:
    """Measure every case, print a line each, append them to `results`; returns how many failed."""
    ceilings = measure_ceilings()
    shared = {
        "gpu": jax.devices()[0].device_kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "command": " ".join(["python", "-m", "benchmarks.bench_kernels", *sys.argv[1:]]),
        "copy_tb_s": round(ceilings.copy / 1e12, 3),
        "matmul_tflop_s": round(ceilings.matmul / 1e12, 1),
    }
    print(f"{shared['gpu']}: copy {shared['copy_tb_s']} TB/s, matmul {shared['matmul_tflop_s']} TFLOP/s")
    results.parent.mkdir(parents=True, exist_ok=True)
    failed = 0
    for case in cases:
        try:
            measured = case.run(ceilings)
            line = {"bench": case.bench, "case": case.case, "value": measured.value, "unit": case.unit}
            text = json_line(line | measured.extra | shared)
        except Exception as error:  # the other cases still count: device time is scarce
            failed += 1
            print(f"FAILED {case.name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            continue
        with results.open("a") as file:
            file.write(text)
        extra = " ".join(f"{k}={v}" for k, v in measured.extra.items())
        print(f"{case.name}: {measured.value:.4g} {case.unit} {extra}", flush=True)
    return failed
