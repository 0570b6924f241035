"""Vectors of 16 float32 (``vector``) from memory and to it, as float32 and as bfloat16.

Addresses are int64; nothing needs to be aligned beyond its elements.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from ringserve.kernels.cpu import llvm
from ringserve.kernels.cpu.llvm import V16F32, V16I16, V16I32, all_lanes, prefetch_line
from ringserve.kernels.cpu.vector import vector


def _rounded_bits(b: Any, value: Any) -> Any:
    """float32 as int32 whose high halves are the bfloat16: to nearest, ties to even."""
    bits = b.bitcast(value, V16I32)
    odd = b.and_(b.lshr(bits, all_lanes(16)), all_lanes(1))
    return b.add(bits, b.add(odd, all_lanes(0x7FFF)))


def _high_halves(b: Any, bits: Any) -> Any:
    """Of 16 int32, as int16."""
    return b.trunc(b.lshr(bits, all_lanes(16)), V16I16)


@intrinsic
def load(context: Any, at: Any) -> Any:
    """16 float32 at an address."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        return llvm.load(b, args[0], 0, V16F32)

    return vector(types.int64), generate


@intrinsic
def store(context: Any, at: Any, value: Any) -> Any:
    """Write 16 float32."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        llvm.store(b, args[1], args[0], 0)
        return ctx.get_dummy_value()

    return types.void(types.int64, vector), generate


@intrinsic
def load_bfloat16(context: Any, at: Any) -> Any:
    """16 bfloat16 at an address, widened."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        half = llvm.load(b, args[0], 0, V16I16, 2)
        return b.bitcast(b.shl(b.zext(half, V16I32), all_lanes(16)), V16F32)

    return vector(types.int64), generate


@intrinsic
def store_bfloat16(context: Any, at: Any, value: Any) -> Any:
    """Write 16 float32 as bfloat16, rounded to nearest even."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        llvm.store(b, _high_halves(b, _rounded_bits(b, args[1])), args[0], 0, 2)
        return ctx.get_dummy_value()

    return types.void(types.int64, vector), generate


@intrinsic
def store_rounded(context: Any, at: Any, value: Any) -> Any:
    """``store_bfloat16`` that returns what was written, as float32."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        bits = _rounded_bits(b, args[1])
        llvm.store(b, _high_halves(b, bits), args[0], 0, 2)
        return b.bitcast(b.and_(bits, all_lanes(-65536)), V16F32)

    return vector(types.int64, vector), generate


@intrinsic
def store_even_half(context: Any, at: Any, value: Any) -> Any:
    """Write 16 float32 as bfloat16 into the low halves of 16 uint32; the high halves become zero."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        llvm.store(b, b.zext(_high_halves(b, _rounded_bits(b, args[1])), V16I32), args[0], 0)
        return ctx.get_dummy_value()

    return types.void(types.int64, vector), generate


@intrinsic
def store_odd_half(context: Any, at: Any, value: Any) -> Any:
    """Write 16 float32 as bfloat16 into the high halves of 16 uint32; the low halves stay."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        old = llvm.load(b, args[0], 0, V16I32)
        wide = b.shl(b.zext(_high_halves(b, _rounded_bits(b, args[1])), V16I32), all_lanes(16))
        llvm.store(b, b.or_(b.and_(old, all_lanes(0xFFFF)), wide), args[0], 0)
        return ctx.get_dummy_value()

    return types.void(types.int64, vector), generate


@intrinsic
def prefetch_l2(context: Any, at: Any) -> Any:
    """Ask for a cache line, into L2."""

    def generate(ctx: Any, b: Any, signature: Any, args: Any) -> Any:
        prefetch_line(b, args[0], 0, 2)
        return ctx.get_dummy_value()

    return types.void(types.int64), generate
