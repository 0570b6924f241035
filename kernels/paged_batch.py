"""What a step's attention looks at: which query rows belong to which sequence, and where its keys and values lie.

The layout of the work (which rows are computed together, which pages are gathered, what is masked) is the same for
every layer of a step with the same window and head count, so it is planned once and kept with the batch.

The plan keeps each row's result independent of how its prompt was cut into chunks, and of who else is in the batch:

* tiles of query rows begin at absolute multiples of ``QUERY_TILE``;
* gathered keys begin at a position that depends on the tile alone;
* sums over keys go through blocks whose size depends on their place in the row alone (a BLAS library cuts a long sum
  into parts that depend on its length);
* matrix products have multiples of ``ROW_MULTIPLE`` rows (for fewer, also as one thread's share of a product, a
  library has kernels that add in another order).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import torch

QUERY_TILE = 128
"""Query rows of one sequence that are computed together."""

KEY_BLOCK = 128
"""Keys that one matrix product sums over, and the multiple in which they are gathered, in short rows ..."""

LONG_KEY_BLOCK = 512
"""... and beyond ``LONG_ROW`` keys, where the number of products would count."""

LONG_ROW = 1024

ROW_MULTIPLE = 4
"""Matrix products have a multiple of this many rows."""

GROUP_ELEMENTS = 1 << 18
"""Key elements of one gather of decode rows: 1 MiB of float32, still in the cache when it is used."""


def padded_keys(num_keys: int) -> int:
    """``num_keys`` rounded up to whole blocks."""
    block = KEY_BLOCK if num_keys <= LONG_ROW else LONG_KEY_BLOCK
    return -(-num_keys // block) * block


def padded_rows(num_rows: int) -> int:
    """``num_rows`` rounded up to what a matrix product should have."""
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


def key_blocks(num_keys: int) -> tuple[slice, ...]:
    """The blocks of a row of ``padded_keys``; those of a shorter row are the first ones of a longer row."""
    edges = [*range(0, min(num_keys, LONG_ROW), KEY_BLOCK), *range(LONG_ROW, num_keys, LONG_KEY_BLOCK), num_keys]
    return tuple(slice(start, end) for start, end in pairwise(edges))


class Workspace:
    """Scratch memory that is kept between calls: a fresh large allocation costs a page fault for every 4 KiB."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Uninitialised float32 ``shape``; the memory of the last ``take`` of the same name."""
        size = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.float32)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one query row each, whose padded key ranges are equally long."""

    rows: torch.Tensor
    """int64 [B]: their rows in the packed query."""
    page_ids: torch.Tensor
    """int64 [B * pages]."""
    num_keys: int
    """N: keys gathered for each."""
    first_hidden: int
    """Columns before this one are visible to every query."""
    hidden: torch.Tensor | None
    """bool [B, 1, 1, N - first_hidden]: those that the query must not see; None where it sees all."""
    unwritten: torch.Tensor | None
    """int64: rows of the gathered values ``[B * kv_heads * N, value_dim]`` that no token of the sequence wrote."""
    blocks: tuple[slice, ...]
    """Of the N keys, summed one after the other."""


@dataclass(frozen=True)
class QueryTile:
    """Consecutive query rows of one sequence."""

    rows: slice
    keys: slice
    """Among the sequence's gathered keys."""
    first_hidden: int
    """Columns of ``keys`` before this one are visible to every row."""
    hidden: torch.Tensor
    """bool [rows, 1, columns from ``first_hidden``]."""
    blocks: tuple[slice, ...]
    """Of ``keys``, summed one after the other."""


@dataclass(frozen=True)
class PrefillSequence:
    """A sequence with several query rows."""

    page_ids: torch.Tensor
    """int64 [pages]."""
    num_keys: int
    """Gathered, whole blocks."""
    written: int
    """Of those, keys that the sequence has written."""
    tiles: tuple[QueryTile, ...]


@dataclass(frozen=True)
class Plan:
    """A step's work for one layer."""

    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillSequence, ...]


