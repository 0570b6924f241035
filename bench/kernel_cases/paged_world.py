"""Sequences in a poisoned page pool, in any KV format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch

from ringserve.bench.kernel_cases.outcome import FAST_EXP_TOLERANCE, FEW_KEYS, SOFTCAP_TOLERANCE, TOLERANCE
from ringserve.kernels.gpu.architecture import Architecture, architecture_of
from ringserve.kernels.gpu.kv_format import KVFormat, dequantize_reference, quantize_reference
from ringserve.kernels.paged_attention_reference import paged_attention_reference
from ringserve.kernels.paged_batch import PagedBatch

LONG = (700, 1500, 2050)
"""Contexts of a device's cases beside the short ones that the interpreter has time for: many tiles, all splits."""

NO_PAGE = 2**31 - 1
"""Fills block tables beyond a sequence's pages: read, it is far outside the pool."""


def served_on(device: str) -> Architecture | None:
    """Whose configurations are checked: on a device those that serve there, in the interpreter (None) small ones."""
    return None if device == "cpu" else architecture_of(torch.cuda.get_device_capability(device)[0])


@dataclass(frozen=True)
class WorldShape:
    """What is random about it."""

    dtype: torch.dtype
    """Of queries, and of pages in the native format."""
    kind: KVFormat
    kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    page_size: int
    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    window: int | None
    softcap: float | None

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    def tolerance(self, device: str) -> float:
        """Of the relative error."""
        least = SOFTCAP_TOLERANCE if self.softcap is not None else 0.0
        if device != "cpu":
            least = max(least, FAST_EXP_TOLERANCE)
        tolerance = max(TOLERANCE[self.dtype], least)
        keys = min([FEW_KEYS, *([self.window] if self.window is not None else []), *filter(None, self.context_lens)])
        if self.kind is not KVFormat.NATIVE and keys < FEW_KEYS:
            tolerance += torch.finfo(self.dtype).eps / 2
        return tolerance


@dataclass(frozen=True)
class PagedWorld:
    """All on the device, but for ``exact`` and ``tables``."""

    shape: WorldShape
    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    exact_pages: tuple[torch.Tensor, torch.Tensor]
    """float64 values of the pages."""
    tables: list[torch.Tensor]

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.shape.key_dim**-0.5)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 attention of all rows, and that of the values' magnitudes, which cancellation does not shrink."""
        shape = self.shape
        rows = sum(shape.query_lens)
        results = []
        live = [b for b, length in enumerate(shape.query_lens) if length and shape.context_lens[b]]
        starts = [0]
        for b in live:
            starts.append(starts[-1] + shape.query_lens[b])
        batch = PagedBatch(starts, [shape.context_lens[b] for b in live], [self.tables[b] for b in live])
        first = torch.tensor([sum(shape.query_lens[:b]) for b in live])
        live_rows = torch.cat(
            [torch.arange(int(f), int(f) + shape.query_lens[b]) for b, f in zip(live, first, strict=True)]
            or [torch.empty(0, dtype=torch.int64)]
        )
        q = self.q.cpu()[live_rows]
        keys, values = self.exact_pages
        for pages in (values, values.abs()):
            result = torch.zeros(rows, shape.heads, shape.value_dim, dtype=torch.float64)
            if live:
                result[live_rows] = paged_attention_reference(
                    q, keys, pages, batch, self.scale, shape.window, shape.softcap
                )
            results.append(result)
        return results[0], results[1]


