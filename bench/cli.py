"""``ringserve bench ...``: the commands. Each is imported only when it is asked for."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ringserve.options import OneLineParser

_COMMANDS = {
    "serve": "send load to a running OpenAI-compatible server and measure it",
    "compare": "measure two or more servers in interleaved rounds, with the same requests",
    "startup": "from exec to ready and to the first token",
    "offline": "throughput of the engine on a batch, without HTTP",
    "ipc": "the rings against other ways between processes; no model needed",
}


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``bench``. What follows its command is parsed by ``run``: importing that here would slow all commands."""
    width = max(map(len, _COMMANDS)) + 2
    parser = commands.add_parser(
        "bench",
        help="measure servers, ours and others",
        description="Measure servers, ours and others.",
        epilog="commands:\n"
        + "".join(f"  {name:<{width}}{text}\n" for name, text in _COMMANDS.items())
        + "\n`ringserve bench COMMAND --help` explains one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("bench", choices=tuple(_COMMANDS), metavar="COMMAND", help=", ".join(_COMMANDS))
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its options")


def run(options: argparse.Namespace) -> int:
    """Run the command that ``options.bench`` names with the options in ``options.rest``.

    Raises:
        OptionError: options that do not go together.
        SystemExit: help, or a mistake that argparse tells of.
    """
    with _termination_as_interrupt():
        return _run(options.bench, options.rest)


def _run(name: str, arguments: Sequence[str]) -> int:
    parser = OneLineParser(
        prog=f"ringserve bench {name}",
        description=_COMMANDS[name][:1].upper() + _COMMANDS[name][1:] + ".",
        allow_abbrev=False,
    )
    match name:
        case "serve":
            from ringserve.bench import serve

            serve.add_arguments(parser)
            return serve.run(parser.parse_args(arguments), arguments)
        case "compare":
            from ringserve.bench import compare

            compare.add_arguments(parser)
            return compare.run(parser.parse_args(arguments), arguments)
        case "startup":
            from ringserve.bench import startup

            startup.add_arguments(parser)
            return startup.run(parser.parse_args(arguments), arguments)
        case "ipc":
            from ringserve.bench import ipc

            ipc.add_arguments(parser)
            return ipc.run(parser.parse_args(arguments), arguments)
        case _:
            from ringserve.bench import offline

            offline.add_arguments(parser)
            return offline.run(parser.parse_args(arguments))


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP take Ctrl-C's way out, so that servers which a measurement started end with it."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's business
        yield
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if previous[signal.SIGINT] is signal.SIG_IGN:  # what a shell gives to its background jobs
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if previous[number] is not signal.SIG_IGN:  # an ignored SIGHUP is nohup's wish
            signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
