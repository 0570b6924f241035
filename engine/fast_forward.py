"""The fast path as the model runner's ``Forward``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringserve.engine.fast_decoder import FastDecoder
from ringserve.engine.slot_table import SlotTable


class FastForward:
    """A ``FastDecoder`` fed from the table of slots."""

    def __init__(self, decoder: FastDecoder) -> None:
        self.decoder = decoder

    def forward(
        self, table: SlotTable, slots: NDArray[np.int32], counts: NDArray[np.int32], wanted: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """See ``model_runner.Forward``."""
        return self.decoder.forward(slots, counts, table.computed, table.ids, table.pages, wanted)

    def best_tokens(self) -> list[int] | None:
        """See ``model_runner.Forward``."""
        return self.decoder.best_tokens()

    def close(self) -> None:
        """End the helper threads."""
        self.decoder.close()
