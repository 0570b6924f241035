"""Whether bfloat16 means the same to the interpreter (or the device) as to torch."""

# Kernels have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringserve.bench.kernel_cases.outcome import Outcome


@triton.jit
def _casts(x_ptr, rounded_ptr, product_ptr, integer_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i[:, None] * N + i[None, :])
    rounded = x.to(tl.bfloat16)
    tl.store(rounded_ptr + i[:, None] * N + i[None, :], rounded)
    tl.store(product_ptr + i[:, None] * N + i[None, :], tl.dot(rounded, rounded))
    tl.store(integer_ptr + i, (3 * i).to(tl.bfloat16).to(tl.int32))


def check_casts(seed: int, device: str) -> Outcome:
    """Casts from and to float32 and integers, and products."""
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)) * 3
    rounded, product = torch.empty(16, 16, dtype=torch.bfloat16, device=device), torch.empty(16, 16, device=device)
    integers = torch.empty(16, dtype=torch.int32, device=device)
    _casts[(1,)](x.to(device), rounded, product, integers, N=16)
    expected = x.to(torch.bfloat16)
    same = (
        torch.equal(rounded.cpu(), expected)
        # Matrix units drop bits below 2**-23 of the largest product; bfloat16 read wrongly is off by 1e-2 and more.
        and torch.allclose(product.cpu(), expected.float() @ expected.float(), rtol=1e-5, atol=1e-4)
        and integers.tolist() == [3 * i for i in range(16)]
    )
    return Outcome(0.0 if same else float("nan"), 0.0, "bfloat16")
