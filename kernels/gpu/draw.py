"""Drawing a token from each row of processed logits, on GPUs (Triton).

The definition is ``kernels/sampling.py``'s: temperature, top_k, top_p, min_p, then the inverse CDF over what is kept in
ascending token id, with one uniform from Philox4x32-10 (key: the slot's seed; counter: position, choice, purpose, 0).

Nothing is sorted. top_k and top_p each keep what lies above a value of the row, and of the tokens with that value the
first few. The value is found by bisection between two elements of the row: each pass counts (or weighs) what is at
least the midpoint and moves one end of the interval to the nearest element, so that about twenty passes over a row that
lies in the L2 cache suffice. Weights are float32, sums over blocks float64, hence a token may differ from the
definition's only where ``u``, top_p or min_p lie within 1e-5 of a boundary.

Shapes: logits ``[rows, V]`` float32 without NaN and +inf (``process_logits``); slots ``[rows]`` int32, distinct, -1 for
padding; out ``[rows]`` int32: the token, or -1 where the row has no finite logit. A slot advances by its token: length,
last token, token count. CPU counterpart: ``sampling.draw``; reference: ``sampling_reference.draw_reference``.
"""

# Triton's decorator is untyped for mypy, and kernel parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-any-return, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringserve.kernels.gpu.philox import philox_word, uniform
from ringserve.kernels.gpu.sampler_state import SamplerState
from ringserve.kernels.sampling import SAMPLED_TOKEN

BLOCK = 4096
NUM_WARPS = 8

_SAMPLED_TOKEN: tl.constexpr = tl.constexpr(SAMPLED_TOKEN)


@triton.jit
def _weights(x, top, sharpness):
    """exp((x - top) / T), with sharpness log2(e) / T."""
    return tl.exp2((x - top) * sharpness)


@triton.jit
def _boundary(row, low, high, target, top, sharpness, V: tl.constexpr, BLOCK_V: tl.constexpr, BY_WEIGHT: tl.constexpr):
    """The largest element of the row, from ``low`` to ``high`` (elements), that ``target`` is reached at.

    Reached: so many tokens, or so much weight, are at least as large. It is at ``low``.
    """
    lanes = tl.arange(0, BLOCK_V)
    while low < high:
        middle = low * 0.5 + high * 0.5
        if (middle <= low) | (middle > high):
            middle = high  # neighbours, or numbers so small that half of them is zero
        if BY_WEIGHT:
            sums = tl.zeros([BLOCK_V], tl.float32)
        else:
            sums = tl.zeros([BLOCK_V], tl.int32)
        above = tl.full([BLOCK_V], float("inf"), tl.float32)
        below = tl.full([BLOCK_V], float("-inf"), tl.float32)
        for start in range(0, V, BLOCK_V):
            x = tl.load(row + start + lanes, mask=start + lanes < V, other=float("-inf"))
            is_above = x >= middle
            if BY_WEIGHT:
                sums += tl.where(is_above, _weights(x, top, sharpness), 0.0)
            else:
                sums += is_above.to(tl.int32)
            above = tl.minimum(above, tl.where(is_above, x, float("inf")))
            below = tl.maximum(below, tl.where(is_above, float("-inf"), x))
        if tl.sum(sums, 0) >= target:
            low = tl.min(above, 0)
        else:
            high = tl.max(below, 0)
    return low


@triton.jit
def _around(row, value, top, sharpness, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """Number and weight of the tokens above ``value``, and the number of those that equal it."""
    lanes = tl.arange(0, BLOCK_V)
    counts = tl.zeros([BLOCK_V], tl.int32)
    ties = tl.zeros([BLOCK_V], tl.int32)
    sums = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, V, BLOCK_V):
        x = tl.load(row + start + lanes, mask=start + lanes < V, other=float("-inf"))
        counts += (x > value).to(tl.int32)
        ties += (x == value).to(tl.int32)
        sums += tl.where(x > value, _weights(x, top, sharpness), 0.0)
    return tl.sum(counts, 0), tl.sum(sums, 0), tl.sum(ties, 0)


