"""The static sizes of a step: the arrays of its packed input, and the ladders that sizes are padded to.

Letters as in batch.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np

from slora_jax.memory.layout import MODULES, PageLayout
from slora_jax.pallas_kernels.backend import Backend, LoraShape, lowest_rung

Field = tuple[tuple[int, ...], np.dtype]
LORA = "lora."  # before the names of the work list's arrays
_ALIGNMENT = 64  # words: GPU kernels take inputs that begin at multiples of 256 bytes
_I, _F, _U = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.uint32)


@dataclasses.dataclass(frozen=True)
class StepShape:
    """The static sizes of a step; one executable each."""

    decode_rows: int
    prefill_tokens: int
    prefill_seqs: int
    tiles: int
    pages: int
    bias: int
    lora: tuple[tuple[str, tuple[int, ...]], ...] = ()  # name and shape of the work list's arrays; (): none
    lora_groups: tuple[int, ...] = ()  # of layout.GROUPS: those whose projections may have LoRA

    @property
    def tokens(self) -> int:
        return self.decode_rows + self.prefill_tokens

    @property
    def rows(self) -> int:
        return self.decode_rows + self.prefill_seqs

    @functools.cached_property
    def fields(self) -> Mapping[str, Field]:
        """Name -> (shape, dtype) of every array in the packed input, in order."""
        t, r, b, m = (self.tokens,), (self.rows,), self.prefill_seqs, self.pages
        return {
            "token_ids": (t, _I),  # -1: the slot's last sampled token
            "positions": (t, _I),
            "token_page": (t, _I),  # where its KV goes; -1: padding
            "token_slot": (t, _I),  # the sequence's slot; max_batch_size: padding
            "prompt_len": (t, _I),
            "decode_pages": ((self.decode_rows, m), _I),
            "prefill_pages": ((b, m), _I),
            "tile_seq": ((self.tiles,), _I),  # row of prefill_pages; -1: padding
            "tile_start": ((self.tiles,), _I),  # first token, counted from the first prefill token
            "tile_len": ((self.tiles,), _I),
            "tile_row": ((self.prefill_tokens,), _I),  # tile * TILE + offset of each prefill token
            "sample_token": (r, _I),  # the token whose hidden state row r samples from
            "sample_slot": (r, _I),  # max_batch_size: row does not sample
            "reset_slot": (r, _I),  # slots whose token counts begin anew; then max_batch_size: none
            "temperature": (r, _F),
            "top_k": (r, _I),
            "top_p": (r, _F),
            "min_p": (r, _F),
            "repetition_penalty": (r, _F),
            "presence_penalty": (r, _F),
            "frequency_penalty": (r, _F),
            "seed": ((self.rows, 2), _U),
            "position": (r, _I),
            "num_logprobs": (r, _I),
            "bias_row": ((self.bias,), _I),
            "bias_token": ((self.bias,), _I),
            "bias_value": ((self.bias,), _F),
        } | {LORA + name: (dims, _I) for name, dims in self.lora}

    @functools.cached_property
    def packed_size(self) -> int:
        """int32 words of the packed input."""
        return sum(aligned(math.prod(shape)) for shape, _ in self.fields.values())


def aligned(words: int) -> int:
    """Words of an array in the packed input, with what the next one's alignment takes."""
    return -(-words // _ALIGNMENT) * _ALIGNMENT


@dataclasses.dataclass(frozen=True)
class ShapeBuckets:
    """The ladders of sizes that steps are padded to, so that few executables serve every batch."""

    decode_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    pages: tuple[int, ...]
    bias: tuple[int, ...]
    mixed_prefill_tokens: int  # most prompt tokens of a step with decodes
    max_batch_size: int
    layout: PageLayout
    backend: Backend

    @classmethod
    def for_engine(
        cls,
        layout: PageLayout,
        backend: Backend,
        *,
        max_batch_size: int,
        max_step_tokens: int,
        max_model_len: int,
        ratio: int,
    ) -> ShapeBuckets:
        """Geometric ladders of the given ratio; fewer rungs compile less, more rungs pad less."""
        longest = -(-max_model_len // layout.page_tokens)
        # A step with decodes has max_batch_size rows for them; with the largest rung beside, max_step_tokens.
        mixed = max_step_tokens - max_batch_size
        mixed = mixed if mixed >= max_step_tokens // 2 else max_step_tokens
        rungs = {-(-tokens // layout.page_tokens) for tokens in backend.context_rungs}
        return cls(
            decode_rows=_ladder(max_batch_size, 2, ratio),
            prefill_tokens=_prefill_ladder(mixed, max_step_tokens),
            mixed_prefill_tokens=mixed,
            pages=(*sorted(n for n in rungs if n < longest), longest),
            # Never 0: XLA (jaxlib 0.11.2) crashes over an input of no elements that a shard_map does not use.
            bias=_ladder(max_batch_size * 1280, 64, 16),
            max_batch_size=max_batch_size,
            layout=layout,
            backend=backend,
        )

    @property
    def max_prefill_seqs(self) -> int:
        """Most prompts whose chunks of two or more tokens may share a step."""
        return self._prefill_seqs(self.prefill_tokens[-1])

    def usual(self, lora_groups: tuple[int, ...], pages: int = 1) -> list[StepShape]:
        """The shapes that most steps of short conversations have: decodes, and prefills beside them.

        First without LoRA, then with LoRA for these groups of modules; sequences of so many pages.
        """
        plain = [
            self.fit(decodes=n, prefill_tokens=0, prefill_seqs=0, pages=pages, bias=0)
            for n in self.decode_rows
        ]
        plain += [
            self.fit(decodes=n, prefill_tokens=tokens, prefill_seqs=1, pages=pages, bias=0)
            for tokens in self.prefill_tokens
            for n in (0, 1)
            if not n or tokens <= self.mixed_prefill_tokens
        ]
        with_lora = [shape for step in plain for shape in self._usual_lora(step, lora_groups)]
        return plain + with_lora

    def _usual_lora(self, shape: StepShape, groups: tuple[int, ...]) -> list[StepShape]:
        """A shape with each size of LoRA work lists that usual batches need."""
        bounds, planner = self.lora_shape(shape), self.backend.planner
        rungs = range(1, planner.usual_rung(bounds) + 1)
        return [self.with_lora(shape, planner.sizes(rung, bounds), groups) for rung in rungs]

    def fit(
        self, *, decodes: int, prefill_tokens: int, prefill_seqs: int, pages: int, bias: int
    ) -> StepShape:
        """The smallest shape of the ladders that holds so much; without LoRA."""
        if prefill_tokens:
            rows = self.decode_rows[-1] if decodes else 0
            tokens = next(
                t
                for t in self.prefill_tokens
                if t >= prefill_tokens and self._prefill_seqs(t) >= prefill_seqs
            )
            seqs = self._prefill_seqs(tokens)
        else:
            rows, tokens, seqs = _rung(self.decode_rows, decodes), 0, 0
        return StepShape(
            decode_rows=rows,
            prefill_tokens=tokens,
            prefill_seqs=seqs,
            tiles=(tokens + seqs * (self.backend.row_alignment - 1)) // self.backend.prefill_tile + seqs,
            pages=_rung(self.pages, pages),
            bias=_rung(self.bias, bias),
        )

    def with_lora(self, shape: StepShape, needs: tuple[int, ...], groups: tuple[int, ...]) -> StepShape:
        """A shape with the lowest rung of LoRA work lists that holds `needs` of the backend's planner."""
        bounds, planner = self.lora_shape(shape), self.backend.planner
        fields = planner.fields(lowest_rung(planner, needs, bounds), bounds)
        return dataclasses.replace(shape, lora=tuple(fields.items()), lora_groups=groups)

    def lora_shape(self, shape: StepShape) -> LoraShape:
        """The bounds of a step's LoRA work."""
        layout = self.layout
        return LoraShape(
            tokens=shape.tokens,
            decode_rows=shape.decode_rows,
            prefill_seqs=shape.prefill_seqs,
            chunks_per_page=layout.chunks_per_page,
            a_chunks=tuple(layout.a_chunks(m) for m in MODULES),
            b_chunks=tuple(layout.b_chunks(m) for m in MODULES),
        )

    def _prefill_seqs(self, tokens: int) -> int:
        return min(self.max_batch_size, max(1, tokens // 16))


def _ladder(limit: int, start: int, ratio: int) -> tuple[int, ...]:
    rungs = []
    while start < limit:
        rungs.append(start)
        start *= ratio
    return (*rungs, limit)


def _prefill_ladder(mixed: int, limit: int) -> tuple[int, ...]:
    """The most that a step with decodes takes, a half, an eighth, a 32nd of it, ...; and `limit`.

    Long steps are the usual ones (prompts gather), and their padding is the dearest.
    """
    rungs, rung = {mixed, limit}, mixed // 2
    while rung > 16:
        rungs.add(min(-(-rung // 32) * 32, limit))
        rung //= 4
    return tuple(sorted(rungs))


def _rung(ladder: tuple[int, ...], need: int) -> int:
    return next(r for r in ladder if r >= need)
