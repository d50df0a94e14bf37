"""Who is next where one adapter at a time is merged into the weights (`lora_mode="merge"`).

The batch has one adapter, the *turn*'s (the base counts as one), until nobody of it is left or enough others
were overtaken; then the batch drains, and whoever waits longest has the next turn.
"""

from __future__ import annotations

import dataclasses

from slora_jax.lora.store import Adapter
from slora_jax.request import Sequence
from slora_jax.scheduling.policies import Passes, RankHeap


@dataclasses.dataclass
class Turn:
    """The adapter of the sequence that was admitted last; None: the base."""

    adapter: Adapter | None = None


class MergeOrder:
    """Sequences of the turn first, by rank; when `max_passes` that came later have gone before the oldest, or
    none of the turn is left, all by rank. `turn` is shared by the orders of a queue, whose owner keeps it.
    """

    def __init__(self, max_passes: int, turn: Turn) -> None:
        self._max_passes, self._turn = max_passes, turn
        self._all = RankHeap()
        self._of: dict[Adapter | None, RankHeap] = {}
        self._passes = Passes()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, sequence: Sequence) -> None:
        self._passes.arrived(sequence)
        self.release(sequence)

    def head(self) -> Sequence | None:
        own = self._of.get(self._turn.adapter)
        if own is not None and self._passes.count() < self._max_passes:
            return own.head()
        return self._all.head()

    def hold(self, sequence: Sequence) -> None:
        self._all.discard(sequence)
        own = self._of.get(sequence.adapter)
        if own is not None:
            own.discard(sequence)
            if not own:
                del self._of[sequence.adapter]

    def release(self, sequence: Sequence) -> None:
        self._all.push(sequence)
        self._of.setdefault(sequence.adapter, RankHeap()).push(sequence)

    def remove(self, sequence: Sequence, admitted: bool) -> None:
        self.hold(sequence)
        self._passes.left(sequence)
