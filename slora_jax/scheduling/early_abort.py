"""Early abort: requests that cannot have their first token in time are ended, so that others can.

S-LoRA, section "admission control": under overload, serving everybody in order makes everybody late. The rule
keeps the latest requests that can be served within the target, and serves those in order of arrival.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math

from slora_jax.request import Call, Request

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Overdue:
    """A request that is to be ended now, and why; None: coming back at another time would not help it."""

    request: Request
    reason: str
    retry_after_s: float | None = None


class MovingRate:
    """Events a second, older ones weighted less by a factor e every `window` seconds."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._events = self._seconds = 0.0
        self.observed = 0.0  # seconds, unweighted

    def add(self, events: int, seconds: float) -> None:
        """So many events in the next `seconds`."""
        keep = math.exp(-seconds / self._window)
        self._events = self._events * keep + events
        self._seconds = self._seconds * keep + self._window * (1 - keep)
        self.observed += seconds

    @property
    def value(self) -> float:
        """0 before any time was observed."""
        return self._events / self._seconds if self._seconds > 0 else 0.0

    @property
    def upper(self) -> float:
        """One standard deviation of so many events above `value`."""
        return (self._events + math.sqrt(self._events)) / self._seconds if self._seconds > 0 else 0.0


class MovingBound:
    """What a noisy time seldom exceeds: moving mean and twice the moving mean deviation (TCP's estimator)."""

    def __init__(self) -> None:
        self._mean: float | None = None
        self._deviation = 0.0

    def add(self, seconds: float) -> None:
        """One more of those times."""
        if self._mean is None:
            self._mean = seconds
            return
        self._deviation += (abs(seconds - self._mean) - self._deviation) / 8
        self._mean += (seconds - self._mean) / 8

    @property
    def value(self) -> float:
        """Seconds; 0 before the first one."""
        return 0.0 if self._mean is None else self._mean + 2 * self._deviation


class EarlyAbort:
    """Which calls to give up, given the rates at which others arrive and are taken. O(1) a request.

    One that has begun is never given up, nor one that came since the last step while a slot is free for it.
    Let T be the target and p the time from a request's start to its
    first token. Those whose age plus p exceeds T are late whatever happens. While calls come at least as fast
    as they are begun (mu a second, measured while some wait, a standard deviation in their favour), only the
    latest mu * (T - p) can be in time; older ones are given up.
    """

    def __init__(self, target_s: float, max_batch_size: int) -> None:
        self._target = target_s
        self._max_batch_size = max_batch_size
        # Calls that have not begun, oldest first, and their requests that may be taken.
        self._waiting: collections.OrderedDict[Call, dict[Request, None]] = collections.OrderedDict()
        self._arrivals, self._service = MovingRate(3 * target_s), MovingRate(3 * target_s)
        self._first_token = MovingBound()
        self._then: float | None = None
        self._compiled_at = -math.inf
        self._full_for: float | None = None  # seconds before _then, if somebody waited all that time
        self._arrived = self._started = 0  # since _then

    def add(self, request: Request) -> None:
        """It may be taken from now on; once more for each of its sequences has no effect."""
        call = request.call
        if call.begun:
            return
        if call not in self._waiting:
            self._waiting[call] = {}
            self._arrived += 1
        self._waiting[call][request] = None

    def started(self, request: Request) -> None:
        """One of its sequences was admitted."""
        call = request.call
        call.begun = True
        if self._waiting.pop(call, None) is not None:
            self._started += 1

    def forget(self, request: Request) -> None:
        """It has ended."""
        requests = self._waiting.get(request.call)
        if requests is not None:
            requests.pop(request, None)
            if not requests:
                del self._waiting[request.call]

    def first_token(self, request: Request) -> None:
        """It has its first token."""
        metrics = request.metrics
        assert metrics.first_token_time is not None and metrics.first_scheduled_time is not None
        if metrics.first_scheduled_time > self._compiled_at:
            self._first_token.add(metrics.first_token_time - metrics.first_scheduled_time)

    def compiled(self, now: float) -> None:
        """A step compiled until now: what it kept waiting says nothing of the steps to come."""
        self._compiled_at = now
        self._then = self._full_for = None

    def late(self, now: float, *, running: int) -> list[Overdue]:
        """Take out the calls to give up, and list their requests. Once a step, before any is admitted.

        `running`: sequences that run. With none, what first tokens took before (a full batch, say) means
        little; who is in time by now is served, and measured anew.
        """
        slots, tried_at = self._max_batch_size - running, self._then
        self._measure(now)
        room = self._target if not running else self._target - self._first_token.value
        keep = len(self._waiting)
        if self._service.observed >= self._target and self._arrivals.value >= self._service.upper:
            keep = max(1, int(self._service.upper * room))
        late: list[tuple[Call, float]] = []
        for call in self._waiting:
            waited = now - _arrival(call)
            if waited <= room and len(self._waiting) - len(late) <= keep:
                break
            if slots > 0 and (tried_at is None or _arrival(call) > tried_at):
                slots -= sum(request.params.n for request in self._waiting[call])
                continue
            late.append((call, waited))
        for call, _ in late:
            del self._waiting[call]
        given_up = [(r, waited) for call, waited in late for r in call.requests if not r.finished]
        if given_up:
            logger.info(
                "early-abort gave up %d requests, the oldest after %.2f s: their first tokens would miss "
                "ttft_target_s %g (%s)",
                len(given_up),
                given_up[0][1],
                self._target,
                self._rates,
            )
        return [Overdue(r, _reason(waited, self._drain_s), self._drain_s) for r, waited in given_up]

    @property
    def _drain_s(self) -> float:
        """Seconds until those that wait now are served at the measured rate, or given up at the latest."""
        rate = self._service.value
        return min(self._target, len(self._waiting) / rate) if rate > 0 else self._target

    def _measure(self, now: float) -> None:
        if self._full_for is not None:  # those just taken are all for whom it made room
            self._service.add(self._started, self._full_for)
            self._full_for = None
        if self._then is not None:
            self._arrivals.add(self._arrived, now - self._then)
            oldest = next(iter(self._waiting), None)
            if oldest is not None and _arrival(oldest) <= self._then:  # was left waiting then
                self._full_for = now - self._then
        self._then = now
        self._arrived = self._started = 0

    @property
    def _rates(self) -> str:
        if not self._service.observed:
            return "no rates were measured yet"
        return f"{self._arrivals.value:.2f} calls/s arrive, {self._service.value:.2f} are served"


def _arrival(call: Call) -> float:
    return call.requests[0].metrics.arrival_time


def _reason(waited: float, retry_after_s: float) -> str:
    """For the client, who can do nothing about settings and rates. The seconds are those of Retry-After."""
    retry = max(1, math.ceil(retry_after_s))
    return f"given up after {waited:.2f} s: its first token would come too late; retry in {retry} s"
