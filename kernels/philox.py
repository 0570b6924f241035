"""Philox4x32-10, the counter-based random number generator of Salmon et al., "Parallel random numbers: as easy as 1, 2,
3" (SC 2011). A counter of four 32-bit words and a key of two give four random words; there is no state.

One round, with (hi, lo) the halves of a 64-bit product::

    c0, c1, c2, c3  <-  hi(M1 * c2) ^ c1 ^ k0,  lo(M1 * c2),  hi(M0 * c0) ^ c3 ^ k1,  lo(M0 * c0)

and between rounds the key grows by the Weyl constants. Known answers: ``kat_vectors`` of the Random123 library.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counters: NDArray[np.uint32], keys: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Random words ``[n, 4]`` for counters ``[n, 4]`` and keys ``[n, 2]``."""
    c0, c1, c2, c3 = counters.astype(np.uint64).T
    k0, k1 = keys.astype(np.uint64).T
    for _ in range(ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0 = (product_1 >> _HALF) ^ c1 ^ k0
        c2 = (product_0 >> _HALF) ^ c3 ^ k1
        c1 = product_1 & _LOW
        c3 = product_0 & _LOW
        k0 = (k0 + _WEYL_0) & _LOW
        k1 = (k1 + _WEYL_1) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniforms(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """The upper 24 bits of each word as a number strictly between 0 and 1: ``((x >> 8) + 0.5) * 2**-24``."""
    return ((words >> np.uint32(8)).astype(np.float64) + 0.5) * 2.0**-24
