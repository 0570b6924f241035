"""How keys and values lie in their pages, and which codes int8 has for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ringserve.kernels.cpu.aligned import aligned_zeros
from ringserve.kernels.cpu.kv_pages_int8 import write_key_int8, write_value_int8
from ringserve.kernels.gpu.kv_format import KVFormat, quantize_reference
from ringserve.kernels.kv_codes import quantize_kv

Row = Callable[[np.random.Generator, int], NDArray[np.float64]]

ROWS: dict[str, Row] = {
    "ordinary": lambda rng, dim: rng.standard_normal(dim),
    "ties": lambda rng, dim: np.resize([127.0, 0.5, -1.5, 2.5, -3.5, 126.5], dim),
    "zeros": lambda rng, dim: np.zeros(dim),
    "tiny": lambda rng, dim: rng.standard_normal(dim) * 1e-20,
    "large": lambda rng, dim: rng.standard_normal(dim) * 1e30,
    "one outlier": lambda rng, dim: np.concatenate([[300.0], rng.standard_normal(dim - 1)]),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(("dim", "page_size"), [(32, 16), (64, 64), (80, 32), (96, 16), (128, 16), (256, 128)])
def test_int8_pages_are_written_by_the_definition(kind: str, dim: int, page_size: int) -> None:
    """Bit for bit the codes and scales of the definition, in their places; nothing else is touched."""
    rng = np.random.default_rng(dim)
    scratch, token = aligned_zeros((dim,), np.uint8), page_size - 6
    for tokens in ((token,), range(token, page_size)):
        x = np.stack([ROWS[kind](rng, dim) for _ in tokens]).astype(np.float32)
        keys, values = (np.full(page_size * dim, 0xA5, np.uint8) for _ in range(2))
        scales = np.full((2, page_size), -1, np.float32)
        for row, t in zip(x, tokens, strict=True):
            at = row.ctypes.data, dim
            write_key_int8(*at, keys.ctypes.data, scales[0].ctypes.data, t, scratch.ctypes.data)
            write_value_int8(*at, values.ctypes.data, scales[1].ctypes.data, t, scratch.ctypes.data)
        codes, expected_scales = (part.numpy() for part in quantize_kv(torch.from_numpy(x)))
        by_token = keys.reshape(page_size // 16, dim // 4, 16, 4).transpose(0, 2, 1, 3).reshape(page_size, dim)
        assert np.array_equal(by_token[list(tokens)], (codes.astype(np.int32) + 128).astype(np.uint8))
        by_dim = values.reshape(page_size // 4, dim, 4).transpose(0, 2, 1).reshape(page_size, dim)
        assert np.array_equal(by_dim[list(tokens)], codes.view(np.uint8))
        others = [t for t in range(page_size) if t not in tokens]
        assert (by_token[others] == 0xA5).all()
        assert (by_dim[others] == 0xA5).all()
        for found in scales:
            assert np.array_equal(found[list(tokens)], expected_scales)
            assert (found[others] == -1).all()


@pytest.mark.parametrize("kind", ROWS)
def test_one_definition_for_all_devices(kind: str) -> None:
    x = torch.from_numpy(np.stack([ROWS[kind](np.random.default_rng(i), 64) for i in range(9)])).float()
    for ours, theirs in zip(quantize_kv(x), quantize_reference(x, KVFormat.INT8), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_has_no_finite_scale(bad: float) -> None:
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    x[37] = bad
    page, scales, scratch = np.zeros(16 * 64, np.uint8), np.ones(16, np.float32), np.zeros(64, np.uint8)
    for write in (write_key_int8, write_value_int8):
        write(x.ctypes.data, 64, page.ctypes.data, scales.ctypes.data, 3, scratch.ctypes.data)
        assert not np.isfinite(scales[3])
    assert not torch.isfinite(quantize_kv(torch.from_numpy(x))[1])
