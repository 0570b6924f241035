"""Paged attention against its float64 reference, and the promises about chunks and batch mates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest
import torch

from ringserve.kernels.paged_attention import PagedBatch, Scales, paged_attention, write_kv
from ringserve.kernels.paged_attention_reference import paged_attention_reference


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Pages:
    """Pages full of NaN, into which sequences are written at shuffled places."""

    keys: torch.Tensor
    values: torch.Tensor
    free: list[int]
    scales: Scales | None = None

    @classmethod
    def poisoned(
        cls, num_pages: int, kv_heads: int, page_size: int, dims: tuple[int, int], dtype: torch.dtype, random: Random
    ) -> Pages:
        shape = (num_pages + 1, kv_heads, page_size)
        free = list(range(1, num_pages + 1))
        random.shuffle(free)
        if dtype == torch.int8:
            codes, others = (torch.randint(-128, 128, (*shape, dim), dtype=dtype) for dim in dims)
            return cls(codes, others, free, (torch.full(shape, torch.nan), torch.full(shape, torch.nan)))
        keys = torch.full((*shape, dims[0]), torch.nan, dtype=dtype)
        return cls(keys, torch.full((*shape, dims[1]), torch.nan, dtype=dtype), free)

    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as numbers."""
        if self.scales is None:
            return self.keys, self.values
        return self.keys * self.scales[0][..., None], self.values * self.scales[1][..., None]

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Write a sequence's keys and values; its block table, with a page to spare."""
        num_tokens = len(keys)
        table = torch.tensor([self.free.pop() for _ in range(num_tokens // self.page_size + 1)])
        positions = torch.arange(num_tokens)
        slots = table[positions // self.page_size] * self.page_size + positions % self.page_size
        write_kv(self.keys, self.values, keys, values, slots, self.scales)
        return table


def _random(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


CASES = [
    # heads, KV heads, key dim, value dim, page size, window, softcap, sinks
    (9, 3, 64, 64, 64, None, None, False),
    (9, 3, 64, 64, 16, None, None, False),
    (4, 4, 80, 80, 16, None, None, False),
    (8, 1, 96, 96, 32, None, None, False),
    (4, 2, 128, 128, 64, 33, None, False),
    (4, 2, 256, 256, 16, 1, 30.0, False),
    (6, 6, 48, 32, 8, None, None, False),
    (10, 2, 24, 40, 128, 200, None, True),
    (8, 4, 64, 64, 64, 64, 50.0, True),
    (20, 2, 16, 16, 16, 7, None, False),
]


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(
    case: tuple[int, int, int, int, int, int | None, float | None, bool], dtype: torch.dtype, int8: bool
) -> None:
    heads, kv_heads, key_dim, value_dim, page_size, window, softcap, with_sinks = case
    random, generator = Random(str(case)), torch.Generator().manual_seed(7)
    stored = torch.int8 if int8 else dtype
    pages = Pages.poisoned(1200 // page_size + 40, kv_heads, page_size, (key_dim, value_dim), stored, random)
    query_start, context_lens, tables, queries = [0], [], [], []
    for num_queries, before in ((1, 0), (1, 199), (1, 63), (5, 0), (3, 130), (140, 60), (1, 64), (1, 210), (0, 20)):
        tokens = before + num_queries
        tables.append(
            pages.add(
                _random(generator, tokens, kv_heads, key_dim, dtype=dtype),
                _random(generator, tokens, kv_heads, value_dim, dtype=dtype),
            )
        )
        queries.append(_random(generator, num_queries, heads, key_dim, dtype=dtype) * 2)
        query_start.append(query_start[-1] + num_queries)
        context_lens.append(tokens)
    batch = PagedBatch(query_start, context_lens, tables)
    sinks = torch.randn(heads, generator=generator) if with_sinks else None
    q, scale = torch.cat(queries), key_dim**-0.5
    result = paged_attention(q, pages.keys, pages.values, batch, scale, window, softcap, sinks, pages.scales)
    expected = paged_attention_reference(q, *pages.plain(), batch, scale, window, softcap, sinks)
    assert result.dtype == dtype
    assert result.shape == expected.shape
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(9, 3, 64, None), (9, 3, 64, 100), (8, 8, 64, None), (7, 1, 128, 300), (4, 2, 80, None)],
)
def test_rows_do_not_depend_on_chunks_pages_or_batch_mates(
    heads: int, kv_heads: int, dim: int, window: int | None, dtype: torch.dtype, int8: bool
) -> None:
    random, generator = Random(1), torch.Generator().manual_seed(3)
    length = 290
    k = _random(generator, length, kv_heads, dim, dtype=dtype)
    v = _random(generator, length, kv_heads, dim, dtype=dtype)
    q = _random(generator, length, heads, dim, dtype=dtype)
    mates = [_random(generator, n, kv_heads, dim, dtype=dtype) for n in (17, 190, 290, 430, 700)]
    whole: torch.Tensor | None = None
    for page_size, chunks in ((64, (290, 256, 100, 7, 1)), (16, (33, 2))):
        stored = torch.int8 if int8 else dtype
        pages = Pages.poisoned(3000 // page_size, kv_heads, page_size, (dim, dim), stored, random)
        table = pages.add(k, v)
        mate_tables = [pages.add(mate, mate) for mate in mates]
        for chunk in chunks:
            parts = []
            for start in range(0, length, chunk):
                end = min(length, start + chunk)
                sizes, context_lens, tables, queries = [end - start], [end], [table], [q[start:end]]
                if start % 3 == 0:  # Batch mates before and behind, decoding and in prefill.
                    for at, (mate, mate_table) in enumerate(zip(mates, mate_tables, strict=True)):
                        size = 1 if at % 2 == 0 else 9
                        place = at % 2 * len(sizes)
                        sizes.insert(place, size)
                        context_lens.insert(place, len(mate))
                        tables.insert(place, mate_table)
                        queries.insert(place, q[at : at + size])
                starts = [0]
                for size in sizes:
                    starts.append(starts[-1] + size)
                batch = PagedBatch(starts, context_lens, tables)
                out = paged_attention(
                    torch.cat(queries), pages.keys, pages.values, batch, dim**-0.5, window, scales=pages.scales
                )
                mine = next(i for i, entry in enumerate(tables) if entry is table)
                parts.append(out[starts[mine] : starts[mine + 1]])
            result = torch.cat(parts)
            whole = result if whole is None else whole
            assert torch.equal(result, whole), (page_size, chunk)


@pytest.mark.parametrize("heads", [5, 6, 7, 9])
def test_rows_do_not_depend_on_chunks_with_two_threads(heads: int) -> None:
    # One KV head is the case in which a thread gets some rows of a product instead of some products.
    torch.set_num_threads(2)
    random, generator = Random(3), torch.Generator().manual_seed(5)
    length = 150
    pages = Pages.poisoned(30, 1, 16, (64, 64), torch.float32, random)
    table = pages.add(*(_random(generator, length, 1, 64, dtype=torch.float32) for _ in range(2)))
    q = _random(generator, length, heads, 64, dtype=torch.float32)
    whole = paged_attention(q, pages.keys, pages.values, PagedBatch([0, length], [length], [table]), 0.125)
    for start, end in ((0, 1), (0, 2), (3, 6), (40, 45), (126, 130), (127, 128), (148, 149), (149, 150)):
        batch = PagedBatch([0, end - start], [end], [table])
        part = paged_attention(q[start:end], pages.keys, pages.values, batch, 0.125)
        assert torch.equal(part, whole[start:end])


@pytest.mark.parametrize("window", [None, 1100])
def test_long_rows(window: int | None) -> None:
    random, generator = Random(2), torch.Generator().manual_seed(4)
    dtype = torch.float32
    length, start = 1700, 1660
    pages = Pages.poisoned(30, 1, 64, (64, 64), dtype, random)
    table = pages.add(*(_random(generator, length, 1, 64, dtype=dtype) for _ in range(2)))
    q = _random(generator, length - start, 3, 64, dtype=dtype)
    chunk = (q, pages.keys, pages.values, PagedBatch([0, length - start], [length], [table]), 0.125, window)
    whole = paged_attention(*chunk)
    torch.testing.assert_close(whole.double(), paged_attention_reference(*chunk), rtol=1e-5, atol=1e-5)
    for i in range(length - start):
        batch = PagedBatch([0, 1], [start + i + 1], [table])
        alone = paged_attention(q[i : i + 1], pages.keys, pages.values, batch, 0.125, window)
        assert torch.equal(alone[0], whole[i])


def test_write_kv_touches_only_its_slots() -> None:
    keys = torch.full((4, 2, 8, 6), -1.0)
    values = torch.full((4, 2, 8, 5), -1.0)
    k, v = torch.rand(4, 2, 6), torch.rand(4, 2, 5)
    write_kv(keys, values, k, v, torch.tensor([3 * 8 + 2, -1, 8, 2 * 8 + 7]))
    for row, (page, offset) in {0: (3, 2), 2: (1, 0), 3: (2, 7)}.items():
        assert torch.equal(keys[page, :, offset], k[row])
        assert torch.equal(values[page, :, offset], v[row])
    assert int((keys != -1).sum()) == 3 * 2 * 6
    assert int((values != -1).sum()) == 3 * 2 * 5


def test_inconsistent_batches_are_refused() -> None:
    table = torch.tensor([1])
    with pytest.raises(ValueError, match="disagree"):
        PagedBatch([0, 1], [4, 4], [table, table])
    with pytest.raises(ValueError, match="more query rows"):
        PagedBatch([0, 5], [4], [table])
    with pytest.raises(ValueError, match="pages"):
        PagedBatch([0, 1], [17], [table]).plan(16, 1, 8, None)
