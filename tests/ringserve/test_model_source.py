"""Where a model's files come from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import COMMIT, FakeHub

from ringserve.model_source import DEFAULT_MODEL, ModelNotFound, resolve_model


def test_nothing_named_is_the_embedded_model() -> None:
    source = resolve_model(None, None, None)
    assert (source.kind, source.name) == ("gguf", DEFAULT_MODEL)
    assert Path(source.path).read_bytes()[:4] == b"GGUF"


def test_a_directory_is_named_after_itself_or_as_told(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path / "tiny"), None, None).name == "tiny"
    assert resolve_model(str(tmp_path / "tiny"), None, "big").name == "big"


@pytest.mark.parametrize("model", ["./nothing", "/nothing", "nothing", "a/b/c", "~/nothing", "x/y.gguf"])
def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(model: str) -> None:
    with pytest.raises(ModelNotFound, match="no such file or directory"):
        resolve_model(model, None, None)


def resolve_in_child(hub: FakeHub, home: Path, model: str, revision: str | None = None) -> dict[str, str]:
    """``resolve_model`` in a process whose hub is ``hub``."""
    code = (
        "import sys, json; from ringserve.model_source import *\n"
        "try: source = resolve_model(sys.argv[1], sys.argv[2] or None, None)\n"
        "except ModelNotFound as error: print(json.dumps({'error': str(error)}))\n"
        "else: print(json.dumps({'path': source.path, 'kind': source.kind, 'name': source.name}))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, model, revision or ""],
        env={**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    files = tmp_path / "files"
    files.mkdir()
    (files / "config.json").write_text('{"model_type": "llama"}')
    (files / "model.safetensors").write_bytes(bytes(1000))
    (files / "consolidated.safetensors").write_bytes(bytes(1000))
    (files / "pytorch_model.bin").write_bytes(bytes(1000))
    return files


def test_a_hub_id_is_downloaded_once(repository: Path, tmp_path: Path) -> None:
    with FakeHub("someone/tiny", repository) as hub:
        found = resolve_in_child(hub, tmp_path / "home", "someone/tiny")
        assert (found["kind"], found["name"]) == ("directory", "someone/tiny")
        assert found["path"].endswith(COMMIT)
        # neither pickles nor a second copy of the weights
        assert sorted(os.listdir(found["path"])) == ["config.json", "model.safetensors"]
        downloads = [path for path in hub.paths if "/resolve/" in path]
        hub.paths.clear()
        assert resolve_in_child(hub, tmp_path / "home", "someone/tiny") == found
        assert downloads
        assert [path for path in hub.paths if "/resolve/" in path] == []


@pytest.mark.parametrize(
    ("model", "revision", "words"),
    [
        ("someone/else", None, "neither a local path nor a model on the hub"),
        ("someone/tiny", "v9", "no revision 'v9'"),
        ("some one/tiny", None, "neither a local path nor a valid hub id"),
    ],
)
def test_what_the_hub_does_not_have_is_one_line(
    repository: Path, tmp_path: Path, model: str, revision: str | None, words: str
) -> None:
    with FakeHub("someone/tiny", repository) as hub:
        error = resolve_in_child(hub, tmp_path / "home", model, revision)["error"]
    assert words in error
    assert "\n" not in error


def test_a_hub_that_cannot_be_reached(repository: Path, tmp_path: Path) -> None:
    with FakeHub("someone/tiny", repository) as hub:
        pass
    error = resolve_in_child(hub, tmp_path / "home", "someone/tiny")["error"]
    assert "cannot be reached" in error
