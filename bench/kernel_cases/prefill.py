"""Paged prefill attention."""

from __future__ import annotations

from random import Random

import torch

from ringserve.bench.kernel_cases.outcome import Outcome, relative_error
from ringserve.bench.kernel_cases.paged_world import FORMATS, LONG, make_world, random_shape, served_on
from ringserve.kernels.gpu.paged_prefill import (
    PrefillBlocks,
    PrefillConfig,
    paged_prefill,
    prefill_blocks,
    prefill_config,
)


def check_prefill(seed: int, device: str, far: bool = False) -> Outcome:
    """Chunks with and without a prefix, sequences without a query, padding blocks."""
    random = Random(seed)
    dtype, kind = FORMATS[seed % len(FORMATS)]
    served = served_on(device)
    sizes = []
    for _ in range(random.choice([1, 1, 2, 3])):
        queries = random.choice([0, 1, 2, 5, 16, 17, 24, *((300,) if served is not None else ())])
        prefixes = [0, 0, 1, 15, 16, 40, 63, *(LONG if served is not None else ())]
        sizes.append((queries + random.choice(prefixes), queries))
    shape = random_shape(random, dtype, kind, sizes)
    # In few blocks: the interpreter takes its time for each.
    block_m = max(32, random.choice([32, 64, 128]), 16 if shape.group <= 4 else 64)
    config = PrefillConfig(block_m=block_m, block_n=random.choice([32, 64, 64]), num_warps=4, num_stages=2)
    world = make_world(shape, random, device, far)
    if served is not None:
        config = prefill_config(served, world.k_pages, shape.value_dim)
    expected, magnitude = world.expected()
    blocks = prefill_blocks(shape.query_lens, config.rows_per_block(shape.group))
    blocks = prefill_blocks(
        shape.query_lens, config.rows_per_block(shape.group), blocks.sequences.shape[0] + random.choice([0, 1, 2])
    )
    rows = sum(shape.query_lens)
    # One row more than there are queries: nothing may be written there.
    out = torch.full((rows + 1, shape.heads, shape.value_dim), torch.nan, dtype=dtype, device=device)
    paged_prefill(
        world.q,
        world.k_pages,
        world.v_pages,
        world.block_table,
        world.query_start,
        world.seq_lens,
        PrefillBlocks(blocks.sequences.to(device), blocks.offsets.to(device)),
        world.scale,
        out,
        config,
        scales=world.scales,
        window=shape.window,
        softcap=shape.softcap,
    )
    error = relative_error(out[:rows], expected, magnitude)
    if not bool(out[rows].isnan().all()):
        error = float("nan")
    return Outcome(error, shape.tolerance(device), f"{shape} {config}")


def check_far_prefill(seed: int, device: str) -> Outcome:
    """With pages beyond 2**31 elements."""
    return check_prefill(seed, device, far=True)
