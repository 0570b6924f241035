"""The command as a user types it: one line and a status for a mistake, never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ringserve import __version__
from ringserve.chat import typed
from ringserve.options import options


def run(*arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "ringserve", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def test_version() -> None:
    assert run("--version").stdout == f"ringserve {__version__}\n"


def test_help_names_every_flag() -> None:
    text = run("serve", "--help").stdout
    for option in options():
        assert option.name == "model" or option.flag in text


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ((), 2, "the following arguments are required: COMMAND"),
        (("srve",), 2, "invalid choice: 'srve'"),
        (("serve", "--zebra"), 2, "unrecognized arguments: --zebra"),
        (("serve", "--prot=9"), 2, "unrecognized arguments: --prot=9; did you mean --port?"),
        (("serve", "--kv-cache-memory", "1e999"), 2, "--kv-cache-memory: '1e999' is not a size"),
        (("serve", "--ring-capacity", "2G"), 2, "--ring-capacity: 2147483648 is not valid"),
        (("serve", "--shutdown-timeout", "inf"), 2, "--shutdown-timeout: 'inf' is not valid"),
        (("serve", "--chat-template", "x" * 300), 2, "File name too long"),
        (("serve", "x" * 300), 1, "File name too long"),
        (("serve", "~nobody-of-this-name/model"), 1, "home directory"),
        (("serve", ""), 1, "MODEL is empty"),
        (("serve", "--max-num", "3"), 2, "unrecognized arguments"),
        (("serve", "--block-size", "9"), 2, "--block-size: 9 is not a power of two"),
        (("serve", "--dtype", "int3"), 2, "invalid choice: 'int3'"),
        (("serve", "--config", "/nowhere.toml"), 2, "/nowhere.toml: No such file"),
        (("serve", "/nowhere/model"), 1, "/nowhere/model: no such file or directory"),
        (("serve", "model.gguf"), 1, "model.gguf: no such file or directory"),
        (("serve", "not-a-model"), 1, "not-a-model: no such file or directory"),
    ],
)
def test_a_mistake_is_one_line_and_a_status(arguments: tuple[str, ...], status: int, words: str) -> None:
    done = run(*arguments)
    assert done.returncode == status
    assert words in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("ringserve: error: ")


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    done = run("serve", str(tmp_path))
    assert done.returncode == 1
    assert "has no config.json" in done.stderr


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGML" + bytes(100))
    done = run("serve", str(file))
    assert done.returncode == 1
    assert "is not a GGUF file" in done.stderr


def test_chat_without_a_server() -> None:
    done = run("chat", "--url", "http://127.0.0.1:9/v1", "--quick", "hi")
    assert done.returncode == 1
    assert "start a server with `ringserve serve`" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--api-key", "schlüssel"), "--api-key: a key must be ASCII text"),
        (("--url", "http://host:port"), "--url http://host:port: "),
        (("--url", "nonsense"), "--url nonsense: an address such as"),
    ],
)
def test_a_mistake_of_chat_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    done = run("chat", "--quick", "hi", *arguments)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"ringserve: error: {words}")


def test_what_is_typed_is_text() -> None:
    assert typed("caf\u00e9 \udcff!") == "caf\u00e9 \ufffd!"


def test_the_supervisor_side_imports_no_model_code() -> None:
    code = (
        "import sys, ringserve.launch, ringserve.model_source, ringserve.cli;"
        "unwanted = {'torch', 'transformers', 'tokenizers', 'starlette', 'uvicorn', 'numpy'};"
        "print(sorted(unwanted & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
