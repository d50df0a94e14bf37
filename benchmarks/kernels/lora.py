"""Cases of the LoRA kernels: shrink and expand of the modules that share an input, decode and prefill.

Work lists have the sizes that the engine gives them, padding and all (`lists` of a setting: other sizes).
Bytes are those of the true ranks' A and B (decode), or x, y read and written, A and B (prefill). Every
call of a timing meets another layer or other adapters, 400 MB of them and more before one returns. `xla_us`
is what the backend `xla` takes for the same batch; SLORA_BENCH_NO_XLA=1 leaves it out.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.common import AGAINST_XLA, Case, Ceilings, Measurement, seconds_per_call, xla_seconds
from slora_jax.pallas_kernels.backend import XLA, LoraShape, lowest_rung
from slora_jax.pallas_kernels.lora_work import LoraWork, lora_work_needed
from slora_jax.pallas_kernels.mosaic_backend import MOSAIC, RUNS
from slora_jax.pallas_kernels.mosaic_lora import apply_lora
from slora_jax.pallas_kernels.xla_lora import AdapterBlocks, LoraBlocks

PAGE_TOKENS, W, LAYERS = 16, 256, 8
READ_BEFORE_AGAIN = 400_000_000  # bytes, so that no call finds in the L2 what another has read


@dataclasses.dataclass(frozen=True)
class Setting:
    """One shape: `tokens` spread evenly over `distinct` adapters, whose ranks cycle through `ranks`."""

    tokens: int
    distinct: int
    ranks: tuple[int, ...]
    d_model: int
    kv: int  # columns of k and of v
    prompt: bool = False
    modules: str = "q,k,v"  # or o
    # The engine's work lists; decode items only; runs only; no padding to a rung.
    lists: Literal["engine", "items", "runs", "exact"] = "engine"

    @property
    def out_dims(self) -> tuple[int, ...]:
        return (self.d_model, self.kv, self.kv) if self.modules == "q,k,v" else (self.d_model,)

    @property
    def group(self) -> tuple[int, ...]:
        return (0, 1, 2) if self.modules == "q,k,v" else (3,)

    def by_module(self, values: Sequence[int]) -> list[int]:
        """The group's values among those of all seven modules, of which the others have 0."""
        return [dict(zip(self.group, values, strict=True)).get(m, 0) for m in range(7)]

    @property
    def shape(self) -> LoraShape:
        a, b = self.chunks
        return LoraShape(
            tokens=self.tokens,
            decode_rows=0 if self.prompt else self.tokens,
            prefill_seqs=self.distinct if self.prompt else 0,
            chunks_per_page=self.per_page,
            a_chunks=tuple(self.by_module([a] * len(b))),
            b_chunks=tuple(self.by_module(b)),
        )

    @property
    def per_page(self) -> int:
        return PAGE_TOKENS * 2 * self.kv // (8 * W)

    @property
    def chunks(self) -> tuple[int, tuple[int, ...]]:
        """Chunks in a block of A; of B by module."""
        return self.d_model // W, tuple(n // W for n in self.out_dims)

    def adapter(self, rank: int, pages: np.ndarray) -> AdapterBlocks:
        blocks, (a, b) = rank // 8, self.chunks
        starts = list(itertools.accumulate([blocks * (a + n) for n in b], initial=0))[: len(b)]
        of_b = [s + blocks * a for s in starts]
        return pages, self.by_module([blocks] * len(b)), self.by_module(starts), self.by_module(of_b)

    def pages_of(self, rank: int) -> int:
        a, b = self.chunks
        return -(-(rank // 8) * sum(a + n for n in b) // self.per_page)

    @property
    def rank_of(self) -> list[int]:
        return [self.ranks[i % len(self.ranks)] for i in range(self.distinct)]

    @property
    def weight_bytes(self) -> int:
        width = len(self.group) * self.d_model + sum(self.out_dims)
        return sum(2 * r * width for r in self.rank_of)

    @property
    def token_adapter(self) -> np.ndarray:
        return np.sort(np.arange(self.tokens) % self.distinct).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Data:
    """Device arrays: a pool, and several sets of adapters in disjoint shuffled pages."""

    x: jax.Array
    y: jax.Array
    pool: jax.Array
    works: list[LoraWork]
    adapters: list[list[AdapterBlocks]]


@functools.lru_cache(maxsize=1)
def make(s: Setting) -> Data:
    sets = max(1, min(64, -(-READ_BEFORE_AGAIN // (LAYERS * s.weight_bytes))))
    counts = [s.pages_of(r) for r in s.rank_of]
    n_pages = 1 + sets * sum(counts)
    order = np.random.default_rng(0).permutation(np.arange(1, n_pages)).astype(np.int32)
    ends = np.cumsum(np.tile(counts, sets))
    lists = [order[e - c : e] for e, c in zip(ends, counts * sets, strict=True)]
    adapters = [
        [s.adapter(r, pages) for r, pages in zip(s.rank_of, lists[k * s.distinct :], strict=False)]
        for k in range(sets)
    ]
    sizes = _list_sizes(s, adapters[0])
    built = [MOSAIC.planner.build(s.token_adapter, w, sizes, s.shape) for w in adapters]
    works = [LoraWork(**{name: jnp.asarray(array) for name, array in work.items()}) for work in built]
    keys = jax.random.split(jax.random.key(0), 3)
    elems = PAGE_TOKENS * 2 * s.kv
    pool = jnp.stack([_weights(k, n_pages, elems) for k in jax.random.split(keys[0], LAYERS)])
    pool = pool.at[:, 0].set(0)  # as in the engine
    x = jax.random.normal(keys[1], (s.tokens, s.d_model), jnp.bfloat16)
    y = jax.random.normal(keys[2], (s.tokens, sum(s.out_dims)), jnp.bfloat16) * jnp.bfloat16(0.1)
    return Data(x, y, pool, works, adapters)


def _list_sizes(s: Setting, adapters: list[AdapterBlocks]) -> tuple[int, ...]:
    needs: tuple[int, ...] = lora_work_needed(s.token_adapter, adapters, s.shape.decode_rows)
    if s.lists == "exact":
        return needs
    if s.lists == "runs":  # in as many as the engine's where these do
        items, runs, _, pages = lora_work_needed(s.token_adapter, adapters, as_runs=True)
        return items, max(RUNS, runs), 0, pages
    if s.lists == "engine":
        needs = MOSAIC.planner.needs(s.token_adapter, adapters, s.shape)
    return lowest_rung(MOSAIC.planner, needs, s.shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _weights(key: jax.Array, n_pages: int, elems: int) -> jax.Array:
    weights: jax.Array = jax.random.normal(key, (n_pages, elems), jnp.bfloat16) * jnp.bfloat16(0.02)
    return weights


def apply(
    s: Setting,
    data: Data,
    i: int,
    y: jax.Array,
    x: jax.Array,
    pool: jax.Array,
    works: list[LoraWork],
    **kw: Any,
) -> jax.Array:
    return apply_lora(
        x, y, pool, i % LAYERS, works[i // LAYERS % len(works)],
        modules=s.group, in_dim=s.d_model, out_dims=s.out_dims, chunk_width=W, **kw,
    )  # fmt: skip


@functools.lru_cache(maxsize=1)
def reference(s: Setting, layer: int) -> jax.Array:
    """x A^T B in float32 of the first set of adapters, by gathering every token's weights."""
    data = make(s)
    chunks = data.pool[layer].reshape(-1, 8, W)
    (a, b), out = s.chunks, jnp.zeros(data.y.shape, jnp.float32)
    with jax.default_matmul_precision("highest"):
        for rank in sorted(set(s.rank_of)):
            tokens = np.flatnonzero(np.array(s.rank_of)[s.token_adapter] == rank)
            for part in np.array_split(tokens, -(-len(tokens) * rank // 4096)):
                column = 0
                for m, n in enumerate(b):
                    sides = []
                    for side, width in ((2, a), (3, n)):
                        first, count = s.group[m], rank // 8 * width
                        rows = np.array(
                            [
                                [pages[c // s.per_page] * s.per_page + c % s.per_page
                                 for c in range(blocks[side][first], blocks[side][first] + count)]
                                for blocks in (data.adapters[0][t] for t in s.token_adapter[part])
                                for pages in blocks[:1]
                            ]
                        )  # fmt: skip
                        w = chunks[rows].reshape(len(part), rank // 8, width, 8, W).swapaxes(2, 3)
                        sides.append(w.reshape(len(part), rank, width * W).astype(jnp.float32))
                    h = jnp.einsum("td,trd->tr", data.x[part].astype(jnp.float32), sides[0])
                    out = out.at[part, column : column + n * W].add(jnp.einsum("tr,trd->td", h, sides[1]))
                    column += n * W
    return out


def xla_blocks(s: Setting) -> LoraBlocks:
    """The work list of the first set of adapters for the backend `xla`, of the size the engine gives it."""
    adapters = make(s).adapters[0]
    sizes = lowest_rung(XLA.planner, XLA.planner.needs(s.token_adapter, adapters, s.shape), s.shape)
    arrays = XLA.planner.build(s.token_adapter, adapters, sizes, s.shape)
    return LoraBlocks(**{name: jnp.asarray(array) for name, array in arrays.items()})


def apply_xla(
    s: Setting, i: int, y: jax.Array, x: jax.Array, pool: jax.Array, blocks: LoraBlocks
) -> jax.Array:
    out: jax.Array = XLA.apply_lora(
        x, y, pool, i % LAYERS, blocks, modules=s.group, in_dim=s.d_model, out_dims=s.out_dims, chunk_width=W
    )
    return out


def measure(s: Setting, ceilings: Ceilings, variants: dict[str, Any], against_xla: bool) -> Measurement:
    data = make(s)
    once = jax.jit(lambda y, x, pool, works: apply(s, data, LAYERS - 1, y, x, pool, works, **variants))
    got = once(data.y, data.x, data.pool, data.works).astype(jnp.float32) - data.y.astype(jnp.float32)
    want = reference(s, LAYERS - 1)
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    assert error < 0.02, f"relative error of what is added {error:.3g}"
    args = data.pool, data.works
    us, alone = (
        1e6 * seconds_per_call(step, (jnp.copy(data.y), jnp.copy(data.x)), *args, calls=64)
        for step in (functools.partial(_step, s, data, variants), _tie)
    )
    us -= alone
    moved = s.weight_bytes + s.prompt * s.tokens * 2 * (s.d_model + 2 * sum(s.out_dims))
    extra: dict[str, Any] = {
        "tb_s": round(moved / us / 1e6, 3),
        "of_copy": round(moved / us * 1e6 / ceilings.copy, 3),
        "mb": round(moved / 1e6, 1),
        "error": round(error, 5),
    }
    if against_xla:
        carry = jnp.copy(data.y), jnp.copy(data.x)
        seconds = xla_seconds(functools.partial(_xla_step, s), carry, data.pool, xla_blocks(s))
        extra["xla_us"] = round(1e6 * seconds - alone, 1)
    return Measurement(us, extra)


Carry = tuple[jax.Array, jax.Array]


def _tie(i: int, carry: Carry, *_: Any) -> Carry:
    """Some of y into x: without it XLA drops shrinks that it has computed before, and runs others too
    early.
    """
    y, x = carry
    return y, x.at[0, :8].set(y[0, :8])


def _step(s: Setting, data: Data, variants: dict[str, Any], i: int, carry: Carry, *args: Any) -> Carry:
    y, x = carry
    return _tie(i, (apply(s, data, i, y, x, *args, **variants), x))


def _xla_step(s: Setting, i: int, carry: Carry, pool: jax.Array, blocks: LoraBlocks) -> Carry:
    y, x = carry
    return _tie(i, (apply_xla(s, i, y, x, pool, blocks), x))


def case(s: Setting, *, against_xla: bool = False, **tuning: Any) -> Case:
    """`kv` is told where k and v are narrower than the model."""
    described = {
        "tokens": s.tokens,
        "distinct": s.distinct,
        "ranks": "/".join(map(str, s.ranks)),
        "d_model": s.d_model,
        "modules": s.modules,
    }
    described |= {"kv": s.kv} if s.kv != s.d_model else {}
    other = tuning if s.lists == "engine" else tuning | {"lists": s.lists}
    return Case(
        bench=("lora_prefill" if s.prompt else "lora_decode") + "_variant" * bool(other),
        case=described | other,
        unit="us",
        run=functools.partial(measure, s, variants=tuning, against_xla=against_xla),
    )


MIXED = (64, 32, 16, 8)
MHA = (
    (256, 256, (16,)),
    (256, 256, MIXED),
    (256, 256, (8,)),
    (256, 256, (64,)),
    (256, 32, (16,)),
    (256, 1, (16,)),
    (256, 1, (64,)),
    (256, 5, MIXED),
    (64, 64, (16,)),
    (16, 16, (16,)),
    (1, 1, (64,)),
)
SETTINGS = [
    *(Setting(tokens, distinct, ranks, 4096, 4096) for tokens, distinct, ranks in MHA),
    *(Setting(256, 256, ranks, 4096, 1024) for ranks in ((16,), MIXED)),
    Setting(256, 256, (16,), 5120, 5120),
    Setting(2048, 8, (16,), 4096, 4096, prompt=True),
    Setting(2048, 8, MIXED, 4096, 1024, prompt=True),
]
CASES = [case(s, against_xla=AGAINST_XLA) for s in SETTINGS]


def tunings(s: Setting, *choices: dict[str, Any]) -> list[Case]:
    """Cases of what the defaults were chosen from."""
    return [case(s, **choice) for choice in choices]


def decode(tokens: int, distinct: int, ranks: tuple[int, ...], **kw: Any) -> Setting:
    return Setting(tokens, distinct, ranks, 4096, 4096, **kw)


if os.environ.get("SLORA_BENCH_VARIANTS"):
    for ranks in ((8,), (16,), MIXED):
        choices = {"deltas": 1}, {"stages": 2}, {"stages": 5}, {"pack": False}, {"split": 2}
        CASES += tunings(decode(256, 256, ranks), *choices)
    CASES += [case(decode(256, 256, ranks, modules="o")) for ranks in ((8,), (16,))]
    for s in (decode(256, 1, (16,)), decode(256, 32, (16,)), decode(16, 16, (16,))):
        CASES += tunings(s, {"split": 4}, {"split": 16})
    few: list[tuple[int, tuple[int, ...]]] = [(1, (16,)), (1, (64,)), (5, MIXED), (10, (64,)), (32, (16,))]
    for modules in ("q,k,v", "o"):
        settings = [decode(256, n, ranks, modules=modules) for n, ranks in few]
        CASES += [case(dataclasses.replace(s, lists="items")) for s in settings]
        CASES += [case(dataclasses.replace(s, lists="runs")) for s in settings if modules == "q,k,v"]
        for s in settings[:3]:
            CASES += [case(s)] * (modules == "o")
            CASES += tunings(s, {"split": 2}, {"split": 8})
    CASES += [case(decode(256, n, MIXED, lists="exact")) for n in (100, 256)]
    for ranks, kv in (((16,), 4096), (MIXED, 1024)):
        s = Setting(2048, 8, ranks, 4096, kv, prompt=True)
        CASES += tunings(s, {"reads_y": False}, {"shrink_blocks": 2}, {"tile_split": 2})
    same_data = ("modules", "tokens", "distinct", "ranks", "d_model", "kv")
    CASES.sort(key=lambda c: [str(c.case.get(k)) for k in same_data])  # which is made once
