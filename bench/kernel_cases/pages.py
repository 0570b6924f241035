"""Kernels that write pages: RoPE with the KV write, quantisation, page copies."""

# Kernels have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call"

from __future__ import annotations

from random import Random

import torch
import triton
import triton.language as tl

from ringserve.bench.kernel_cases.outcome import Outcome, relative_error
from ringserve.bench.kernel_cases.paged_world import FORMATS
from ringserve.kernels.gpu.kv_format import (
    MAX_CODE,
    KVFormat,
    decode_codes,
    dequantize_reference,
    encode_codes,
    quantize_reference,
)
from ringserve.kernels.gpu.page_copy import copy_pages, gather_pages, scatter_pages
from ringserve.kernels.gpu.rope_kv_write import rope_kv_write, rope_reference
from ringserve.kernels.page_copy import PageLayout

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-7}


def check_rope_kv_write(seed: int, device: str) -> Outcome:
    """Views into a fused projection, partial and interleaved rotation, padding slots, pages far away."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    dtype, kind = FORMATS[seed % len(FORMATS)]
    tokens, heads, kv_heads = random.choice([0, 1, 3, 8]), random.choice([1, 3, 4]), random.choice([1, 2])
    dim = random.choice([64, 80, 96, 112, 128, 256])
    value_dim = random.choice([dim, dim, 48])
    rotary = random.choice([dim, dim, dim // 2, dim // 4])
    interleaved, page_size, num_pages = random.random() < 0.3, random.choice([8, 16, 64]), 5
    sizes = [heads * dim, kv_heads * dim, kv_heads * value_dim]
    fused = torch.randn(tokens, sum(sizes), generator=generator).to(dtype).to(device)
    q, k, v = fused.split(sizes, dim=1)
    q, k, v = q.view(tokens, heads, dim), k.view(tokens, kv_heads, dim), v.view(tokens, kv_heads, value_dim)
    angles = torch.rand(300, rotary // 2, generator=generator) * 6.3
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(0, 300, (tokens,), generator=generator)
    slots = torch.randperm(num_pages * page_size - page_size, generator=generator)[:tokens] + page_size
    slots[torch.rand(tokens, generator=generator) < 0.2] = -1
    far = dtype is not torch.float32 and random.random() < 0.3
    stride = 2**31 // (num_pages - 1) + 64 if far else 0
    pages = [
        _pool(num_pages, kv_heads, page_size, d, dtype if kind is KVFormat.NATIVE else _CODES[kind], stride, device)
        for d in (dim, value_dim)
    ]
    scales = [torch.full((num_pages, kv_heads, page_size), torch.nan, device=device) for _ in pages]
    turned_q = rope_reference(q.cpu(), cos, sin, positions, interleaved)
    written = [rope_reference(k.cpu(), cos, sin, positions, interleaved), v.cpu().double()]
    before = [page.clone() if not far else None for page in pages]
    rope_kv_write(
        q,
        k,
        v,
        cos.to(device),
        sin.to(device),
        positions.to(random.choice([torch.int32, torch.int64])).to(device),
        slots.to(random.choice([torch.int32, torch.int64])).to(device),
        pages[0],
        pages[1],
        scales=None if kind is KVFormat.NATIVE else (scales[0], scales[1]),
        interleaved=interleaved,
    )
    worst = relative_error(q, turned_q) / TOLERANCE[dtype]
    kept = slots >= 0
    where = (slots[kept] // page_size, slice(None), slots[kept] % page_size)
    for expected, page, scale, old in zip(written, pages, scales, before, strict=True):
        stored = page[tuple(i.to(device) if isinstance(i, torch.Tensor) else i for i in where)].cpu()
        if kind is KVFormat.NATIVE:
            worst = max(worst, relative_error(stored, expected[kept]) / TOLERANCE[dtype])
        else:
            row_scale = scale.cpu()[where]
            values = dequantize_reference(stored, row_scale)
            # Half a step of the largest element, or for e4m3 half of its last bit.
            step = 0.5 if kind is KVFormat.INT8 else 16.0
            bound = (step + 1e-3) * row_scale.double()[..., None] + TOLERANCE[dtype] * expected[kept].abs().amax(
                -1, keepdim=True
            )
            if stored.numel():
                worst = max(worst, float(((values - expected[kept]).abs() / bound).max()))
        if old is not None and stored.numel():
            untouched = torch.ones(num_pages, page_size, dtype=torch.bool)
            untouched[where[0], where[2]] = False
            same = page.cpu().transpose(1, 2)[untouched].contiguous().view(torch.uint8)
            if not torch.equal(same, old.cpu().transpose(1, 2)[untouched].contiguous().view(torch.uint8)):
                worst = float("nan")
    return Outcome(worst, 1.0, f"{dtype} {kind!r} {tokens=} {dim=} {value_dim=} {rotary=} {interleaved=} {far=}")


_CODES = {KVFormat.INT8: torch.int8, KVFormat.E4M3: torch.uint8}


def _pool(
    num_pages: int, kv_heads: int, page_size: int, dim: int, dtype: torch.dtype, stride: int, device: str
) -> torch.Tensor:
    """Poisoned pages; with a stride, far apart and not initialised."""
    page = kv_heads * page_size * dim
    if not stride:
        pages = torch.empty(num_pages, kv_heads, page_size, dim, dtype=dtype, device=device)
        pages.view(torch.uint8).fill_(0xFF)
        return pages
    buffer = torch.empty(stride * (num_pages - 1) + page, dtype=dtype, device=device)
    return buffer.as_strided((num_pages, kv_heads, page_size, dim), (stride, page_size * dim, dim, 1))


@triton.jit
def _round_trip(x_ptr, code_ptr, back_ptr, N: tl.constexpr, FORMAT: tl.constexpr):
    i = tl.arange(0, N)
    codes = encode_codes(tl.load(x_ptr + i), FORMAT)
    tl.store(code_ptr + i, codes)
    tl.store(back_ptr + i, decode_codes(codes, tl.float32, FORMAT))


def check_quantize(seed: int, device: str) -> Outcome:
    """Codes are bit-identical to torch's conversions: every e4m3 number, every midpoint and its neighbours, random."""
    kind = (KVFormat.INT8, KVFormat.E4M3)[seed % 2]
    generator = torch.Generator().manual_seed(seed)
    if kind is KVFormat.E4M3:
        numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    else:
        numbers = torch.arange(128, dtype=torch.float32)
    middle = (numbers[1:] + numbers[:-1]) / 2
    edges = torch.cat([numbers, middle, torch.nextafter(middle, numbers[1:]), torch.nextafter(middle, numbers[:-1])])
    scattered = (torch.rand(2048 - 2 * len(edges), generator=generator) - 0.5) * 2 * MAX_CODE[kind]
    x = torch.cat([edges, -edges, scattered]).to(device)
    codes = torch.empty(2048, dtype=_CODES[kind], device=device)
    back = torch.empty(2048, device=device)
    _round_trip[(1,)](x, codes, back, N=2048, FORMAT=int(kind))
    rows = torch.cat([x.cpu(), torch.tensor([MAX_CODE[kind]])])
    expected, scales = quantize_reference(rows, kind)
    exact = dequantize_reference(expected[None], scales[None])[0][:-1]
    if kind is KVFormat.E4M3:
        back = back * 256
    same = torch.equal(codes.cpu(), expected[:-1]) and torch.equal(back.cpu().double(), exact)
    return Outcome(0.0 if same else float("nan"), 0.0, f"{kind!r}")


