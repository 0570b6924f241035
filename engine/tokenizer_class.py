"""Which of transformers' classes reads a directory's tokenizer: the choice of ``AutoTokenizer`` without importing it.

Importing ``transformers.models.auto`` imports torch (5.24). Its two tables are plain literals, so they are read from
its source text; a test compares them, and the choice, with the real thing.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_GENERIC: Final = frozenset(
    {"PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "PythonBackend", "MistralCommonBackend"}
)
"""Names that mean: whatever tokenizer.json says."""


@dataclass(frozen=True)
class ClassTables:
    """What ``AutoTokenizer`` knows about model types."""

    registered: dict[str, str]
    """Model type -> class name without "Fast"."""
    distrusted: frozenset[str]
    """Model types whose repositories are known to name a wrong class."""


def read_class_tables() -> ClassTables:
    """The tables of the installed transformers; empty ones if its source has another shape."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return ClassTables({}, frozenset())
    source = Path(spec.origin).parent / "models" / "auto" / "tokenization_auto.py"
    values: dict[str, ast.expr] = {}
    for node in ast.parse(source.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            values[node.target.id] = node.value
    distrusted = {
        str(element.value)
        for element in _elements(values.get("MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS"))
        if isinstance(element, ast.Constant)
    }
    registered = dict.fromkeys(distrusted, "TokenizersBackend")
    mapping = values.get("TOKENIZER_MAPPING_NAMES")
    for pair in _elements(mapping.args[0]) if isinstance(mapping, ast.Call) and mapping.args else []:
        if isinstance(pair, ast.Tuple) and len(pair.elts) == 2:
            key, name = pair.elts
            while isinstance(name, ast.IfExp):  # "Name" if is_tokenizers_available() else None
                name = name.body
            if isinstance(key, ast.Constant) and isinstance(name, ast.Constant) and name.value is not None:
                registered[str(key.value)] = str(name.value).removesuffix("Fast")
    return ClassTables(registered, frozenset(distrusted))


def _elements(node: ast.expr | None) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.List | ast.Set) else []


def choose_class_name(model_type: str, named: str, byte_level: bool, tables: ClassTables) -> str:
    """The class's name without "Fast"; "" for whatever tokenizer.json says.

    Args:
        model_type: of config.json.
        named: ``tokenizer_class`` of tokenizer_config.json, else of config.json.
        byte_level: whether tokenizer.json is byte-level.
    """
    named = named.removesuffix("Fast")
    registered = tables.registered.get(model_type, "")
    distrusted = model_type in tables.distrusted
    if named == "LlamaTokenizer" and byte_level and not distrusted:
        return ""
    if named and registered and registered != named:
        # A model type of its own class does not trust names without reason, one without an own class never does.
        chosen = "" if registered in _GENERIC else registered if distrusted else named
    else:
        chosen = named or registered
    return "" if chosen in _GENERIC else chosen


def tokenizer_class(directory: Path) -> Any:
    """The class whose ``from_pretrained`` reads this directory as ``AutoTokenizer`` would.

    Raises:
        ValueError: a file is not valid JSON.
    """
    import transformers

    config = read_json(directory / "config.json")
    named = read_json(directory / "tokenizer_config.json").get("tokenizer_class") or config.get("tokenizer_class") or ""
    name = choose_class_name(
        str(config.get("model_type") or ""), str(named), _is_byte_level(directory), read_class_tables()
    )
    for candidate in (name, name + "Fast") if name else ():
        found = getattr(transformers, candidate, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerFast):
            return found
    return transformers.PreTrainedTokenizerFast


def _is_byte_level(directory: Path) -> bool:
    description = read_json(directory / "tokenizer.json")
    parts = [description.get("pre_tokenizer"), description.get("decoder")]
    return '"type": "ByteLevel"' in json.dumps(parts)


def read_json(path: Path) -> dict[str, Any]:
    """An object in a file; empty without the file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}
