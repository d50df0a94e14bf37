"""The requests that have not ended: how one comes to be among them, and what it gives back as it ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Literal

from slora_jax.completion import end
from slora_jax.lora.store import Adapter, AdapterStore
from slora_jax.outbox import Outbox
from slora_jax.outputs import FinishReason
from slora_jax.request import Request, Sequence
from slora_jax.scheduling.scheduler import Scheduler

Outcome = Literal["finished", "aborted", "failed"]


class RequestTable(Mapping[str, Request]):
    """Requests by id, from the queue to their end. Each holds a reference to its adapter, and its sequences
    that have not ended are the scheduler's; the last events of those that are ended here go to `outbox`.

    `outcomes` counts the requests that have ended.
    """

    def __init__(self, adapters: AdapterStore, scheduler: Scheduler, outbox: Outbox) -> None:
        self._adapters, self._scheduler, self._outbox = adapters, scheduler, outbox
        self._requests: dict[str, Request] = {}
        self.outcomes: dict[Outcome, int] = {"finished": 0, "aborted": 0, "failed": 0}

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def ids(self) -> list[str]:
        """Of those that have not ended. Safe in any thread."""
        return list(self._requests)

    def is_taken(self, request_id: str) -> bool:
        """Whether a request of this id has not ended, has events that were not handed out, or a stream."""
        return request_id in self._requests or self._outbox.knows(request_id)

    def add(self, requests: Seq[Request], *, queue_limits: bool) -> None:
        """Queue all of these, whose ids are free, or none: LimitExceededError where they exceed a limit, with
        `queue_limits` also that of a queue.
        """
        acquired: list[Adapter] = []
        try:
            for request in requests:
                if request.adapter is not None:
                    self._adapters.acquire(request.adapter)
                    acquired.append(request.adapter)
            self._scheduler.waiting.check(requests, queue=queue_limits)
        except BaseException:
            for adapter in acquired:
                self._adapters.release(adapter)
            raise
        for request in requests:
            self._requests[request.request_id] = request
            for sequence in request.sequences:
                self._scheduler.waiting.add(sequence)

    def end(
        self,
        request: Request,
        finish_reason: FinishReason,
        error: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """End what is left of a request, with these fields in its last events."""
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._outbox.ready.append(
                    end(sequence, finish_reason, error=error, retry_after_s=retry_after_s)
                )
                self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Give back what an ended sequence holds; with the last one of a request, the request itself."""
        self._scheduler.finish(sequence)
        request = sequence.request
        if not request.finished:
            return
        del self._requests[request.request_id]
        if request.adapter is not None:
            self._adapters.release(request.adapter)
        reasons = {s.finish_reason for s in request.sequences}
        self.outcomes[
            "failed" if "error" in reasons else "aborted" if "abort" in reasons else "finished"
        ] += 1

    def check_integrity(self) -> None:
        """Sequences and references to adapters add up; raises AssertionError saying what does not."""
        live = [s for r in self._requests.values() for s in r.sequences if s.finish_reason is None]
        held = [*self._scheduler.running, *self._scheduler.waiting]
        assert len(live) == len(held) and set(map(id, live)) == set(map(id, held)), (
            "a sequence is lost or doubled"
        )
        for adapter in self._adapters:
            users = sum(r.adapter is adapter for r in self._requests.values())
            assert adapter.users == users, f"adapter '{adapter.name}' has {adapter.users} users, not {users}"