def check_page_copy(seed: int, device: str) -> Outcome:
    """Copies within a slab, and through a stage into another; slabs of more than 2**31 words among them."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    dtype = random.choice([torch.int64, torch.uint8])
    num_pages = random.choice([4, 9])
    sizes = [random.choice([1, 64, 1000, 1024, 2500]) for _ in range(random.choice([1, 2, 4]))]
    far = dtype is torch.uint8 and random.random() < 0.5
    offsets, end = [], random.choice([0, 16]) + (2**31 if far else 0)
    for size in sizes:
        offsets.append(end)
        end += num_pages * size + random.choice([0, 16])
    slab = torch.empty(end, dtype=dtype, device=device)
    part = slab[offsets[0] :]
    part.copy_(torch.randint(0, 100, (len(part),), generator=generator).to(dtype))
    layout = PageLayout.create(offsets, sizes, torch.device(device))
    views = [slab[o : o + num_pages * s].view(num_pages, s) for o, s in zip(offsets, sizes, strict=True)]
    order = torch.randperm(num_pages, generator=generator)
    sources, targets = order[: num_pages // 2].clone(), order[num_pages // 2 : num_pages // 2 * 2].clone()
    expected = [view.cpu().clone() for view in views]
    skipped = random.randrange(len(sources))
    for i, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
        for view in expected:
            if i != skipped:
                view[target] = view[source]
    sources[skipped] = -1
    copy_pages(slab, sources.to(torch.int32).to(device), targets.to(device), layout)
    fine = all(torch.equal(view.cpu(), e) for view, e in zip(views, expected, strict=True))
    ids = torch.randperm(num_pages, generator=generator)[:3].to(device)
    stage = torch.zeros(3, layout.page_words, dtype=dtype, device=device)
    gather_pages(slab, ids, stage, layout)
    fine &= torch.equal(stage.cpu(), torch.cat([e[ids.cpu()] for e in expected], dim=1))
    back = torch.randperm(num_pages, generator=generator)[:3].to(device)
    scatter_pages(stage, back, slab, layout)
    for view, e in zip(views, expected, strict=True):
        moved = e.clone()
        moved[back.cpu()] = e[ids.cpu()]
        fine &= torch.equal(view.cpu(), moved)
    return Outcome(0.0 if fine else float("nan"), 0.0, f"{dtype} {num_pages=} {sizes=} {far=}")
