"""Kernels that work on rows: normalisation, the gate."""

from __future__ import annotations

from random import Random

import torch

from ringserve.bench.kernel_cases.outcome import Outcome, relative_error
from ringserve.kernels.gpu.add_rms_norm import add_rms_norm, add_rms_norm_reference
from ringserve.kernels.gpu.head_rms_norm import head_rms_norm
from ringserve.kernels.gpu.silu_mul import silu_mul, silu_mul_reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}
"""One or two roundings to the type."""


def _rows(
    rows: int, size: int, extra: int, dtype: torch.dtype, generator: torch.Generator, device: str
) -> torch.Tensor:
    wide = torch.full((rows, size + extra), torch.nan, dtype=dtype)
    wide[:, :size] = torch.randn(rows, size, generator=generator)
    return wide.to(device)[:, :size]


def check_add_rms_norm(seed: int, device: str) -> Outcome:
    """With and without a residual, in place and not, as Llama and as Gemma."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    dtype = DTYPES[seed % 3]
    rows, size = random.choice([0, 1, 3, 7]), random.choice([1, 33, 64, 576, 1000, 2048, 4096])
    unit_offset, in_place = random.random() < 0.3, random.random() < 0.3
    x = _rows(rows, size, random.choice([0, 8]), dtype, generator, device)
    residual = _rows(rows, size, 0, dtype, generator, device) if random.random() < 0.7 else None
    weight = torch.randn(size, generator=generator).to(dtype).to(device)
    expected, kept = add_rms_norm_reference(
        x.cpu(), residual.cpu() if residual is not None else None, weight.cpu(), 1e-5, unit_offset
    )
    out = x if in_place else torch.full((rows, size), torch.nan, dtype=dtype, device=device)
    add_rms_norm(x, residual, weight, 1e-5, out, unit_offset=unit_offset)
    error = relative_error(out, expected)
    if residual is not None and not torch.equal(residual.cpu().double(), kept):
        error = float("nan")
    return Outcome(error, TOLERANCE[dtype], f"{dtype} {rows}x{size} {residual is not None=} {unit_offset=} {in_place=}")


def check_head_rms_norm(seed: int, device: str) -> Outcome:
    """Heads of queries and keys inside a fused projection; what lies beside them stays as it is."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    dtype = DTYPES[seed % 3]
    tokens, heads, kv_heads = random.choice([0, 1, 3, 7]), random.choice([1, 3, 4]), random.choice([1, 2])
    dim = random.choice([16, 24, 64, 80, 128, 256])
    columns = (heads + 2 * kv_heads) * dim
    fused = _rows(tokens, columns, random.choice([0, 8]), dtype, generator, device)
    q, k, v = torch.split(fused, [heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    weights = [torch.randn(dim, generator=generator).to(dtype) for _ in range(2)]
    expected = torch.cat(
        [
            add_rms_norm_reference(part.cpu().reshape(-1, dim), None, weight, 1e-6)[0].reshape(part.shape)
            for part, weight in zip((q, k), weights, strict=True)
        ],
        dim=1,
    )
    values = v.clone()
    on_device = [weight.to(device) for weight in weights]
    head_rms_norm(q.view(tokens, heads, dim), k.view(tokens, kv_heads, dim), on_device[0], on_device[1], 1e-6)
    error = relative_error(torch.cat([q, k], dim=1), expected)
    if not torch.equal(v, values):
        error = float("nan")
    return Outcome(error, TOLERANCE[dtype], f"{dtype} {tokens} tokens, {heads} + {kv_heads} heads of {dim}")


def check_silu_mul(seed: int, device: str) -> Outcome:
    """Rows of fused projections."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    dtype = DTYPES[seed % 3]
    rows, size = random.choice([0, 1, 3, 7]), random.choice([1, 48, 1024, 1536, 3000])
    gate_up = _rows(rows, 2 * size, random.choice([0, 8]), dtype, generator, device)
    gate_up[:, : size // 4] *= 30  # far out of the sigmoid's range
    out = torch.full((rows, size), torch.nan, dtype=dtype, device=device)
    expected = silu_mul_reference(gate_up.cpu())
    silu_mul(gate_up, out)
    return Outcome(relative_error(out, expected), TOLERANCE[dtype], f"{dtype} {rows}x{size}")
