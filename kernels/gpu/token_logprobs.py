"""Log probabilities of rows of logits: the chosen token's, its rank, and the k most likely, on GPUs (Triton).

``x_j - log(sum_i exp(x_i))``; rank is 1 + the number of tokens with a larger logit. NaN counts as -inf, +inf as the
largest float32; what is not finite is reported as MINUS_INFINITY. The most likely come in descending order, ties in
ascending id: each is found by one pass over the row for the largest element that comes after the one before.

Shapes: logits ``[rows, V]`` in any float type; tokens ``[rows]`` int32 (negative: the row is skipped); ks ``[rows]``
int32 (negative: skipped); ids int32 and values float32 ``[rows, 1 + most]``, of which row r's first ``1 + ks[r]`` are
written, the chosen token first; ranks ``[rows]`` int32. ``ks <= min(most, V)``.
CPU counterpart: ``logprobs.row_logprobs``; a log-softmax in float64 is the tests' reference.
"""

# Triton's decorator is untyped for mypy, and kernel parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-any-return, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringserve.kernels.logprobs import MINUS_INFINITY

BLOCK = 4096
NUM_WARPS = 8

_LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
_MINUS_INFINITY: tl.constexpr = tl.constexpr(MINUS_INFINITY)


@triton.jit
def _clean(x):
    x = x.to(tl.float32)
    x = tl.where(x != x, float("-inf"), x)
    return tl.where(x == float("inf"), _LARGEST, x)


@triton.jit
def _logprob(x, log_sum):
    value = x - log_sum
    return tl.where((x > float("-inf")) & (log_sum > float("-inf")), value, _MINUS_INFINITY)


@triton.jit(do_not_specialize_on_alignment=["token_ptr", "k_ptr", "rank_ptr"])
def _token_logprobs(
    logits_ptr,
    token_ptr,
    k_ptr,
    id_ptr,
    value_ptr,
    rank_ptr,
    logits_stride,
    out_stride,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + r)
    k = tl.load(k_ptr + r)
    if (token >= 0) & (k >= 0):
        row = logits_ptr + r * logits_stride
        lanes = tl.arange(0, BLOCK_V)
        chosen = _clean(tl.load(row + token))
        tops = tl.full([BLOCK_V], float("-inf"), tl.float32)
        larger = tl.zeros([BLOCK_V], tl.int32)
        for start in range(0, V, BLOCK_V):
            x = _clean(tl.load(row + start + lanes, mask=start + lanes < V, other=float("-inf")))
            tops = tl.maximum(tops, x)
            larger += (x > chosen).to(tl.int32)
        top = tl.max(tops, 0)
        finite_top = tl.where(top > float("-inf"), top, 0.0)
        sums = tl.zeros([BLOCK_V], tl.float32)
        for start in range(0, V, BLOCK_V):
            x = _clean(tl.load(row + start + lanes, mask=start + lanes < V, other=float("-inf")))
            sums += tl.exp(x - finite_top)
        log_sum = tl.where(top > float("-inf"), finite_top + tl.log(tl.sum(sums, 0)), float("-inf"))
        tl.store(id_ptr + r * out_stride, token)
        tl.store(value_ptr + r * out_stride, _logprob(chosen, log_sum))
        tl.store(rank_ptr + r, 1 + tl.sum(larger, 0))
        value = finite_top * 0.0 + float("inf")
        value_id = token * 0 - 1
        for i in range(k):
            best = tl.full([BLOCK_V], float("-inf"), tl.float32)
            best_id = tl.full([BLOCK_V], V, tl.int32)
            for start in range(0, V, BLOCK_V):
                ids = start + lanes
                x = _clean(tl.load(row + ids, mask=ids < V, other=float("-inf")))
                after = ((x < value) | ((x == value) & (ids > value_id))) & (ids < V)
                # A lane's ids ascend: only a larger value replaces what it has, or the first one.
                better = after & ((x > best) | (best_id == V))
                best = tl.where(better, x, best)
                best_id = tl.where(better, ids, best_id)
            found = best_id < V
            value = tl.max(tl.where(found, best, float("-inf")), 0)
            value_id = tl.min(tl.where(found & (best == value), best_id, V), 0)
            tl.store(id_ptr + r * out_stride + 1 + i, value_id)
            tl.store(value_ptr + r * out_stride + 1 + i, _logprob(value, log_sum))


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    ks: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    ranks: torch.Tensor,
) -> None:
    """Into ids, values and ranks; see the module for shapes. ids and values have the same strides."""
    rows, vocab = logits.shape
    _token_logprobs[(rows,)](
        logits,
        tokens,
        ks,
        ids,
        values,
        ranks,
        logits.stride(0),
        ids.stride(0),
        V=vocab,
        BLOCK_V=min(BLOCK, triton.next_power_of_2(vocab)),
        num_warps=NUM_WARPS,
    )
