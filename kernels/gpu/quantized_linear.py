"""A linear layer with 8-bit weights for few rows, on GPUs (Triton): what decoding small batches is bound by.

``out = x @ (w * s[:, None]).T + bias`` with codes ``w`` in int8, or e4m3 bits in uint8, and one scale for each output
(``kv_format`` has the codes). The products are in x's type, the sums in float32; the scale multiplies the sum. Reading
half the bytes of bfloat16 weights takes half the time; with hundreds of rows a plain matrix product is quicker.

Shapes: x ``[M, K]`` (stride 1 in K); w ``[N, K]`` contiguous; scales float32 ``[N]``; bias ``[N]`` or None; out
``[M, N]``; M at most MAX_ROWS. K is cut into SPLITS runs, so that few outputs still fill the device: their float32
sums go to scratch and are added in a fixed order, so that a result does not depend on timing.
"""

# Triton's decorator is untyped for mypy, and kernel parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-any-return, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ringserve.kernels.gpu.architecture import Architecture
from ringserve.kernels.gpu.kv_format import KVFormat, decode_codes, dequantize_reference, kv_format, quantize_reference

MAX_ROWS = 64
MAX_SPLITS = 16
MIN_SPLIT = 512
"""Fewest inputs that are worth a run of their own."""


@dataclass(frozen=True)
class LinearConfig:
    """How a device runs the kernel."""

    block_n: int
    """Outputs of a program."""
    block_k: int
    """Inputs of a tile."""
    num_warps: int
    num_stages: int


CONFIGS = {
    Architecture.LARGE: LinearConfig(block_n=64, block_k=128, num_warps=4, num_stages=4),
    Architecture.COMPACT: LinearConfig(block_n=64, block_k=128, num_warps=4, num_stages=4),
    Architecture.CDNA: LinearConfig(block_n=64, block_k=64, num_warps=4, num_stages=2),
}


def choose_splits(inputs: int, outputs: int, num_multiprocessors: int, config: LinearConfig) -> int:
    """The power of two that gives every multiprocessor two programs, with at least MIN_SPLIT inputs each."""
    programs, splits = -(-outputs // config.block_n), 1
    while splits < MAX_SPLITS and programs * splits < 2 * num_multiprocessors and inputs >= 2 * splits * MIN_SPLIT:
        splits *= 2
    return splits


@triton.jit(do_not_specialize=["M"])
def _linear_runs(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    M,
    x_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    FORMAT: tl.constexpr,  # a KVFormat
    HAS_BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    RUN: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    split = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, BLOCK_K)
    w_rows = w_ptr + outputs.to(tl.int64)[:, None] * K
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    start = split * RUN
    for at in tl.range(start, tl.minimum(start + RUN, K), BLOCK_K, num_stages=STAGES):
        k = at + inputs
        x = tl.load(x_rows + k[None, :], mask=(rows < M)[:, None] & (k < K)[None, :], other=0.0)
        codes = tl.load(w_rows + k[None, :], mask=(outputs < N)[:, None] & (k < K)[None, :], other=0)
        acc = tl.dot(x, tl.trans(decode_codes(codes, x.dtype, FORMAT)), acc, input_precision=PRECISION)
    mask = (rows < M)[:, None] & (outputs < N)[None, :]
    if SPLITS == 1:
        scales = tl.load(scale_ptr + outputs, mask=outputs < N, other=0.0)
        if FORMAT == 2:
            scales *= 256.0
        acc *= scales[None, :]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
        tl.store(
            out_ptr + rows.to(tl.int64)[:, None] * out_stride + outputs[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=mask,
        )
    else:
        partial = partial_ptr + (split * BLOCK_M + rows).to(tl.int64)[:, None] * N
        tl.store(partial + outputs[None, :], acc, mask=mask)


@triton.jit
def _add_runs(
    partial_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    out_stride,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = outputs < N
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial_ptr + (split * BLOCK_M + row) * N + outputs, mask=used, other=0.0)
    scales = tl.load(scale_ptr + outputs, mask=used, other=0.0)
    if FORMAT == 2:
        scales *= 256.0
    total *= scales
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs, mask=used, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + outputs, total.to(out_ptr.dtype.element_ty), mask=used)


def padded_rows(rows: int) -> int:
    """Rows of the products, and of each run's scratch. Raises ValueError beyond MAX_ROWS."""
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows are more than the {MAX_ROWS} that this kernel is for")
    return max(16, triton.next_power_of_2(rows))


def linear_scratch(rows: int, outputs: int, splits: int, device: torch.device) -> torch.Tensor:
    """float32 scratch for launches of at most so many rows; may be kept and shared."""
    return torch.empty(splits * padded_rows(rows) * outputs if splits > 1 else 1, dtype=torch.float32, device=device)


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scratch: torch.Tensor,
    splits: int,
    config: LinearConfig,
) -> torch.Tensor:
    """Into ``out``, which is returned; see the module for shapes. ``scratch``: see ``linear_scratch``."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    block_m = padded_rows(rows)
    kind = int(kv_format(weight.dtype))
    _linear_runs[(triton.cdiv(outputs, config.block_n), splits)](
        x,
        weight,
        scales,
        bias if bias is not None else scales,
        out,
        scratch,
        rows,
        x.stride(0),
        out.stride(0),
        N=outputs,
        K=inputs,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLITS=splits,
        FORMAT=kind,
        HAS_BIAS=bias is not None,
        STAGES=config.num_stages,
        PRECISION="ieee",
        num_warps=config.num_warps,
    )
    if splits > 1:
        block = min(1024, triton.next_power_of_2(outputs))
        _add_runs[(rows, triton.cdiv(outputs, block))](
            scratch,
            scales,
            bias if bias is not None else scales,
            out,
            out.stride(0),
            N=outputs,
            BLOCK_M=block_m,
            BLOCK=block,
            SPLITS=splits,
            FORMAT=kind,
            HAS_BIAS=bias is not None,
            num_warps=4,
        )
    return out


def quantize_weight(weight: torch.Tensor, kind: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[N, K]`` and scales ``[N]`` of a weight."""
    return quantize_reference(weight, kind)


def quantized_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """In float64."""
    result = x.double() @ dequantize_reference(weight, scales).T
    return result if bias is None else result + bias.double()
