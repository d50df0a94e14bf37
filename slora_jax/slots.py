"""What steps read of each slot's sequence and what seldom changes, as arrays with a row for each slot."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from slora_jax.lora.store import Adapter
from slora_jax.pallas_kernels.backend import AdapterBlocks
from slora_jax.request import BASE_GENERATION, Sequence, seed_words

_SAMPLING = (  # of SamplingParams, under the same names
    ("temperature", np.float32),
    ("top_k", np.int32),
    ("top_p", np.float32),
    ("min_p", np.float32),
    ("repetition_penalty", np.float32),
    ("presence_penalty", np.float32),
    ("frequency_penalty", np.float32),
)
_REQUEST = np.dtype([*_SAMPLING, ("seed", np.uint32, 2), ("num_logprobs", np.int32)])
SAMPLING_FIELDS = _REQUEST.names or ()  # of sampling.SamplingRows


class SlotTable:
    """A row for each slot, written when the slot gets a sequence; of a batch, NumPy gathers the rest.

    `update` first, for the sequences of a step: what the rows of other slots hold is of no use. A row is
    written anew where its slot has another sequence, or the same one whose pages have `moved` meanwhile;
    pages that a sequence was given are added to its row.
    """

    def __init__(self, slots: int, max_pages: int) -> None:
        self.pages = np.zeros((slots, max_pages), np.int32)  # [slot, m]; 0 behind a sequence's own
        self.prompt_len = np.zeros(slots, np.int32)  # [slot], as the following
        self.request = np.zeros(slots, _REQUEST)
        self.has_bias = np.zeros(slots, np.bool_)  # logit_bias or min_tokens
        self.generation = np.zeros(slots, np.int64)  # of the adapter; BASE_GENERATION: the base model
        self.adapters: list[AdapterBlocks | None] = [None] * slots
        self.writes = 0  # of whole rows: while it stays, every slot has the same sequence and adapter pages
        self._sequences: list[Sequence | None] = [None] * slots
        self._moved = [0] * slots
        self._num_pages = [0] * slots

    def update(self, sequences: Iterable[Sequence]) -> None:
        """Make the rows of these sequences' slots agree with them. O(1) for each whose row does."""
        known, moved, counts = self._sequences, self._moved, self._num_pages
        for sequence in sequences:
            slot = sequence.slot
            assert slot is not None
            if known[slot] is not sequence or moved[slot] != sequence.moved:
                self._write(slot, sequence)
            elif counts[slot] != len(sequence.pages):
                self.pages[slot, counts[slot] : len(sequence.pages)] = sequence.pages[counts[slot] :]
                counts[slot] = len(sequence.pages)

    def _write(self, slot: int, sequence: Sequence) -> None:
        params, count = sequence.request.params, len(sequence.pages)
        self.pages[slot, :count] = sequence.pages
        self.pages[slot, count:] = 0
        self.prompt_len[slot] = sequence.prompt_len
        logprobs = -1 if params.logprobs is None else params.logprobs
        drawn = (getattr(params, name) for name, _ in _SAMPLING)
        self.request[slot] = (*drawn, seed_words(sequence.seed), logprobs)
        self.has_bias[slot] = bool(params.logit_bias) or params.min_tokens > 0
        self.generation[slot] = sequence.generation
        self.adapters[slot] = None if sequence.adapter is None else _adapter_blocks(sequence.adapter)
        self._sequences[slot], self._moved[slot], self._num_pages[slot] = sequence, sequence.moved, count
        self.writes += 1


def number_adapters(generations: Iterable[int]) -> list[int]:
    """0, 1, ... for each adapter's generation in the order that they first come; -1: base model."""
    numbers = {BASE_GENERATION: -1}
    return [numbers.setdefault(generation, len(numbers) - 1) for generation in generations]


def _adapter_blocks(adapter: Adapter) -> AdapterBlocks:
    """A resident adapter as the backend's planner takes it."""
    return np.asarray(adapter.weight_pages, np.int32), *adapter.shape.layout.tables
