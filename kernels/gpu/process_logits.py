"""Logits to what a token is drawn from: bias, penalties, the mask of min_tokens; on GPUs (Triton).

For the row of a slot (``kernels/penalties.py`` has the penalties' definition), in this order::

    x[bias_ids] += bias_values
    x = x / r if x > 0 else x * r            for tokens that occur in prompt or answer
    x = x - (c * frequency + presence)       for tokens that occur c > 0 times in the answer
    x[end_ids] = -inf                        as long as lengths < hide_ends_before
    NaN becomes -inf, +inf the largest float32

Shapes: logits ``[rows, V]`` in any float type; slots ``[rows]`` int32, -1 for padding; out ``[rows, V]`` float32, which
must not be the logits (log probabilities are taken from them). Stride 1 in the last dimension.
CPU counterpart: ``engine/sampler.py``; reference: ``sampling_reference.process_reference``.
"""

# Triton's decorator is untyped for mypy, and kernel parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-any-return, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringserve.kernels.gpu.sampler_state import IN_PROMPT, SamplerState

BLOCK = 2048
NUM_WARPS = 4

_COUNT_MASK: tl.constexpr = tl.constexpr(IN_PROMPT - 1)


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def _process_logits(
    logits_ptr,
    slot_ptr,
    out_ptr,
    length_ptr,
    hide_before_ptr,
    end_id_ptr,
    num_ends_ptr,
    bias_id_ptr,
    bias_value_ptr,
    num_biases_ptr,
    count_row_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    token_count_ptr,
    logits_stride,
    out_stride,
    end_stride,
    bias_stride,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    if slot >= 0:
        ids = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
        used = ids < V
        x = tl.load(logits_ptr + row * logits_stride + ids, mask=used, other=0.0).to(tl.float32)
        for i in range(tl.load(num_biases_ptr + slot)):
            bias_id = tl.load(bias_id_ptr + slot * bias_stride + i)
            x = tl.where(ids == bias_id, x + tl.load(bias_value_ptr + slot * bias_stride + i), x)
        count_row = tl.load(count_row_ptr + slot).to(tl.int64)
        if count_row >= 0:
            state = tl.load(token_count_ptr + count_row * V + ids, mask=used, other=0)
            factor = tl.load(repetition_ptr + slot)
            penalized = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
            x = tl.where(state != 0, penalized, x)
            count = state & _COUNT_MASK
            step = count.to(tl.float64) * tl.load(frequency_ptr + slot) + tl.load(presence_ptr + slot)
            x = tl.where(count > 0, x - step.to(tl.float32), x)
        if tl.load(length_ptr + slot) < tl.load(hide_before_ptr + slot):
            for i in range(tl.load(num_ends_ptr + slot)):
                x = tl.where(ids == tl.load(end_id_ptr + slot * end_stride + i), float("-inf"), x)
        x = tl.where(x != x, float("-inf"), x)
        x = tl.where(x == float("inf"), 3.4028234663852886e38, x)
        tl.store(out_ptr + row * out_stride + ids, x, mask=used)


def process_logits(logits: torch.Tensor, slots: torch.Tensor, state: SamplerState, out: torch.Tensor) -> torch.Tensor:
    """Into ``out``, which is returned; rows of padding are not written."""
    rows, vocab = logits.shape
    _process_logits[(rows, triton.cdiv(vocab, BLOCK))](
        logits,
        slots,
        out,
        state.lengths,
        state.hide_ends_before,
        state.end_ids,
        state.num_ends,
        state.bias_ids,
        state.bias_values,
        state.num_biases,
        state.count_rows,
        state.repetition,
        state.presence,
        state.frequency,
        state.token_counts,
        logits.stride(0),
        out.stride(0),
        state.end_ids.stride(0),
        state.bias_ids.stride(0),
        V=vocab,
        BLOCK_V=BLOCK,
        num_warps=NUM_WARPS,
    )
    return out
