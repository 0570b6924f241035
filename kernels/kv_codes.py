"""int8 keys and values: what a head's vector becomes in the KV pool, on CPUs and GPUs.

``code = round(x / scale)`` in int8, ties to even, ``scale = max|x| / 127`` in float32, one for each token and kv head,
for keys and values apart. The largest error of an element is half a step, max|x| / 254.
"""

from __future__ import annotations

import torch

MAX_CODE = 127.0
SMALLEST_SCALE = 1e-12
"""Of a row of zeros, so that nothing is divided by zero."""


def quantize_kv(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes of ``x [..., dim]`` and float32 scales ``[...]``. What is not finite gives a scale that is not."""
    x = x.float()
    scales = (x.abs().amax(-1) / MAX_CODE).clamp_min(SMALLEST_SCALE)
    return (x / scales[..., None]).round().nan_to_num(0.0).to(torch.int8), scales
