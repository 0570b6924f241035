"""Parts of sampling on one row of float32, for compiled code: nothing is sorted but a handful of values.

``select`` finds where a descending order of the values would be cut, by bisection: a pass counts (or weighs) what lies
at or above a trial value, sixteen values at a time, so a row of 50,000 takes a few microseconds a pass. Trials
alternate between the middle of the interval and the middle of the floats in it: no row takes more than 64 of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from ringserve.kernels.cpu import vector
from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.exponentials import exp2
from ringserve.kernels.cpu.llvm import V16F32, bits_f32, f32_bits, load_f32, load_i32, store_f32, store_i32
from ringserve.kernels.cpu.vector_memory import load, store

BLOCK = 32
"""Values whose maximum is kept, so that blocks without candidates are passed over."""

SUM_BLOCK = 256
"""Weights added in float32, in 16 lanes, before float64 takes over."""

LARGEST = np.float32(np.finfo(np.float32).max)
MINUS_INFINITY = np.float32(-np.inf)
LOG2_E = np.float32(1.4426950408889634)

_FEW = 24
_SIGN = np.int32(0x7FFFFFFF)


@intrinsic
def _finite(context: Any, value: Any) -> Any:
    """16 lanes: NaN as -inf, +inf as the largest float."""

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        largest, lowest = (ir.Constant(V16F32, [float(bound)] * 16) for bound in (LARGEST, MINUS_INFINITY))
        capped = b.select(b.fcmp_ordered("<", args[0], largest), args[0], largest)
        return b.select(b.fcmp_ordered("ord", args[0], args[0]), capped, lowest)

    return vector.vector(vector.vector), gen


@compiled
def clean_row(row: int, vocab: int, x: Any, maxima: Any) -> Any:
    """Copy the row at address ``row`` to ``x``: NaN as -inf, +inf as the largest float, padded to whole blocks.

    The padding is -inf. ``maxima`` gets every block's largest value. Returns the row's.
    """
    top = MINUS_INFINITY
    whole = vocab // BLOCK
    target = x.ctypes.data
    for block in range(whole):
        at = row + 4 * BLOCK * block
        to = target + 4 * BLOCK * block
        first, second = _finite(load(at)), _finite(load(at + 64))
        store(to, first)
        store(to + 64, second)
        largest = vector.largest_lane(vector.maximum(first, second))
        maxima[block] = largest
        top = max(top, largest)
    if whole * BLOCK < vocab:
        largest = MINUS_INFINITY
        for i in range(whole * BLOCK, (whole + 1) * BLOCK):
            value = load_f32(row + 4 * i) if i < vocab else MINUS_INFINITY
            # A comparison with NaN is false.
            value = min(value, LARGEST) if value > MINUS_INFINITY else MINUS_INFINITY
            x[i] = value
            largest = max(largest, value)
        maxima[whole] = largest
        top = max(top, largest)
    return top


@compiled
def first_of(x: Any, maxima: Any, vocab: int, top: Any) -> int:
    """The smallest index of ``top``, the row's largest value."""
    for block in range((vocab + BLOCK - 1) // BLOCK):
        if maxima[block] == top:
            for i in range(block * BLOCK, min(vocab, (block + 1) * BLOCK)):
                if x[i] == top:
                    return i
    return -1


@compiled
def exponentials(values: Any, count: int, top: Any, scale: Any, weights: Any) -> None:
    """``weights[i] = 2 ** ((values[i] - top) * scale)``; both arrays have room for a multiple of 16."""
    at, to = values.ctypes.data, weights.ctypes.data
    tops, scales = vector.broadcast(top), vector.broadcast(scale)
    for i in range(0, count, 16):
        exponent = vector.multiply(vector.subtract(load(at + 4 * i), tops), scales)
        store(to + 4 * i, exp2(exponent))


@intrinsic
def _where_at_least(context: Any, value: Any, bound: Any, then: Any) -> Any:
    """Lanes of ``then`` where ``value >= bound``, else zero."""

    def gen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        value, bound, then = args
        return b.select(b.fcmp_ordered(">=", value, bound), then, ir.Constant(V16F32, [0.0] * 16))

    return vector.vector(vector.vector, vector.vector, vector.vector), gen


@compiled
def _sum(weights: Any, first: int, last: int) -> Any:
    """In 16 lanes, then the lanes, then what is left of a vector."""
    at = weights.ctypes.data
    sums = vector.broadcast(np.float32(0))
    whole = first + (last - first) // 16 * 16
    for i in range(first, whole, 16):
        sums = vector.add(sums, load(at + 4 * i))
    total = vector.sum_lanes(sums)
    for i in range(whole, last):
        total += load_f32(at + 4 * i)
    return total


@compiled
def total_weight(weights: Any, count: int) -> float:
    """The sum: blocks of ``SUM_BLOCK`` in float32, these in float64 in ascending order."""
    total = 0.0
    for first in range(0, count, SUM_BLOCK):
        total += _sum(weights, first, min(count, first + SUM_BLOCK))
    return total


@compiled
def pick(weights: Any, count: int, uniform: float) -> int:
    """The first index whose cumulative weight reaches ``uniform`` times the sum."""
    target = uniform * total_weight(weights, count)
    before = 0.0
    last = count - 1
    for first in range(0, count, SUM_BLOCK):
        end = min(count, first + SUM_BLOCK)
        after = before + _sum(weights, first, end)
        if after >= target:
            cumulative = before
            for i in range(first, end):
                cumulative += weights[i]
                if cumulative >= target:
                    return i
                if weights[i] > 0:
                    last = i
            return last  # the two sums round differently: the block's last token that weighs anything
        before = after
    return last


@compiled
def gather(x: Any, maxima: Any, vocab: int, bound: Any, values: Any, ids: Any) -> int:
    """Values of at least ``bound`` and their indices, ascending; how many."""
    count = 0
    x_at, values_at, ids_at = x.ctypes.data, values.ctypes.data, ids.ctypes.data
    for block in range((vocab + BLOCK - 1) // BLOCK):
        if maxima[block] >= bound:
            for i in range(block * BLOCK, min(vocab, (block + 1) * BLOCK)):
                value = load_f32(x_at + 4 * i)
                store_f32(values_at + 4 * count, value)
                store_i32(ids_at + 4 * count, i)
                count += value >= bound
    return count


@compiled
def weight_from(values: Any, weights: Any, count: int, bound: Any) -> Any:
    """(the weight, the number) of the values of at least ``bound``; added in the order of ``total_weight``."""
    at, weights_at = values.ctypes.data, weights.ctypes.data
    bounds, one = vector.broadcast(bound), vector.broadcast(np.float32(1))
    total, found = 0.0, 0
    for first in range(0, count, SUM_BLOCK):
        end = min(count, first + SUM_BLOCK)
        whole = first + (end - first) // 16 * 16
        sums = vector.broadcast(np.float32(0))
        numbers = vector.broadcast(np.float32(0))
        for i in range(first, whole, 16):
            value = load(at + 4 * i)
            sums = vector.add(sums, _where_at_least(value, bounds, load(weights_at + 4 * i)))
            numbers = vector.add(numbers, _where_at_least(value, bounds, one))
        weight = vector.sum_lanes(sums)
        found += int(vector.sum_lanes(numbers))
        for i in range(whole, end):
            if load_f32(at + 4 * i) >= bound:
                weight += load_f32(weights_at + 4 * i)
                found += 1
        total += weight
    return total, found


@compiled
def _order(value: Any) -> int:
    """An integer that orders as the floats do."""
    bits = f32_bits(value + np.float32(0))  # -0.0 orders as 0.0
    return int(bits if bits >= 0 else bits ^ _SIGN)


@compiled
def _from_order(order: int) -> Any:
    bits = np.int32(order)
    return bits_f32(bits if bits >= 0 else bits ^ _SIGN)


@compiled
def following(value: Any) -> Any:
    """The next larger float."""
    return _from_order(_order(value) + 1)


@compiled
def select(values: Any, weights: Any, count: int, target: float, low: Any, top: Any) -> Any:
    """Where the shortest descending run of values that weighs ``target`` ends: (last value, how many of that value).

    Ties count in ascending index; all of the values where they weigh less. ``low`` is at most the smallest value (or
    at most the last of the run), ``top`` the largest. ``count > 0``.
    """
    above = 0.0  # the weight of what is >= high
    num_low, num_high = count, 0  # how many are >= low, >= high
    high = following(top)
    by_value = True
    while num_low - num_high > _FEW:
        middle = low * np.float32(0.5) + high * np.float32(0.5)
        if not by_value or not (low < middle < high):
            middle = _from_order((_order(low) + _order(high)) >> 1)
            if not (low < middle < high):
                break
        by_value = not by_value
        weight, found = weight_from(values, weights, count, middle)
        if weight >= target:
            low, num_low = middle, found
        else:
            high, num_high, above = middle, found, weight
    return _cut(values, weights, count, low, high, above, target)


@compiled
def _cut(values: Any, weights: Any, count: int, low: Any, high: Any, above: float, target: float) -> Any:
    """The end of ``select``, among the values in [low, high): few, or all the same."""
    some_values, some_weights = np.empty(_FEW, np.float32), np.empty(_FEW, np.float32)
    found = 0
    for i in range(count):
        if (values[i] >= low) & (values[i] < high):
            if found == _FEW:
                return _cut_ties(values, weights, count, low, high, above, target)
            at = found
            while at > 0 and some_values[at - 1] < values[i]:
                some_values[at], some_weights[at] = some_values[at - 1], some_weights[at - 1]
                at -= 1
            some_values[at], some_weights[at] = values[i], weights[i]
            found += 1
    ties = 0
    last = low
    for i in range(found):
        ties = ties + 1 if i > 0 and some_values[i] == last else 1
        last = some_values[i]
        above += some_weights[i]
        if above >= target:
            break
    return last, ties


@compiled
def _cut_ties(values: Any, weights: Any, count: int, low: Any, high: Any, above: float, target: float) -> Any:
    ties = 0
    last = low
    for i in range(count):
        if (values[i] >= low) & (values[i] < high):
            last = values[i]
            ties += 1
            above += weights[i]
            if above >= target:
                break
    return last, ties


@compiled
def keep(values: Any, ids: Any, weights: Any, count: int, last: Any, ties: int) -> int:
    """Keep what ``select`` selected, in place and in order; how many."""
    kept = 0
    values_at, ids_at, weights_at = values.ctypes.data, ids.ctypes.data, weights.ctypes.data
    for i in range(count):
        value = load_f32(values_at + 4 * i)
        tie = value == last
        store_f32(values_at + 4 * kept, value)
        store_i32(ids_at + 4 * kept, load_i32(ids_at + 4 * i))
        store_f32(weights_at + 4 * kept, load_f32(weights_at + 4 * i))
        kept += (value > last) | (tie & (ties > 0))
        ties -= tie
    return kept


@compiled
def keep_heavy(ids: Any, weights: Any, count: int, least: Any) -> int:
    """Keep what weighs at least ``least``, in place and in order; how many."""
    kept = 0
    for i in range(count):
        ids[kept], weights[kept] = ids[i], weights[i]
        kept += weights[i] >= least
    return kept
