"""What an earlier start has found out about a model that the fast path serves, so that a later one need not load it.

A start that has packed a model's weights and found the fast path's logits equal to the model's own leaves a record
beside the packed weights: everything else that serving needs, the checksum of the weights that were checked, and a key.
A later start with the same key takes both, without torch, transformers or the model's files. The key (``start_key``)
holds whatever the result depends on: the model's files, the settings, the code of this project, the versions of the
libraries, the processor. Any doubt (another key, a damaged or missing file, weights that are not those checked) means
that there is no record, and the whole start is done.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from numpy.typing import NDArray

import ringserve
from ringserve import __version__
from ringserve.config import ExecutorSettings
from ringserve.engine.decoder_weights import DecoderShape, DecoderWeights, LayerWeights, Rotary
from ringserve.engine.fast_model import FastModel
from ringserve.engine.fast_packing import restored
from ringserve.engine.kept_weights import KERNELS
from ringserve.engine.model_error import first_line
from ringserve.engine.weight_cache import Entry
from ringserve.kernels.cpu.features import host_level, processor
from ringserve.kernels.cpu.linear_bf16 import padded
from ringserve.kernels.source_digest import source_digest
from ringserve.messages.sampling import SamplingDefaults

FORMAT = 1
LIBRARIES = ("numba", "llvmlite", "numpy", "torch", "transformers", "safetensors")
PACKAGE = Path(ringserve.__file__).parent
SOURCES = (PACKAGE, PACKAGE / "messages", Path(__file__).parent, KERNELS, KERNELS / "cpu")
"""Directories whose Python files decide what a start finds out."""
MAX_RECORDS = 64
"""The ones used last stay."""

_SUFFIX = ".checked"

logger = logging.getLogger("ringserve.executor")


class CheckedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The record."""

    key: str
    weights: int
    """Checksum of the packed weights."""
    architecture: str
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults
    max_model_len: int
    shape: DecoderShape
    windows: list[int]
    rotary_scaling: float


def start_key(settings: ExecutorSettings, dtype: str, identity: str) -> str:
    """Everything that a record depends on; ``identity``: of the model's files. Raises OSError."""
    return json.dumps(
        {
            "format": FORMAT,
            "files": identity,
            "settings": _relevant(settings),
            "dtype": dtype,
            "code": [source_digest(directory).hex() for directory in SOURCES],
            "versions": {"ringserve": __version__, "python": sys.version}
            | {name: _version(name) for name in LIBRARIES},
            "processor": processor(),
        },
        sort_keys=True,
    )


def _relevant(settings: ExecutorSettings) -> Any:
    """All settings but those that change nothing about the weights, their check, or the model's limits. An option
    that is added is relevant until it is named here."""
    plain = msgspec.to_builtins(settings)
    for name in ("log_level", "max_num_seqs", "max_num_batched_tokens"):
        del plain[name]
    for name in ("threads", "kv_cache_memory", "swap_space"):
        del plain["config"][name]
    del plain["source"]["name"]  # what clients call it
    return plain


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def restored_model(record: CheckedModel, entry: Entry | None) -> FastModel | None:
    """The model of ``record`` with the weights of ``entry``, if they are those that were checked."""
    if entry is None or entry.checksum != record.weights:
        return None
    try:
        weights = restored_weights(entry, record)
    except (KeyError, ValueError):
        return None
    return FastModel(weights, record.windows, host_level(), record.max_model_len)


def load_record(directory: Path, key: str) -> CheckedModel | None:
    """The record with this key; None where there is none, or it is damaged."""
    path = _path(directory, key)
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            return None
        record = msgspec.json.decode(body, type=CheckedModel)
    except (OSError, msgspec.MsgspecError):
        return None
    if record.key != key:
        return None
    with contextlib.suppress(OSError):  # it was used
        os.utime(path)
    return record


def store_record(directory: Path, record: CheckedModel) -> None:
    """Keep ``record``; a line in the log where that cannot be done."""
    body = msgspec.json.encode(record)
    try:
        descriptor, name = tempfile.mkstemp(prefix=".partial-", dir=directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            Path(name).rename(_path(directory, record.key))
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        logger.warning(
            "that the model passed its check cannot be kept in %s (%s): every start will check it; make room there, or "
            "name another directory with XDG_CACHE_HOME",
            directory,
            first_line(error),
        )
        return
    _clean(directory)


def _path(directory: Path, key: str) -> Path:
    return directory / (hashlib.sha256(key.encode()).hexdigest()[:32] + _SUFFIX)


def _clean(directory: Path) -> None:
    found = []
    for path in directory.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):  # another start may be cleaning too
            found.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(found)[:-MAX_RECORDS]:
        with contextlib.suppress(OSError):  # or it is another user's
            path.unlink()


def unpacked_arrays(weights: DecoderWeights) -> dict[str, NDArray[Any]]:
    """What a decoder has beside its packed layers, by name."""
    arrays: dict[str, NDArray[Any]] = {
        "embedding": weights.embedding,
        "norm": weights.norm,
        "rotary": weights.rotary.frequencies,
    }
    if weights.exact_head is not None and weights.exact_head is not weights.embedding:
        arrays["exact_head"] = weights.exact_head
    for index, layer in enumerate(weights.layers):
        prefix = f"layers.{index}."
        arrays |= {prefix + "input_norm": layer.input_norm, prefix + "mlp_norm": layer.mlp_norm}
        if layer.q_norm is not None:
            arrays[prefix + "q_norm"] = layer.q_norm
        if layer.k_norm is not None:
            arrays[prefix + "k_norm"] = layer.k_norm
    return arrays


def restored_weights(entry: Entry, record: CheckedModel) -> DecoderWeights:
    """A decoder from what was kept of it. Raises KeyError, ValueError where that is not it."""
    shape, arrays = record.shape, entry.arrays
    if arrays["embedding"].shape[0] < shape.vocab_size or arrays["embedding"].shape[1] != shape.hidden:
        raise ValueError("an embedding of another shape")
    attention = shape.heads * shape.head_dim
    layers = []
    for index in range(shape.layers):
        prefix = f"layers.{index}."
        layers.append(
            LayerWeights(
                input_norm=arrays[prefix + "input_norm"],
                qkv=restored(arrays, prefix + "qkv", shape.qkv_columns, shape.hidden),
                q_norm=arrays.get(prefix + "q_norm"),
                k_norm=arrays.get(prefix + "k_norm"),
                output=restored(arrays, prefix + "output", shape.hidden, attention),
                mlp_norm=arrays[prefix + "mlp_norm"],
                gate_up=restored(arrays, prefix + "gate_up", 2 * padded(shape.intermediate), shape.hidden),
                down=restored(arrays, prefix + "down", shape.hidden, shape.intermediate),
            )
        )
    head = restored(arrays, "head", shape.vocab_size, shape.hidden)
    return DecoderWeights(
        shape=shape,
        embedding=arrays["embedding"],
        layers=tuple(layers),
        norm=arrays["norm"],
        head=head,
        exact_head=arrays.get("exact_head", arrays["embedding"]) if head.int8 else None,
        rotary=Rotary(arrays["rotary"], record.rotary_scaling),
    )
