"""Which sizes of steps are prepared before the first request: graphs of decode steps, and steps with chunks."""

from __future__ import annotations

from bisect import bisect_left

_SMALL = (1, 2, 4)
_STEP = 8


def graph_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8, to ``max_num_seqs`` itself."""
    buckets = {*_SMALL, *range(_STEP, max_num_seqs + 1, _STEP), max_num_seqs}
    return tuple(sorted(bucket for bucket in buckets if bucket <= max_num_seqs))


def bucket_of(buckets: tuple[int, ...], rows: int) -> int:
    """The smallest that has room."""
    return buckets[bisect_left(buckets, rows)]


def warm_up_tokens(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Tokens of the prompts of steps that together compile everything: launches differ by powers of two, and not beyond
    a few hundred rows. The largest comes first."""
    sizes = {1, 2, *(16 * 2**i + extra for i in range(5) for extra in (0, 1)), max_num_batched_tokens}
    return tuple(sorted((size for size in sizes if size <= max_num_batched_tokens), reverse=True))
