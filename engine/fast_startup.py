"""Whether the fast path serves a loaded model: applicability, packing, compiling, and the check on its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ringserve.engine.fast_decoder import FastDecoder
from ringserve.engine.fast_kernels import compile_kernels, is_compiled
from ringserve.engine.fast_model import FastModel
from ringserve.engine.fast_packing import Packer
from ringserve.engine.fast_weights import NotApplicableError, decoder_shape, decoder_weights, layer_windows
from ringserve.engine.kv_layout import HostPages
from ringserve.engine.model_error import ModelError
from ringserve.engine.model_loader import LoadedModel
from ringserve.engine.self_check import check_other_path
from ringserve.engine.start_stages import CHECKING, COMPILING, PACKING, QUANTISING, READING
from ringserve.kernels.cpu.features import Level, host_level
from ringserve.kernels.cpu.team import FUTEX

Progress = Callable[[str, float], None]

CHECK_LENGTHS = (41, 22)
"""Tokens of the check's sequences, over several pages and segments."""
CHECK_STEPS = (((0, 19), (0, 20)), ((19, 40), (20, 21)), ((40, 41), (21, 22)))
"""What each step computes of the two: chunks packed; a later chunk beside a decode; decodes alone, which take another
way through the operations."""
CHECK_PAGE_SIZE = 16
TOLERANCE = {"none": 0.03, "int8": 0.1}
"""Root mean square of the differences of logits, as a part of the logits' spread; a wrong mask or rotation gives one
beyond 0.25."""


def prepare_fast(
    loaded: LoadedModel,
    quantization: str,
    page_size: int,
    max_model_len: int,
    free_bytes: int,
    progress: Progress,
    level: Level | None = None,
    packer: Callable[[], Packer] | None = None,
) -> FastModel:
    """Pack ``loaded``'s weights and check the result against the model itself. ``packer`` may know weights that were
    packed at an earlier start; to keep what passes is the caller's business.

    Raises NotApplicableError where the fast path does not know the model, ModelError where the model cannot be checked.
    """
    if loaded.dtype != "bfloat16":
        raise NotApplicableError(f"it computes in bfloat16, not in {loaded.dtype}")
    if page_size < CHECK_PAGE_SIZE:
        raise NotApplicableError(f"its pages have at least {CHECK_PAGE_SIZE} tokens, not {page_size}")
    if FUTEX < 0:
        raise NotApplicableError("its threads wait by a system call that is not known for this machine")
    level = host_level() if level is None else level
    shape = decoder_shape(loaded.model)
    pack = packer() if packer is not None else Packer(quantization)
    stage = READING if pack.found else QUANTISING if quantization == "int8" else PACKING
    progress(stage, 0.0)
    weights = decoder_weights(loaded.model, shape, pack, lambda part: progress(stage, round(part, 1)))
    progress(stage, 1.0)
    model = FastModel(weights, layer_windows(loaded.model), level, max_model_len)
    if not is_compiled():
        progress(COMPILING, 0.0)
    pool = HostPages(model.layers, 16, CHECK_PAGE_SIZE, "bfloat16")
    decoder = model.decoder(pool, 1, 64, max(CHECK_LENGTHS))
    compile_kernels(decoder)
    progress(CHECKING, 0.0)
    try:
        check_other_path(
            loaded.model,
            lambda sequences: _compute(decoder, layer_windows(loaded.model), sequences),
            CHECK_LENGTHS,
            TOLERANCE[quantization],
            free_bytes,
            max_model_len,
        )
    except ModelError as error:
        raise NotApplicableError(str(error)) from error
    progress(CHECKING, 1.0)
    return model


def _compute(decoder: FastDecoder, windows: list[int], sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of all tokens, by ``CHECK_STEPS``, through pages that lie backwards and interleaved."""
    decoder.set_windows(windows)
    pages = max(-(-len(ids) // CHECK_PAGE_SIZE) for ids in sequences)
    ids = np.zeros((2, max(len(ids) for ids in sequences) + 1), np.int32)
    tables = np.zeros((2, pages), np.int32)
    for i, sequence in enumerate(sequences):
        ids[i, : len(sequence)] = sequence.numpy()
        tables[i] = np.arange(2 * pages - i, 0, -2)[:pages]
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    slots = np.arange(2, dtype=np.int32)
    for step in CHECK_STEPS:
        computed = np.array([start for start, _ in step], np.int64)
        counts = np.array([stop - start for start, stop in step], np.int32)
        wanted = np.arange(int(counts.sum()), dtype=np.int32)
        logits = torch.from_numpy(decoder.forward(slots, counts, computed, ids, tables, wanted).copy())
        for i, part in enumerate(torch.split(logits, counts.tolist())):
            parts[i].append(part)
    return [torch.cat(logits) for logits in parts]
