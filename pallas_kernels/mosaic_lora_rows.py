"""The expand of a decode item of one or two tokens, by multiply-adds from shared memory.

wgmma computes a window of 8 tokens, and its products reach y through shared memory and TMA. For one token
that is eight times the products and a chain of some hundred cycles a step; here each thread has two columns
of a chunk, adds up a module's rank rows in float32, and adds the sum to y in memory (`red`), which nobody
waits for. Pallas's interpreter has neither threads nor atomics and runs a plain form of the same sums; on the
chip tests/kernels/test_on_gpu.py compares.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from slora_jax.pallas_kernels.mosaic_lora_item import OPERAND, SWIZZLE
from slora_jax.pallas_kernels.xla_lora import RANK_BLOCK

Ref = Any  # of Pallas; untyped there
_TILE_BYTES = 1024  # of OPERAND's (8, 64) tiles of bfloat16; unit u of 16 bytes of row r lies at u ^ r


def add_row(
    weights: Ref,
    h: Ref,
    y: Ref,
    *,
    first: jax.Array,
    end: jax.Array,
    h_row: jax.Array,
    row: jax.Array,
    column: jax.Array,
    interpreted: bool,
) -> None:
    """y[row, column : column + W] += bf16(sum over r of h[h_row, r] weights[r, :]), of blocks first .. end.

    weights bf16 [64, W], a stage's rank rows, and h bf16 [24, 64], both in shared memory as OPERAND; y bf16
    in memory. Rank rows outside the blocks are not read, other rows of y not touched. All threads of a
    warpgroup call it; the first W / 64 warps work.
    """
    if interpreted:
        _add_row_plainly(weights, h, y, first, end, h_row, row, column)
        return
    scalar = plgpu.Layout.WG_SPLAT(())
    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(OPERAND), plgpu.RefType(OPERAND), plgpu.RefType(), *[scalar] * 5)
    )
    columns = y.shape[1]
    pieces = weights.shape[1] // SWIZZLE

    def emit(_: Any, weights: Any, h: Any, y: Any, *scalars: Any) -> None:
        first, end, h_row, row, column = (s.registers.flat[0] for s in scalars)
        thread = arith.remui(mgpu.utils.thread_idx(), _i32(128))
        warp, lane = arith.divui(thread, _i32(32)), arith.remui(thread, _i32(32))
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, warp, _i32(pieces))):
            sums = _sums(weights, h, first, end, h_row, warp, lane, pieces)
            own = _add(_mul(warp, SWIZZLE), _mul(lane, 2))
            at = _add(_add(_mul(row, columns), column), own)
            mgpu.utils.inline_ptx(
                "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $2, $1;"
                " red.relaxed.gpu.global.add.noftz.bf16x2 [$0], both; }",
                _at(mgpu.utils.memref_ptr(y), _mul(at, 2)),
                *sums,
            )

    inline(emit)(weights, h, y, first, end, h_row, row, column)


def _sums(
    weights: Any, h: Any, first: Any, end: Any, h_row: Any, warp: Any, lane: Any, pieces: int
) -> list[Any]:
    """The thread's two f32 sums over rank rows: of columns 64 warp + 2 lane and the next one."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    four = ir.VectorType.get((4,), i32)
    weights, h = (mgpu.utils.memref_ptr(ref) for ref in (weights, h))
    unit, within = arith.divui(lane, _i32(4)), _mul(arith.remui(lane, _i32(4)), 4)
    permuted = [_add(_mul(arith.xori(unit, _i32(r)), 16), within) for r in range(RANK_BLOCK)]
    row = arith.remui(h_row, _i32(RANK_BLOCK))
    h = _at(h, _mul(h_row, SWIZZLE * 2))

    def block(i: Any, sums: list[Any]) -> list[Any]:
        nth = _add(first, i)
        tile = _at(weights, _mul(_add(_mul(nth, pieces), warp), _TILE_BYTES))
        factors = llvm.load(four, _at(h, _mul(arith.xori(nth, row), 16)))
        pairs = [llvm.load(i32, _at(tile, _add(permuted[r], _i32(128 * r)))) for r in range(RANK_BLOCK)]
        low, high = sums
        for r, pair in enumerate(pairs):
            factor = _halves(llvm.extractelement(factors, _i32(r // 2)))[r % 2]
            a, b = _halves(pair)
            low, high = _fma(factor, a, low), _fma(factor, b, high)
        return [low, high]

    zeros = [mgpu.utils.c(0.0, f32)] * 2
    sums: list[Any] = mgpu.utils.fori(arith.subi(end, first), zeros)(block).results
    return sums


def _i32(n: int) -> Any:
    return mgpu.utils.c(n, ir.IntegerType.get_signless(32))


def _add(a: Any, b: Any) -> Any:
    return arith.addi(a, b)


def _mul(a: Any, n: int) -> Any:
    return arith.muli(a, _i32(n))


def _at(pointer: Any, nbytes: Any) -> Any:
    return mgpu.utils.getelementptr(pointer, [nbytes], ir.IntegerType.get_signless(8))


def _halves(pair: Any) -> tuple[Any, Any]:
    """Two bfloat16 that lie in an i32, as f32."""
    f32 = ir.F32Type.get()
    low, high = arith.shli(pair, _i32(16)), arith.andi(pair, _i32(-65536))
    return arith.bitcast(f32, low), arith.bitcast(f32, high)


def _fma(a: Any, b: Any, c: Any) -> Any:
    f32 = ir.F32Type.get()
    return mgpu.utils.inline_ptx("fma.rn.f32 $0, $1, $2, $3;", a, b, c, result_types=f32)


def _add_row_plainly(
    weights: Ref, h: Ref, y: Ref, first: jax.Array, end: jax.Array, h_row: jax.Array, row: Any, column: Any
) -> None:
    """The same for the interpreter."""
    width = weights.shape[1]

    def block(i: jax.Array, total: jax.Array) -> jax.Array:
        ranks = pl.ds(i * RANK_BLOCK, RANK_BLOCK)
        products = h[h_row, ranks].astype(jnp.float32)[:, None] * weights[ranks].astype(jnp.float32)
        added: jax.Array = total + products.sum(axis=0)
        return added

    total = lax.fori_loop(first, end, block, jnp.zeros(width, jnp.float32))
    at = y.at[row, pl.ds(column, width)]
    at[...] = at[...] + total.astype(jnp.bfloat16)
    plgpu.commit_smem()  # it takes a copy over weights that were read for a race without
