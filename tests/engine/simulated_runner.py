"""A ModelRunner without a model: it keeps token ids in pages, so that a wrong page gives a wrong token.

The next token is a hash of everything read back from the sequence's KV pages and from its adapter's pages. KV
holds a token and the adapter that it was computed with, as real KV depends on both. If a page is shared
wrongly, freed too early, or written by someone else, or an adapter's pages are not the ones that were loaded,
the output differs from `expected_tokens`.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from slora_jax.config import EngineConfig, ModelConfig
from slora_jax.lora.loader import PreparedAdapter
from slora_jax.lora.packing import PackedAdapter
from slora_jax.lora.peft_folder import FolderStamp
from slora_jax.lora.transfer import ArrayCopy, HostCopy, StagedCopy
from slora_jax.memory.layout import MODULES, PageLayout
from slora_jax.pallas_kernels.backend import XLA
from slora_jax.scheduling.scheduler import Chunk, StepPlan
from slora_jax.step_shape import ShapeBuckets

BASE = 0


def next_token(history: Seq[int], fingerprint: int, vocab_size: int) -> int:
    return zlib.crc32(repr((list(history), fingerprint)).encode()) % vocab_size


def expected_tokens(prompt: Seq[int], fingerprint: int, n: int, vocab_size: int) -> list[int]:
    """What a request of n output tokens must give, computed without pages."""
    history = list(prompt)
    for _ in range(n):
        history.append(next_token(history, fingerprint, vocab_size))
    return history[len(prompt) :]


def simulated_adapter(
    layout: PageLayout, fingerprint: int, rank: int, modules: Seq[str] = MODULES[:4]
) -> PreparedAdapter:
    """An adapter of real size whose every page holds its fingerprint."""
    placed = layout.adapter(dict.fromkeys(modules, rank))
    pages = np.full(
        (layout.n_layers, placed.num_pages, layout.tp * layout.page_elems), fingerprint, np.float32
    )
    packed = PackedAdapter(pages=pages, layout=placed, rank=rank, target_modules=tuple(modules), features={})
    return PreparedAdapter(f"/simulated/{fingerprint}", packed)


@dataclasses.dataclass(eq=False)
class SimulatedInFlight:
    """A step that is computed as late as a device may: when its tokens are fetched, or another's after it."""

    rows: list[tuple[int, Chunk]]
    compute: Callable[[], list[int]]
    before: list[SimulatedInFlight]  # that are not computed yet, in their order, this one among them
    tokens: list[int] | None = None

    def fetch(self) -> dict[str, np.ndarray]:
        while self.tokens is None:
            step = self.before[0]
            step.tokens = step.compute()
            del self.before[0]
        return {"tokens": np.asarray(self.tokens, np.int32)}


