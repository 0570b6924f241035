"""The launches that a served model makes, on small tensors: what they compile to depends on shapes and types alone."""

from __future__ import annotations

import torch

from ringserve.kernels.gpu.add_rms_norm import add_rms_norm
from ringserve.kernels.gpu.architecture import Architecture
from ringserve.kernels.gpu.draw import draw
from ringserve.kernels.gpu.head_rms_norm import head_rms_norm
from ringserve.kernels.gpu.kv_format import KVFormat
from ringserve.kernels.gpu.page_copy import copy_pages, gather_pages, scatter_pages
from ringserve.kernels.gpu.paged_decode import DecodeScratch, decode_config, paged_decode
from ringserve.kernels.gpu.paged_prefill import paged_prefill, prefill_blocks, prefill_config
from ringserve.kernels.gpu.process_logits import process_logits
from ringserve.kernels.gpu.quantized_linear import CONFIGS, linear_scratch, quantized_linear
from ringserve.kernels.gpu.rope_kv_write import rope_kv_write
from ringserve.kernels.gpu.sampler_state import SamplerState
from ringserve.kernels.gpu.silu_mul import silu_mul
from ringserve.kernels.gpu.step_rows import RowArrays, step_rows
from ringserve.kernels.gpu.token_logprobs import token_logprobs
from ringserve.kernels.gpu.write_words import write_words
from ringserve.kernels.page_copy import PageLayout

STORED = {KVFormat.INT8: torch.int8, KVFormat.E4M3: torch.uint8}
KV_HEADS = 2
CPU = torch.device("cpu")


def _index(*shape: int) -> torch.Tensor:
    """An index array as a part of a larger one, not aligned."""
    size = torch.Size(shape).numel()
    return torch.zeros(size + 1, dtype=torch.int32)[1:].view(shape)


def _pages(
    dim: int, dtype: torch.dtype, kind: KVFormat
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    pages = torch.empty(3, KV_HEADS, 16, dim, dtype=STORED.get(kind, dtype))
    scales = torch.empty(3, KV_HEADS, 16)
    return pages, None if kind is KVFormat.NATIVE else (scales, scales)


def launch_decode(
    architecture: Architecture,
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    kind: KVFormat = KVFormat.NATIVE,
    *,
    group: int = 4,
    batch: int = 2,
    max_pages: int = 8,
    splits: int = 4,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    pages, scales = _pages(dim, dtype, kind)
    heads = KV_HEADS * group
    paged_decode(
        torch.empty(batch, heads, dim, dtype=dtype),
        pages,
        pages,
        _index(batch, max_pages),
        _index(batch),
        1.0,
        torch.empty(batch, heads, dim, dtype=dtype),
        DecodeScratch.allocate(batch, heads, splits, dim, CPU),
        decode_config(architecture, pages, dim),
        scales=scales,
        window=window,
        softcap=softcap,
    )


def launch_prefill(
    architecture: Architecture,
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    kind: KVFormat = KVFormat.NATIVE,
    *,
    group: int = 4,
    batch: int = 2,
    max_pages: int = 8,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    pages, scales = _pages(dim, dtype, kind)
    heads = KV_HEADS * group
    config = prefill_config(architecture, pages, dim)
    paged_prefill(
        torch.empty(batch * 5, heads, dim, dtype=dtype),
        pages,
        pages,
        _index(batch, max_pages),
        _index(batch + 1),
        _index(batch),
        prefill_blocks([5] * batch, config.rows_per_block(group)),
        1.0,
        torch.empty(batch * 5, heads, dim, dtype=dtype),
        config,
        scales=scales,
        window=window,
        softcap=softcap,
    )


def launch_rope(kind: KVFormat = KVFormat.NATIVE, *, dim: int = 128, tokens: int = 3) -> None:
    pages, scales = _pages(dim, torch.bfloat16, kind)
    fused = torch.empty(tokens, (8 + 2 * KV_HEADS) * dim, dtype=torch.bfloat16)
    q, k, v = torch.split(fused, [8 * dim, KV_HEADS * dim, KV_HEADS * dim], dim=1)
    rope_kv_write(
        q.view(tokens, 8, dim),
        k.view(tokens, KV_HEADS, dim),
        v.view(tokens, KV_HEADS, dim),
        torch.empty(32, dim // 2),
        torch.empty(32, dim // 2),
        _index(tokens),
        _index(tokens),
        pages,
        pages,
        scales=scales,
    )


def launch_rows(rows: int = 3, size: int = 4096) -> None:
    x, residual = torch.empty(rows, size, dtype=torch.bfloat16), torch.empty(rows, size, dtype=torch.bfloat16)
    add_rms_norm(x, residual, torch.empty(size, dtype=torch.bfloat16), 1e-5, x)
    heads = torch.empty(rows, 10, 128, dtype=torch.bfloat16)
    weight = torch.empty(128, dtype=torch.bfloat16)
    head_rms_norm(heads[:, :8], heads[:, 8:], weight, weight, 1e-6)
    silu_mul(torch.empty(rows, 2 * size, dtype=torch.bfloat16), x)


def launch_sampling(rows: int = 3, vocab: int = 128_256) -> None:
    state = SamplerState.allocate(4, vocab, CPU, count_rows=1, most_ends=4, most_biases=4)
    slots, logits = _index(rows), torch.empty(rows, vocab, dtype=torch.bfloat16)
    processed = torch.empty(rows, vocab)
    process_logits(logits, slots, state, processed)
    draw(processed, slots, state, slots)
    token_logprobs(logits, slots, slots, torch.empty(rows, 21, dtype=torch.int32), torch.empty(rows, 21), slots)


def launch_step_inputs(rows: int = 3, max_pages: int = 8) -> None:
    arrays = RowArrays(_index(rows), _index(rows), _index(rows), _index(rows), _index(rows, max_pages), _index(rows))
    step_rows(_index(rows), _index(rows), _index(5), _index(5), _index(5), _index(5, max_pages), 16, arrays)
    write_words(torch.zeros(rows, 2, dtype=torch.int32), torch.zeros(64, dtype=torch.int32))


def launch_page_copies(pages: int = 3) -> None:
    layout = PageLayout.create([0, 4096], [1024, 1024], CPU)
    slab, stage = torch.empty(8192, dtype=torch.int64), torch.empty(pages, 2048, dtype=torch.int64)
    ids = _index(pages)
    copy_pages(slab, ids, ids, layout)
    gather_pages(slab, ids, stage, layout)
    scatter_pages(stage, ids, slab, layout)


def launch_linear(architecture: Architecture, rows: int = 3, kind: KVFormat = KVFormat.INT8, splits: int = 2) -> None:
    x, out = torch.empty(rows, 4096, dtype=torch.bfloat16), torch.empty(rows, 1024, dtype=torch.bfloat16)
    weight, scales = torch.empty(1024, 4096, dtype=STORED[kind]), torch.empty(1024)
    quantized_linear(
        x, weight, scales, None, out, linear_scratch(rows, 1024, splits, CPU), splits, CONFIGS[architecture]
    )
