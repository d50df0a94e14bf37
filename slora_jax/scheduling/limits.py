"""Limits of a tenant and of an adapter: sequences at once, tokens a minute, sequences that wait.

They hold for each one of a kind; a name may have its own.

Requests that would exceed the queue or the tokens are refused with LimitExceededError, before any is queued.
Sequences beyond `max_concurrency` are parked: they wait without standing in the way of others.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping

from slora_jax.config import LIMITS, EngineConfig, NamedLimits
from slora_jax.errors import LimitExceededError
from slora_jax.request import Request, Sequence
from slora_jax.scheduling.policies import RankHeap

_QUEUE_RETRY_S = 1.0  # a full queue moves with the next sequence that ends


@dataclasses.dataclass(frozen=True)
class Limit:
    """Of one of a kind ("tenant" or "adapter"); None: no limit."""

    kind: str
    own: frozenset[str] = frozenset()  # of LIMITS: set for this name, not for all of a kind
    max_concurrency: int | None = None
    tokens_per_minute: int | None = None
    max_queue: int | None = None

    def __bool__(self) -> bool:
        numbers = self.max_concurrency, self.tokens_per_minute, self.max_queue
        return any(number is not None for number in numbers)

    def setting(self, limit: str, name: str) -> str:
        """Where one of LIMITS is set that `name` has."""
        return f"{self.kind}_limits['{name}'] {limit}" if limit in self.own else f"{self.kind}_{limit}"


@dataclasses.dataclass(frozen=True)
class KindLimits:
    """Of all tenants, or of all adapters: `usual`, but for those that have their own by name."""

    usual: Limit
    named: Mapping[str, Limit]

    def __bool__(self) -> bool:
        return bool(self.usual) or any(self.named.values())

    def of(self, name: str) -> Limit:
        return self.named.get(name, self.usual)


def configured_limits(config: EngineConfig) -> tuple[KindLimits, KindLimits]:
    """Those of tenants and of adapters."""
    return (
        _kind_limits("tenant", config, config.tenant_limits),
        _kind_limits("adapter", config, config.adapter_limits),
    )


def _kind_limits(kind: str, config: EngineConfig, named: NamedLimits) -> KindLimits:
    usual = {limit: getattr(config, f"{kind}_{limit}") for limit in LIMITS}
    by_name = {name: Limit(kind, frozenset(own), **(usual | dict(own))) for name, own in named.items()}
    return KindLimits(Limit(kind, **usual), by_name)


@dataclasses.dataclass(eq=False)
class _Account:
    """What one tenant or adapter uses. `tokens` may be negative: outputs are charged when they are there."""

    limit: Limit
    name: str
    tokens: float  # left at `time`
    time: float
    waiting: int = 0
    active: int = 0  # sequences that were let through: they run, or the policy may take them
    parked: RankHeap = dataclasses.field(default_factory=RankHeap)

    @property
    def full(self) -> bool:
        return self.limit.max_concurrency is not None and self.active >= self.limit.max_concurrency

    @property
    def owes(self) -> bool:
        """Whether it has used tokens of a limited rate that have not come back."""
        rate = self.limit.tokens_per_minute
        return rate is not None and self.tokens < rate

    def refill(self, now: float) -> None:
        rate = self.limit.tokens_per_minute
        if rate is not None:
            self.tokens = min(float(rate), self.tokens + (now - self.time) * rate / 60)
        self.time = now

    def check(self, sequences: int, prompt_tokens: int, *, queue: bool) -> None:
        """Raise LimitExceededError where a limit does not allow so many more together."""
        limit, who = self.limit, f"{self.limit.kind} '{self.name}'"
        most, max_queue = limit.max_queue if queue else None, limit.setting("max_queue", self.name)
        if most is not None and sequences > most:
            raise ValueError(
                f"{sequences} sequences at once never fit {max_queue} {most}: lower n, or send fewer prompts "
                "together"
            )
        if most is not None and self.waiting + sequences > most:
            raise LimitExceededError(
                f"{who} has {self.waiting} sequences waiting, and {sequences} more exceed "
                f"{max_queue} {most}: retry later",
                _QUEUE_RETRY_S,
                f"{limit.kind}_max_queue",
            )
        rate = limit.tokens_per_minute
        if rate is not None and self.tokens < (need := min(prompt_tokens, rate)):
            seconds = (need - self.tokens) * 60 / rate
            raise LimitExceededError(
                f"{who} has used up {limit.setting('tokens_per_minute', self.name)} {rate}: retry in "
                f"{seconds:.1f} s",
                seconds,
                f"{limit.kind}_tokens_per_minute",
            )


class Limits:
    """The accounts of all tenants and adapters that are in use; O(log parked) an operation."""

    def __init__(self, limits: Iterable[KindLimits], clock: Callable[[], float]) -> None:
        self._limits = [kind for kind in limits if kind]
        self._rates = any(
            limit.tokens_per_minute is not None
            for kind in self._limits
            for limit in (kind.usual, *kind.named.values())
        )
        self._clock = clock
        self._accounts: dict[tuple[str, str], _Account] = {}
        self._parked: dict[Sequence, _Account] = {}
        self._forget_at = 1024

    def check(self, requests: Iterable[Request], *, queue: bool = True) -> None:
        """Charge prompts to their tenants and adapters, all or none: raises LimitExceededError, or ValueError
        for more than a queue ever takes. Without `queue`, the queues' limits do not hold for them.
        """
        if len(self._accounts) >= self._forget_at:
            self._forget()
        sequences: collections.Counter[_Account] = collections.Counter()
        tokens: collections.Counter[_Account] = collections.Counter()
        for request in requests:
            for account in self._of(request):
                sequences[account] += len(request.sequences)
                tokens[account] += len(request.prompt_token_ids)
        now = self._clock()
        for account, count in sequences.items():
            account.refill(now)
            account.check(count, tokens[account], queue=queue)
        for account, count in tokens.items():
            account.tokens -= count

    def add(self, sequence: Sequence) -> bool:
        """It waits from now on; False: parked, until `ended` of another lets it through."""
        for account in self._of(sequence.request):
            account.waiting += 1
        return self._let_through(sequence)

    def parks(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence is parked."""
        return sequence in self._parked

    def admitted(self, sequence: Sequence) -> None:
        """It waits no more, for the first time."""
        for account in self._of(sequence.request):
            account.waiting -= 1

    def sampled(self, sequence: Sequence) -> None:
        """It gave one token of output."""
        if self._rates:
            for account in self._of(sequence.request):
                account.tokens -= 1

    def ended(self, sequence: Sequence, waiting: bool) -> list[Sequence]:
        """It ended, while `waiting` to be admitted or after that. Those that are let through in its place.

        The prompt of a request whose first sequence was never admitted is not charged.
        """
        accounts = self._of(sequence.request)
        if waiting and sequence.index == 0:
            for account in accounts:
                account.tokens += len(sequence.request.prompt_token_ids)
        parked_by = self._parked.pop(sequence, None)
        for account in accounts:
            account.waiting -= waiting
            account.active -= parked_by is None
        if parked_by is not None:
            parked_by.parked.discard(sequence)
            return []
        followers = []
        for account in accounts:
            while not account.full and (following := account.parked.head()) is not None:
                account.parked.discard(following)
                if self._let_through(following):
                    followers.append(following)
        return followers

    def check_integrity(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> None:
        """Accounts add up, nobody is parked without need; raises AssertionError saying what does not.

        `waiting` were never admitted; `running` were, preempted ones included.
        """
        waits: collections.Counter[int] = collections.Counter()
        active: collections.Counter[int] = collections.Counter()
        for sequence in waiting:
            for account in self._of(sequence.request):
                waits[id(account)] += 1
                active[id(account)] += sequence not in self._parked
        for sequence in running:
            assert sequence not in self._parked, "a running sequence is parked"
            for account in self._of(sequence.request):
                active[id(account)] += 1
        for (kind, name), account in self._accounts.items():
            counts = account.waiting, account.active
            assert counts == (waits[id(account)], active[id(account)]), f"{kind} '{name}': {counts}"
        assert all(account.full for account in self._parked.values()), "a sequence is parked without need"

    def _let_through(self, sequence: Sequence) -> bool:
        accounts = self._of(sequence.request)
        for account in accounts:
            if account.full:
                account.parked.push(sequence)
                self._parked[sequence] = account
                return False
        self._parked.pop(sequence, None)
        for account in accounts:
            account.active += 1
        return True

    def _of(self, request: Request) -> list[_Account]:
        accounts = []
        for limits in self._limits:
            kind = limits.usual.kind
            name = request.tenant if kind == "tenant" else request.adapter_id
            if name is None:
                continue
            account = self._accounts.get((kind, name))
            if account is None and (limit := limits.of(name)):
                account = self._open(limit, name)
            if account is not None:
                accounts.append(account)
        return accounts

    def _open(self, limit: Limit, name: str) -> _Account:
        account = _Account(limit, name, float(limit.tokens_per_minute or 0), self._clock())
        self._accounts[limit.kind, name] = account
        return account

    def _forget(self) -> None:
        """Drop the accounts that are as good as new: names are the clients' to invent."""
        now = self._clock()
        for account in self._accounts.values():
            account.refill(now)
        self._accounts = {
            key: account
            for key, account in self._accounts.items()
            if account.waiting or account.active or account.owes
        }
        self._forget_at = 1024 + 2 * len(self._accounts)
