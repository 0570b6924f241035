"""Vectors of 16 float32 inside numba functions, with a fixed order of additions.

A loop over scalars leaves it to LLVM how a sum is cut up, and it may choose differently for aligned, unaligned or
overlapping arrays. These operations say it themselves. They are plain LLVM vectors, so every processor compiles them:
one register with AVX-512, two or four elsewhere. Addresses are int64; nothing needs to be aligned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from ringserve.kernels.cpu.features import has_avx512
from ringserve.kernels.cpu.llvm import I16, I32, I64, V16F32, V16I32, address, prefetch_line, splat

V16F, V16I, V16H = V16F32, V16I32, ir.VectorType(I16, 16)


class Float32x16(types.Type):  # type: ignore[misc]
    """numba's name of the type."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = Float32x16()


@register_model(Float32x16)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, V16F)


def pointer(b: Any, base: Any, kind: Any) -> Any:
    """An int64 as a pointer to ``kind``."""
    return address(b, base, 0, kind)


def constant_lanes(value: float) -> Any:
    """A float constant in all 16 lanes."""
    return ir.Constant(V16F, [float(value)] * 16)


def integer_lanes(value: int) -> Any:
    """An int32 constant in all 16 lanes."""
    return ir.Constant(V16I, [value] * 16)


def llvm_function(b: Any, name: str, arguments: int, kind: Any = V16F) -> Any:
    """An LLVM intrinsic of vectors."""
    return cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind] * arguments), name)


