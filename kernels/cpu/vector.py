"""Vectors of 16 float32 inside numba functions, with a fixed order of additions: arithmetic and reductions.

A loop over scalars leaves it to LLVM how a sum is cut up, and it may choose differently for aligned, unaligned or
overlapping arrays. These operations say it themselves. They are plain LLVM vectors, so every processor compiles them:
one register with AVX-512, two or four elsewhere. ``vector_memory`` loads and stores them, ``exponentials`` has 2**x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from ringserve.kernels.cpu.llvm import I32, V16F32, V16I32, call, fma, permute, splat


class Float32x16(types.Type):  # type: ignore[misc]
    """numba's name of the type."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = Float32x16()


@register_model(Float32x16)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, V16F32)


def constant_lanes(value: float) -> Any:
    """For functions that build IR: a float constant in all 16 lanes."""
    return ir.Constant(V16F32, [float(value)] * 16)


@intrinsic
def broadcast(context: Any, scalar: Any) -> Any:
    """A float32 in all lanes."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return splat(b, args[0], V16F32)

    return vector(types.float32), generate


def _make_binary(emit: Callable[[Any, Any, Any], Any]) -> Any:
    """``emit(b, left, right)`` builds the operation."""

    def binary(context: Any, left: Any, right: Any) -> Any:
        def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
            return emit(b, *args)

        return vector(vector, vector), generate

    return intrinsic(binary)


def _larger(b: Any, left: Any, right: Any) -> Any:
    return b.select(b.fcmp_ordered(">", left, right), left, right)


add = _make_binary(lambda b, left, right: b.fadd(left, right))
subtract = _make_binary(lambda b, left, right: b.fsub(left, right))
multiply = _make_binary(lambda b, left, right: b.fmul(left, right))
divide = _make_binary(lambda b, left, right: b.fdiv(left, right))
maximum = _make_binary(_larger)
"""The larger of each lane; the right one where either is NaN."""


@intrinsic
def multiply_add(context: Any, left: Any, right: Any, addend: Any) -> Any:
    """left * right + addend; fused where the processor fuses."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return fma(b, *args)

    return vector(vector, vector, vector), generate


@intrinsic
def absolute(context: Any, value: Any) -> Any:
    """|value|."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return call(b, "llvm.fabs.v16f32", V16F32, args)

    return vector(vector), generate


def _make_keep(other: float) -> Any:
    """Lanes whose number lies in a range; ``other`` elsewhere, whatever was there."""

    def keep(context: Any, value: Any, first: Any, low: Any, high: Any) -> Any:
        def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
            value, first, low, high = args
            number = b.add(splat(b, b.trunc(first, I32), V16I32), ir.Constant(V16I32, list(range(16))))
            above = b.icmp_signed(">=", number, splat(b, b.trunc(low, I32), V16I32))
            below = b.icmp_signed("<", number, splat(b, b.trunc(high, I32), V16I32))
            return b.select(b.and_(above, below), value, constant_lanes(other))

        return vector(vector, types.int64, types.int64, types.int64), generate

    return intrinsic(keep)


keep_between = _make_keep(float("-inf"))
"""``keep_between(value, first, low, high)``: lanes whose number (``first`` for the first one) lies in [low, high); -inf
elsewhere."""
zero_outside = _make_keep(0.0)
"""The same with 0 elsewhere."""


def _make_fold(combine: Callable[[Any, Any, Any], Any]) -> Any:
    """16 lanes into one: 8 + 8, 4 + 4, 2 + 2, 1 + 1."""

    def fold(context: Any, value: Any) -> Any:
        def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
            (value,) = args
            for half in (8, 4, 2, 1):
                low = permute(b, value, list(range(half)))
                value = combine(b, low, permute(b, value, list(range(half, 2 * half))))
            return b.extract_element(value, ir.Constant(I32, 0))

        return types.float32(vector), generate

    return intrinsic(fold)


sum_lanes = _make_fold(lambda b, low, high: b.fadd(low, high))
largest_lane = _make_fold(_larger)
