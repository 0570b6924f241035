"""Which slot each row of the device's steps has, as the host last wrote it: only what differs is written again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringserve.engine.gpu.device_state import DeviceState

_Words = NDArray[np.int32]


class RowMirror:
    """``row_slots`` and ``row_lengths`` of the state, once everything submitted is done."""

    def __init__(self, num_rows: int) -> None:
        self._slots: _Words = np.full(num_rows, -1, dtype=np.int32)
        self._lengths: _Words = np.zeros(num_rows, dtype=np.int32)

    def clear(self) -> None:
        """The device's rows become padding."""
        self._slots[:] = -1
        self._lengths[:] = 0

    def writes(self, state: DeviceState, slots: _Words, lengths: _Words) -> list[tuple[_Words, _Words]]:
        """(addresses, words) that give the first rows these slots and lengths."""
        pieces = []
        for name, known, wanted in (("row_slots", self._slots, slots), ("row_lengths", self._lengths, lengths)):
            changed = np.flatnonzero(known[: len(wanted)] != wanted)
            if len(changed):
                known[changed] = wanted[changed]
                pieces.append((state.addresses(name, changed), wanted[changed]))
        return pieces
