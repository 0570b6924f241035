"""Rotary position embedding, "two halves" convention: with h = dim / 2 and angles a[position, i],

out[i]     = x[i] * cos a[i] - x[i + h] * sin a[i]
out[i + h] = x[i + h] * cos a[i] + x[i] * sin a[i]
"""

from __future__ import annotations

from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.vector import add, multiply, subtract
from ringserve.kernels.cpu.vector_memory import load, store


@compiled
def rotate(x: int, cos: int, sin: int, dim: int, out: int) -> None:
    """One head: ``dim`` >= 32 float32 at ``x`` to ``out`` (another place); ``cos``, ``sin``: dim / 2 float32."""
    half = dim // 2
    i = 0
    while True:
        c, s = load(cos + 4 * i), load(sin + 4 * i)
        low, high = load(x + 4 * i), load(x + 4 * (i + half))
        store(out + 4 * i, subtract(multiply(low, c), multiply(high, s)))
        store(out + 4 * (i + half), add(multiply(high, c), multiply(low, s)))
        if i + 16 >= half:
            return
        i = min(i + 16, half - 16)  # the last vector may overlap: the same values once more
