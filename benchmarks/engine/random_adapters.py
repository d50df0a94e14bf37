"""Random adapters on q, k, v, o: made by rank, registered, brought into the pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from slora_jax.engine import Engine
from slora_jax.lora.loader import PreparedAdapter
from slora_jax.lora.packing import PackedAdapter
from slora_jax.memory.layout import GROUPS

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
SETTINGS = {"none": (), "S1": (8,), "S2": (64, 32, 16, 8), "S4": (64, 32, 16)}


def ranks_of(mix: str) -> list[int]:
    """Ranks of "64/32/16/8"; raises SystemExit."""
    ranks = [int(rank) if rank.isdecimal() else 0 for rank in mix.split("/")]
    if min(ranks) < 1:
        raise SystemExit(f"--ranks: '{mix}' must be ranks of 1 and more, joined by /: 16, or 64/32/16/8")
    return ranks


def attention_groups() -> set[int]:
    """The groups of modules that random adapters are on."""
    return {i for i, g in enumerate(GROUPS) if set(g) & set(MODULES)}


def random_adapters(engine: Engine, ranks: Iterable[int]) -> dict[int, PreparedAdapter]:
    """By rank, a random adapter on q, k, v, o with its host copy, which all of that rank may share."""
    layout, rng, prepared = engine._layout, np.random.default_rng(0), {}
    for rank in ranks:
        placed = layout.adapter(dict.fromkeys(MODULES, rank))
        pages = np.empty(
            (layout.n_layers, placed.num_pages, layout.tp * layout.page_elems), jnp.dtype(engine.config.dtype)
        )
        pages[...] = (0.02 * rng.standard_normal(pages.shape[1:], np.float32)).astype(pages.dtype)
        packed = PackedAdapter(pages=pages, layout=placed, rank=rank, target_modules=MODULES, features={})
        host = engine._runner.host_copy(pages)
        prepared[rank] = PreparedAdapter(f"random/rank{rank}", packed, host=host)
    return prepared


def register_adapters(engine: Engine, prepared: Mapping[int, PreparedAdapter], n: int) -> list[str]:
    """n adapters whose ranks take turns."""
    names, ranks = [f"a{i}" for i in range(n)], list(prepared)
    for i, name in enumerate(names):
        engine.load_adapter(name, prepared[ranks[i % len(ranks)]])
    return names


def make_resident(engine: Engine, names: Sequence[str]) -> None:
    """Load adapters into the pool; raises RuntimeError where it does not hold all of them, or one fails."""
    adapters, loader, stats = [engine._adapters.get(name) for name in names], engine._loader, engine.stats()
    need, room = sum(a.num_pages for a in adapters), stats.pages_total - stats.pages_kv
    if need > room:  # each would push another one out, for ever
        raise RuntimeError(f"{len(adapters)} adapters need {need} pages, the pool has {room} beside the KV")
    while not all([loader.seek(a, room=True, waits=False) for a in adapters]):
        loader.transfer()
        loader.wait(1.0)
        loader.settle()
        if failed := loader.take_failures():
            raise RuntimeError(failed[0][1])
