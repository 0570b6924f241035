"""How fast attention is: decode against the copy rate, prefill against torch's own."""

from __future__ import annotations

from functools import partial

import torch

from ringserve.bench.gpu.device import Device
from ringserve.kernels.gpu.kv_format import KVFormat
from ringserve.kernels.gpu.paged_decode import DecodeScratch, choose_splits, decode_config, paged_decode
from ringserve.kernels.gpu.paged_prefill import PrefillBlocks, paged_prefill, prefill_blocks, prefill_config

KV_HEADS, GROUP, DIM, PAGE = 8, 4, 128, 16
DECODES = ((1, 131_072), (16, 8192), (64, 2048), (64, 4096), (256, 1024))
PREFILLS = ((2048, 0), (8192, 0), (2048, 6144))
"""(queries, prefix)."""

STORED = {KVFormat.INT8: torch.int8, KVFormat.E4M3: torch.uint8}


def _pages(tokens: int, kind: KVFormat, device: Device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Key and value pages with anything finite in them, and scales."""
    shape = (tokens // PAGE + 2, KV_HEADS, PAGE, DIM)
    if kind is KVFormat.NATIVE:
        keys, values = (torch.randn(shape, dtype=device.dtype, device=device.torch) for _ in range(2))
    else:
        keys, values = (torch.randint(0, 100, shape, dtype=STORED[kind], device=device.torch) for _ in range(2))
    return keys, values, torch.full(shape[:3], 0.01, device=device.torch)


def measure_decode(device: Device) -> dict[str, object]:
    """Bytes of KV read a second, two sets in turn so that no cache has them, graphs replayed."""
    sizes = ((2, 40),) if device.dry else DECODES
    return {"runs": [_decode_run(device, *size, kind) for size in sizes for kind in KVFormat]}


def _decode_run(device: Device, batch: int, context: int, kind: KVFormat) -> dict[str, object]:
    sets = [_pages(batch * context, kind, device) for _ in range(2)]
    pages_each = -(-context // PAGE)
    order = torch.randperm(batch * pages_each, device=device.torch) % (batch * context // PAGE + 1)
    table = order.to(torch.int32).view(batch, pages_each)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device.torch)
    q = torch.randn(batch, KV_HEADS * GROUP, DIM, dtype=device.dtype, device=device.torch)
    out = torch.empty_like(q)
    splits = choose_splits(batch, KV_HEADS, device.num_multiprocessors)
    scratch = DecodeScratch.allocate(batch, KV_HEADS * GROUP, splits, DIM, device.torch)
    config = decode_config(device.architecture, sets[0][0], DIM)

    def both() -> None:
        for keys, values, scale in sets:
            scales = None if kind is KVFormat.NATIVE else (scale, scale)
            paged_decode(q, keys, values, table, lengths, DIM**-0.5, out, scratch, config, scales=scales)

    seconds = device.seconds(device.capture(both)) / len(sets)
    if not bool(out.isfinite().all()):
        raise AssertionError(f"{kind!r}: attention is not finite")
    token_bytes = DIM * sets[0][0].element_size() + (4 if kind is not KVFormat.NATIVE else 0)
    return {
        "batch": batch,
        "context": context,
        "format": kind.name,
        "splits": splits,
        "microseconds": seconds * 1e6,
        "bytes_per_second": batch * context * KV_HEADS * 2 * token_bytes / seconds,
    }


def measure_prefill(device: Device) -> dict[str, object]:
    """TFLOP/s of products and values, and torch's fused attention on the same without a page table."""
    results = []
    for queries, prefix in ((20, 12),) if device.dry else PREFILLS:
        for kind in (KVFormat.NATIVE, KVFormat.E4M3):
            tokens = queries + prefix
            keys, values, scales = _pages(tokens, kind, device)
            table = torch.arange(1, -(-tokens // PAGE) + 1, dtype=torch.int32, device=device.torch)[None]
            q = torch.randn(queries, KV_HEADS * GROUP, DIM, dtype=device.dtype, device=device.torch)
            out = torch.empty_like(q)
            config = prefill_config(device.architecture, keys, DIM)
            blocks = prefill_blocks([queries], config.rows_per_block(GROUP))
            run = partial(
                paged_prefill,
                q,
                keys,
                values,
                table,
                torch.tensor([0, queries], dtype=torch.int32, device=device.torch),
                torch.tensor([tokens], dtype=torch.int32, device=device.torch),
                PrefillBlocks(blocks.sequences.to(device.torch), blocks.offsets.to(device.torch)),
                DIM**-0.5,
                out,
                config,
                scales=None if kind is KVFormat.NATIVE else (scales, scales),
            )
            seconds = device.seconds(run)
            pairs = queries * prefix + queries * (queries + 1) / 2
            operations = 4 * KV_HEADS * GROUP * DIM * pairs
            entry: dict[str, object] = {
                "queries": queries,
                "prefix": prefix,
                "format": kind.name,
                "teraflops": operations / seconds / 1e12,
            }
            if prefix == 0 and kind is KVFormat.NATIVE:
                dense = q.transpose(0, 1)[None].contiguous()
                k = torch.randn(1, KV_HEADS * GROUP, tokens, DIM, dtype=device.dtype, device=device.torch)
                fused = partial(torch.nn.functional.scaled_dot_product_attention, dense, k, k, is_causal=True)
                entry["torch_teraflops"] = operations / device.seconds(fused) / 1e12
            results.append(entry)
    return {"runs": results}
