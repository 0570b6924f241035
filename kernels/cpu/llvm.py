"""Instructions that numba has no words for, as LLVM IR: bit casts, plain memory accesses, and the helpers that the
kernels' own IR is written with.

Callable from compiled code (addresses are int64 and must be aligned to their type):

* ``f32_bits(x) -> int32``, ``bits_f32(i) -> float32``; loops over them vectorise;
* ``load_f32(p)``, ``store_f32(p, v)``, and the same for i64, i32 and i8: plain memory accesses at an address.

For functions that build IR (``gen`` of an intrinsic): the types, ``splat``, ``address``, ``load``, ``store``,
``fma``, ``dot_bf16``, ``dot_u8s8``, ``prefetch_line``, ``switch`` and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    null = "zeroinitializer"
    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


V16I16, V16I32, V16F32 = ir.VectorType(I16, 16), ir.VectorType(I32, 16), ir.VectorType(F32, 16)
V32BF16 = ir.VectorType(BFloat(), 32)


def const(value: int) -> Any:
    """An int64 constant."""
    return ir.Constant(I64, value)


def address(b: Any, base: Any, offset: int | Any, kind: Any) -> Any:
    """A pointer to ``kind`` at ``base + offset`` bytes (int64 values)."""
    offset = const(offset) if isinstance(offset, int) else offset
    return b.inttoptr(b.add(base, offset), ir.PointerType(kind))


def load(b: Any, base: Any, offset: int | Any, kind: Any, align: int = 4) -> Any:
    """Load a ``kind`` from ``base + offset`` bytes."""
    value = b.load(address(b, base, offset, kind))
    value.align = align
    return value


def store(b: Any, value: Any, base: Any, offset: int | Any, align: int = 4) -> None:
    """Store ``value`` at ``base + offset`` bytes."""
    b.store(value, address(b, base, offset, value.type)).align = align


def splat(b: Any, value: Any, kind: Any) -> Any:
    """A vector whose elements all are ``value``."""
    undefined = ir.Constant(kind, ir.Undefined)
    one = b.insert_element(undefined, value, ir.Constant(I32, 0))
    return b.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count))


def zeros(kind: Any) -> Any:
    """A vector of zeros."""
    return ir.Constant(kind, [0 if isinstance(kind.element, ir.IntType) else 0.0] * kind.count)


def call(b: Any, name: str, result: Any, arguments: Sequence[Any]) -> Any:
    """Call an LLVM intrinsic."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), list(arguments))


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """``x * y + z``; 16 float32. Rounded once where the processor can (all that have a level of their own)."""
    return call(b, "llvm.fmuladd.v16f32", V16F32, [x, y, z])


def smax(b: Any, x: Any, y: Any) -> Any:
    """The larger of each of 16 int32."""
    return call(b, "llvm.smax.v16i32", V16I32, [x, y])


def smin(b: Any, x: Any, y: Any) -> Any:
    """The smaller of each of 16 int32."""
    return call(b, "llvm.smin.v16i32", V16I32, [x, y])


def all_lanes(value: int) -> Any:
    """16 equal int32."""
    return ir.Constant(V16I32, [value] * 16)


def largest_of_lanes(b: Any, x: Any) -> Any:
    """The largest of 16 int32."""
    return call(b, "llvm.vector.reduce.smax.v16i32", I32, [x])


def sum_of_lanes(b: Any, x: Any) -> Any:
    """The sum of 16 int32."""
    return call(b, "llvm.vector.reduce.add.v16i32", I32, [x])


def permute(b: Any, x: Any, order: list[int]) -> Any:
    """Element ``order[i]`` of ``x`` in place i."""
    undefined = ir.Constant(x.type, ir.Undefined)
    return b.shuffle_vector(x, undefined, ir.Constant(ir.VectorType(I32, len(order)), order))


def opaque(b: Any, value: Any) -> Any:
    """An int64 of which the compiler knows nothing."""
    return b.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [value], False)


def dot_bf16(b: Any, sums: Any, x: Any, y: Any, native: bool) -> Any:
    """``sums + x[2i] * y[2i] + x[2i+1] * y[2i+1]``: x and y are 16 int32, each two bfloat16 (VDPBF16PS)."""
    if native:
        x, y = b.bitcast(x, V32BF16), b.bitcast(y, V32BF16)
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", V16F32, [sums, x, y])
    high = ir.Constant(V16I32, [-65536] * 16)
    shift = ir.Constant(V16I32, [16] * 16)
    odd = [b.bitcast(b.and_(value, high), V16F32) for value in (x, y)]
    even = [b.bitcast(b.shl(value, shift), V16F32) for value in (x, y)]
    return fma(b, even[0], even[1], fma(b, odd[0], odd[1], sums))


def dot_u8s8(b: Any, sums: Any, x: Any, y: Any, native: bool) -> Any:
    """``sums + dot of four``: x is 16 int32 of four uint8 each, y of four int8 each (VPDPBUSD)."""
    if native:
        return call(b, "llvm.x86.avx512.vpdpbusd.512", V16I32, [sums, x, y])
    for byte in range(4):
        left, right = (ir.Constant(V16I32, [8 * amount] * 16) for amount in (3 - byte, 3))
        x_byte, y_byte = b.lshr(b.shl(x, left), right), b.ashr(b.shl(y, left), right)
        sums = b.add(sums, b.mul(x_byte, y_byte))
    return sums