@triton.jit
def _tie_id(row, value, number, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """The id of the ``number``-th token that equals ``value``."""
    lanes = tl.arange(0, BLOCK_V)
    before = 0
    found = V
    start = 0
    while (found == V) & (start < V):
        x = tl.load(row + start + lanes, mask=start + lanes < V, other=float("-inf"))
        ties = (x == value).to(tl.int32)
        is_it = (ties > 0) & (before + tl.cumsum(ties, 0) == number)
        found = tl.min(tl.where(is_it, start + lanes, V), 0)
        before += tl.sum(ties, 0)
        start += BLOCK_V
    return found


@triton.jit
def _kept_weights(row, start, boundary, last_tie, min_p, top, sharpness, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """Weights of a block's tokens; 0 for those that are not kept."""
    ids = start + tl.arange(0, BLOCK_V)
    x = tl.load(row + ids, mask=ids < V, other=float("-inf"))
    weights = _weights(x, top, sharpness)
    kept = ((x > boundary) | ((x == boundary) & (ids <= last_tie))) & (weights >= min_p)
    return tl.where(kept, weights, 0.0)


@triton.jit(do_not_specialize_on_alignment=["slot_ptr", "out_ptr"])
def _draw(
    logits_ptr,
    slot_ptr,
    out_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    choice_ptr,
    length_ptr,
    last_token_ptr,
    count_row_ptr,
    token_count_ptr,
    logits_stride,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + r).to(tl.int64)
    if slot >= 0:
        row = logits_ptr + r * logits_stride
        lanes = tl.arange(0, BLOCK_V)
        length = tl.load(length_ptr + slot)
        temperature = tl.load(temperature_ptr + slot)

        tops = tl.full([BLOCK_V], float("-inf"), tl.float32)
        bottoms = tl.full([BLOCK_V], float("inf"), tl.float32)
        for start in range(0, V, BLOCK_V):
            x = tl.load(row + start + lanes, mask=start + lanes < V, other=float("-inf"))
            tops = tl.maximum(tops, x)
            bottoms = tl.minimum(bottoms, tl.where(x > float("-inf"), x, float("inf")))
        top = tl.max(tops, 0)
        token = -1
        if top > float("-inf"):
            if temperature == 0.0:
                token = _tie_id(row, top, 1, V, BLOCK_V)
            else:
                # Below 1e-30 the quotient would leave the type's range; the result is the same.
                sharpness = 1.4426950408889634 / tl.maximum(temperature, 1e-30)
                # Kept: what is above the boundary, and so many of the tokens that equal it.
                boundary = tl.min(bottoms, 0)
                kept_ties = V
                top_k = tl.load(top_k_ptr + slot)
                if (top_k > 0) & (top_k < V):
                    num_above, _, num_ties = _around(row, boundary, top, sharpness, V, BLOCK_V)
                    if num_above + num_ties > top_k:
                        boundary = _boundary(row, boundary, top, top_k, top, sharpness, V, BLOCK_V, False)
                        num_above, _, num_ties = _around(row, boundary, top, sharpness, V, BLOCK_V)
                        kept_ties = top_k - num_above
                top_p = tl.load(top_p_ptr + slot)
                if top_p < 1.0:
                    _, sum_above, num_ties = _around(row, boundary, top, sharpness, V, BLOCK_V)
                    most_ties = tl.minimum(kept_ties, num_ties)
                    target = top_p * (sum_above + most_ties * _weights(boundary, top, sharpness))
                    lowest = boundary
                    boundary = _boundary(row, lowest, top, target, top, sharpness, V, BLOCK_V, True)
                    _, sum_above, num_ties = _around(row, boundary, top, sharpness, V, BLOCK_V)
                    # The division may leave int32's range, where a weight is tiny.
                    needed = tl.minimum((target - sum_above) / _weights(boundary, top, sharpness), num_ties * 1.0)
                    needed = tl.maximum(tl.ceil(needed).to(tl.int32), 1)
                    kept_ties = tl.where(boundary == lowest, tl.minimum(needed, most_ties), needed)
                last_tie = V
                if kept_ties < V:
                    last_tie = _tie_id(row, boundary, kept_ties, V, BLOCK_V)

                min_p = tl.load(min_p_ptr + slot)
                total = tl.sum(tl.zeros([BLOCK_V], tl.float32), 0).to(tl.float64)
                for start in range(0, V, BLOCK_V):
                    weights = _kept_weights(row, start, boundary, last_tie, min_p, top, sharpness, V, BLOCK_V)
                    total += tl.sum(weights, 0).to(tl.float64)
                seed = tl.load(seed_ptr + slot)
                word = philox_word(length, tl.load(choice_ptr + slot), length * 0 + _SAMPLED_TOKEN, seed)
                target_sum = uniform(word) * total
                before = total * 0.0
                start = 0
                while (token < 0) & (start < V):
                    weights = _kept_weights(row, start, boundary, last_tie, min_p, top, sharpness, V, BLOCK_V)
                    block_sum = tl.sum(weights, 0).to(tl.float64)
                    if before + block_sum >= target_sum:
                        # A scan adds in another order than the sum, and not monotonically: only what weighs anything
                        # may be drawn, and where the scan stays below the target, the last of it.
                        reached = tl.cumsum(weights, 0) >= (target_sum - before).to(tl.float32)
                        first = tl.min(tl.where(reached & (weights > 0.0), start + lanes, V), 0)
                        last = tl.max(tl.where(weights > 0.0, start + lanes, -1), 0)
                        token = tl.where(first < V, first, last)
                    before += block_sum
                    start += BLOCK_V
        tl.store(out_ptr + r, token)
        if token >= 0:
            tl.store(last_token_ptr + slot, token)
            tl.store(length_ptr + slot, length + 1)
            count_row = tl.load(count_row_ptr + slot).to(tl.int64)
            if count_row >= 0:
                counter = token_count_ptr + count_row * V + token
                tl.store(counter, tl.load(counter) + 1)


def draw(logits: torch.Tensor, slots: torch.Tensor, state: SamplerState, out: torch.Tensor) -> torch.Tensor:
    """Tokens into ``out``, which is returned; the slots advance."""
    rows, vocab = logits.shape
    _draw[(rows,)](
        logits,
        slots,
        out,
        state.temperatures,
        state.top_ks,
        state.top_ps,
        state.min_ps,
        state.seeds,
        state.choices,
        state.lengths,
        state.last_tokens,
        state.count_rows,
        state.token_counts,
        logits.stride(0),
        V=vocab,
        BLOCK_V=min(BLOCK, triton.next_power_of_2(vocab)),
        num_warps=NUM_WARPS,
    )
    return out
