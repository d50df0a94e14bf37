"""Who is next: by arrival, priority, adapter and tenant, and who is overtaken how often."""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import random
from collections.abc import Callable

import pytest

from benchmarks.virtual_server import Arrival, VirtualServer
from slora_jax import SamplingParams
from slora_jax.request import Sequence
from slora_jax.scheduling.merge_order import MergeOrder, Turn
from slora_jax.scheduling.policies import ClusterOrder, FcfsOrder, TenantOrder
from tests.engine.policy_server import POLICIES, admission_order, overtakes, server, spread
from tests.engine.slow_loading import Bench


def test_fcfs_admits_in_order_of_arrival() -> None:
    served = server()
    served.run(Arrival(0.001 * i, 5, 1 + i % 3) for i in range(20))
    assert admission_order(served) == [str(i) for i in range(20)]


def test_a_lower_priority_number_goes_first_by_the_seconds_it_is_worth() -> None:
    served = server(batch=1, priority_s=10.0)
    arrivals = [Arrival(0.0, 4, 100), Arrival(0.01, 4, 1), Arrival(0.02, 4, 1, priority=-1)]
    arrivals += [Arrival(0.03, 4, 1, priority=1)]
    served.run(arrivals)
    assert admission_order(served) == ["0", "2", "1", "3"]


@pytest.mark.parametrize("policy", POLICIES)
def test_urgent_requests_without_end_do_not_starve_a_patient_one(policy: str) -> None:
    served = server(policy, batch=1, priority_s=1.0, ttft_target_s=1000.0)
    served.run(
        [Arrival(0.0, 4, 20, priority=3)] + [Arrival(0.001 + 0.05 * i, 4, 20, priority=-2) for i in range(60)]
    )
    patient = served.requests[0].metrics
    assert patient.first_token_time is not None
    urgent = [r for r in served.requests[1:] if r.metrics.first_token_time is not None]
    before = [r for r in urgent if (r.metrics.first_token_time or 0) < patient.first_token_time]
    assert all(r.metrics.arrival_time <= 5.0 for r in before), "overtaken by what came 5 steps of 1 s later"


def test_cluster_prefers_adapters_of_the_batch_then_resident_ones_then_the_base_order() -> None:
    served = server("cluster", batch=2)
    batch, resident = spread(served, 2)
    absent = served.register("absent", 385)  # fits when nothing else runs
    served.run([Arrival(0.0, 4, 1, adapter=resident)])  # stays resident, idle
    start = served.now
    long = Arrival(start, 4, 60, adapter=batch)
    for arrival in (long, Arrival(start, 4, 20)):
        served.add(arrival)
    served.step()
    for adapter in (absent, resident, batch, absent, resident, batch):
        served.add(Arrival(served.now, 4, 2, adapter=adapter))
    served.run([])
    assert admission_order(served)[3:] == ["5", "8", "4", "7", "3", "6"]


def test_cluster_counts_those_who_left_the_queue_unserved_as_gone() -> None:
    """Requests that were aborted before it make no room for others to overtake the oldest."""
    served = server("cluster", batch=1, cluster_max_passes=3)
    near, far = spread(served, 2)
    served.add(Arrival(0.0, 4, 5, near))
    served.step()
    gone = [served.add(Arrival(served.now, 4, 5, far)) for _ in range(30)]
    oldest = served.add(Arrival(served.now, 4, 5, far))
    for _ in range(20):
        served.add(Arrival(served.now, 4, 5, near))
    for request in gone:
        served.abort(request, "by the user")
    served.run([])
    assert overtakes(served)[oldest.request_id] == 3


def test_cluster_knows_of_adapters_that_another_tenant_brought_in() -> None:
    served = server("vtc+cluster", batch=2)
    first, second, third = spread(served, 3)
    for adapter, tenant in ((second, "a"), (third, "b"), (first, "b"), (second, "b")):
        served.add(Arrival(0.0, 4, 50 if tenant == "a" else 1, adapter, tenant))
    served.run([])
    assert admission_order(served) == ["0", "3", "1", "2"]


