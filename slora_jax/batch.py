"""A step's input: from the scheduler's plan to one packed int32 array, and back to named arrays on the
device.

Everything a step reads from the host travels in one transfer. Letters: t tokens (decode rows first, then the
prefill chunks, then padding), D decode rows, b prefill sequences, R = D + b rows that may sample, m pages
of the longest sequence, n prefill tiles, K bias entries.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slora_jax.memory.layout import GROUPS, MODULES, PageLayout
from slora_jax.pallas_kernels.backend import AdapterBlocks, Backend, lowest_rung
from slora_jax.sampling import SamplingRows
from slora_jax.scheduling.scheduler import Chunk, StepPlan
from slora_jax.slots import SAMPLING_FIELDS, SlotTable, number_adapters
from slora_jax.step_shape import LORA, ShapeBuckets, StepShape, aligned

_Bias = tuple[int, int, float]  # chunk of the plan, token, what is added to its logit
_GROUP_MODULES = tuple(tuple(MODULES.index(m) for m in group) for group in GROUPS)
_KEPT_SHAPES = 8  # whose inputs' memory is kept; each is up to megabytes
_INT32 = np.dtype(np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepBatch:
    """The arrays of `StepShape.fields` on the device, grouped by who reads them."""

    token_ids: jax.Array  # i32[t]
    positions: jax.Array  # i32[t]
    token_page: jax.Array  # i32[t]
    token_slot: jax.Array  # i32[t]
    prompt_len: jax.Array  # i32[t]
    decode_pages: jax.Array  # i32[D, m]
    prefill_pages: jax.Array  # i32[b, m]
    tile_seq: jax.Array  # i32[n]
    tile_start: jax.Array  # i32[n]
    tile_len: jax.Array  # i32[n]
    tile_row: jax.Array  # i32[t - D]
    sample_token: jax.Array  # i32[R]
    sample_slot: jax.Array  # i32[R]
    reset_slot: jax.Array  # i32[R]
    sampling: SamplingRows
    lora: Any | None  # the backend's work list; None: no adapter in the batch


_SAMPLING_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingRows))
_OWN_FIELDS = tuple(f.name for f in dataclasses.fields(StepBatch) if f.name not in ("sampling", "lora"))


def unpack(packed: jax.Array, shape: StepShape, lora_work: type[Any]) -> StepBatch:
    """packed i32[shape.packed_size] -> StepBatch, inside jit (slices and bitcasts only)."""
    arrays, start = {}, 0
    for name, (dims, dtype) in shape.fields.items():
        words = packed[start : start + math.prod(dims)].reshape(dims)
        arrays[name] = words if dtype == _INT32 else lax.bitcast_convert_type(words, jnp.dtype(dtype))
        start += aligned(math.prod(dims))
    return StepBatch(
        **{name: arrays[name] for name in _OWN_FIELDS},
        sampling=SamplingRows(**{name: arrays[name] for name in _SAMPLING_FIELDS}),
        lora=lora_work(**{name: arrays[LORA + name] for name, _ in shape.lora}) if shape.lora else None,
    )


@dataclasses.dataclass(eq=False)
class PackedStep:
    """A step's input in host memory. Its own until `BatchBuilder.launched`, then the builder's again."""

    shape: StepShape
    words: np.ndarray  # i32[packed_size]
    view: Mapping[str, np.ndarray]  # the shape's fields, in these words
    padding: np.ndarray  # i32[w]: the first w words, all before the LoRA work list, where nothing is put
    lora: Mapping[str, np.ndarray]  # the work list that was written to it, by name without LORA

    @classmethod
    def of(cls, shape: StepShape, no_slot: int) -> PackedStep:
        """A new one, all padding. `no_slot` is the number behind the last slot."""
        words = np.zeros(shape.packed_size, np.int32)
        view = _views(words, shape)
        for name in ("token_page", "tile_seq", "num_logprobs"):
            view[name][:] = -1
        for name in ("token_slot", "sample_slot", "reset_slot"):
            view[name][:] = no_slot
        for name in ("top_p", "repetition_penalty"):
            view[name][:] = 1
        view["bias_row"][:] = shape.rows
        without_lora = dataclasses.replace(shape, lora=()).packed_size
        return cls(shape, words, view, words[:without_lora].copy(), {})

    @property
    def wants_logprobs(self) -> bool:
        """Whether a row of it does."""
        return bool((self.view["num_logprobs"] >= 0).any())


class _InputBuffers:
    """Inputs of steps that are done, to be written again: fresh memory costs a page fault every 4 KB.

    One may be written once the step that read it is done, which its outputs tell: until then its transfer
    may be under way, and on a CPU there is none, the step reads the host's memory itself.
    """

    def __init__(self, no_slot: int) -> None:
        self._no_slot = no_slot
        # Launched, the oldest first, each with an output of its step; shapes in the order of their last use.
        self._read: dict[StepShape, collections.deque[tuple[PackedStep, jax.Array]]] = {}

    def take(self, shape: StepShape) -> PackedStep:
        """One of a step that is done, or a new one."""
        read = self._read.get(shape)
        if read and read[0][1].is_ready():  # type: ignore[attr-defined]
            return read.popleft()[0]
        return PackedStep.of(shape, self._no_slot)

    def give(self, step: PackedStep, output: jax.Array) -> None:
        """It was launched, `output` is one of its results. The shape used least recently is let go."""
        read = self._read.pop(step.shape, None) or collections.deque()
        read.append((step, output))
        self._read[step.shape] = read
        if len(self._read) > _KEPT_SHAPES:
            del self._read[next(iter(self._read))]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A plan's chunks, decodes first."""

    decodes: int  # how many
    slot: np.ndarray  # i64[chunks], like the others
    start: np.ndarray
    count: np.ndarray
    samples: np.ndarray  # bool

    @classmethod
    def of(cls, plan: StepPlan) -> _Rows:
        fields = zip(*((c.sequence.slot, c.start, c.count, c.samples) for c in plan), strict=True)
        return cls(len(plan.decodes), *map(np.array, fields))


