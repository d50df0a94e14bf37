"""A ModelRunner without a model: it keeps token ids in pages, so that a wrong page gives a wrong token.

The next token is a hash of everything read back from the sequence's KV pages and from its adapter's pages. KV
holds a token and the adapter that it was computed with, as real KV depends on both. If a page is shared
wrongly, freed too early, or written by someone else, or an adapter's pages are not the ones that were loaded,
the output differs from `expected_tokens`.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from slora_jax.batch import ShapeBuckets
from slora_jax.config import EngineConfig, ModelConfig
from slora_jax.lora.loader import PreparedAdapter
from slora_jax.lora.packing import PackedAdapter
from slora_jax.lora.peft_folder import FolderStamp
from slora_jax.lora.transfer import HostCopy, StagedCopy
from slora_jax.memory.layout import MODULES, PageLayout
from slora_jax.pallas_kernels.backend import XLA
from slora_jax.scheduling.scheduler import Chunk, StepPlan

BASE = 0


def next_token(history: Seq[int], fingerprint: int, vocab_size: int) -> int:
    return zlib.crc32(repr((list(history), fingerprint)).encode()) % vocab_size


def expected_tokens(prompt: Seq[int], fingerprint: int, n: int, vocab_size: int) -> list[int]:
    """What a request of n output tokens must give, computed without pages."""
    history = list(prompt)
    for _ in range(n):
        history.append(next_token(history, fingerprint, vocab_size))
    return history[len(prompt) :]


def simulated_adapter(layout: PageLayout, fingerprint: int, rank: int) -> PreparedAdapter:
    """An adapter of real size whose every page holds its fingerprint."""
    placed = layout.adapter({m: rank for m in MODULES[:4]})
    pages = np.full(
        (layout.n_layers, placed.num_pages, layout.tp * layout.page_elems), fingerprint, np.float32
    )
    packed = PackedAdapter(pages=pages, layout=placed, rank=rank, target_modules=MODULES[:4], features={})
    return PreparedAdapter(f"/simulated/{fingerprint}", packed)


class SimulatedInFlight:
    def __init__(self, rows: list[tuple[int, Chunk]], tokens: list[int]) -> None:
        self.rows = rows
        self._tokens = np.asarray(tokens, np.int32)

    def fetch(self) -> dict[str, np.ndarray]:
        return {"tokens": self._tokens}


class SimulatedRunner:
    """Takes ModelRunner's place in an Engine (same constructor and methods)."""

    def __init__(
        self,
        model_config: ModelConfig,
        config: EngineConfig,
        mesh: Any,
        layout: PageLayout,
        num_pages: int,
        max_model_len: int,
        params: Any,
    ) -> None:
        self.layout, self._vocab = layout, model_config.vocab_size
        self.buckets = ShapeBuckets.for_engine(
            layout,
            XLA,
            max_batch_size=config.max_batch_size,
            max_step_tokens=config.max_step_tokens,
            max_model_len=max_model_len,
            ratio=4,
        )
        self._memory: list[Any] = [None] * num_pages
        self._last: dict[int, int] = {}
        self.max_step_tokens = config.max_step_tokens
        self.merges = config.lora_mode == "merge"

    stages_adapters = False
    copy_bytes_per_s: float | None = None
    packed = None
    compilations = 0
    pinned_host_limit: int | None = None

    def host_copy(self, pages: np.ndarray) -> HostCopy:
        return HostCopy(pages)

    def stage_adapters(self, copies: Seq[HostCopy], pages: Seq[Seq[int]]) -> list[StagedCopy]:
        return [StagedCopy(copy.pages, np.asarray(ids)) for copy, ids in zip(copies, pages, strict=True)]

    def write_adapters(self, staged: Seq[StagedCopy]) -> None:
        for copy in staged:
            pages = np.asarray(copy.pages)
            assert pages.shape[1] == len(copy.ids)
            for i, page in enumerate(copy.ids):
                self._memory[page] = ("adapter", int(pages[0, i, 0]), i)

    def launch(self, plan: StepPlan) -> SimulatedInFlight:
        assert plan.num_tokens <= self.max_step_tokens
        assert not self.merges or len({c.sequence.generation for c in plan}) == 1, "two adapters in a batch"
        rows: list[tuple[int, Chunk]] = []
        tokens: list[int] = []
        for chunk in plan:
            fingerprint = self._fingerprint(chunk)
            history = self._run(chunk, fingerprint)
            if chunk.samples:
                token = next_token(history, fingerprint, self._vocab)
                assert chunk.sequence.slot is not None
                self._last[chunk.sequence.slot] = token
                rows.append((len(tokens), chunk))
                tokens.append(token)
        return SimulatedInFlight(rows, tokens)

    def _run(self, chunk: Chunk, fingerprint: int) -> list[int]:
        """Write the chunk's tokens to the sequence's pages, then read its whole history back."""
        mark = self._vocab * fingerprint
        sequence, size = chunk.sequence, self.layout.page_tokens
        known = sequence.tokens[chunk.start : chunk.start + chunk.count]
        assert known or chunk.count == 1
        assert sequence.slot is not None
        for offset, token in enumerate(known or [self._last[sequence.slot]]):
            position = chunk.start + offset
            page = sequence.pages[position // size]
            if position % size == 0:
                self._memory[page] = [None] * size
            self._memory[page][position % size] = token + mark
        end = chunk.start + chunk.count
        return [self._memory[sequence.pages[p // size]][p % size] - mark for p in range(end)]

    def _fingerprint(self, chunk: Chunk) -> int:
        adapter = chunk.sequence.adapter
        if adapter is None:
            return BASE
        found = [self._memory[p] for p in adapter.weight_pages]
        fingerprint = found[0][1]
        assert found == [("adapter", fingerprint, i) for i in range(len(found))], found
        return int(fingerprint)


class Disk:
    """Folders by path, each with its adapter's fingerprint and rank; what is told to fail does, once."""

    def __init__(self) -> None:
        self.folders: dict[str, tuple[int, int]] = {}
        self.failing: list[str] = []  # what fails next: read, stage, copy or write
        self.failures = 0
        self.reads = 0

    def fails(self, what: str) -> None:
        if what in self.failing:
            self.failing.remove(what)
            self.failures += 1
            raise RuntimeError(f"a {what} that was told to fail")

    def stamp(self, path: str) -> FolderStamp:
        return FolderStamp(path, (self.folders[path],))

    def prepare(self, layout: PageLayout, path: str) -> PreparedAdapter:
        self.reads += 1
        self.fails("read")
        if path not in self.folders:
            self.failures += 1
            raise FileNotFoundError(f"no adapter at '{path}'")
        fingerprint, rank = self.folders[path]
        made = simulated_adapter(layout, fingerprint, rank)
        return dataclasses.replace(made, path=path, stamp=self.stamp(path), host=HostCopy(made.packed.pages))


class SlowCopy(StagedCopy):
    """A copy that is done after some looks at it, or when it is waited for; perhaps with an error."""

    def __init__(self, copy: StagedCopy, looks: int, error: Exception | None) -> None:
        super().__init__(copy.pages, copy.ids)
        object.__setattr__(self, "state", [looks, error])

    def is_ready(self) -> bool:
        self.state[0] -= 1  # type: ignore[attr-defined]
        return bool(self.state[0] < 0)  # type: ignore[attr-defined]

    def wait(self) -> None:
        error = self.state[1]  # type: ignore[attr-defined]
        self.state[0] = 0  # type: ignore[attr-defined]
        if error is not None:
            raise error


class StagingRunner(SimulatedRunner):
    """A device with memory of its own: copies take their time and may fail."""

    disk = Disk()
    looks: Callable[[], int] = staticmethod(lambda: 0)
    stages_adapters = True

    def stage_adapters(self, copies: Seq[HostCopy], pages: Seq[Seq[int]]) -> list[StagedCopy]:
        self.disk.fails("stage")
        slow: list[StagedCopy] = []
        for copy in super().stage_adapters(copies, pages):
            error = None
            try:
                self.disk.fails("copy")
            except RuntimeError as failure:
                error = failure
            slow.append(SlowCopy(copy, self.looks(), error))
        return slow

    def write_adapters(self, staged: Seq[StagedCopy]) -> None:
        self.disk.fails("write")
        super().write_adapters(staged)
