"""From files to a model whose attention is ours.

A directory in Hugging Face layout goes through transformers' Auto classes; a GGUF file of the Llama family through
``gguf_weights``; any other GGUF file is converted once, by transformers, into a directory in the user's cache. Whatever
goes wrong is a ``ModelError``: one line with the remedy.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ringserve.config import ModelSource
from ringserve.engine.attention import ATTENTION_NAME, register_attention
from ringserve.engine.dtypes import resolve_dtype as resolve_dtype
from ringserve.engine.gguf_weights import GgufFile, is_plain_llama, llama_config, load_llama, open_gguf
from ringserve.engine.model_error import ModelError, first_line
from ringserve.engine.model_limits import eos_ids, sampling_defaults, text_config
from ringserve.engine.user_cache import user_cache as user_cache
from ringserve.engine.weight_cache import source_identity
from ringserve.messages.sampling import SamplingDefaults

Progress = Callable[[str, float], None]
"""(stage, fraction)."""

LOADING = "loading weights"
CONVERTING = "converting the GGUF file (once)"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to be checked."""

    model: nn.Module
    config: Any
    """transformers' configuration."""
    architecture: str
    dtype: str
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults


def load_model(
    source: ModelSource,
    dtype: str,
    progress: Progress,
    cache: Path | None = None,
    check_config: Callable[[Any], object] = lambda config: None,
    device: torch.device | None = None,
) -> LoadedModel:
    """Load ``source`` with weights of ``dtype`` (not auto).

    Args:
        cache: for converted files; default: the user's.
        check_config: raises ModelError where the configuration is not what was asked for, before weights are read.
        device: where transformers' loader puts the weights; default: the host. It needs ``accelerate`` for that.
    """
    register_attention()
    path = Path(source.path)
    if not path.exists():
        raise ModelError(f"{path} does not exist; give a directory in Hugging Face layout, a GGUF file or a hub id")
    progress(LOADING, 0.0)
    if source.kind == "directory":
        return _load_directory(path, dtype, progress, check_config, device)
    file = open_gguf(path)
    if is_plain_llama(file):
        check_config(llama_config(file))
        model = load_llama(file, DTYPES[dtype], ATTENTION_NAME, lambda fraction: progress(LOADING, fraction))
        return LoadedModel(model, model.config, type(model).__name__, dtype, file.eos_token_ids, SamplingDefaults())
    length = file.metadata.get(f"{file.architecture}.context_length")
    if length is not None:  # the configuration proper comes of the conversion
        check_config(SimpleNamespace(max_position_embeddings=int(length)))
    converted = _convert_gguf(file, dtype, progress, cache if cache is not None else user_cache())
    loaded = _load_directory(converted, dtype, progress, check_config, device)
    ends = eos_ids(file.eos_token_ids, loaded.eos_token_ids)
    return LoadedModel(loaded.model, loaded.config, loaded.architecture, dtype, ends, loaded.defaults)


def _load_directory(
    path: Path,
    dtype: str,
    progress: Progress,
    check_config: Callable[[Any], object],
    device: torch.device | None = None,
) -> LoadedModel:
    from transformers import AutoModelForCausalLM

    config = read_config(path)
    check_config(config)
    with quiet():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                attn_implementation=ATTENTION_NAME,
                dtype=DTYPES[dtype],
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below, in one line
                **({} if device is None else {"device_map": {"": device}}),
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # transformers and safetensors raise many types for damaged or foreign files
            raise ModelError(_explain_load_failure(path, config, error)) from error
    if info["mismatched_keys"]:
        name, found, expected = min(info["mismatched_keys"], key=lambda entry: str(entry[0]))
        raise ModelError(
            f"{path}: {name} is {list(found)} where config.json says {list(expected)}; the files do not belong "
            "together: download the checkpoint again"
        )
    lacking = sorted(info["missing_keys"])
    if lacking:
        raise ModelError(
            f"{path} lacks {len(lacking)} of the model's weights, first {lacking[0]}; download the checkpoint again"
        )
    progress(LOADING, 1.0)
    generation = getattr(model, "generation_config", None) if (path / "generation_config.json").exists() else None
    return describe_loaded(model, config, dtype, generation)


