"""What all commands share: help, names, keys, commands of servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_commands import SMALL, serve
from fake_openai import FakeOpenAI

from ringserve.cli import main


@pytest.mark.parametrize("command", ["serve", "compare", "startup", "offline"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", command, "--help"])
    assert f"usage: ringserve bench {command}" in capsys.readouterr().out


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "--help"])
    out = capsys.readouterr().out
    assert all(f"  {command} " in out for command in ("serve", "compare", "startup", "offline"))


def test_names_are_neither_markup_nor_formulas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("[/x]", "[bold]", "$\\nope$")
    with FakeOpenAI(model="$\\nope$") as server:
        servers = [word for name in names for word in ("--server", f"{name}={server.url}")]
        load = ("--rounds", "1", "--num-requests", "2", "--output-tokens", "3")
        assert main(["bench", "compare", *servers, *load, "--plot", str(tmp_path / "x.svg")]) == 0
        assert serve(server.url, *SMALL, "--plot", str(tmp_path / "y.svg")) == 0
    table = capsys.readouterr().out.partition("medians")[2]
    assert all(name in table for name in names)


@pytest.mark.parametrize("key", ["\u2014", "a\r\nX: y"])
@pytest.mark.parametrize("command", ["serve", "compare"])
def test_a_key_that_is_no_header(command: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", command, "--api-key", key])
    assert "--api-key" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["startup", "--command"], ["compare", "--command"]])
@pytest.mark.parametrize("server", ['"open {port}', "server without a port"])
def test_commands_that_are_none(arguments: list[str], server: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = server if "startup" in arguments else f"a={server}"
    try:
        status: object = main(["bench", *arguments, given])
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    assert "--command" in capsys.readouterr().err
