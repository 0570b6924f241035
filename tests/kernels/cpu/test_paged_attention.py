"""Paged attention on CPUs: right by its definition, and the same bits however the queries are cut up."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_attention_cases import Floats, make_sequence, reference

from ringserve.kernels.cpu.features import AVX512, PORTABLE, Level, host_level

LEVELS = [PORTABLE, AVX512] if host_level() == AVX512 else [PORTABLE]
TYPES = [pytest.param(False, id="bfloat16"), pytest.param(True, id="int8")]


def queries_for(count: int, dim: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal((count, dim), dtype=np.float32)


@pytest.mark.parametrize("int8", TYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("dim", "group", "page_size", "window"),
    [
        (64, 3, 64, 0),
        (64, 1, 16, 0),
        (80, 2, 32, 0),
        (96, 4, 64, 37),
        (128, 8, 128, 0),
        (256, 5, 64, 70),
        (32, 32, 16, 5),
        (64, 3, 64, 1),
    ],
)
def test_equals_the_definition(level: Level, int8: bool, dim: int, group: int, page_size: int, window: int) -> None:
    sequence = make_sequence(150, dim, page_size, int8=int8)
    for first, tokens in ((0, 1), (0, 2), (15, 1), (63, 2), (120, 64 // group), (149, 1)):
        tokens = min(tokens, 150 - first)
        queries = queries_for(tokens * group, dim)
        got = sequence.attend(level, queries, group, first, window)
        expected = reference(sequence, queries, group, first, window)
        # The weights have bfloat16's 8 bits; those of int8 pages have 16, as the queries have then.
        assert np.abs(got - expected).max() < (2e-4 if int8 else 0.008)


@pytest.mark.parametrize("int8", TYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dim", "page_size", "window"), [(64, 64, 0), (80, 16, 0), (64, 32, 19), (128, 64, 40)])
def test_a_row_does_not_depend_on_the_rows_around_it(
    level: Level, int8: bool, dim: int, page_size: int, window: int
) -> None:
    group, length = 3, 140
    sequence = make_sequence(length, dim, page_size, int8=int8)
    queries = queries_for(length * group, dim)
    alone = np.concatenate(
        [sequence.attend(level, queries[t * group : (t + 1) * group], group, t, window) for t in range(length)]
    )
    rng = np.random.default_rng(2)
    for _ in range(3):
        t = 0
        while t < length:
            count = min(int(rng.integers(1, 64 // group + 1)), length - t)
            got = sequence.attend(level, queries[t * group : (t + count) * group], group, t, window)
            assert np.array_equal(got, alone[t * group : (t + count) * group])
            t += count


@pytest.mark.parametrize("int8", TYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dim", "page_size", "window"), [(64, 64, 0), (64, 128, 600), (80, 16, 0), (32, 32, 7)])
def test_long_sequences_span_by_span(level: Level, int8: bool, dim: int, page_size: int, window: int) -> None:
    """Right, and the same bits alone, among neighbours on both sides of a span's border, and by several threads."""
    group, length = 3, 1300
    sequence = make_sequence(length, dim, page_size, int8=int8)
    for first in (500, 511, 512, 1023, 1024, 1290):
        queries = queries_for(10 * group, dim)
        got = sequence.attend(level, queries, group, first, window)
        expected = reference(sequence, queries, group, first, window)
        assert np.abs(got - expected).max() < (2e-4 if int8 else 0.008)
        for t in range(10):
            rows = slice(t * group, (t + 1) * group)
            assert np.array_equal(sequence.attend(level, queries[rows], group, first + t, window), got[rows])
            assert np.array_equal(sequence.attend_in_spans(level, queries[rows], first + t, window), got[rows])


@pytest.mark.parametrize("int8", TYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_not_finite_shows(level: Level, int8: bool) -> None:
    sequence = make_sequence(40, 64, 16, int8=int8)
    queries = queries_for(2, 64)
    queries[1, 3] = np.nan
    got = sequence.attend(level, queries, 2, 39, 0)
    assert np.isfinite(got[0]).all()
    assert np.isnan(got[1]).all()


@pytest.mark.parametrize("int8", TYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_large_scores_do_not_overflow(level: Level, int8: bool) -> None:
    sequence = make_sequence(40, 64, 16, int8=int8)
    queries = queries_for(1, 64) * np.float32(1e4)
    got = sequence.attend(level, queries, 1, 39, 0)
    assert np.abs(got - reference(sequence, queries, 1, 39, 0)).max() < 0.008