@pytest.mark.parametrize("seeker", ["waits", "was preempted"])
def test_cluster_knows_of_adapters_that_are_on_their_way_for_another_tenant(seeker: str) -> None:
    """Also where that one leaves before it runs: what was loaded for it is used first."""
    bench = Bench(
        num_pages=400,
        max_batch_size=1,
        max_step_tokens=16,
        scheduling_policy="vtc+cluster",
        adapter_prefetch=1,
    )
    engine = bench.engine
    for i, name in enumerate("xy"):
        bench.register(name, i + 1)

    def ask(name: str | None, tenant: str, tokens: int) -> str:
        return engine.add_request([1], name, SamplingParams(max_tokens=tokens), tenant=tenant)

    if seeker == "waits":
        ask(None, "first", 1)
        bench.run()
        ask(None, "second", 20)
        engine.step()
        old, new = ask("y", "second", 2), ask("x", "second", 2)
        seeking = ask("x", "first", 2)
    else:
        seeking = ask("x", "first", 20)
        while not engine.stats().num_running:
            bench.executor.run()
            engine.step()
        engine._loop.rewind()  # as Ctrl-C does
        engine._adapters.evict(1, math.inf)  # x gives way
        old, new = ask("y", "second", 2), ask("x", "second", 2)
    assert not engine._adapters.get("x").near
    engine.step()
    assert engine._adapters.get("x").near
    assert not engine._adapters.get("y").near
    engine.abort(seeking)
    ended = list(bench.run())
    assert ended.index(new) < ended.index(old)


@pytest.mark.parametrize("max_passes", [0, 1, 5, 64])
@pytest.mark.parametrize("policy", ["cluster", "vtc+cluster"])
def test_cluster_overtakes_nobody_more_than_max_passes_times(policy: str, max_passes: int) -> None:
    served = server(policy, batch=3, num_pages=40, cluster_max_passes=max_passes)
    adapters = spread(served, 6)
    draw = random.Random(0)
    arrivals = [
        Arrival(0.01 * i, 4, draw.randint(1, 12), adapter=draw.choice(adapters[: draw.choice((1, 6))]))
        for i in range(300)
    ]
    served.run(arrivals)
    worst = max(overtakes(served).values())
    assert worst <= max_passes
    assert worst > 0 or max_passes == 0, "it never clustered"


def test_cluster_loads_fewer_adapters_than_fcfs() -> None:
    loads = {}
    for policy in ("fcfs", "cluster"):
        served = server(policy, batch=4, num_pages=40)
        adapters = spread(served, 12)
        draw = random.Random(1)
        served.run([Arrival(0.0, 4, 6, adapter=draw.choice(adapters)) for _ in range(200)])
        loads[policy] = served.loads
    assert loads["cluster"] < 0.6 * loads["fcfs"]


IN, OUT = 1.0, 2.0


def backlogged(
    weights: dict[str, float], lengths: dict[str, tuple[int, int]], policy: str, steps: int, batch: int = 8
) -> tuple[VirtualServer, float]:
    """Tenants whose queues never empty; the largest gap of any two services (price over weight)."""
    served = server(policy, batch=batch, num_pages=4000, tenant_weights=weights)
    adapters = spread(served, 5)
    draw = random.Random(2)
    services: dict[str, float] = dict.fromkeys(weights, 0.0)
    queued: collections.Counter[str] = collections.Counter()
    gap = 0.0
    for _ in range(steps):
        queued = collections.Counter(s.request.tenant for s in served.waiting)
        for tenant, (prompt, output) in lengths.items():
            for _ in range(20 - queued[tenant]):
                served.add(Arrival(served.now, prompt, output, draw.choice(adapters), tenant))
        before = set(served.scheduler.running)
        plan = served.step()
        for sequence in {c.sequence for c in plan} - before:
            tenant = sequence.request.tenant
            services[tenant] += IN * sequence.prompt_len / weights[tenant]
        for chunk in plan:
            tenant = chunk.sequence.request.tenant
            services[tenant] += OUT * chunk.samples / weights[tenant]
        gap = max(gap, max(services.values()) - min(services.values()))
    served.check_integrity()
    return served, gap


