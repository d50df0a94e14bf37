"""Copies straight into the pool, on a CPU."""

from __future__ import annotations

import ctypes
import itertools

from slora_jax.lora import cuda_dma


class FakeDma:
    """What `CudaDma` does, on a CPU, when an event is waited for or has been looked at twice."""

    def __init__(self) -> None:
        self.begun: list[dict[str, int]] = []
        self.done = 0
        self.calls = 0
        self.fails_at: int | None = None

    def copy(self, source: int, target: int, **sizes: int) -> None:
        self.calls += 1
        if self.calls == self.fails_at:
            raise cuda_dma.CudaCopyError("a copy that was told to fail")
        self.begun.append({"source": source, "target": target, **sizes})

    def event(self) -> FakeEvent:
        return FakeEvent(self, len(self.begun))

    def wait(self) -> None:
        self.run(len(self.begun))

    def run(self, end: int) -> None:
        for c in self.begun[self.done : end]:
            for z, y in itertools.product(range(c["slices"]), range(c["rows"])):
                ctypes.memmove(
                    c["target"] + (z * c["target_rows"] + y) * c["row_bytes"],
                    c["source"] + (z * c["source_rows"] + y) * c["row_bytes"],
                    c["row_bytes"],
                )
        self.done = max(self.done, end)


class FakeEvent:
    def __init__(self, dma: FakeDma, end: int) -> None:
        self._dma, self._end, self._looks = dma, end, 0

    def is_done(self) -> bool:
        self._looks += 1
        if self._looks > 1:
            self.wait()
        return self._dma.done >= self._end

    def wait(self) -> None:
        self._dma.run(self._end)
