"""Finds and builds the tokenizer of a model without importing torch.

* A directory in Hugging Face layout goes through the class that ``AutoTokenizer`` would choose (which cannot be asked
  itself: importing it imports torch). A directory with a SentencePiece model alone is converted by the same class.
* A GGUF file describes its tokenizer in its metadata: read by ``gguf_header``, built by transformers' converter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from ringserve.config import TokenizerSettings
from ringserve.engine.gguf_header import GgufError, read_gguf_metadata
from ringserve.engine.tokenizer_class import tokenizer_class

_FILES: Final = ("tokenizer.json", "tokenizer.model")
_SPECIAL_KEYS: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
"""transformers' name -> GGUF's key under ``tokenizer.ggml.``"""


class TokenizerLoadError(Exception):
    """The tokenizer cannot be loaded: one line with the remedy."""


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer and what belongs to it."""

    backend: Tokenizer
    """Without truncation and padding."""
    chat_templates: dict[str, str]
    """Jinja sources by name: "default", and what else the model brings ("tool_use")."""
    special_tokens: dict[str, Any]
    """``bos_token``, ``eos_token``, ... as the chat template sees them."""


def load_tokenizer(settings: TokenizerSettings) -> LoadedTokenizer:
    """Load what the settings name: ``tokenizer`` (a directory) before ``source``; ``chat_template`` before the model's.

    Raises:
        TokenizerLoadError: with one line that says what to do.
    """
    if settings.tokenizer is not None:
        loaded = _load_directory(Path(settings.tokenizer), "--tokenizer")
    elif settings.source.kind == "gguf":
        loaded = _load_gguf(Path(settings.source.path))
    else:
        loaded = _load_directory(Path(settings.source.path), "model")
    loaded.backend.no_truncation()
    loaded.backend.no_padding()
    if settings.chat_template is None:
        return loaded
    try:
        template = Path(settings.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerLoadError(
            f"--chat-template {settings.chat_template}: cannot be read ({_one_line(error)}); "
            "give the path of a file with a Jinja template"
        ) from error
    return LoadedTokenizer(loaded.backend, {"default": template}, loaded.special_tokens)


def _load_directory(directory: Path, what: str) -> LoadedTokenizer:
    if not directory.is_dir():
        raise TokenizerLoadError(f"{what} {directory}: not a directory; give a directory that holds tokenizer.json")
    if not any((directory / name).is_file() for name in _FILES):
        raise TokenizerLoadError(
            f"{what} {directory}: no tokenizer.json and no tokenizer.model in it; "
            "name the directory that has them with --tokenizer"
        )
    try:
        tokenizer = tokenizer_class(directory).from_pretrained(str(directory), local_files_only=True)
        backend = tokenizer.backend_tokenizer
    except Exception as error:  # transformers and tokenizers raise whatever their parsers raise
        raise TokenizerLoadError(
            f"{what} {directory}: the tokenizer cannot be loaded ({_one_line(error)}); check that its files are "
            "complete, or name a directory with a tokenizer.json with --tokenizer"
        ) from error
    return LoadedTokenizer(backend, _templates(tokenizer.chat_template), dict(tokenizer.special_tokens_map))


def _load_gguf(path: Path) -> LoadedTokenizer:
    try:
        metadata = read_gguf_metadata(path)
        return _build_from_gguf(metadata)
    except GgufError as error:
        raise TokenizerLoadError(f"{path}: {error}; download the file again") from error
    except OSError as error:
        raise TokenizerLoadError(f"{path}: cannot be read ({_one_line(error)})") from error
    except Exception as error:  # whatever the converter raises on metadata it does not expect
        raise TokenizerLoadError(
            f"{path}: no tokenizer can be built from it ({_one_line(error)}); "
            "name a directory with a tokenizer.json with --tokenizer"
        ) from error


def _build_from_gguf(metadata: dict[str, Any]) -> LoadedTokenizer:
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    if "tokenizer.ggml.tokens" not in metadata:
        raise GgufError("it holds no vocabulary (tokenizer.ggml.tokens)")
    description, config = (
        {name: metadata[f"tokenizer.{key}"] for key, name in renames.items() if f"tokenizer.{key}" in metadata}
        for renames in (GGUF_TOKENIZER_MAPPING["tokenizer"], GGUF_TOKENIZER_MAPPING["tokenizer_config"])
    )
    model = description.get("tokenizer_type")
    if model == "llama":
        # Files older than the flag mean a SentencePiece vocabulary, to which llama.cpp adds BOS.
        config.setdefault("add_bos_token", True)
    elif model == "gemma4":
        # The flag is set, yet the model's template writes <bos> itself; a second one would be wrong.
        config["add_bos_token"] = False
    tokens = description["tokens"]
    for name, key in _SPECIAL_KEYS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        config[name] = tokens[token_id] if token_id is not None else None
    backend, _ = convert_gguf_tokenizer(str(metadata.get("general.architecture")), description)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **config)
    return LoadedTokenizer(
        tokenizer.backend_tokenizer, _templates(tokenizer.chat_template), dict(tokenizer.special_tokens_map)
    )


def _templates(template: str | dict[str, str] | None) -> dict[str, str]:
    if template is None:
        return {}
    return {"default": template} if isinstance(template, str) else dict(template)


def _one_line(error: BaseException) -> str:
    """The first line of an exception's message, bounded."""
    text = str(error).strip()
    line = text.splitlines()[0] if text else type(error).__name__
    return line if len(line) <= 200 else line[:197] + "..."
