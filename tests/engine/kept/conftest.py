"""Models and what their first starts have kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from fast_models import FAMILY
from kept_starts import make_settings, start

from ringserve.config import ExecutorSettings
from ringserve.engine import cpu_loading


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and what its first start has kept."""
    home = tmp_path_factory.mktemp("kept")
    path = make_checkpoint(home / "model", *FAMILY["qwen2-sliding"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        start(make_settings(path)).runner.close()
    return home


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same model (other tests have changed nothing about it) and a copy of what was kept."""
    shutil.copytree(made / "cache", tmp_path / "cache")
    (tmp_path / "model").symlink_to(made / "model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that a test may change, started once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_checkpoint(tmp_path / "model", *FAMILY["llama"])
    start(make_settings(path)).runner.close()
    return tmp_path


@pytest.fixture
def is_recalled(monkeypatch: pytest.MonkeyPatch) -> Callable[[ExecutorSettings], bool]:
    """Whether a start does without the whole way (which is not gone here)."""

    class WholeWay(Exception):
        """Not taken here."""

    def refuse(*_: Any) -> None:
        raise WholeWay

    monkeypatch.setattr(cpu_loading, "load_and_check", refuse)

    def recalled(settings: ExecutorSettings) -> bool:
        try:
            start(settings).runner.close()
        except WholeWay:
            return False
        return True

    return recalled
