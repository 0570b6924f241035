"""What threads of compiled code meet in: atomic accesses, the spinning loop's hint, and the processor's clock.

Addresses are int64 and aligned to 8 bytes; values are int64.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ringserve.kernels.cpu.llvm import I64, address, call

IS_X86 = platform.machine() in ("x86_64", "AMD64")


@intrinsic
def load_acquire(context: Any, p: Any) -> Any:
    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load_atomic(address(b, args[0], 0, I64), "acquire", 8)

    return types.int64(types.int64), gen


@intrinsic
def store_release(context: Any, p: Any, value: Any) -> Any:
    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store_atomic(args[1], address(b, args[0], 0, I64), "release", 8)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), gen


@intrinsic
def fetch_add(context: Any, p: Any, value: Any) -> Any:
    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.atomic_rmw("add", address(b, args[0], 0, I64), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), gen


@intrinsic
def compare_exchange(context: Any, p: Any, expected: Any, new: Any) -> Any:
    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        pair = b.cmpxchg(address(b, args[0], 0, I64), args[1], args[2], "acq_rel", "acquire")
        return b.extract_value(pair, 0)

    return types.int64(types.int64, types.int64, types.int64), gen


@intrinsic
def pause(context: Any) -> Any:
    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        if IS_X86:
            call(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
        else:
            b.asm(ir.FunctionType(ir.VoidType(), []), "yield", "", [], True)
        return ctx.get_dummy_value()

    return types.void(), gen


@intrinsic
def read_clock(context: Any) -> Any:
    """The processor's cycle (or time stamp) counter."""

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return call(b, "llvm.readcyclecounter", I64, [])

    return types.int64(), gen