@dataclasses.dataclass(frozen=True)
class _Computed:
    """What a step knows of a chunk when it is launched."""

    start: int
    count: int
    known: list[int]  # its tokens that the host has; none: the slot's last
    pages: list[int]
    slot: int
    samples: bool
    adapter_pages: list[int]  # none: the base


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
        self._under_way: list[SimulatedInFlight] = []
        self.max_step_tokens = config.max_step_tokens
        self.merges = config.lora_mode == "merge"

    stages_adapters = False
    copy_bytes_per_s: float | None = None
    compiling = False
    packed = None
    compilations = 0
    pinned_host_limit: int | None = None

    def host_copy(self, pages: np.ndarray) -> HostCopy:
        return HostCopy(pages)

    def stage_adapters(self, copies: Seq[HostCopy], pages: Seq[Seq[int]]) -> Seq[StagedCopy]:
        return [ArrayCopy(copy.pages, np.asarray(ids)) for copy, ids in zip(copies, pages, strict=True)]

    def write_adapter(self, staged: StagedCopy) -> None:
        assert isinstance(staged, ArrayCopy)
        pages = np.asarray(staged.pages)
        assert pages.shape[1] == len(staged.ids)
        SimulatedRunner.wait(self)  # a write comes after the steps launched
        for i, page in enumerate(staged.ids):
            self._memory[page] = ("adapter", int(pages[0, i, 0]), i)

    def launch(self, plan: StepPlan) -> SimulatedInFlight:
        assert plan.num_tokens <= self.max_step_tokens
        assert not self.merges or len({c.sequence.generation for c in plan}) == 1, "two adapters in a batch"
        chunks = [self._computed(chunk) for chunk in plan]
        rows = list(enumerate(chunk for chunk in plan if chunk.samples))
        step = SimulatedInFlight(rows, functools.partial(self._compute, chunks), self._under_way)
        self._under_way.append(step)
        return step

    def wait(self) -> None:
        for step in list(self._under_way):
            step.fetch()

    def _computed(self, chunk: Chunk) -> _Computed:
        sequence, end = chunk.sequence, chunk.start + chunk.count
        known = sequence.tokens[chunk.start : end]
        assert known or chunk.count == 1
        assert sequence.slot is not None
        adapter = [] if sequence.adapter is None else list(sequence.adapter.weight_pages)
        pages = list(sequence.pages)
        return _Computed(chunk.start, chunk.count, known, pages, sequence.slot, chunk.samples, adapter)

    def _compute(self, chunks: list[_Computed]) -> list[int]:
        tokens: list[int] = []
        for chunk in chunks:
            fingerprint = self._fingerprint(chunk.adapter_pages)
            history = self._run(chunk, fingerprint)
            if chunk.samples:
                self._last[chunk.slot] = next_token(history, fingerprint, self._vocab)
                tokens.append(self._last[chunk.slot])
        return tokens

    def _run(self, chunk: _Computed, fingerprint: int) -> list[int]:
        """Write the chunk's tokens to the sequence's pages, then read its whole history back."""
        mark, size = self._vocab * fingerprint, self.layout.page_tokens
        for offset, token in enumerate(chunk.known or [self._last[chunk.slot]]):
            position = chunk.start + offset
            page = chunk.pages[position // size]
            if position % size == 0:
                self._memory[page] = [None] * size
            self._memory[page][position % size] = token + mark
        end = chunk.start + chunk.count
        return [self._memory[chunk.pages[p // size]][p % size] - mark for p in range(end)]

    def _fingerprint(self, pages: list[int]) -> int:
        if not pages:
            return BASE
        found = [self._memory[p] for p in pages]
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
        self.tensors = 0  # of an adapter
        self.between_tensors: Callable[[], None] = lambda: None

    def fails(self, what: str) -> None:
        if what in self.failing:
            self.failing.remove(what)
            self.failures += 1
            raise RuntimeError(f"a {what} that was told to fail")

    def stamp(self, path: str) -> FolderStamp:
        return FolderStamp(path, (self.folders[path],))

    def prepare(self, layout: PageLayout, path: str, checkpoint: Callable[[], None]) -> PreparedAdapter:
        self.reads += 1
        for _ in range(self.tensors):
            checkpoint()
            self.between_tensors()
        self.fails("read")
        if path not in self.folders:
            self.failures += 1
            raise FileNotFoundError(f"no adapter at '{path}'")
        fingerprint, rank = self.folders[path]
        made = simulated_adapter(layout, fingerprint, rank)
        return dataclasses.replace(made, path=path, stamp=self.stamp(path), host=HostCopy(made.packed.pages))


class DirectCopy:
    """A copy straight into the pool's pages that is done after some looks at it, or when it is waited for, or
    after some steps, needed or not; perhaps with an error. From its begin until then the pages hold neither
    what they held nor the adapter.
    """

    def __init__(self, runner: StagingRunner, copy: ArrayCopy, looks: int, error: Exception | None) -> None:
        self._runner, self._copy, self._looks, self._error = runner, copy, looks, error
        self._done, self.steps_left = False, looks + 2
        for page in copy.ids:
            runner._memory[page] = "torn"

    def is_ready(self) -> bool:
        self._looks -= 1
        if self._looks < 0:
            self.leave_pages()
        return self._done

    def wait(self) -> None:
        self.leave_pages()
        if self._error is not None:
            raise self._error

    def leave_pages(self) -> None:
        if self._done:
            return
        if self._error is None:
            SimulatedRunner.write_adapter(self._runner, self._copy)
        self._done = True
        self._runner._copies = [copy for copy in self._runner._copies if copy is not self]


class StagingRunner(SimulatedRunner):
    """A device that copies adapters beside its steps: copies take their time and may fail."""

    disk = Disk()
    looks: Callable[[], int] = staticmethod(lambda: 0)
    stages_adapters = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._copies: list[DirectCopy] = []  # under way

    def stage_adapters(self, copies: Seq[HostCopy], pages: Seq[Seq[int]]) -> Seq[StagedCopy]:
        self.disk.fails("stage")
        begun = []
        for host, ids in zip(copies, pages, strict=True):
            error = None
            try:
                self.disk.fails("copy")
            except RuntimeError as failure:
                error = failure
            begun.append(DirectCopy(self, ArrayCopy(host.pages, np.asarray(ids)), self.looks(), error))
        self._copies += begun
        return begun

    def wait(self) -> None:
        super().wait()
        for copy in list(self._copies):
            copy.leave_pages()

    def write_adapter(self, staged: StagedCopy) -> None:
        self.disk.fails("write")
        assert isinstance(staged, DirectCopy)
        assert staged._done

    def launch(self, plan: StepPlan) -> SimulatedInFlight:
        for copy in list(self._copies):
            copy.steps_left -= 1
            if copy.steps_left < 0:
                copy.leave_pages()
        return super().launch(plan)
