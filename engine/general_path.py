"""The general path on a CPU: transformers' modelling code with our attention, its linear layers packed or quantised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from ringserve.engine.calibration import input_sizes
from ringserve.engine.dtypes import DType
from ringserve.engine.int8_linear import quantize_linears
from ringserve.engine.kv_pool import KVPool
from ringserve.engine.linear_team import LinearTeam
from ringserve.engine.model_error import ModelError, first_line
from ringserve.engine.model_loader import LoadedModel
from ringserve.engine.packed_linear import pack_linears, prefers_team
from ringserve.engine.self_check import TracedModel
from ringserve.engine.start_stages import COMPILING, QUANTISING
from ringserve.engine.torch_forward import TorchForward
from ringserve.kernels.cpu.compiled import is_kept
from ringserve.kernels.cpu.features import host_level
from ringserve.kernels.cpu.linear_call import run_call


class TorchPath:
    """See ``cpu_model.GeneralPath``; the model has passed its check, which needs the plain weights."""

    def __init__(
        self,
        loaded: LoadedModel,
        traced: TracedModel,
        dtype: DType,
        quantization: str,
        threads: int,
        progress: Callable[[str, float], None],
    ) -> None:
        self._loaded, self._traced, self._dtype = loaded, traced, dtype
        self._quantization, self._threads, self._progress = quantization, threads, progress
        self._packed = 0

    def forward(self, pool: KVPool) -> TorchForward:
        """Over these pages."""
        model, level = self._loaded.model, host_level()
        team = None
        int8 = self._quantization == "int8"
        bfloat16 = self._dtype == "bfloat16" and prefers_team(level)
        if int8 or bfloat16:
            if not is_kept(run_call):
                self._progress(COMPILING, 0.0)
            team = LinearTeam(self._threads, level)
        if int8 and team is not None:
            self._progress(QUANTISING, 0.0)
            sizes, head = input_sizes(model), cast(Any, model).get_output_embeddings()
            # Rounding the output layer matters most, wherever two logits are almost equal.
            quantize_linears(model, team, sizes, lambda part: self._progress(QUANTISING, round(part, 1)), leave=head)
        self._packed = pack_linears(model, team if bfloat16 else None)
        return TorchForward(model, self._traced.modules, pool, team)

    def explain(self, error: Exception) -> None:
        """Modelling code that reaches for a packed weight fails in its own way."""
        if self._packed:
            raise ModelError(
                f"{self._loaded.architecture} does not run on packed bfloat16 weights ({first_line(error)}); "
                "use --dtype float32"
            ) from error
