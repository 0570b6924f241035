"""Known answers of Philox4x32-10: Random123's ``kat_vectors``."""

from __future__ import annotations

import numpy as np
import pytest

from ringserve.kernels.philox import philox4x32, uniforms

VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = philox4x32(np.array([counter], dtype=np.uint32), np.array([key], dtype=np.uint32))
    assert tuple(words[0].tolist()) == expected


def test_rows_are_independent() -> None:
    counters = np.array([counter for counter, _, _ in VECTORS], dtype=np.uint32)
    keys = np.array([key for _, key, _ in VECTORS], dtype=np.uint32)
    assert philox4x32(counters, keys).tolist() == [list(expected) for _, _, expected in VECTORS]


def test_uniforms_lie_strictly_between_0_and_1() -> None:
    values = uniforms(np.array([0, 255, 256, 0xFFFFFFFF], dtype=np.uint32))
    assert values.tolist() == [0.5 * 2**-24, 0.5 * 2**-24, 1.5 * 2**-24, 1 - 0.5 * 2**-24]
