"""The general path on a CPU: transformers' modelling code with our attention, its linear layers packed or quantised."""

from __future__ import annotations

from collections.abc import Callable

from ringserve.engine.dtypes import DType
from ringserve.engine.int8_linear import quantize_linears
from ringserve.engine.kv_pool import KVPool
from ringserve.engine.model_error import ModelError, first_line
from ringserve.engine.model_loader import LoadedModel
from ringserve.engine.packed_linear import pack_linears
from ringserve.engine.self_check import TracedModel
from ringserve.engine.start_stages import QUANTISING
from ringserve.engine.torch_forward import TorchForward
from ringserve.kernels.cpu.features import host_level


class TorchPath:
    """See ``cpu_model.GeneralPath``; the model has passed its check, which needs the plain weights."""

    def __init__(
        self,
        loaded: LoadedModel,
        traced: TracedModel,
        dtype: DType,
        quantization: str,
        progress: Callable[[str, float], None],
    ) -> None:
        self._loaded, self._traced, self._dtype = loaded, traced, dtype
        self._quantization, self._progress = quantization, progress
        self._packed = 0

    def forward(self, pool: KVPool) -> TorchForward:
        """Over these pages."""
        if self._quantization == "int8":
            self._progress(QUANTISING, 0.0)
            quantize_linears(self._loaded.model, host_level(), lambda part: self._progress(QUANTISING, round(part, 1)))
        else:
            self._packed = pack_linears(self._loaded.model)
        return TorchForward(self._loaded.model, self._traced.modules, pool)

    def explain(self, error: Exception) -> None:
        """Modelling code that reaches for a packed weight fails in its own way."""
        if self._packed:
            raise ModelError(
                f"{self._loaded.architecture} does not run on bfloat16 weights in oneDNN's layout "
                f"({first_line(error)}); use --dtype float32"
            ) from error
