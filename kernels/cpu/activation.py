"""SwiGLU's middle: silu(gate) * up, silu(x) = x / (1 + exp(-x)), element by element."""

from __future__ import annotations

from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.exponentials import silu_multiply
from ringserve.kernels.cpu.vector_memory import load, store, store_bfloat16


@compiled
def silu_mul(gate: int, up: int, size: int, out: int) -> None:
    """``size`` (a multiple of 16) float32 each to float32."""
    for i in range(0, size, 16):
        store(out + 4 * i, silu_multiply(load(gate + 4 * i), load(up + 4 * i)))


@compiled
def silu_mul_bfloat16(gate: int, up: int, size: int, out: int) -> None:
    """``size`` (a multiple of 16) float32 each to bfloat16."""
    for i in range(0, size, 16):
        store_bfloat16(out + 2 * i, silu_multiply(load(gate + 4 * i), load(up + 4 * i)))