@dataclasses.dataclass(frozen=True)
class _KeptLora:
    """A LoRA work list, and what it was made for."""

    made_for: tuple[Any, ...]
    shape: StepShape
    arrays: Mapping[str, np.ndarray]


class BatchBuilder:
    """Writes plans into packed arrays. Reads sequences, owns nothing of theirs.

    `merged`: adapters are in the weights, and steps compute no LoRA.
    """

    def __init__(
        self, layout: PageLayout, backend: Backend, buckets: ShapeBuckets, *, merged: bool = False
    ) -> None:
        self._layout, self._backend, self._buckets = layout, backend, buckets
        self._merged = merged
        self._slots = SlotTable(buckets.max_batch_size, buckets.pages[-1])
        self._buffers = _InputBuffers(no_slot=buckets.max_batch_size)
        self._lora_groups: tuple[int, ...] = ()
        self._kept_lora: _KeptLora | None = None

    def expect(self, lora_groups: Iterable[int]) -> tuple[int, ...]:
        """Steps with adapters compute LoRA for these groups of modules from now on; all of them so far.

        Groups are never forgotten, so that executables do not change with every batch's adapters.
        """
        self._lora_groups = tuple(sorted({*self._lora_groups, *lora_groups}))
        return self._lora_groups

    def launched(self, step: PackedStep, output: jax.Array) -> None:
        """The step was launched: when `output`, one of its results, is ready, its memory is used again."""
        self._buffers.give(step, output)

    def build(self, plan: StepPlan) -> PackedStep:
        """A plan's packed input, once `Scheduler.schedule` has committed it; hand it to `launched` after."""
        chunks = list(plan)
        self._slots.update(c.sequence for c in chunks)
        rows = _Rows.of(plan)
        bias = self._bias(chunks, rows)
        shape = self._buckets.fit(
            decodes=len(plan.decodes),
            prefill_tokens=sum(c.count for c in plan.prefills),
            prefill_seqs=len(plan.prefills),
            pages=max(len(c.sequence.pages) for c in chunks),
            bias=len(bias),
        )
        lora: Mapping[str, np.ndarray] = {}
        if not self._merged and self._slots.generation[rows.slot].any():
            shape, lora = self._lora(rows, shape)
        step = self._buffers.take(shape)
        self._pack(plan, rows, step, bias)
        if step.lora is not lora:
            for name, array in lora.items():
                step.view[LORA + name][...] = array
            step.lora = lora
        return step

    def _pack(self, plan: StepPlan, rows: _Rows, step: PackedStep, bias: list[_Bias]) -> None:
        """All but the LoRA work list."""
        view, decodes = step.view, step.shape.decode_rows
        step.words[: len(step.padding)] = step.padding
        self._put_decodes(view, plan.decodes, rows)
        token, tile = decodes, 0
        for index, chunk in enumerate(plan.prefills):
            self._put_chunk(view, chunk, token, view["prefill_pages"][index])
            tile = self._put_tiles(view, chunk, index, token - decodes, tile)
            token += chunk.count
            view["sample_token"][decodes + index] = token - 1
        row = np.arange(len(rows.slot))
        row[len(plan.decodes) :] += decodes - len(plan.decodes)
        self._put_rows(view, row, rows)
        if bias:
            of_chunk, *entries = zip(*bias, strict=True)
            view["bias_row"][: len(bias)] = row[list(of_chunk)]
            view["bias_token"][: len(bias)], view["bias_value"][: len(bias)] = entries

    def _put_decodes(self, view: Mapping[str, np.ndarray], chunks: list[Chunk], rows: _Rows) -> None:
        """Single tokens, a row each."""
        n, table = len(chunks), self._slots
        slot, start = rows.slot[:n], rows.start[:n]
        view["token_ids"][:n] = [
            s.tokens[c.start] if c.start < len(s.tokens) else -1 for c in chunks for s in (c.sequence,)
        ]
        view["positions"][:n] = start
        view["token_page"][:n] = table.pages[slot, start // self._layout.page_tokens]
        view["token_slot"][:n] = slot
        view["prompt_len"][:n] = table.prompt_len[slot]
        view["sample_token"][:n] = np.arange(n)
        pages = view["decode_pages"]
        table.pages[:, : pages.shape[1]].take(slot, axis=0, out=pages[:n], mode="clip")

    def _put_chunk(self, view: Mapping[str, np.ndarray], chunk: Chunk, at: int, table: np.ndarray) -> None:
        """A prompt's tokens from token `at` on, and its sequence's pages into `table` [m]."""
        sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.count
        span = slice(at, at + chunk.count)
        table[:] = self._slots.pages[sequence.slot, : len(table)]
        positions = np.arange(start, end)
        view["token_ids"][span] = sequence.tokens[start:end]
        view["positions"][span] = positions
        view["token_page"][span] = table[positions // self._layout.page_tokens]
        view["token_slot"][span] = sequence.slot
        view["prompt_len"][span] = sequence.prompt_len

    def _put_tiles(
        self, view: Mapping[str, np.ndarray], chunk: Chunk, index: int, start: int, tile: int
    ) -> int:
        """Cut a chunk at its windows' borders, from tile `tile` on; the number of the next one."""
        size, end = self._backend.prefill_tile, start + chunk.count
        first, *others = range(start - start % self._backend.row_alignment, end, size)
        starts = np.array([max(first, start), *others])
        lengths = np.array([*others, end]) - starts
        span = slice(tile, tile + len(starts))
        view["tile_seq"][span] = index
        view["tile_start"][span] = starts
        view["tile_len"][span] = lengths
        nth = np.arange(tile, tile + len(starts))
        view["tile_row"][start:end] = np.repeat(nth * size - starts, lengths) + np.arange(start, end)
        return tile + len(starts)

    def _put_rows(self, view: Mapping[str, np.ndarray], row: np.ndarray, rows: _Rows) -> None:
        """How each row that samples is drawn, and which slots' token counts begin anew."""
        resets = rows.slot[rows.start == 0]
        view["reset_slot"][: len(resets)] = resets
        at, slot = row[rows.samples], rows.slot[rows.samples]
        view["sample_slot"][at] = slot
        request = self._slots.request[slot]
        for name in SAMPLING_FIELDS:
            view[name][at] = request[name]
        view["position"][at] = self._position(rows)[rows.samples]

    def _position(self, rows: _Rows) -> np.ndarray:
        """Of the token that each row samples, among its sequence's outputs."""
        position: np.ndarray = rows.start + rows.count - self._slots.prompt_len[rows.slot]
        return position

    def _bias(self, chunks: list[Chunk], rows: _Rows) -> list[_Bias]:
        """logit_bias, and a ban of every token that would end a sequence before `min_tokens`."""
        entries: list[_Bias] = []
        position = self._position(rows)
        for index in np.flatnonzero(self._slots.has_bias[rows.slot] & rows.samples).tolist():
            sequence = chunks[index].sequence
            params = sequence.request.params
            entries += [(index, token, bias) for token, bias in params.logit_bias.items()]
            if position[index] < params.min_tokens:
                entries += [(index, token, -math.inf) for token in sorted(sequence.stop_ids)]
        return entries

    def _lora(self, rows: _Rows, shape: StepShape) -> tuple[StepShape, Mapping[str, np.ndarray]]:
        """A shape with LoRA, and the work list; the last step's where the same sequences are in its rows."""
        made_for = shape, self._slots.writes, rows.decodes, rows.slot.tobytes(), rows.count.tobytes()
        kept = self._kept_lora
        if kept is None or kept.made_for != made_for or kept.shape.lora_groups != self._lora_groups:
            kept = self._kept_lora = _KeptLora(made_for, *self._new_lora(rows, shape))
        return kept.shape, kept.arrays

    def _new_lora(self, rows: _Rows, shape: StepShape) -> tuple[StepShape, Mapping[str, np.ndarray]]:
        token_adapter, adapters = self._adapters(rows, shape)
        planner, bounds = self._backend.planner, self._buckets.lora_shape(shape)
        needs = planner.needs(token_adapter, adapters, bounds)
        groups = self.expect(g for g, modules in enumerate(_GROUP_MODULES) if _targeted(adapters, modules))
        sizes = lowest_rung(planner, needs, bounds)
        with_lora = self._buckets.with_lora(shape, needs, groups)
        return with_lora, planner.build(token_adapter, adapters, sizes, bounds)

    def _adapters(self, rows: _Rows, shape: StepShape) -> tuple[np.ndarray, list[AdapterBlocks]]:
        """Each token's index among the batch's adapters i32[t] (-1: base), and their pages and blocks."""
        index = np.array(number_adapters(self._slots.generation[rows.slot].tolist()), np.int32)
        _, first = np.unique(index, return_index=True)
        found = [self._slots.adapters[slot] for slot in rows.slot[first].tolist()]
        token_adapter = np.full(shape.tokens, -1, np.int32)
        token_adapter[: rows.decodes] = index[: rows.decodes]
        prompts = np.repeat(index[rows.decodes :], rows.count[rows.decodes :])
        token_adapter[shape.decode_rows : shape.decode_rows + len(prompts)] = prompts
        return token_adapter, [blocks for blocks in found if blocks is not None]


def _targeted(adapters: list[AdapterBlocks], modules: tuple[int, ...]) -> bool:
    """Whether an adapter has rank blocks of one of these modules."""
    return any(blocks[m] for _, blocks, _, _ in adapters for m in modules)


def _views(packed: np.ndarray, shape: StepShape) -> dict[str, np.ndarray]:
    views, start = {}, 0
    for name, (dims, dtype) in shape.fields.items():
        size = math.prod(dims)
        views[name] = packed[start : start + size].view(dtype).reshape(dims)
        start += aligned(size)
    return views
