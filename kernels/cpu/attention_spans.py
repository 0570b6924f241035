"""Softmax over the keys of a long sequence in pieces: the state of a piece, and how two states become one.

Keys are cut at absolute multiples of ``SPAN`` positions. What attention knows of some rows after a span is a *state*:

    out [rows, dim]      sum over the span's keys of w_t v_t,     w_t = 2 ** (scale * (s_t - maximum))
    total [rows, 16]     sum of w_t, in 16 parts
    maximum [rows]       the largest s_t, not scaled; LOWEST where the row sees no key of the span
    scale [rows]         of the row's scores

all float32, one after the other at one address. Spans are merged in ascending order, so the result depends on the
row's own position (and window) alone: not on who computed which span, nor on the rows around it. A state of a row that
saw nothing changes nothing, bit for bit, and is replaced by the first that saw something.

This module knows no page and no type of keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.exponentials import exp2_coarse
from ringserve.kernels.cpu.llvm import load_f32, store_f32
from ringserve.kernels.cpu.vector import add, broadcast, multiply, sum_lanes
from ringserve.kernels.cpu.vector_memory import load, store

SPAN = 512
"""Keys. A multiple of every page size; a thread reads so many in some microseconds."""
LOWEST = -1e30
"""The maximum before anything was seen; finite, so that no difference of infinities comes up."""


@compiled
def state_bytes(rows: int, dim: int) -> int:
    """What the state of ``rows`` rows takes."""
    return rows * (4 * dim + 64 + 4 + 4)


@compiled
def totals_of(state: int, rows: int, dim: int) -> int:
    """Where a state's totals begin."""
    return state + 4 * rows * dim


@compiled
def maxima_of(state: int, rows: int, dim: int) -> int:
    """Where a state's maxima begin."""
    return state + rows * (4 * dim + 64)


@compiled
def scales_of(state: int, rows: int, dim: int) -> int:
    """Where a state's scales begin."""
    return state + rows * (4 * dim + 64 + 4)


@compiled
def clear_state(state: int, rows: int, dim: int, scale: Any) -> None:
    """Nothing was seen yet; every row has the same scale."""
    zero = broadcast(np.float32(0))
    totals, maxima, scales = totals_of(state, rows, dim), maxima_of(state, rows, dim), scales_of(state, rows, dim)
    for r in range(rows):
        for i in range(0, dim, 16):
            store(state + 4 * (r * dim + i), zero)
        store(totals + 64 * r, zero)
        store_f32(maxima + 4 * r, np.float32(LOWEST))
        store_f32(scales + 4 * r, scale)


@compiled
def first_page(first_position: int, window: int, page_size: int) -> int:
    """The first page that the row at ``first_position`` sees; ``window``: 0 for none."""
    if window > 0 and first_position >= window:
        return (first_position - window + 1) // page_size
    return 0


@compiled
def merge_states(level: Any, rows: int, dim: int, into: int, later: int) -> None:
    """``into`` becomes the state of its keys and those of ``later``, which come after them."""
    totals, later_totals = totals_of(into, rows, dim), totals_of(later, rows, dim)
    maxima, later_maxima = maxima_of(into, rows, dim), maxima_of(later, rows, dim)
    scales = scales_of(into, rows, dim)
    one = broadcast(np.float32(1))
    for r in range(rows):
        before, after = load_f32(maxima + 4 * r), load_f32(later_maxima + 4 * r)
        scale = load_f32(scales + 4 * r)
        old, new = one, one  # exactly: 2 ** 0 of a polynomial is not
        if after > before:
            store_f32(maxima + 4 * r, after)
            old = exp2_coarse(level, broadcast((before - after) * scale))
        else:
            new = exp2_coarse(level, broadcast((after - before) * scale))
        at, other = totals + 64 * r, later_totals + 64 * r
        store(at, add(multiply(load(at), old), multiply(load(other), new)))
        for i in range(0, dim, 16):
            at, other = into + 4 * (r * dim + i), later + 4 * (r * dim + i)
            store(at, add(multiply(load(at), old), multiply(load(other), new)))


@compiled
def normalise(rows: int, dim: int, state: int) -> None:
    """Divide the sums by the weights' totals, in place."""
    totals = totals_of(state, rows, dim)
    for r in range(rows):
        by = broadcast(np.float32(1) / sum_lanes(load(totals + 64 * r)))
        for i in range(0, dim, 16):
            at = state + 4 * (r * dim + i)
            store(at, multiply(load(at), by))
