"""A model on a device against transformers' own float32 logits: chunks packed, a later chunk beside a decode, decodes.

The steps go through pages that lie backwards and interleaved, as the CPU's check does it (``self_check``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringserve.engine.gpu.step_inputs import DeviceModel, StepInputs

LENGTHS = (41, 22)
"""Tokens of the check's sequences, over several pages and tiles."""

STEPS = (((0, 19), (0, 20)), ((19, 40), (20, 21)), ((40, 41), (21, 22)))
"""What each step computes of the two."""

NUM_PAGES = 16
"""Enough for both with pages of 8 tokens and more."""

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}
"""By the model's type: root mean square of the differences of logits, as a part of the logits' spread. A wrong mask or
rotation gives one beyond 0.25."""

WEIGHT_TOLERANCE = {"none": 0.0, "int8": 0.05, "fp8": 0.1}
KV_TOLERANCE = {"auto": 0.0, "int8": 0.02, "fp8": 0.05}
"""What 8-bit weights, and keys and values, add."""


def tolerance(dtype: torch.dtype, quantization: str, kv_cache_dtype: str) -> float:
    """For a model computed like this."""
    return TOLERANCE[dtype] + WEIGHT_TOLERANCE[quantization] + KV_TOLERANCE[kv_cache_dtype]


def compute_logits(
    model: DeviceModel,
    sequences: Sequence[torch.Tensor],
    page_size: int,
    device: torch.device,
    steps: Sequence[Sequence[tuple[int, int]]] = STEPS,
    padding: int = 0,
) -> list[torch.Tensor]:
    """Logits of all tokens of each sequence. ``padding`` rows beside the decoding ones, in steps that only decode, as a
    captured graph has them."""
    longest = max(len(ids) for ids in sequences)
    width = -(-longest // page_size)
    count = len(sequences)
    tables = [torch.arange(count * width - i, 0, -count, dtype=torch.int32)[:width] for i in range(count)]
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in steps:
        rows = [(i, start, stop) for i, (start, stop) in enumerate(step) if stop > start]
        decodes = [row for row in rows if row[2] - row[1] == 1]
        chunks = [row for row in rows if row[2] - row[1] > 1]
        blank = 0 if chunks else padding
        inputs = _inputs(decodes, chunks, blank, sequences, tables, page_size, device)
        logits = model.forward(inputs)
        lengths = [stop - start for _, start, stop in (*decodes, *chunks)]
        for (i, _, _), part in zip((*decodes, *chunks), torch.split(logits[: sum(lengths)], lengths), strict=True):
            parts[i].append(part)
    return [torch.cat(logits) for logits in parts]


def _inputs(
    decodes: Sequence[tuple[int, int, int]],
    chunks: Sequence[tuple[int, int, int]],
    blank: int,
    sequences: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
    page_size: int,
    device: torch.device,
) -> StepInputs:
    def numbers(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for i, start, stop in decodes:
        token_ids += sequences[i][start:stop].tolist()
        positions.append(start)
        slots.append(int(tables[i][start // page_size]) * page_size + start % page_size)
    token_ids, positions, slots = token_ids + [0] * blank, positions + [0] * blank, slots + [-1] * blank
    chunk_start = [0]
    for i, start, stop in chunks:
        token_ids += sequences[i][start:stop].tolist()
        positions += range(start, stop)
        slots += [int(tables[i][p // page_size]) * page_size + p % page_size for p in range(start, stop)]
        chunk_start.append(chunk_start[-1] + stop - start)
    width = len(tables[0])
    no_pages = torch.zeros(width, dtype=torch.int32)
    table = torch.stack([*(tables[i] for i, _, _ in decodes), *[no_pages] * blank, *(tables[i] for i, _, _ in chunks)])
    return StepInputs(
        token_ids=numbers(token_ids),
        positions=numbers(positions),
        slot_mapping=numbers(slots),
        block_table=table.to(device),
        seq_lens=numbers([stop for _, _, stop in decodes] + [0] * blank + [stop for _, _, stop in chunks]),
        num_decodes=len(decodes) + blank,
        chunk_lens=tuple(stop - start for _, start, stop in chunks),
        chunk_start=numbers(chunk_start),
        wanted=None,
    )
