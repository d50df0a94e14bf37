"""Events on their way to whoever asked for their requests: the caller of `Engine.step`, or a stream."""

from __future__ import annotations

from collections.abc import Set

from slora_jax.outputs import StreamEvent


class Outbox:
    """Who steps the engine meets everybody's events: what is others' is kept for them.

    `ready` takes all events as they come; once sorted, it is what is handed out next. Whoever hands it out
    leaves a new list there.
    """

    def __init__(self) -> None:
        self.ready: list[StreamEvent] = []
        self._kept: dict[str, list[StreamEvent]] = {}  # by request id
        self._streamed: set[str] = set()  # request ids of open streams

    def sort(self, mine: Set[str] | None = None) -> bool:
        """Leave in `ready` all events of the stream of the requests `mine`, or (None) of the requests that no
        stream has; whether there are any.
        """
        if self._kept or (self._streamed and not self._all_for(mine)):
            for event in self.ready:
                self._kept.setdefault(event.request_id, []).append(event)
            own = self._kept.keys() - self._streamed if mine is None else mine
            found = [request_id for request_id in self._kept if request_id in own]
            self.ready = [event for request_id in found for event in self._kept.pop(request_id)]
        return bool(self.ready)

    def _all_for(self, mine: Set[str] | None) -> bool:
        """Whether what is ready is all for the stream of the requests `mine`, or (None) for `step`."""
        if mine is None:
            return all(event.request_id not in self._streamed for event in self.ready)
        return all(event.request_id in mine for event in self.ready)

    def is_streamed(self, request_id: str) -> bool:
        """Whether a request has a stream."""
        return request_id in self._streamed

    def open(self, request_ids: Set[str]) -> None:
        """These requests have a stream from now on."""
        self._streamed |= request_ids

    def close(self, request_ids: Set[str]) -> None:
        """Their stream is over: what it has not taken is dropped."""
        mine = self._streamed & request_ids
        self._streamed -= mine
        for request_id in mine:
            self._kept.pop(request_id, None)
        self.ready = [event for event in self.ready if event.request_id not in mine]

    def remove(self, request_id: str) -> list[StreamEvent]:
        """Take a request's events out, oldest first."""
        own = [event for event in self.ready if event.request_id == request_id]
        self.ready = [event for event in self.ready if event.request_id != request_id]
        return self._kept.pop(request_id, []) + own

    def knows(self, request_id: str) -> bool:
        """Whether a request has events that were not handed out, or a stream that was not closed."""
        if request_id in self._kept or request_id in self._streamed:
            return True
        return any(event.request_id == request_id for event in self.ready)

    def has_any_for_step(self) -> bool:
        """Whether there are events of requests that no stream has."""
        unsorted = any(event.request_id not in self._streamed for event in self.ready)
        return unsorted or bool(self._kept.keys() - self._streamed)