def describe_loaded(model: nn.Module, config: Any, dtype: str, generation: Any) -> LoadedModel:
    """``generation``: the checkpoint's own GenerationConfig, or None."""
    return LoadedModel(
        model=model.eval(),
        config=config,
        architecture=type(model).__name__,
        dtype=dtype,
        eos_token_ids=eos_ids(
            *(getattr(source, "eos_token_id", None) for source in (generation, config, text_config(config)))
        ),
        defaults=sampling_defaults(generation),
    )


def read_config(path: Path) -> Any:
    """transformers' configuration of a checkpoint. Raises ModelError where it cannot be served."""
    from transformers import AutoConfig

    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{path} has no config.json; give a directory in Hugging Face layout or a GGUF file")
    try:
        raw = json.loads(file.read_text())
        if not isinstance(raw, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read ({first_line(error)}); download it again") from error
    if raw.get("quantization_config") or raw.get("compression_config"):
        raise ModelError(
            f"{path} is a quantised checkpoint, which is not supported; serve the original model, or a GGUF file of it"
        )
    with quiet():
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # unknown architectures and odd configurations come as several types
            kind = raw.get("model_type", "unknown")
            if raw.get("auto_map"):
                reason = "brings its own code, which is never run"
            else:
                reason = f"is of architecture '{kind}', which transformers cannot load ({first_line(error)})"
            raise ModelError(f"{path} {reason}; choose a model of an architecture in transformers") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{path} is an encoder-decoder ('{config.model_type}'); only decoders can be served")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{path} has no *.safetensors files; convert the checkpoint to safetensors")
    return config


def _explain_load_failure(path: Path, config: Any, error: Exception) -> str:
    text = first_line(error)
    kind = getattr(config, "model_type", "unknown")
    if isinstance(error, KeyError) and ATTENTION_NAME in text:
        return f"{path} ('{kind}') cannot be served: its code does not use transformers' attention interface"
    if "Unrecognized configuration class" in text:
        return f"{path} ('{kind}') is not a decoder that generates text; choose a causal language model"
    if type(error).__name__ == "SafetensorError" or "safetensor" in text.lower():
        return f"the safetensors files of {path} are damaged ({text}); download them again"
    return f"{path} ('{kind}') cannot be loaded ({type(error).__name__}: {text}); download the checkpoint again"


def _convert_gguf(file: GgufFile, dtype: str, progress: Progress, cache: Path) -> Path:
    """A directory with ``file``'s weights as safetensors; made once, kept under a key of the file's identity."""
    identity = f"{source_identity(file.path)}:{dtype}"
    target = cache / "gguf" / f"{file.path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if target.is_dir():
        return target
    if any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")):
        raise ModelError(
            f"{file.path} is of architecture '{file.architecture}': converting it needs two more packages; "
            "pip install 'ringserve[gguf]'"
        )
    from transformers import AutoModelForCausalLM, GgufConfig

    progress(CONVERTING, 0.0)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    except OSError as error:
        raise ModelError(
            f"{file.path} is converted into {target.parent}, which cannot be written ({first_line(error)}); name "
            "another directory with XDG_CACHE_HOME"
        ) from error
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                file.path.parent,
                gguf_file=file.path.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=DTYPES[dtype],
                local_files_only=True,
                trust_remote_code=False,
            )
            model.config.quantization_config = None
            del model.config.quantization_config
            model.save_pretrained(scratch)
        with contextlib.suppress(OSError):  # another process was faster: its result is as good
            scratch.rename(target)
    except Exception as error:  # as in _load_directory
        raise ModelError(
            f"{file.path} (architecture '{file.architecture}') cannot be converted ({type(error).__name__}: "
            f"{first_line(error)}); use the model's Hugging Face checkpoint"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress(CONVERTING, 1.0)
    return target


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers' bars and advice are not for our terminal; its errors come as exceptions."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