def fold(b: Any, v: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine 16 lanes into one: 8 + 8, 4 + 4, 2 + 2, 1 + 1."""
    width = 16
    while width > 1:
        half = width // 2
        lanes = ir.VectorType(I32, half)
        low = b.shuffle_vector(v, v, ir.Constant(lanes, list(range(half))))
        high = b.shuffle_vector(v, v, ir.Constant(lanes, list(range(half, width))))
        v = combine(low, high)
        width = half
    return b.extract_element(v, ir.Constant(I32, 0))


def float_to_bfloat16_bits(b: Any, v: Any) -> Any:
    """Round to nearest, ties to even; <16 x i16>."""
    bits = b.bitcast(v, V16I)
    odd = b.and_(b.lshr(bits, integer_lanes(16)), integer_lanes(1))
    rounded = b.add(bits, b.add(odd, integer_lanes(0x7FFF)))
    return b.trunc(b.lshr(rounded, integer_lanes(16)), V16H)


def exp2_lanes(b: Any, x: Any) -> Any:
    """2**x for x <= 127, relative error below 3e-7; 0 below -126, -inf included.

    The fraction in [-0.5, 0.5] goes through a polynomial (Cody and Waite's scheme, Taylor coefficients of degree 6),
    the integer part into the exponent's bits.
    """
    low = constant_lanes(-126.0)
    clamped = b.select(b.fcmp_ordered(">", x, low), x, low)
    whole = b.call(llvm_function(b, "llvm.rint.v16f32", 1), [clamped])
    fraction = b.fsub(clamped, whole)
    fma = llvm_function(b, "llvm.fmuladd.v16f32", 3)
    ln2 = 0.6931471805599453
    coefficients = [ln2**n / _factorial(n) for n in range(7)]
    value = constant_lanes(coefficients[6])
    for coefficient in reversed(coefficients[:6]):
        value = b.call(fma, [value, fraction, constant_lanes(coefficient)])
    exponent = b.shl(b.fptosi(whole, V16I), integer_lanes(23))
    scaled = b.bitcast(b.add(b.bitcast(value, V16I), exponent), V16F)
    # Unordered comparison: NaN stays NaN.
    scaled = b.select(b.fcmp_ordered("<", x, low), constant_lanes(0.0), scaled)
    return b.select(b.fcmp_unordered("uno", x, x), x, scaled)


def _factorial(n: int) -> int:
    return 1 if n < 2 else n * _factorial(n - 1)


@intrinsic  # type: ignore[untyped-decorator]
def load(context: Any, at: Any) -> Any:
    """16 float32 at ``address``."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        value = b.load(pointer(b, args[0], V16F))
        value.align = 4
        return value

    return vector(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def store(context: Any, at: Any, value: Any) -> Any:
    """Write 16 float32."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(args[1], pointer(b, args[0], V16F)).align = 4
        return ctx.get_dummy_value()

    return types.void(types.int64, vector), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_bfloat16(context: Any, at: Any) -> Any:
    """16 bfloat16 at ``address``, widened."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        half = b.load(pointer(b, args[0], V16H))
        half.align = 2
        return b.bitcast(b.shl(b.zext(half, V16I), integer_lanes(16)), V16F)

    return vector(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_bfloat16(context: Any, at: Any, value: Any) -> Any:
    """Write 16 float32 as bfloat16, rounded to nearest even."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(float_to_bfloat16_bits(b, args[1]), pointer(b, args[0], V16H)).align = 2
        return ctx.get_dummy_value()

    return types.void(types.int64, vector), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_even_half(context: Any, at: Any, value: Any) -> Any:
    """Write 16 float32 as bfloat16 into the low halves of 16 uint32; the high halves become zero."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        wide = b.zext(float_to_bfloat16_bits(b, args[1]), V16I)
        b.store(wide, pointer(b, args[0], V16I)).align = 4
        return ctx.get_dummy_value()

    return types.void(types.int64, vector), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_odd_half(context: Any, at: Any, value: Any) -> Any:
    """Write 16 float32 as bfloat16 into the high halves of 16 uint32; the low halves stay."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        where = pointer(b, args[0], V16I)
        old = b.load(where)
        old.align = 4
        wide = b.shl(b.zext(float_to_bfloat16_bits(b, args[1]), V16I), integer_lanes(16))
        b.store(b.or_(b.and_(old, integer_lanes(0xFFFF)), wide), where).align = 4
        return ctx.get_dummy_value()

    return types.void(types.int64, vector), generate


@intrinsic  # type: ignore[untyped-decorator]
def broadcast(context: Any, scalar: Any) -> Any:
    """A float32 in all lanes."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return splat(b, args[0], V16F)

    return vector(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def add(context: Any, left: Any, right: Any) -> Any:
    """left + right."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.fadd(args[0], args[1])

    return vector(vector, vector), generate


@intrinsic  # type: ignore[untyped-decorator]
def subtract(context: Any, left: Any, right: Any) -> Any:
    """left - right."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.fsub(args[0], args[1])

    return vector(vector, vector), generate


@intrinsic  # type: ignore[untyped-decorator]
def multiply(context: Any, left: Any, right: Any) -> Any:
    """left * right."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.fmul(args[0], args[1])

    return vector(vector, vector), generate


@intrinsic  # type: ignore[untyped-decorator]
def divide(context: Any, left: Any, right: Any) -> Any:
    """left / right."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.fdiv(args[0], args[1])

    return vector(vector, vector), generate


@intrinsic  # type: ignore[untyped-decorator]
def multiply_add(context: Any, left: Any, right: Any, addend: Any) -> Any:
    """left * right + addend; fused where the processor fuses."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.call(llvm_function(b, "llvm.fmuladd.v16f32", 3), args)

    return vector(vector, vector, vector), generate


@intrinsic  # type: ignore[untyped-decorator]
def maximum(context: Any, left: Any, right: Any) -> Any:
    """The larger of each lane."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.select(b.fcmp_ordered(">", args[0], args[1]), args[0], args[1])

    return vector(vector, vector), generate


@intrinsic  # type: ignore[untyped-decorator]
def absolute(context: Any, value: Any) -> Any:
    """|value|."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.call(llvm_function(b, "llvm.fabs.v16f32", 1), args)

    return vector(vector), generate


@intrinsic  # type: ignore[untyped-decorator]
def exp2(context: Any, value: Any) -> Any:
    """2**value; see ``exp2_lanes``."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return exp2_lanes(b, args[0])

    return vector(vector), generate


WEIGHT_COEFFICIENTS = (0.9999991655, 0.69312197, 0.2402498126, 0.0559170395, 0.0095605105)
"""2**f for -0.5 <= f <= 0.5: a least-squares fit of the relative error at Chebyshev points, below 3e-6."""
SMALLEST_EXPONENT = -150.0


@intrinsic  # type: ignore[untyped-decorator]
def exp2_coarse(context: Any, level: Any, value: Any) -> Any:
    """2**value for value <= 127 with a relative error below 3e-6, less than a bfloat16 shows; 0 far below."""
    native = has_avx512(level)

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        x = args[1]
        low = constant_lanes(SMALLEST_EXPONENT if native else -126.0)
        below = b.fcmp_ordered("<", x, low)
        x = b.select(below, low, x)  # NaN stays
        whole = b.call(llvm_function(b, "llvm.rint.v16f32", 1), [x])
        fraction = b.fsub(x, whole)
        fma = llvm_function(b, "llvm.fmuladd.v16f32", 3)
        result = constant_lanes(WEIGHT_COEFFICIENTS[-1])
        for coefficient in reversed(WEIGHT_COEFFICIENTS[:-1]):
            result = b.call(fma, [result, fraction, constant_lanes(coefficient)])
        if native:
            return scale_exponent(b, result, whole)
        exponent = b.shl(b.fptosi(whole, V16I), integer_lanes(23))
        scaled = b.bitcast(b.add(b.bitcast(result, V16I), exponent), V16F)
        scaled = b.select(below, constant_lanes(0.0), scaled)
        return b.select(b.fcmp_unordered("uno", x, x), x, scaled)

    return vector(level, vector), generate


def scale_exponent(b: Any, value: Any, exponent: Any) -> Any:
    """value * 2**exponent (VSCALEFPS); the exponent is a whole float."""
    i16 = ir.IntType(16)
    kind = ir.FunctionType(V16F, [V16F, V16F, V16F, i16, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.mask.scalef.ps.512")
    everywhere, as_set = ir.Constant(i16, -1), ir.Constant(I32, 4)
    return b.call(function, [value, exponent, value, everywhere, as_set])


@intrinsic  # type: ignore[untyped-decorator]
def store_rounded(context: Any, level: Any, at: Any, value: Any) -> Any:
    """Write 16 float32 as bfloat16, rounded to nearest even; returns what was written, as float32."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        _, at, value = args
        bits = b.bitcast(value, V16I)
        odd = b.and_(b.lshr(bits, integer_lanes(16)), integer_lanes(1))
        rounded = b.add(bits, b.add(odd, integer_lanes(0x7FFF)))
        b.store(b.trunc(b.lshr(rounded, integer_lanes(16)), V16H), pointer(b, at, V16H)).align = 2
        return b.bitcast(b.and_(rounded, integer_lanes(-65536)), V16F)

    return vector(level, types.int64, vector), generate


@intrinsic  # type: ignore[untyped-decorator]
def silu_multiply(context: Any, gate: Any, up: Any) -> Any:
    """gate / (1 + exp(-gate)) * up."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        gate, up = args
        exponent = b.fmul(gate, constant_lanes(-1.4426950408889634))
        high = constant_lanes(126.0)
        exponent = b.select(b.fcmp_ordered(">", exponent, high), high, exponent)
        bottom = b.fadd(constant_lanes(1.0), exp2_lanes(b, exponent))
        return b.fmul(b.fdiv(gate, bottom), up)

    return vector(vector, vector), generate


@intrinsic  # type: ignore[untyped-decorator]
def keep_between(context: Any, value: Any, first: Any, low: Any, high: Any) -> Any:
    """Lanes whose number (``first`` for the first one) lies in [low, high); -inf elsewhere."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        value, first, low, high = args
        lanes = ir.Constant(V16I, list(range(16)))
        number = b.add(splat(b, b.trunc(first, I32), V16I), lanes)
        above = b.icmp_signed(">=", number, splat(b, b.trunc(low, I32), V16I))
        below = b.icmp_signed("<", number, splat(b, b.trunc(high, I32), V16I))
        return b.select(b.and_(above, below), value, constant_lanes(float("-inf")))

    return vector(vector, types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def sum_lanes(context: Any, value: Any) -> Any:
    """The sum of the lanes, halves upon halves."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return fold(b, args[0], b.fadd)

    return types.float32(vector), generate


@intrinsic  # type: ignore[untyped-decorator]
def largest_lane(context: Any, value: Any) -> Any:
    """The largest lane."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return fold(b, args[0], lambda low, high: b.select(b.fcmp_ordered(">", low, high), low, high))

    return types.float32(vector), generate


@intrinsic  # type: ignore[untyped-decorator]
def read_i64(context: Any, at: Any) -> Any:
    """One int64."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load(pointer(b, args[0], I64))

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def write_i64(context: Any, at: Any, value: Any) -> Any:
    """Write one int64."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(args[1], pointer(b, args[0], I64))
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def write_i32(context: Any, at: Any, value: Any) -> Any:
    """Write the low 32 bits."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(b.trunc(args[1], I32), pointer(b, args[0], I32))
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def read_clock(context: Any) -> Any:
    """The processor's cycle (or time stamp) counter."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(I64, [])
        return b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.readcyclecounter"), [])

    return types.int64(), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_l2(context: Any, at: Any) -> Any:
    """Ask for a cache line, into L2."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        prefetch_line(b, args[0], 0, 2)
        return ctx.get_dummy_value()

    return types.void(types.int64), generate
