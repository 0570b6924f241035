"""The threads that compute the linear layers of models which run through transformers' modules, one layer at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringserve.kernels.cpu import linear_call
from ringserve.kernels.cpu.aligned import aligned_zeros
from ringserve.kernels.cpu.features import Level
from ringserve.kernels.cpu.team import FUTEX, RECORD, STOP, Team

Call = NDArray[np.int64]
"""A layer's or a call's numbers, [linear_call.CALL_FIELDS]."""

TILES = 64
"""Into about so many tiles a large layer is cut."""


class LinearTeam:
    """A team of threads and the call that it computes. Not thread-safe: one caller, which is the team's leader."""

    def __init__(self, num_threads: int, level: Level) -> None:
        """On machines whose threads cannot wait for one another (``team.FUTEX``) it is the caller alone."""
        self.level = level
        self._call: Call = np.zeros(linear_call.CALL_FIELDS, np.int64)
        self._records = aligned_zeros((linear_call.OPERATIONS * RECORD,), np.uint8)
        fixed = (self._records.ctypes.data, self._call, level)
        num_threads = num_threads if FUTEX >= 0 else 1
        if num_threads > 1:  # compiled here, not by the thread that is needed
            stopped = np.zeros(8, np.int64)
            stopped[STOP // 8] = 1
            linear_call.help_calls(stopped.ctypes.data, 1, *fixed)
        self._team = Team(num_threads, lambda header, thread: linear_call.help_calls(header, thread, *fixed))

    def compute(self, layer: Call, rows: int, x: tuple[int, int], out: tuple[int, int]) -> None:
        """``layer``'s product; address and row stride (elements) of its input and output."""
        call = self._call
        call[:] = layer
        call[linear_call.INPUT], call[linear_call.LD_INPUT] = x
        call[linear_call.OUTPUT], call[linear_call.LD_OUTPUT] = out
        call[linear_call.ROWS] = rows
        linear_call.run_call(self._team.header, self._records.ctypes.data, call, self.level)

    def close(self) -> None:
        """End the helper threads."""
        self._team.close()


def layer_call(n: int, k: int, k_pad: int, panels: int, **fields: int) -> Call:
    """What every call of a layer has in common; further ``fields`` by the names in ``linear_call``."""
    call: Call = np.zeros(linear_call.CALL_FIELDS, np.int64)
    each = -(-panels // TILES)
    fields |= {"COLUMNS": n, "K": k, "K_PAD": k_pad, "PANELS": panels, "PANELS_EACH": each}
    for name, value in fields.items():
        call[getattr(linear_call, name)] = value
    return call