@pytest.mark.parametrize("policy", ["vtc", "vtc+cluster"])
@pytest.mark.parametrize(
    "weights", [{"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 4.0, "b": 1.0, "c": 2.0}], ids=["even", "weighted"]
)
def test_services_of_backlogged_tenants_differ_by_no_more_than_vtc_proves(
    policy: str, weights: dict[str, float]
) -> None:
    lengths = {"a": (4, 40), "b": (40, 4), "c": (10, 10)}
    batch = 8
    _, gap = backlogged(weights, lengths, policy, 3000, batch)
    longest = max(p + o for p, o in lengths.values())
    bound = 2 * max(IN * 40, OUT * batch * longest) / min(weights.values())
    assert gap <= bound
    _, unfair = backlogged(weights, lengths, "fcfs", 3000, batch)
    assert unfair > 4 * gap, "first come, first served drifts apart without end"


def test_vtc_gives_a_tenant_back_from_idleness_no_credit() -> None:
    served = server("vtc", batch=1)
    for _ in range(30):
        served.add(Arrival(0.0, 4, 10, tenant="busy"))
    for _ in range(150):
        served.step()
    first = len(served.admitted)
    for _ in range(30):
        served.add(Arrival(served.now, 4, 10, tenant="late"))
    served.run([])
    order = [s.request.tenant for s in served.admitted[first:]]
    assert abs(order[:20].count("late") - 10) <= 1, "the late tenant shares from now on, it does not catch up"


def test_vtc_lifts_a_tenant_that_finds_nobody_waiting_to_the_one_that_left_last() -> None:
    served = server("vtc", batch=1)
    served.run(Arrival(0.0, 4, 10, tenant="busy") for _ in range(15))
    for tenant in ("late", "busy"):
        for _ in range(20):
            served.add(Arrival(served.now, 4, 10, tenant=tenant))
    served.run([])
    order = [s.request.tenant for s in served.admitted[15:]]
    assert abs(order[:20].count("late") - 10) <= 1


def test_vtc_does_not_let_one_tenants_queue_delay_another() -> None:
    served = server("vtc", batch=2)
    for _ in range(200):
        served.add(Arrival(0.0, 8, 10, tenant="flood"))
    served.step()
    other = served.add(Arrival(served.now, 8, 10, tenant="other"))
    served.run([])
    waited = (other.metrics.first_token_time or 1e9) - other.metrics.arrival_time
    assert waited < 0.2


def test_vtc_forgets_idle_tenants() -> None:
    served = server("vtc", batch=8, num_pages=100)
    served.run(Arrival(0.02 * i, 1, 1, tenant=f"user-{i}") for i in range(5000))
    assert served.waiting._vtc is not None
    assert len(served.waiting._vtc.counters()) < 2500


@pytest.mark.parametrize("policy", POLICIES)
def test_candidates_are_those_whom_the_policy_would_take_one_after_the_other(policy: str) -> None:
    """Those passed over are put back at their ranks; with one passed over, the others keep their order."""
    served = server(policy, batch=1, num_pages=4000, ttft_target_s=100.0)
    adapters = spread(served, 4)
    draw = random.Random(5)
    for i in range(40):
        adapter = draw.choice([*adapters, None])
        served.add(Arrival(0.0, 4, 2, adapter, "abc"[i % 3], draw.randint(-1, 1)))
    with contextlib.closing(served.waiting.candidates()) as candidates:
        seen = list(candidates)
    assert set(seen) == set(served.waiting)
    with contextlib.closing(served.waiting.candidates()) as candidates:
        assert [next(candidates) for _ in range(7)] == seen[:7]
    assert served.waiting.head() is seen[0]
    with contextlib.closing(served.waiting.candidates()) as candidates:
        next(candidates)
        second = next(candidates)
        served.waiting.admitted(second)
        assert second not in served.waiting
        if policy in ("fcfs", "early-abort"):
            assert next(candidates) is seen[2]
    assert served.waiting.head() is not second
    assert len(served.waiting) == 39


def test_vtc_foresees_who_comes_next_as_if_those_before_had_been_admitted() -> None:
    """What is loaded ahead is what will be needed: tenants take turns, each by the price of its prompts."""
    served = server("vtc", batch=1, num_pages=4000)
    for i in range(30):
        served.add(Arrival(0.0, 20 if i % 2 else 5, 1, tenant="ab"[i % 2]))
    with contextlib.closing(served.waiting.candidates()) as candidates:
        foreseen = [s.request.request_id for s in itertools.islice(candidates, 15)]
    served.run([])
    tenants = [served.requests[int(r)].tenant for r in foreseen]
    assert tenants.count("a") == 12  # each is four times as cheap
    assert len(set(foreseen) & set(admission_order(served)[:15])) >= 14  # outputs cost, too


@pytest.mark.parametrize("order_of", [FcfsOrder, lambda: ClusterOrder(4, {}), lambda: MergeOrder(4, Turn())])
@pytest.mark.parametrize("seed", range(3))
def test_the_length_of_an_order_counts_all_but_those_on_hold(
    order_of: Callable[[], TenantOrder], seed: int
) -> None:
    served, rng, order = server(), random.Random(seed), order_of()
    adapters = [None, *spread(served, 3)]
    free: list[Sequence] = []
    held: list[Sequence] = []
    for step in range(300):
        do = rng.choice(["add", "hold", "release", "remove"])
        mine = held if do == "release" else rng.choice([free, held]) if do == "remove" else free
        if do == "add":
            new = served.add(Arrival(0.0, 4, 1, adapter=rng.choice(adapters))).sequences[0]
            new.rank = rng.random(), step
            order.add(new)
            free.append(new)
        elif mine:
            sequence = mine.pop(rng.randrange(len(mine)))
            if do == "hold":
                order.hold(sequence)
                held.append(sequence)
            elif do == "release":
                order.release(sequence)
                free.append(sequence)
            else:
                order.remove(sequence, admitted=True)
        assert len(order) == len(free)
        head = order.head()
        assert head in free if free else head is None