@dataclass
class PagedBatch:
    """B sequences packed into one row of T query tokens.

    Sequence ``b`` has query rows ``query_start[b] .. query_start[b + 1]``, the last of its ``context_lens[b]`` tokens
    (those before this step and this step's own). Its key at position ``p`` lies in page
    ``block_tables[b][p // page_size]`` at offset ``p % page_size``. Raises ValueError where that does not add up.
    """

    query_start: Sequence[int]
    """B + 1 ascending row numbers, from 0."""
    context_lens: Sequence[int]
    block_tables: Sequence[torch.Tensor]
    """int64, at least ``ceil(context_len / page_size)`` entries each."""
    workspace: Workspace = field(default_factory=Workspace)
    """Pass a long-lived one to keep the scratch memory from step to step."""
    _plans: dict[tuple[int, int, int, int | None], Plan] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not len(self.query_start) - 1 == len(self.context_lens) == len(self.block_tables):
            raise ValueError("query_start, context_lens and block_tables disagree about the number of sequences")
        for b, context_len in enumerate(self.context_lens):
            if not 0 <= self.query_start[b + 1] - self.query_start[b] <= context_len:
                raise ValueError(f"sequence {b} has more query rows than tokens, or fewer than none")

    def plan(self, page_size: int, kv_heads: int, key_dim: int, window: int | None) -> Plan:
        """The work of a layer with these shapes; planned at the first call."""
        key = (page_size, kv_heads, key_dim, window)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make_plan(*key)
            self._plans[key] = plan
        return plan

    def _make_plan(self, page_size: int, kv_heads: int, key_dim: int, window: int | None) -> Plan:
        if KEY_BLOCK % page_size:
            raise ValueError(f"the page size must divide {KEY_BLOCK}, {page_size} does not")
        decodes: list[tuple[int, int, int]] = []
        prefills: list[PrefillSequence] = []
        for b, context_len in enumerate(self.context_lens):
            if context_len > len(self.block_tables[b]) * page_size:
                raise ValueError(f"sequence {b} has {context_len} tokens but {len(self.block_tables[b])} pages")
            num_queries = self.query_start[b + 1] - self.query_start[b]
            if num_queries == 1:
                first_key = _first_key(context_len - 1, window)
                decodes.append((padded_keys(context_len - first_key), first_key, b))
            elif num_queries > 1:
                prefills.append(self._plan_prefill(b, page_size, window))
        decodes.sort()
        groups = _groups(decodes, kv_heads * key_dim)
        return Plan(tuple(self._plan_decodes(g, page_size, kv_heads, window) for g in groups), tuple(prefills))

    def _pages(self, b: int, first_key: int, num_keys: int, page_size: int) -> torch.Tensor:
        """Page ids of ``num_keys`` keys from ``first_key`` on; the reserved page 0 where the sequence has none."""
        first = first_key // page_size
        used = -(-(min(self.context_lens[b] - first_key, num_keys)) // page_size)
        ids = torch.zeros(num_keys // page_size, dtype=torch.int64)
        ids[:used] = self.block_tables[b][first : first + used]
        return ids

    def _plan_decodes(
        self, members: list[tuple[int, int, int]], page_size: int, kv_heads: int, window: int | None
    ) -> DecodeGroup:
        num_keys = members[-1][0]
        columns = torch.arange(num_keys)
        written = torch.tensor([self.context_lens[b] - first_key for _, first_key, b in members])
        unwritten = columns >= written[:, None]
        hidden = unwritten if window is None else unwritten | (columns < written[:, None] - window)
        first_hidden = int(written.min()) if window is None else 0
        rows = torch.nonzero(unwritten[:, None, :].expand(-1, kv_heads, -1).reshape(-1)).flatten()
        return DecodeGroup(
            rows=torch.tensor([self.query_start[b] for _, _, b in members]),
            page_ids=torch.cat([self._pages(b, first_key, num_keys, page_size) for _, first_key, b in members]),
            num_keys=num_keys,
            first_hidden=first_hidden,
            hidden=hidden[:, None, None, first_hidden:] if bool(hidden.any()) else None,
            unwritten=rows if len(rows) else None,
            blocks=key_blocks(num_keys),
        )

    def _plan_prefill(self, b: int, page_size: int, window: int | None) -> PrefillSequence:
        start, end = self.query_start[b], self.query_start[b + 1]
        context_len = self.context_lens[b]
        first_position = context_len - (end - start)
        base = _first_key(first_position, window)
        tiles: list[QueryTile] = []
        position = first_position
        while position < context_len:
            tile_end = min((position // QUERY_TILE + 1) * QUERY_TILE, context_len)
            first_key = _first_key(position, window)
            end_key = first_key + padded_keys(tile_end - first_key)
            first_hidden = 0 if window is not None else position + 1 - first_key
            queries = torch.arange(position, tile_end)[:, None]
            keys = torch.arange(first_key + first_hidden, end_key)[None, :]
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            row = start + position - first_position
            tiles.append(
                QueryTile(
                    rows=slice(row, row + tile_end - position),
                    keys=slice(first_key - base, end_key - base),
                    first_hidden=first_hidden,
                    hidden=hidden[:, None, :],
                    blocks=key_blocks(end_key - first_key),
                )
            )
            position = tile_end
        num_keys = max(tile.keys.stop for tile in tiles)
        return PrefillSequence(
            page_ids=self._pages(b, base, num_keys, page_size),
            num_keys=num_keys,
            written=context_len - base,
            tiles=tuple(tiles),
        )


def _first_key(position: int, window: int | None) -> int:
    """Position of the first key gathered for a query: one for all queries of its tile."""
    if window is None:
        return 0
    tile_start = position // QUERY_TILE * QUERY_TILE
    return max(0, tile_start - window + 1) // KEY_BLOCK * KEY_BLOCK


def _groups(decodes: list[tuple[int, int, int]], elements_per_key: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut sequences sorted by their number of keys into groups that waste at most a quarter and fit into a cache."""
    group: list[tuple[int, int, int]] = []
    for member in decodes:
        num_keys = member[0]
        if group and (
            num_keys * 4 > group[0][0] * 5 or (len(group) + 1) * num_keys * elements_per_key > GROUP_ELEMENTS
        ):
            yield group
            group = []
        group.append(member)
    if group:
        yield group
