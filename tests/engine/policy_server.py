"""A server on a virtual clock under a policy, and what it did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.virtual_server import StepCost, VirtualServer
from slora_jax import EngineConfig
from slora_jax.lora.store import Adapter

POLICIES = ("fcfs", "cluster", "vtc", "early-abort", "vtc+cluster", "vtc+cluster+early-abort")


def server(
    policy: str = "fcfs",
    *,
    batch: int = 2,
    num_pages: int = 400,
    cost: StepCost | None = None,
    load_seconds: Callable[[], float | None] | None = None,
    **fields: Any,
) -> VirtualServer:
    config = EngineConfig(
        scheduling_policy=policy, max_batch_size=batch, max_step_tokens=64, page_tokens=4, **fields
    )
    return VirtualServer(config, num_pages, cost, load_seconds)


def admission_order(served: VirtualServer) -> list[str]:
    return [s.request.request_id for s in served.admitted]


def overtakes(served: VirtualServer) -> dict[str, int]:
    """How many requests that came later were admitted before each one."""
    order = list(dict.fromkeys(int(i) for i in admission_order(served)))  # without those that came back
    return {str(r): sum(o > r for o in order[: order.index(r)]) for r in order}


def spread(served: VirtualServer, n: int, pages: int = 3) -> list[Adapter]:
    return [served.register(f"a{i}", pages) for i in range(n)]
