"""What an executor says it is doing while it starts."""

from __future__ import annotations

PACKING = "packing weights"
QUANTISING = "quantising weights to int8"
READING = "reading packed weights"
COMPILING = "compiling the CPU kernels (once)"
CHECKING = "checking the model"
WARMING_UP = "warming up"
