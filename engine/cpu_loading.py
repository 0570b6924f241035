"""A CPU's whole way to a model that can be served: transformers loads it, one of the two paths is chosen and checked.

What this finds out about a model on the fast path is kept (``kept_model``): the next start does without this module,
torch and transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ringserve.config import ExecutorSettings
from ringserve.engine.config_check import check_config
from ringserve.engine.cpu_model import CpuModel
from ringserve.engine.fast_model import FastModel
from ringserve.engine.fast_packing import Packer
from ringserve.engine.fast_startup import prepare_fast
from ringserve.engine.fast_weights import NotApplicableError
from ringserve.engine.general_path import TorchPath
from ringserve.engine.kept_model import CheckedModel, start_key, store_record, unpacked_arrays
from ringserve.engine.kept_weights import KeptWeights
from ringserve.engine.kv_budget import free_memory
from ringserve.engine.model_error import ModelError
from ringserve.engine.model_limits import choose_max_model_len
from ringserve.engine.model_loader import LoadedModel, load_model
from ringserve.engine.self_check import check_model
from ringserve.engine.serving_plan import ServingPlan
from ringserve.engine.start_stages import CHECKING

Progress = Callable[[str, float], None]

logger = logging.getLogger("ringserve.executor")


def load_and_check(
    settings: ExecutorSettings,
    plan: ServingPlan,
    threads: int,
    kept: Callable[[], KeptWeights | None],
    progress: Progress,
) -> CpuModel:
    """``kept``: waits for the packed weights of an earlier start to be read. Raises ModelError."""
    loaded = load_model(
        settings.source,
        plan.dtype,
        progress,
        check_config=lambda config: check_config(config, settings, plan, free_memory()),
    )
    max_model_len = choose_max_model_len(loaded.config, settings.max_model_len)
    fast = _fast_model(loaded, settings, plan, max_model_len, kept, progress)
    if fast is not None:
        return CpuModel(
            architecture=loaded.architecture,
            eos_token_ids=loaded.eos_token_ids,
            defaults=loaded.defaults,
            max_model_len=max_model_len,
            vocab_size=fast.weights.shape.vocab_size,
            layers=fast.layers,
            path=fast,
        )
    progress(CHECKING, 0.0)
    traced = check_model(loaded.model, free_memory(), max_model_len)
    progress(CHECKING, 1.0)
    return CpuModel(
        architecture=loaded.architecture,
        eos_token_ids=loaded.eos_token_ids,
        defaults=loaded.defaults,
        max_model_len=max_model_len,
        vocab_size=traced.vocab_size,
        layers=traced.layers,
        path=TorchPath(loaded, traced, plan.dtype, settings.config.quantization, threads, progress),
    )


def _fast_model(
    loaded: LoadedModel,
    settings: ExecutorSettings,
    plan: ServingPlan,
    max_model_len: int,
    kept: Callable[[], KeptWeights | None],
    progress: Progress,
) -> FastModel | None:
    """The fast path where it is wanted and applies; why not is said in the log, or is the error if it was asked for."""
    asked = settings.config.model_impl
    if asked == "transformers":
        return None
    quantization = settings.config.quantization
    packers: list[Packer] = []

    def packer() -> Packer:
        packers.append(Packer(quantization, kept()))
        return packers[0]

    try:
        # Free bytes 0: the check needs float32 weights, and gets them one module's at a time. A first start holds the
        # weights twice in any case, as they were loaded and packed; all of them in float32 would be another twice.
        fast = prepare_fast(
            loaded, quantization, plan.page_size, max_model_len, 0, progress, packer=packer, kv_dtype=plan.kv_dtype
        )
    except NotApplicableError as error:
        if asked == "fast":
            raise ModelError(
                f"the fast path does not serve {loaded.architecture}: {error}; leave --model-impl out"
            ) from error
        logger.info("%s is computed by transformers' code, not on the fast path: %s", loaded.architecture, error)
        return None
    _keep(settings, loaded, fast, packers[0], kept())
    return fast


def _keep(
    settings: ExecutorSettings, loaded: LoadedModel, fast: FastModel, packer: Packer, kept: KeptWeights | None
) -> None:
    """What passed the check, for the next start."""
    checksum = packer.keep(unpacked_arrays(fast.weights))
    if kept is None or kept.directory is None or checksum is None or not kept.is_current():
        return
    try:
        key = start_key(settings, loaded.dtype, kept.identity)
    except OSError:  # this project's own files cannot be read
        return
    store_record(
        kept.directory,
        CheckedModel(
            key=key,
            weights=checksum,
            architecture=loaded.architecture,
            eos_token_ids=loaded.eos_token_ids,
            defaults=loaded.defaults,
            max_model_len=fast.max_positions,
            shape=fast.weights.shape,
            windows=fast.windows,
            rotary_scaling=fast.weights.rotary.scaling,
        ),
    )
