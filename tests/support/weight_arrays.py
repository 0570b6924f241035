"""Packed weights for tests, and what a child process does with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringserve.engine.weight_cache import WeightCache


def example_arrays(seed: int = 0) -> dict[str, NDArray[Any]]:
    """Several types and sizes, one of them empty."""
    rng = np.random.default_rng(seed)
    return {
        "layers.0.weight": rng.integers(0, 2**16, (3, 5, 48, 2), dtype=np.uint16),
        "layers.0.scales": rng.standard_normal(77).astype(np.float32),
        "nothing": np.empty((0, 4), np.int8),
        "large": rng.integers(-127, 128, (700, 4000), dtype=np.int8),
        "transposed": rng.standard_normal((6, 7)).T,
    }


def store_often(directory: Path, seed: int) -> None:
    """Store and load one key again and again, beside others who do the same with other seeds (0 to 2)."""
    cache = WeightCache(directory)
    for _ in range(10):
        cache.store("key", example_arrays(seed))
        loaded = cache.load("key")
        assert loaded is not None
        assert any(
            all((loaded.arrays[name] == array).all() for name, array in example_arrays(i).items()) for i in range(3)
        )
