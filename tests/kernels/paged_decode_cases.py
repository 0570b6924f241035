"""Random cases of the Triton paged-decode kernel against float64, on a device or in Triton's interpreter.

A program, not a test module, since the interpreter is chosen by the environment before Triton is imported:
``TRITON_INTERPRET=1 python paged_decode_cases.py cpu`` or ``python paged_decode_cases.py cuda``. Every page that no
sequence owns, every unwritten slot, the outputs and the scratch start as NaN.
"""

# Kernels have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from random import Random

import torch
import triton
import triton.language as tl

from ringserve.kernels.paged_attention import PagedBatch, write_kv
from ringserve.kernels.paged_attention_reference import paged_attention_reference
from ringserve.kernels.paged_decode import DecodeConfig, DecodeScratch, paged_decode

TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 3e-7}
"""Of the norm of what ``check`` measures against."""

SOFTCAP_TOLERANCE = 5e-6
"""tanh through exp loses relative precision near 0."""

MAX_KEYS = 320


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    kv_heads: int
    group: int
    dims: tuple[int, int]
    page_size: int
    lengths: tuple[int, ...]
    splits: int
    min_split: int
    block_n: int
    window: int | None
    softcap: float | None


def make_case(seed: int) -> Case:
    random = Random(seed)
    dim = random.choice([16, 32, 64, 64, 80, 96, 128])
    return Case(
        dtype=[torch.bfloat16, torch.float16, torch.float32][seed % 3],
        kv_heads=random.choice([1, 1, 2, 3]),
        group=seed % 8 + 1,
        dims=(dim, random.choice([dim, dim, dim, 64])),
        page_size=random.choice([16, 16, 16, 64, 8]),
        lengths=tuple(
            random.choice([0, 1, 15, 16, 17, 33, 64, 100, 200, MAX_KEYS]) for _ in range(random.choice([1, 2]))
        ),
        splits=random.choice([1, 2, 4, 16]),
        min_split=random.choice([32, 64, 256]),
        block_n=random.choice([32, 64]),
        window=random.choice([None, None, None, 1, 50, 1000]),
        softcap=random.choice([None, None, None, 20.0]),
    )


def check(case: Case, seed: int, device: str) -> float:
    """The error relative to the attention of ``|v|``, which cancellation between values does not shrink: in norm, or a
    quarter of the largest one. NaN where poison came through."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    key_dim, value_dim = case.dims
    max_pages = -(-MAX_KEYS // case.page_size)
    free = list(range(1, max_pages * len(case.lengths) + 9))
    shape = (len(free) + 1, case.kv_heads, case.page_size)
    random.shuffle(free)
    k_pages = torch.full((*shape, key_dim), torch.nan, dtype=case.dtype)
    v_pages = torch.full((*shape, value_dim), torch.nan, dtype=case.dtype)
    tables = []
    for length in case.lengths:
        table = torch.tensor([free.pop() for _ in range(-(-length // case.page_size))], dtype=torch.int64)
        positions = torch.arange(length)
        write_kv(
            k_pages,
            v_pages,
            torch.randn(length, case.kv_heads, key_dim, generator=generator),
            torch.randn(length, case.kv_heads, value_dim, generator=generator),
            table[positions // case.page_size] * case.page_size + positions % case.page_size,
        )
        tables.append(table)
    batch, heads = len(case.lengths), case.kv_heads * case.group
    q = torch.randn(batch, heads, key_dim, generator=generator).to(case.dtype)
    scale = key_dim**-0.5

    expected = torch.zeros(batch, heads, value_dim, dtype=torch.float64)
    magnitude = torch.zeros_like(expected)
    for b, length in enumerate(case.lengths):
        if length:
            alone = PagedBatch([0, 1], [length], [tables[b]])
            for target, values in ((expected, v_pages), (magnitude, v_pages.abs())):
                target[b] = paged_attention_reference(
                    q[b : b + 1], k_pages, values, alone, scale, case.window, case.softcap
                )[0]

    block_table = torch.full((batch, max_pages), 2**31 - 1, dtype=torch.int32)
    for b, table in enumerate(tables):
        block_table[b, : len(table)] = table
    scratch = DecodeScratch.allocate(batch, heads, case.splits, value_dim, torch.device(device))
    scratch.values.fill_(torch.nan)
    scratch.log_sums.fill_(torch.nan)
    out = torch.full((batch, heads, value_dim), torch.nan, dtype=case.dtype, device=device)
    paged_decode(
        q.to(device),
        k_pages.to(device),
        v_pages.to(device),
        block_table.to(device),
        torch.tensor(case.lengths, dtype=torch.int32, device=device),
        scale,
        out,
        scratch,
        window=case.window,
        softcap=case.softcap,
        config=DecodeConfig(case.block_n, 4, 2, case.min_split),
    )
    error = out.cpu().double() - expected
    if not bool(expected.any()):
        return float(error.abs().max())
    largest = float(error.abs().max() / magnitude.max())
    return max(float(error.norm() / magnitude.norm()), largest / 4)


@triton.jit
def _casts(x_ptr, rounded_ptr, product_ptr, integer_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i[:, None] * N + i[None, :])
    rounded = x.to(tl.bfloat16)
    tl.store(rounded_ptr + i[:, None] * N + i[None, :], rounded)
    tl.store(product_ptr + i[:, None] * N + i[None, :], tl.dot(rounded, rounded))
    tl.store(integer_ptr + i, (3 * i).to(tl.bfloat16).to(tl.int32))


def check_casts(device: str) -> bool:
    """Whether bfloat16 means the same to the interpreter (or the device) as to torch."""
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)) * 3
    rounded, product = torch.empty(16, 16, dtype=torch.bfloat16, device=device), torch.empty(16, 16, device=device)
    integers = torch.empty(16, dtype=torch.int32, device=device)
    _casts[(1,)](x.to(device), rounded, product, integers, N=16)
    expected = x.to(torch.bfloat16)
    return (
        torch.equal(rounded.cpu(), expected)
        and torch.allclose(product.cpu(), expected.float() @ expected.float(), rtol=1e-5, atol=1e-5)
        and integers.tolist() == [3 * i for i in range(16)]
    )


def main(device: str, num_cases: int) -> int:
    if os.environ.get("TRITON_INTERPRET") == "1":
        from interpreter import repair

        repair()
    failures = [] if check_casts(device) else ["bfloat16 casts"]
    for seed in range(num_cases):
        case = make_case(seed)
        tolerance = TOLERANCE[case.dtype]
        if case.softcap is not None:
            tolerance = max(tolerance, SOFTCAP_TOLERANCE)
        error = check(case, seed, device)
        if not error <= tolerance:
            failures.append(f"seed {seed}: error {error:.2e} over {tolerance:.0e} in {case}")
    print("\n".join(failures) if failures else f"{num_cases} cases passed")
    return 1 if failures else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
