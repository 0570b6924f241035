"""The largest logit of a part of a row, as a number by which parts can be compared.

    best_key(x, n, column) -> int64      x: address of float32 [n], the first of which is column ``column`` of its row

A key's upper 32 bits order as the values do, with NaN above all; its lower ones are higher for earlier columns. The
largest of the keys of a row's parts therefore belongs to what ``argmax`` finds in the whole row, and ``key_columns``
says which column that is. -0 and 0 are equal. ``n`` > 0; up to 15 floats beyond x[n] are read and ignored.

This is for whoever has just computed the logits: a pass over all of them later would read them from memory again.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from ringserve.kernels.cpu import llvm
from ringserve.kernels.cpu.llvm import I32, I64, V16F32, V16I32

_COLUMNS = 0x7FFFFFFF
_INFINITY_BITS = 0x7F800000
_LOWEST = -0x80000000


@register_jitable
def key_columns(keys: Any) -> Any:
    """The columns of keys: int64, a number or an array."""
    return _COLUMNS - (keys & _COLUMNS)


@intrinsic
def best_key(context: Any, x: Any, n: Any, column: Any) -> Any:
    """See the top of this file."""

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        x, n, column = args
        before, loop, done = b.block, b.append_basic_block("vectors"), b.append_basic_block("best")
        count = llvm.splat(b, b.trunc(n, I32), V16I32)
        b.branch(loop)

        b.position_at_end(loop)
        at, lanes = b.phi(I64), b.phi(V16I32)
        best, where = b.phi(V16I32), b.phi(V16I32)
        # Adding zero makes -0 a 0.
        value = b.fadd(llvm.load(b, x, b.mul(at, llvm.const(4)), V16F32), ir.Constant(V16F32, [0.0] * 16))
        bits = b.bitcast(value, V16I32)
        magnitude = b.and_(bits, llvm.all_lanes(0x7FFFFFFF))
        # Integers in the order of the floats: those of negative numbers run backwards.
        order = b.xor(bits, b.and_(b.ashr(bits, llvm.all_lanes(31)), llvm.all_lanes(0x7FFFFFFF)))
        is_nan = b.icmp_signed(">", magnitude, llvm.all_lanes(_INFINITY_BITS))
        order = b.select(is_nan, llvm.all_lanes(0x7FFFFFFF), order)
        order = b.select(b.icmp_signed("<", lanes, count), order, llvm.all_lanes(_LOWEST))
        larger = b.icmp_signed(">", order, best)
        new_best, new_where = b.select(larger, order, best), b.select(larger, lanes, where)
        next_at, next_lanes = b.add(at, llvm.const(16)), b.add(lanes, llvm.all_lanes(16))
        numbers = ir.Constant(V16I32, list(range(16)))
        first = [llvm.const(0), numbers, llvm.all_lanes(_LOWEST), llvm.zeros(V16I32)]
        llvm.incoming([at, lanes, best, where], first, before)
        llvm.incoming([at, lanes, best, where], [next_at, next_lanes, new_best, new_where], loop)
        b.cbranch(b.icmp_signed("<", next_at, n), loop, done)

        b.position_at_end(done)
        top = llvm.largest_of_lanes(b, new_best)
        # Among the lanes that have it, the earliest column: the largest number counted backwards.
        backwards = b.sub(llvm.all_lanes(_COLUMNS), new_where)
        is_top = b.icmp_signed("==", new_best, llvm.splat(b, top, V16I32))
        low = llvm.largest_of_lanes(b, b.select(is_top, backwards, llvm.zeros(V16I32)))
        low = b.sub(b.sext(low, I64), column)
        return b.or_(b.shl(b.sext(top, I64), llvm.const(32)), low)

    return types.int64(types.int64, types.int64, types.int64), gen
