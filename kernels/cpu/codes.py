"""float32 vectors on their way into bytes, and what int8 keys and values need of them.

Rounding is to nearest, ties to even: a number added to 1.5 * 2**23 leaves its rounded integer in the low bits of the
sum, in two's complement. NaN gives an arbitrary byte; whoever stores bytes keeps NaN in the scale beside them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ringserve.kernels.cpu.llvm import F32, I8, I32, V16F32, V16I32, all_lanes, call, store
from ringserve.kernels.cpu.vector import constant_lanes, vector

ROUND = 12582912.0
"""1.5 * 2**23."""
V16I8 = ir.VectorType(I8, 16)


def _rounded(b: Any, value: Any) -> Any:
    """The sum with ROUND, as int32: its low 16 bits are the rounded number's."""
    return b.bitcast(b.fadd(value, constant_lanes(ROUND)), V16I32)


def _make_store_bytes(bias: int) -> Any:
    def store_bytes(context: Any, at: Any, value: Any) -> Any:
        def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
            at, value = args
            store(b, b.trunc(b.add(_rounded(b, value), all_lanes(bias)), V16I8), at, 0, 1)
            return ctx.get_dummy_value()

        return types.void(types.int64, vector), generate

    return intrinsic(store_bytes)


store_int8 = _make_store_bytes(0)
"""``store_int8(at, value)``: 16 float32 in [-128, 127] as int8."""
store_biased = _make_store_bytes(128)
"""``store_biased(at, value)``: the same plus 128, as uint8."""


def _make_store_split(carry: int) -> Any:
    def store_split(context: Any, high: Any, low: Any, value: Any) -> Any:
        def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
            high, low, value = args
            bits = _rounded(b, value)
            store(b, b.trunc(bits, V16I8), low, 0, 1)
            store(b, b.trunc(b.lshr(b.add(bits, all_lanes(carry)), all_lanes(8)), V16I8), high, 0, 1)
            return b.fsub(b.bitcast(bits, V16F32), constant_lanes(ROUND))

        return vector(types.int64, types.int64, vector), generate

    return intrinsic(store_split)


store_split_signed = _make_store_split(128)
"""``store_split_signed(high, low, value)``: 16 float32 of magnitude up to 32639, rounded, as 256 * high + low, both
int8. Returns the rounded numbers."""
store_split_unsigned = _make_store_split(0)
"""The same for 0 .. 65535, both parts uint8."""


@intrinsic
def larger_or_nan(context: Any, left: Any, right: Any) -> Any:
    """The larger of each lane of numbers that are not negative; NaN where one is NaN: as bits, NaN is above all."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        left, right = (b.bitcast(value, V16I32) for value in args)
        return b.bitcast(b.select(b.icmp_unsigned(">", left, right), left, right), V16F32)

    return vector(vector, vector), generate


@intrinsic
def largest_or_nan(context: Any, value: Any) -> Any:
    """The largest lane of numbers that are not negative; NaN where one is NaN."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        bits = b.bitcast(args[0], V16I32)
        return b.bitcast(call(b, "llvm.vector.reduce.umax.v16i32", I32, [bits]), F32)

    return types.float32(vector), generate