def make_world(shape: WorldShape, random: Random, device: str, far: bool = False) -> PagedWorld:
    """Random keys, values and queries; pages in random order, views with random strides.

    ``far``: the last page begins beyond 2**31 elements.
    """
    generator = torch.Generator().manual_seed(random.getrandbits(40))
    pages_of = [-(-length // shape.page_size) for length in shape.context_lens]
    num_pages = sum(pages_of) + random.choice([1, 2, 9])
    free = list(range(1, num_pages))
    random.shuffle(free)
    if far:  # the last page is used first
        free.append(free.pop(free.index(num_pages - 1)))
    tables = [torch.tensor([free.pop() for _ in range(count)], dtype=torch.int64) for count in pages_of]
    exact, stored, scales = [], [], []
    for dim in (shape.key_dim, shape.value_dim):
        values = torch.full((num_pages, shape.kv_heads, shape.page_size, dim), torch.nan, dtype=torch.float32)
        for table, length in zip(tables, shape.context_lens, strict=True):
            positions = torch.arange(length)
            values[table[positions // shape.page_size], :, positions % shape.page_size] = torch.randn(
                length, shape.kv_heads, dim, generator=generator
            )
        pages, scale = _store(values, shape)
        exact.append(dequantize_reference(pages, scale))
        stored.append(_far(pages, device) if far else _strided(pages, random, device))
        if scale is not None:
            scales.append(_strided(scale, Random(num_pages), device))  # both with the same strides
    width = max(pages_of, default=0) + random.choice([1, 4])
    table_rows = torch.full((len(tables), width), NO_PAGE, dtype=torch.int32)
    for b, table in enumerate(tables):
        table_rows[b, : len(table)] = table
    starts = [0]
    for length in shape.query_lens:
        starts.append(starts[-1] + length)
    q = torch.randn(starts[-1], shape.heads, shape.key_dim, generator=generator).to(shape.dtype)
    return PagedWorld(
        shape=shape,
        q=_strided(q, random, device),
        k_pages=stored[0],
        v_pages=stored[1],
        scales=(scales[0], scales[1]) if scales else None,
        block_table=_strided(table_rows[:, None], random, device)[:, 0],
        seq_lens=torch.tensor(shape.context_lens, dtype=torch.int32, device=device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        exact_pages=(exact[0], exact[1]),
        tables=tables,
    )


def _store(values: torch.Tensor, shape: WorldShape) -> tuple[torch.Tensor, torch.Tensor | None]:
    if shape.kind is KVFormat.NATIVE:
        return values.to(shape.dtype), None
    written = ~values.isnan().any(-1)
    codes, scales = quantize_reference(values.nan_to_num(0.0), shape.kind)
    codes[~written] = 0x7F
    scales[~written] = torch.nan
    return codes, scales


def _strided(tensor: torch.Tensor, random: Random, device: str) -> torch.Tensor:
    """The tensor as a view of a wider one, as a layer's half of a slab or a part of a fused projection is."""
    extra = random.choice([0, 0, 3])
    wide = torch.zeros((tensor.shape[0], tensor.shape[1] + extra, *tensor.shape[2:]), dtype=tensor.dtype)
    if wide.is_floating_point():
        wide.fill_(torch.nan)
    wide[:, : tensor.shape[1]] = tensor
    return wide.to(device)[:, : tensor.shape[1]]


def _far(pages: torch.Tensor, device: str) -> torch.Tensor:
    """The pages as views into more than 2**31 elements, which a host commits only where they are written."""
    num_pages = pages.shape[0]
    stride = 2**31 // (num_pages - 1) // 64 * 64 + 64
    buffer = torch.empty(stride * (num_pages - 1) + pages[0].numel(), dtype=pages.dtype, device=device)
    view = buffer.as_strided(pages.shape, (stride, *pages[0].stride()))
    for page in range(num_pages):
        view[page] = pages[page].to(device)
    return view


def random_shape(random: Random, dtype: torch.dtype, kind: KVFormat, sizes: Sequence[tuple[int, int]]) -> WorldShape:
    """For sequences of (context, query) lengths."""
    key_dim, value_dim = random.choice([(64, 64), (64, 64), (64, 32), (80, 80), (96, 96), (128, 128), (192, 128)])
    if random.random() < 0.04:
        key_dim = value_dim = 256
    return WorldShape(
        dtype=dtype,
        kind=kind,
        kv_heads=random.choice([1, 1, 1, 2]),
        group=random.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 16]),
        key_dim=key_dim,
        value_dim=value_dim,
        page_size=random.choice([16, 16, 16, 8, 32, 64]),
        context_lens=tuple(context for context, _ in sizes),
        query_lens=tuple(queries for _, queries in sizes),
        window=random.choice([None, None, None, 1, 20, 50, 1000]),
        softcap=random.choice([None, None, None, 20.0]),
    )


FORMATS = (
    (torch.bfloat16, KVFormat.NATIVE),
    (torch.float16, KVFormat.NATIVE),
    (torch.bfloat16, KVFormat.E4M3),
    (torch.bfloat16, KVFormat.INT8),
    (torch.float16, KVFormat.E4M3),
    (torch.float16, KVFormat.INT8),
    (torch.float32, KVFormat.NATIVE),
)
"""Types of products and formats of pages, one for each residue of a seed."""
