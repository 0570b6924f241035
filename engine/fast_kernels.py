"""The fast path's compiled code: is it there, and make it."""

from __future__ import annotations

import logging

import numpy as np

from ringserve.engine.fast_decoder import KV_STORAGE, FastDecoder
from ringserve.engine.kv_layout import KVDType
from ringserve.kernels.cpu.compiled import is_kept
from ringserve.kernels.cpu.decoder import run_step
from ringserve.kernels.cpu.features import Level

logger = logging.getLogger("ringserve.executor")


def is_compiled(level: Level, kv_dtype: KVDType) -> bool:
    """Whether the kernels lie in a cache: whether their first call takes no time."""
    return is_kept(run_step, level, KV_STORAGE[kv_dtype])


def compile_kernels(decoder: FastDecoder) -> None:
    """Run one token through everything."""
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    ids, tables = np.zeros((1, 16), np.int32), np.zeros((1, 4), np.int32)
    decoder.forward(zero, one, np.zeros(1, np.int64), ids, tables, zero)
    if not is_compiled(decoder.level, decoder.kv_dtype):
        logger.warning(
            "the compiled kernels can be kept neither beside the installation nor in the user's cache directory: "
            "every start will compile them; make room there, or give the user a home directory that can be written"
        )
