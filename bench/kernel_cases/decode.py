"""Paged decode attention."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch

from ringserve.bench.kernel_cases.outcome import Outcome, relative_error
from ringserve.bench.kernel_cases.paged_world import FORMATS, LONG, make_world, random_shape, served_on
from ringserve.kernels.gpu.paged_decode import DecodeConfig, DecodeScratch, decode_config, paged_decode


def check_decode(seed: int, device: str, far: bool = False) -> Outcome:
    """One token of each sequence; empty rows, runs without keys, splits beyond the length."""
    random = Random(seed)
    dtype, kind = FORMATS[seed % len(FORMATS)]
    served = served_on(device)
    choices = [0, 1, 15, 16, 17, 33, 64, 65, 100, 130, *(LONG if served is not None else ())]
    lengths = [random.choice(choices) for _ in range(random.choice([1, 1, 2, 3]))]
    shape = random_shape(random, dtype, kind, [(length, 1) for length in lengths])
    config = DecodeConfig(
        block_n=random.choice([32, 64, 64]), num_warps=4, num_stages=2, min_split=random.choice([32, 64, 256])
    )
    splits = random.choice([1, 2, 4, 16])
    world = make_world(shape, random, device, far)
    if served is not None:
        config = replace(decode_config(served, world.k_pages, shape.value_dim), min_split=config.min_split)
    expected, magnitude = world.expected()
    scratch = DecodeScratch.allocate(len(lengths), shape.heads, splits, shape.value_dim, torch.device(device))
    scratch.values.fill_(torch.nan)
    scratch.log_sums.fill_(torch.nan)
    out = torch.full((len(lengths), shape.heads, shape.value_dim), torch.nan, dtype=dtype, device=device)
    paged_decode(
        world.q,
        world.k_pages,
        world.v_pages,
        world.block_table,
        world.seq_lens,
        world.scale,
        out,
        scratch,
        config,
        scales=world.scales,
        window=shape.window,
        softcap=shape.softcap,
    )
    return Outcome(
        relative_error(out, expected, magnitude), shape.tolerance(device), f"{shape} {config} splits={splits}"
    )


def check_far_decode(seed: int, device: str) -> Outcome:
    """With pages beyond 2**31 elements."""
    return check_decode(seed, device, far=True)