def row_addresses(b: Any, base: Any, stride: Any, rows: int) -> list[Any]:
    """Addresses of every third row: the two between are reached by the processor's address arithmetic."""
    return [b.add(base, b.mul(stride, const(row))) for row in range(0, rows, 3)]


def row_address(b: Any, starts: list[Any], stride: Any, row: int, offset: Any) -> Any:
    """The address of ``offset`` bytes into a row, from ``row_addresses``."""
    at = b.add(starts[row // 3], offset)
    for _ in range(row % 3):
        at = b.add(at, stride)
    return at


def store_tile(b: Any, tile: list[list[Any]], out: Any, stride: Any, add: Any) -> None:
    """Store rows of vectors at ``out``, rows ``stride`` bytes apart, or add them to what is there where ``add``."""
    adding, writing = b.append_basic_block("add"), b.append_basic_block("write")
    after = b.append_basic_block("stored")
    b.cbranch(b.icmp_signed("!=", add, const(0)), adding, writing)
    for block in (adding, writing):
        b.position_at_end(block)
        for row, vectors in enumerate(tile):
            at = b.add(out, b.mul(stride, const(row)))
            for j, vector in enumerate(vectors):
                if block is adding:
                    vector = b.fadd(load(b, at, 64 * j, V16F32), vector)
                store(b, vector, at, 64 * j)
        b.branch(after)
    b.position_at_end(after)


def switch(b: Any, value: Any, numbers: Sequence[int], emit: Callable[[int], None]) -> None:
    """Emit one variant for each of ``numbers``; run the one that ``value`` (int64) names, else the last."""
    after = b.append_basic_block("after")
    variants = [b.append_basic_block(f"variant_{number}") for number in numbers]
    choice = b.switch(value, variants[-1])
    for number, block in zip(numbers, variants, strict=True):
        if block is not variants[-1]:
            choice.add_case(const(number), block)
        b.position_at_end(block)
        emit(number)
        b.branch(after)
    b.position_at_end(after)


def loop(b: Any, count: Any, starts: list[Any], turn: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Emit ``count`` (int64, at least 1) turns: ``turn(i, values)`` without branches gives the next turn's values, the
    first has ``starts``. Returns the last ones."""
    before, block, after = b.block, b.append_basic_block("loop"), b.append_basic_block("looped")
    b.branch(block)
    b.position_at_end(block)
    i, values = b.phi(I64), [b.phi(start.type) for start in starts]
    results = turn(i, values)
    following = b.add(i, const(1))
    incoming([i, *values], [const(0), *starts], before)
    incoming([i, *values], [following, *results], block)
    b.cbranch(b.icmp_signed("<", following, count), block, after)
    b.position_at_end(after)
    return results


def incoming(phis: list[Any], values: list[Any], block: Any) -> None:
    """What each phi is when ``block`` came before."""
    for phi, value in zip(phis, values, strict=True):
        phi.add_incoming(value, block)


@intrinsic
def stack_floats_384(context: Any) -> Any:
    """The address of 384 float32 (aligned to 64 bytes) in the caller's frame: valid until the caller returns."""

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        slot = cgutils.alloca_once(b, ir.ArrayType(V16F32, 24))
        slot.align = 64
        return b.ptrtoint(slot, I64)

    return types.int64(), gen


def prefetch_line(b: Any, base: Any, offset: int | Any, locality: int = 3) -> None:
    """Ask for the cache line at ``base + offset`` bytes, for reading; ``locality`` 3: into all levels, 2: into L2."""
    one = [ir.Constant(I32, value) for value in (0, locality, 1)]
    call(b, "llvm.prefetch.p0", ir.VoidType(), [address(b, base, offset, I8), *one])


@intrinsic
def f32_bits(context: Any, x: Any) -> Any:
    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.bitcast(args[0], I32)

    return types.int32(types.float32), gen


@intrinsic
def bits_f32(context: Any, bits: Any) -> Any:
    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.bitcast(args[0], F32)

    return types.float32(types.int32), gen


def _loader(kind: Any, result: Any) -> Any:
    def loader(context: Any, p: Any) -> Any:
        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            return load(b, args[0], 0, kind, kind.width // 8 if isinstance(kind, ir.IntType) else 4)

        return result(types.int64), gen

    return intrinsic(loader)


def _storer(kind: Any, argument: Any) -> Any:
    def storer(context: Any, p: Any, value: Any) -> Any:
        def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            store(b, args[1], args[0], 0, kind.width // 8 if isinstance(kind, ir.IntType) else 4)
            return ctx.get_dummy_value()

        return types.void(types.int64, argument), gen

    return intrinsic(storer)


load_f32 = _loader(F32, types.float32)
load_i64 = _loader(I64, types.int64)
load_i32 = _loader(I32, types.int32)
load_i8 = _loader(I8, types.int8)
store_f32 = _storer(F32, types.float32)
store_i64 = _storer(I64, types.int64)
store_i32 = _storer(I32, types.int32)
store_i8 = _storer(I8, types.int8)
