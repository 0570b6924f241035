"""Paged attention on CPUs.

For query row ``i`` of a sequence (position ``i``), head ``h`` of KV head ``g = h // (H / KVH)``::

    s_j   = scale * q_i . k_j                          for j <= i and, with a window, i - j < window
    s_j   = softcap * tanh(s_j / softcap)              with softcap
    out_i = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink_h))      the last term only with sinks

Shapes: q ``[T, H, D]``; k_pages ``[pages, KVH, page_size, D]``; v_pages ``[pages, KVH, page_size, Dv]``; out
``[T, H, Dv]`` in q's type. Everything between is float32. Positions that no token of the sequence wrote may hold
anything, NaN included.

The result of a row is bit-identical whatever the chunk its prompt was computed in, the page size and the batch
(``paged_batch`` says how); that was seen with torch's MKL and OpenBLAS products and is tested.
Reference: ``paged_attention_reference``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringserve.kernels.kv_codes import quantize_kv
from ringserve.kernels.paged_batch import DecodeGroup, PagedBatch, PrefillSequence, Workspace, padded_rows

__all__ = ["PagedBatch", "Scales", "Workspace", "paged_attention", "write_kv"]

Scales = tuple[torch.Tensor, torch.Tensor]
"""Of keys and values in int8: float32 ``[pages, KVH, page_size]`` each."""


def write_kv(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: Scales | None = None,
) -> None:
    """Store keys k ``[T, KVH, D]`` and values v ``[T, KVH, Dv]`` at slots ``page * page_size + offset``; -1 skips.

    ``scales``: of pages in int8; written, too.
    """
    _, kv_heads, page_size, _ = k_pages.shape
    if bool((slot_mapping < 0).any()):
        kept = slot_mapping >= 0
        slot_mapping, k, v = slot_mapping[kept], k[kept], v[kept]
    pages = torch.div(slot_mapping, page_size, rounding_mode="floor")
    # Row of (page, head, offset) in the array seen as [pages * KVH * page_size, dim].
    rows = pages * (kv_heads * page_size - page_size) + slot_mapping
    rows = (rows[:, None] + torch.arange(0, kv_heads * page_size, page_size)).flatten()
    for index, (target, source) in enumerate(((k_pages, k), (v_pages, v))):
        if scales is not None:
            source, source_scales = quantize_kv(source)
            scales[index].view(-1).index_copy_(0, rows, source_scales.flatten())
        dim = target.shape[-1]
        target.view(-1, dim).index_copy_(0, rows, source.reshape(-1, dim).to(target.dtype))


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Attention of T packed query rows over their sequences' pages; see the module for formula and shapes.

    ``sinks``: one extra logit for each head, ``[H]``, that takes weight and gives no value. ``scales``: of pages in
    int8 (``kv_codes``).
    """
    num_rows, num_heads, key_dim = q.shape
    _, kv_heads, page_size, value_dim = v_pages.shape
    out = torch.empty(num_rows, num_heads, value_dim, dtype=q.dtype)
    plan = batch.plan(page_size, kv_heads, key_dim, window)
    head_sinks = None if sinks is None else sinks.float().view(kv_heads, 1, num_heads // kv_heads)
    keys, values = (
        _Pages(pages, None if scales is None else scales[index]) for index, pages in enumerate((k_pages, v_pages))
    )
    for group in plan.decodes:
        _decode(group, q, keys, values, out, batch.workspace, scale, softcap, head_sinks)
    for sequence in plan.prefills:
        _prefill(sequence, q, keys, values, out, batch.workspace, scale, softcap, head_sinks)
    return out


@dataclass(frozen=True)
class _Pages:
    """Keys or values as they lie in the pool."""

    elements: torch.Tensor
    scales: torch.Tensor | None


def _gather(stored: _Pages, page_ids: torch.Tensor, num_sequences: int, name: str, work: Workspace) -> torch.Tensor:
    """The pages of ``num_sequences`` sequences as float32 ``[num_sequences, KVH, keys, dim]``."""
    pages = stored.elements
    _, kv_heads, page_size, dim = pages.shape
    per_sequence = len(page_ids) // num_sequences
    gathered = pages.index_select(0, page_ids).view(num_sequences, per_sequence, kv_heads, page_size, dim)
    target = work.take(name, (num_sequences, kv_heads, per_sequence, page_size, dim))
    target.copy_(gathered.transpose(1, 2))
    if stored.scales is not None:
        scales = stored.scales.index_select(0, page_ids).view(num_sequences, per_sequence, kv_heads, page_size)
        target.mul_(scales.transpose(1, 2).unsqueeze(-1))
    return target.view(num_sequences, kv_heads, per_sequence * page_size, dim)


def _weighted_sum(weights: torch.Tensor, values: torch.Tensor, blocks: tuple[slice, ...]) -> torch.Tensor:
    """``weights @ values``, summed block after block in the order of the keys."""
    first, *others = blocks
    result = torch.bmm(weights[:, :, first], values[:, first])
    for block in others:
        result.baddbmm_(weights[:, :, block], values[:, block])
    return result


def _decode(
    group: DecodeGroup,
    q: torch.Tensor,
    k_pages: _Pages,
    v_pages: _Pages,
    out: torch.Tensor,
    work: Workspace,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """One query row for each sequence: the heads that share a KV head are the rows of the products."""
    _, kv_heads, _, value_dim = v_pages.elements.shape
    _, num_heads, key_dim = q.shape
    size, num_keys = len(group.rows), group.num_keys
    heads_per_kv = num_heads // kv_heads
    num_rows = padded_rows(heads_per_kv)
    keys = _gather(k_pages, group.page_ids, size, "keys", work).view(size * kv_heads, num_keys, key_dim)
    values = _gather(v_pages, group.page_ids, size, "values", work).view(size * kv_heads, num_keys, value_dim)
    if group.unwritten is not None:
        values.view(-1, value_dim).index_fill_(0, group.unwritten, 0.0)
    queries = q.new_zeros((size, kv_heads, num_rows, key_dim), dtype=torch.float32)
    torch.mul(
        q.index_select(0, group.rows).view(size, kv_heads, heads_per_kv, key_dim).float(),
        scale,
        out=queries[:, :, :heads_per_kv],
    )
    scores = work.take("scores", (size * kv_heads, num_rows, num_keys))
    torch.bmm(queries.view(size * kv_heads, num_rows, key_dim), keys.transpose(1, 2), out=scores)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if group.hidden is not None:
        by_sequence = scores.view(size, kv_heads, num_rows, num_keys)
        by_sequence[..., group.first_hidden :].masked_fill_(group.hidden, -torch.inf)
    result = _weighted_sum(torch.softmax(scores, -1), values, group.blocks)
    result = result.view(size, kv_heads, num_rows, value_dim)[:, :, :heads_per_kv]
    if sinks is not None:
        total = torch.logsumexp(scores, -1).view(size, kv_heads, num_rows)[:, :, :heads_per_kv]
        result = result * torch.sigmoid(total - sinks.view(kv_heads, heads_per_kv)).unsqueeze(-1)
    out.index_copy_(0, group.rows, result.reshape(size, num_heads, value_dim).to(out.dtype))


def _prefill(
    sequence: PrefillSequence,
    q: torch.Tensor,
    k_pages: _Pages,
    v_pages: _Pages,
    out: torch.Tensor,
    work: Workspace,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Several query rows of one sequence, tile by tile; rows of the products are (token, head of the KV head)."""
    _, kv_heads, _, value_dim = v_pages.elements.shape
    _, num_heads, key_dim = q.shape
    heads_per_kv = num_heads // kv_heads
    keys = _gather(k_pages, sequence.page_ids, 1, "keys", work)[0]
    values = _gather(v_pages, sequence.page_ids, 1, "values", work)[0]
    values[:, sequence.written :] = 0.0
    for tile in sequence.tiles:
        num_tokens = tile.rows.stop - tile.rows.start
        num_keys = tile.keys.stop - tile.keys.start
        used_rows = num_tokens * heads_per_kv
        num_rows = padded_rows(used_rows)
        queries = work.take("queries", (kv_heads, num_rows, key_dim))
        torch.mul(
            q[tile.rows].view(num_tokens, kv_heads, heads_per_kv, key_dim).transpose(0, 1).float(),
            scale,
            out=queries[:, :used_rows].view(kv_heads, num_tokens, heads_per_kv, key_dim),
        )
        queries[:, used_rows:] = 0.0
        scores = work.take("scores", (kv_heads, num_rows, num_keys))
        torch.bmm(queries, keys[:, tile.keys].transpose(1, 2), out=scores)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        by_token = scores[:, :used_rows].view(kv_heads, num_tokens, heads_per_kv, num_keys)
        by_token[..., tile.first_hidden :].masked_fill_(tile.hidden, -torch.inf)
        result = _weighted_sum(torch.softmax(scores, -1), values[:, tile.keys], tile.blocks)
        result = result[:, :used_rows].view(kv_heads, num_tokens, heads_per_kv, value_dim)
        if sinks is not None:
            total = torch.logsumexp(by_token, -1)
            result = result * torch.sigmoid(total - sinks).unsqueeze(-1)
        out[tile.rows] = result.transpose(0, 1).reshape(num_tokens, num_heads, value_dim).to(out.dtype)
