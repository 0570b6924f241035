"""From files to weights on a device, with no second copy anywhere.

A checkpoint of the known family whose files name its tensors as the model does is read tensor by tensor into the parts
of the fused weights, straight from the mapped files. Everything else goes through transformers' loader, straight to the
device where ``accelerate`` is there, and is fused afterwards where it is of the family.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringserve.config import ModelSource
from ringserve.engine.attention import ATTENTION_NAME, register_attention
from ringserve.engine.decoder_family import NotApplicableError
from ringserve.engine.gpu.decoder_weights import DecoderWeights, gpu_shape, place_decoder
from ringserve.engine.model_error import ModelError, first_line
from ringserve.engine.model_loader import (
    DTYPES,
    LOADING,
    LoadedModel,
    Progress,
    describe_loaded,
    load_model,
    quiet,
    read_config,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass
class DeviceWeights:
    """A model on the device."""

    loaded: LoadedModel
    decoder: DecoderWeights | None
    """Of the compact forward, where it applies."""
    reason: str
    """Why it does not."""


def load_on_device(
    source: ModelSource,
    dtype: str,
    device: torch.device,
    progress: Progress,
    check_config: Callable[[Any], object],
    compact: bool = True,
) -> DeviceWeights:
    """Load ``source`` in ``dtype``; ``compact``: the compact forward is wanted where it applies.

    Raises ModelError as ``load_model`` does, and where the device's memory does not hold the weights.
    """
    register_attention()
    try:
        if compact and source.kind == "directory" and Path(source.path).is_dir():
            streamed = _stream(Path(source.path), dtype, device, progress, check_config)
            if streamed is not None:
                return streamed
        direct = device if device.type != "cpu" and importlib.util.find_spec("accelerate") is not None else None
        loaded = load_model(source, dtype, progress, check_config=check_config, device=direct)
        decoder, reason = None, "it was not asked for"
        if compact:
            try:
                decoder = place_decoder(loaded.model, gpu_shape(loaded.model), device)
            except NotApplicableError as error:
                reason = str(error)
        loaded.model.to(device)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the weights do not fit into the GPU's memory ({first_line(error)}); take a smaller model"
        ) from error
    return DeviceWeights(loaded, decoder, reason)


def _stream(
    path: Path, dtype: str, device: torch.device, progress: Progress, check_config: Callable[[Any], object]
) -> DeviceWeights | None:
    """None: transformers' loader is for this one, and says what is wrong with it."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    files = _tensor_files(path)
    config = read_config(path)
    check_config(config)
    if files is None:
        return None
    try:
        with quiet(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=DTYPES[dtype])
        shape = gpu_shape(model)
    except (NotApplicableError, ValueError, KeyError):  # ValueError, KeyError: not a causal model that we know
        return None
    lacking = model.state_dict().keys() - files.keys()
    if lacking and not (lacking == {"lm_head.weight"} and config.tie_word_embeddings):
        return None
    if not _fits(model, files):
        return None
    progress(LOADING, 0.0)
    decoder = place_decoder(model, shape, device)
    _fill(model, files, lambda part: progress(LOADING, round(part, 2)))
    progress(LOADING, 1.0)
    generation = None
    if (path / "generation_config.json").exists():
        try:
            with quiet():
                generation = GenerationConfig.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError):  # transformers' loader goes on without a damaged one, too
            generation = None
    return DeviceWeights(describe_loaded(model, config, dtype, generation), decoder, "")


def _tensor_files(path: Path) -> dict[str, Path] | None:
    """Which file has which tensor. None where the directory is not laid out as transformers writes it."""
    try:
        if (path / INDEX).exists():
            names = json.loads((path / INDEX).read_text())["weight_map"]
            return {str(name): path / str(file) for name, file in names.items()}
        if (path / SINGLE).exists():
            with _open(path / SINGLE) as file:
                return dict.fromkeys(file.keys(), path / SINGLE)
    except Exception:  # whatever is wrong with it, transformers' loader says it
        return None
    return None


def _open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt", device="cpu")


def _fits(model: nn.Module, files: dict[str, Path]) -> bool:
    """Whether the files have the model's tensors in their shapes."""
    state = model.state_dict()
    try:
        for path in set(files.values()):
            with _open(path) as file:
                for name in set(file.keys()) & state.keys():
                    if files.get(name) == path and file.get_slice(name).get_shape() != list(state[name].shape):
                        return False
    except Exception:  # as in _tensor_files
        return False
    return True


def _fill(model: nn.Module, files: dict[str, Path], progress: Callable[[float], None]) -> None:
    """Copy every tensor of the model from its file into its place."""
    places = dict(model.named_parameters(remove_duplicate=False))
    wanted = [name for name in files if name in places]
    done = 0
    for path in sorted({files[name] for name in wanted}):
        with _open(path) as file:
            for name in wanted:
                if files[name] == path:
                    places[name].data.copy_(file.get_tensor(name))
                    done += 1
                    if done % 8 == 0:
                        progress(done / len(wanted))
