"""2**x of vectors (``vector``): Cody and Waite's scheme. The fraction in [-0.5, 0.5] goes through a polynomial, the
integer part into the exponent's bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from ringserve.kernels.cpu.features import has_avx512
from ringserve.kernels.cpu.llvm import I16, I32, V16F32, V16I32, all_lanes, call, fma
from ringserve.kernels.cpu.vector import constant_lanes, vector

LN2 = 0.6931471805599453
TAYLOR_COEFFICIENTS = tuple(LN2**n / math.factorial(n) for n in range(7))
WEIGHT_COEFFICIENTS = (0.9999991655, 0.69312197, 0.2402498126, 0.0559170395, 0.0095605105)
"""2**f for -0.5 <= f <= 0.5: a least-squares fit of the relative error at Chebyshev points, below 3e-6."""
SMALLEST_NORMAL, SMALLEST_EXPONENT = -126.0, -150.0


def _split(b: Any, x: Any, coefficients: Sequence[float]) -> tuple[Any, Any]:
    """The polynomial of ``x``'s fraction, and its integer part."""
    whole = call(b, "llvm.rint.v16f32", V16F32, [x])
    fraction = b.fsub(x, whole)
    value = constant_lanes(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = fma(b, value, fraction, constant_lanes(coefficient))
    return value, whole


def _scale(b: Any, value: Any, exponent: Any, x: Any, below: Any) -> Any:
    """value * 2**exponent for an exponent of -126 to 127, a whole float; 0 where ``below``; NaN where ``x`` is."""
    bits = b.shl(b.fptosi(exponent, V16I32), all_lanes(23))
    scaled = b.bitcast(b.add(b.bitcast(value, V16I32), bits), V16F32)
    scaled = b.select(below, constant_lanes(0.0), scaled)
    return b.select(b.fcmp_unordered("uno", x, x), x, scaled)


def _scale_natively(b: Any, value: Any, exponent: Any) -> Any:
    """value * 2**exponent (VSCALEFPS); the exponent is a whole float."""
    everywhere, as_set = ir.Constant(I16, -1), ir.Constant(I32, 4)
    return call(b, "llvm.x86.avx512.mask.scalef.ps.512", V16F32, [value, exponent, value, everywhere, as_set])


def exp2_lanes(b: Any, x: Any) -> Any:
    """For functions that build IR: 2**x for x <= 127, relative error below 3e-7; 0 below -126, -inf included."""
    low = constant_lanes(SMALLEST_NORMAL)
    value, whole = _split(b, b.select(b.fcmp_ordered(">", x, low), x, low), TAYLOR_COEFFICIENTS)
    return _scale(b, value, whole, x, b.fcmp_ordered("<", x, low))


@intrinsic
def exp2(context: Any, value: Any) -> Any:
    """2**value; see ``exp2_lanes``."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return exp2_lanes(b, args[0])

    return vector(vector), generate


@intrinsic
def exp2_coarse(context: Any, level: Any, value: Any) -> Any:
    """2**value for value <= 127 with a relative error below 3e-6, less than a bfloat16 shows; 0 far below."""
    native = has_avx512(level)

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        x = args[1]
        low = constant_lanes(SMALLEST_EXPONENT if native else SMALLEST_NORMAL)
        below = b.fcmp_ordered("<", x, low)
        x = b.select(below, low, x)  # NaN stays
        value, whole = _split(b, x, WEIGHT_COEFFICIENTS)
        return _scale_natively(b, value, whole) if native else _scale(b, value, whole, x, below)

    return vector(level, vector), generate


@intrinsic
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
