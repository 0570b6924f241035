"""Packed weights are taken only where they are those that were checked, and packed as they would be now."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from kept_starts import kept_file, settings_of

from ringserve.config import ExecutorSettings
from ringserve.engine import kept_weights
from ringserve.engine.kept_model import load_record, start_key, store_record
from ringserve.engine.kept_weights import KERNELS, PACKING_MODULES, KeptWeights, packing_digest
from ringserve.engine.weight_cache import WeightCache
from ringserve.kernels.source_digest import source_digest


def test_weights_that_are_not_those_checked(home: Path, is_recalled: Callable[[ExecutorSettings], bool]) -> None:
    settings = settings_of(home)
    file = kept_file(home, ".weights")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert not is_recalled(settings)
    file.write_bytes(whole)
    assert is_recalled(settings)
    # A sound file of the same key with other numbers in it.
    kept = KeptWeights("none", (home / "model").resolve(), file.parent)
    kept.read()
    assert kept.entry is not None
    arrays = dict(kept.entry.arrays)
    arrays["norm"] = arrays["norm"] + 1
    WeightCache(file.parent).store(kept._key, arrays)
    assert not is_recalled(settings)
    # Sound, and the checksum in the record is theirs, but something is missing.
    record = load_record(file.parent, start_key(settings, "bfloat16", kept.identity))
    assert record is not None
    for missing in ("embedding", "norm", "rotary", "head.weight", "layers.1.mlp_norm", "layers.2.down.bias"):
        checksum = WeightCache(file.parent).store(kept._key, {k: v for k, v in arrays.items() if k != missing})
        store_record(file.parent, msgspec.structs.replace(record, weights=checksum))
        assert not is_recalled(settings), missing
    file.unlink()
    assert not is_recalled(settings)


def test_what_packing_depends_on_is_in_the_weights_key(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = packing_digest()
    for changed in (KERNELS, KERNELS / "cpu"):
        with monkeypatch.context() as patch:
            patch.setattr(
                kept_weights,
                "source_digest",
                lambda path, changed=changed: b"other code" if path == changed else source_digest(path),
            )
            assert packing_digest() != digest
    contents = Path.read_bytes
    for name in PACKING_MODULES:
        with monkeypatch.context() as patch:
            patch.setattr(
                Path,
                "read_bytes",
                lambda path, name=name: contents(path) + (b"#" if path.name == f"{name}.py" else b""),
            )
            assert packing_digest() != digest, name
    kept = KeptWeights("none", (home / "model").resolve(), home / "cache" / "ringserve" / "weights")
    kept.read()
    assert kept.entry is not None
    monkeypatch.setattr(kept_weights, "packing_digest", lambda: "other code")
    other = KeptWeights("none", (home / "model").resolve(), home / "cache" / "ringserve" / "weights")
    other.read()
    assert other.entry is None


def test_no_module_that_packs_is_forgotten() -> None:
    """Whatever the packing modules import of the engine packs, too, or is known to have no part in it."""
    no_part = {"kept_weights", "self_check"}  # whose token ids calibrate: others would do as well
    engine = Path(kept_weights.__file__).parent
    for name in PACKING_MODULES:
        for node in ast.walk(ast.parse((engine / f"{name}.py").read_bytes())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("ringserve.engine."):
                imported = module.removeprefix("ringserve.engine.")
                assert imported in {*PACKING_MODULES, *no_part}, f"{name} imports {imported}"
