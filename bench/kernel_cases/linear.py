"""Linear layers with 8-bit weights."""

from __future__ import annotations

from random import Random

import torch

from ringserve.bench.kernel_cases.outcome import Outcome, relative_error
from ringserve.bench.kernel_cases.paged_world import served_on
from ringserve.kernels.gpu.kv_format import KVFormat
from ringserve.kernels.gpu.quantized_linear import (
    CONFIGS,
    LinearConfig,
    linear_scratch,
    quantize_weight,
    quantized_linear,
    quantized_linear_reference,
)

TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-6}


def check_quantized_linear(seed: int, device: str) -> Outcome:
    """Ragged sizes, runs without inputs, with and without a bias."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
    kind = random.choice([KVFormat.INT8, KVFormat.E4M3])
    rows, outputs = random.choice([1, 2, 16, 17, 64]), random.choice([16, 40, 64, 130])
    inputs, splits = random.choice([32, 100, 256, 576]), random.choice([1, 1, 2, 8])
    config = LinearConfig(random.choice([32, 64]), random.choice([64, 128]), 4, 2)
    served = served_on(device)
    if served is not None:
        config, inputs = CONFIGS[served], random.choice([inputs, 2048])
    codes, scales = quantize_weight(torch.randn(outputs, inputs, generator=generator), kind)
    x = torch.full((rows, inputs + 8), torch.nan, dtype=dtype)
    x[:, :inputs] = torch.randn(rows, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator).to(dtype) if random.random() < 0.5 else None
    scratch = linear_scratch(rows, outputs, splits, torch.device(device)).fill_(torch.nan)
    out = torch.full((rows, outputs), torch.nan, dtype=dtype, device=device)
    quantized_linear(
        x.to(device)[:, :inputs],
        codes.to(device),
        scales.to(device),
        bias.to(device) if bias is not None else None,
        out,
        scratch,
        splits,
        config,
    )
    expected = quantized_linear_reference(x[:, :inputs], codes, scales, bias)
    error = relative_error(out, expected)
    return Outcome(error, TOLERANCE[dtype], f"{dtype} {kind!r} {rows}x{inputs}x{outputs} {splits=} {config}")
