"""The ``ringserve`` command."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence

from ringserve import __version__
from ringserve.bench import cli as bench
from ringserve.options import OneLineParser, OptionError, add_arguments, build_config, options, read_file

_EPILOG = """examples:
  ringserve serve                                 the embedded SmolLM2-135M-Instruct on 127.0.0.1:8000
  ringserve serve ./Qwen2.5-0.5B-Instruct         a directory in Hugging Face layout
  ringserve serve model.gguf --port 9000          a GGUF file
  ringserve serve Qwen/Qwen2.5-0.5B-Instruct      a hub id
  ringserve chat                                  talk to the server on 127.0.0.1:8000
  ringserve bench serve --concurrency 8           load it and measure
  ringserve simulate --calibrate 127.0.0.1:8000   what other loads and policies would see there
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = OneLineParser(
        prog="ringserve",
        description="Serve a language model on this machine through an OpenAI-compatible API.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ringserve {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP until SIGTERM or Ctrl-C. Running requests finish; a second signal stops "
        "at once.",
        allow_abbrev=False,
    )
    serve.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="directory in Hugging Face layout, GGUF file, or hub id (default: the embedded SmolLM2-135M-Instruct)",
    )
    serve.add_argument(
        "--config", metavar="FILE", help="TOML file with the same options (underscores for dashes); flags win"
    )
    add_arguments(serve)
    chat = commands.add_parser(
        "chat",
        help="talk to a running server in the terminal",
        description="Talk to an OpenAI-compatible server; answers stream, each followed by its TTFT and tokens/s.",
        allow_abbrev=False,
    )
    chat.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the API's base (default: %(default)s)")
    chat.add_argument("--model", help="model to talk to (default: the first one that the server lists)")
    chat.add_argument("--api-key", help="if the server asks for one")
    chat.add_argument("--system-prompt", metavar="TEXT", help="instructions before the conversation")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: what fits)")
    chat.add_argument("--temperature", type=float, metavar="T", help="default: the model's own")
    chat.add_argument("-q", "--quick", metavar="TEXT", help="send one message, print the answer, and leave")
    bench.add_parser(commands)
    commands.add_parser("simulate", help="what a load would see: the same scheduler, modelled step times, no waiting")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # before the supervisor listens to signals, or in a command without one
        return 130


def _run(arguments: Sequence[str] | None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if words[:1] == ["simulate"]:  # its options are its own: reading them here would slow all commands
            from ringserve.simulate.command import run

            return run(words[1:])
        parser = build_parser()
        namespace, unknown = parser.parse_known_args(words)
        given = vars(namespace)
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{_suggestion(unknown[0])}")
        command = given.pop("command")
        if command == "bench":
            return bench.run(namespace)
        if command == "chat":
            from ringserve.chat import ChatOptions, chat  # brings an HTTP client that `serve` does not need

            return chat(ChatOptions(**given))
        return _serve(given)
    except OptionError as error:
        print(f"ringserve: error: {error}", file=sys.stderr)
        return 2


def _suggestion(argument: str) -> str:
    close = difflib.get_close_matches(argument.partition("=")[0], [option.flag for option in options()], 1)
    return f"; did you mean {close[0]}?" if close else ""


def _serve(given: dict[str, object]) -> int:
    file = given.pop("config")
    config = build_config({**(read_file(str(file)) if file is not None else {}), **given})

    from ringserve.launch import Supervisor  # multiprocessing, rich: not needed for --help
    from ringserve.logs import set_up_logging
    from ringserve.model_source import ModelNotFound, resolve_model

    set_up_logging("supervisor", config.logging.log_level)
    try:
        source = resolve_model(config.model.model, config.model.revision, config.model.served_model_name)
    except ModelNotFound as error:
        print(f"ringserve: error: {error}", file=sys.stderr)
        return 1
    return Supervisor(config, source).run()
