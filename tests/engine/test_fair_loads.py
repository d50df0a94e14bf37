"""What vtc promises while adapters are being loaded, and to whom."""

from __future__ import annotations

import collections
import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from benchmarks.virtual_server import Arrival, VirtualServer
from slora_jax.lora.store import Adapter
from slora_jax.request import Sequence
from tests.engine.policy_server import server, spread

IN, OUT = 1.0, 2.0  # prices
BATCH, PREFETCH = 4, 4
PROMPTS, OUTPUTS = 16, 12  # longest
U = max(IN * PROMPTS, OUT * BATCH * (PROMPTS + OUTPUTS))  # of VTC's paper: 2 U bounds the gap
PASS = IN * PROMPTS * (BATCH + PREFETCH)  # price of all that one pass over the queue may pass over


class Tenants:
    """Tenants that always wait, over adapters whose loads take their time; what they got, as VTC prices it.

    `unready[g, f]` is what sequences of g got that were admitted while none that waits of f had its adapter:
    whatever the order, nobody of f could have been taken in their place.
    """

    def __init__(
        self,
        policy: str,
        adapters: dict[str, list[int | None]],
        seed: int,
        loads: list[float],
        *,
        always_ready: bool = False,
    ) -> None:
        self._draw, self._always_ready = random.Random(seed), always_ready
        self.served: VirtualServer = server(
            policy,
            batch=BATCH,
            num_pages=70,
            load_seconds=lambda: self._draw.choice(loads),
            adapter_prefetch=PREFETCH,
            cluster_max_passes=4,
        )
        made = spread(self.served, 24, 4)
        self.adapters: dict[str, list[Adapter | None]] = {
            tenant: [None if i is None else made[i] for i in own] for tenant, own in adapters.items()
        }
        self.services = dict.fromkeys(adapters, 0.0)
        self.unready: collections.defaultdict[tuple[str, str], float] = collections.defaultdict(float)
        self._excused: dict[Sequence, list[str]] = {}
        self._admitted: Any = self.served.waiting.admitted
        self.served.waiting.admitted = self._admit  # type: ignore[method-assign]
        self._sampled: Any = self.served.waiting.sampled
        self.served.waiting.sampled = self._sample  # type: ignore[method-assign]

    def step(self) -> None:
        """Each has six that wait; with `always_ready`, a batch of them beside that needs no adapter."""
        for tenant, adapters in self.adapters.items():
            waiting = [s.adapter for s in self.served.waiting if s.request.tenant == tenant]
            new = [self._draw.choice(adapters) for _ in range(6 - len(waiting))]
            if self._always_ready:
                new += [None] * (BATCH - (waiting + new).count(None))
            for adapter in new:
                prompt, output = self._draw.randint(1, PROMPTS), self._draw.randint(1, OUTPUTS)
                self.served.add(Arrival(self.served.now, prompt, output, adapter, tenant))
        self.served.step()
        self.served.check_integrity()

    def excess(self) -> float:
        """What one tenant got beyond another, but for what the other could not have had; the most of any."""
        return max(
            self.services[g] - self.services[f] - self.unready[g, f]
            for g in self.services
            for f in self.services
        )

    def _admit(self, sequence: Sequence) -> None:
        if sequence not in self._excused:  # not one that was preempted
            mine = sequence.request.tenant
            ready = {s.request.tenant for s in self.served.waiting if s.adapter is None or s.adapter.resident}
            self._excused[sequence] = [f for f in self.services if f != mine and f not in ready]
            self._get(sequence, IN * sequence.prompt_len)
        self._admitted(sequence)

    def _sample(self, sequence: Sequence) -> None:
        self._get(sequence, OUT)
        self._sampled(sequence)

    def _get(self, sequence: Sequence, price: float) -> None:
        mine = sequence.request.tenant
        self.services[mine] += price
        for other in self._excused[sequence]:
            self.unready[mine, other] += price


@pytest.mark.parametrize("policy", ["vtc", "vtc+cluster"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), loads=st.lists(st.sampled_from([0.0, 0.02, 0.05, 0.2]), min_size=1))
def test_a_tenant_falls_behind_by_what_it_could_not_have_had_and_the_bound(
    policy: str, seed: int, loads: list[float]
) -> None:
    """One asks for no adapter, one for always the same, one for another each time."""
    tenants = Tenants(policy, {"base": [None], "few": [0], "many": list(range(1, 24))}, seed, loads)
    for _ in range(600):
        tenants.step()
        assert tenants.excess() <= U + PASS


@pytest.mark.parametrize("policy", ["vtc", "vtc+cluster"])
def test_tenants_that_always_have_someone_ready_keep_the_papers_bound_whatever_is_loaded(policy: str) -> None:
    adapters = {"base": [None], "mixed": [None, *range(24)], "cold": list(range(24))}
    tenants = Tenants(policy, adapters, 3, [0.05, 0.2], always_ready=True)
    gap = 0.0
    for _ in range(1000):
        tenants.step()
        gap = max(gap, max(tenants.services.values()) - min(tenants.services.values()))
    assert not tenants.unready
    assert tenants.served.loads > 60
    assert gap <= 2 * U


@pytest.mark.parametrize("policy", ["vtc", "vtc+cluster", "fcfs"])
def test_a_tenant_whose_adapters_have_come_catches_up(policy: str) -> None:
    """Each of its requests waits for a load, and still it gets its share; not so first come, first served."""
    tenants = Tenants(policy, {"base": [None], "few": [0], "many": list(range(1, 24))}, 1, [0.05])
    for _ in range(2000):
        tenants.step()
    assert tenants.unready["base", "many"] > 0
    gap = tenants.services["base"] - tenants.services["many"]
    assert gap <= U if policy != "fcfs" else gap > 2 * U
