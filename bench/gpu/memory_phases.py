"""The device's memory: how fast it copies, and the KV pool with its swaps."""

from __future__ import annotations

import torch

from ringserve.bench.gpu.device import Device
from ringserve.engine.kv_pool import KVPool, LayerKV
from ringserve.engine.swap_pool import SwapPool
from ringserve.kernels.gpu.page_copy import gather_pages, scatter_pages


def measure_copies(device: Device) -> dict[str, object]:
    """Bytes a second, read and written together, of a plain copy: what everything else is measured against."""
    size = 1 << (20 if device.dry else 31)
    source = torch.zeros(size, dtype=torch.uint8, device=device.torch)
    target = torch.empty_like(source)
    seconds = device.seconds(lambda: target.copy_(source), repeats=20, warm_up=5)
    return {"bytes_per_second": 2 * size / seconds}


def check_pool(device: Device) -> dict[str, object]:
    """One slab that CuPy owns and torch sees; swaps out and in; copy on write; a graph over it."""
    namespace = device.namespace
    layers = [LayerKV(2, 16, 16)] * 2 if device.dry else [LayerKV(8, 128, 128)] * 32
    num_pages, swapped = (12, 8) if device.dry else (1024, 512)
    pool = KVPool(layers, num_pages, 16, "bfloat16", namespace)
    if not device.dry:
        address = pool.slab.data_ptr()
        if pool.slab.device.type != "cuda" or int(pool.array.data.ptr) != address or address % 512:
            raise AssertionError("torch does not see CuPy's memory")
    lane = device.transfer_lane()
    swap = SwapPool(pool, swapped, namespace, lane, gather_pages, scatter_pages, stage_pages=4 if device.dry else 64)
    keys = pool.layer(0)[0]
    last = pool.layer(len(layers) - 1)[1]
    numbers = torch.arange(num_pages + 1, device=device.torch).view(-1, 1, 1, 1) % 251
    keys.copy_(numbers.expand_as(keys))
    last.copy_((numbers + 1).expand_as(last))
    out = list(range(1, swapped + 1))
    back = list(range(num_pages - swapped + 1, num_pages + 1))
    seconds = device.seconds(lambda: swap.swap_out(out, list(range(swapped))), repeats=3, warm_up=1)
    keys.zero_()
    last.zero_()
    seconds_in = device.seconds(lambda: swap.swap_in(list(range(swapped)), back), repeats=1, warm_up=0)
    device.synchronize()
    expected = torch.arange(1, swapped + 1, device=device.torch).view(-1, 1, 1, 1) % 251
    if not torch.equal(keys[back].long(), expected.expand_as(keys[back])):
        raise AssertionError("keys did not survive the swap")
    if not torch.equal(last[back].long(), (expected + 1).expand_as(last[back])):
        raise AssertionError("values did not survive the swap")
    run = device.capture(lambda: keys.add_(1))
    keys.zero_()
    run()
    device.synchronize()
    if not bool((keys == 1).all()):
        raise AssertionError("a graph does not write the slab")
    swapped_bytes = swapped * swap.statistics().bytes_per_page
    return {
        "slab_bytes": pool.statistics().slab_bytes,
        "swap_bytes": swapped_bytes,
        "out_submit_s": seconds,
        "in_s": seconds_in,
    }
