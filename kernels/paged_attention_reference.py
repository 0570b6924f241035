"""Paged attention as its formula says, one query row and head at a time, in float64. For tests."""

from __future__ import annotations

import numpy as np
import torch

from ringserve.kernels.paged_batch import PagedBatch


def paged_attention_reference(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same arguments as ``paged_attention``; float64 ``[T, H, Dv]``. Only written positions are read."""
    num_rows, num_heads, _ = q.shape
    _, kv_heads, page_size, value_dim = v_pages.shape
    out = np.zeros((num_rows, num_heads, value_dim))
    for b, context_len in enumerate(batch.context_lens):
        start, end = batch.query_start[b], batch.query_start[b + 1]
        positions = torch.arange(context_len)
        pages, offsets = batch.block_tables[b][positions // page_size], positions % page_size
        keys = k_pages[pages, :, offsets].double().numpy()
        values = v_pages[pages, :, offsets].double().numpy()
        for row in range(start, end):
            position = context_len - (end - row)
            first = 0 if window is None else max(0, position - window + 1)
            visible = slice(first, position + 1)
            for head in range(num_heads):
                g = head // (num_heads // kv_heads)
                scores = keys[visible, g] @ q[row, head].double().numpy() * scale
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                sink = -np.inf if sinks is None else float(sinks[head])
                top = max(float(scores.max()), sink)
                weights = np.exp(scores - top)
                out[row, head] = weights @ values[visible, g] / (weights.sum() + np.exp(sink - top))
    return torch.from_numpy(out)
