"""``ringserve bench offline``: the engine's throughput on a batch, and how much of it is left over HTTP.

Both sides get the same token ids and forced lengths, all requests at once. The offline side is ``ringserve.LLM``: the
same tokenizer, scheduler and executor processes with this process in the frontend's place. With ``--against-serving``
both engines stay up and take turns; the one that waits uses no CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rich.console import Console

from ringserve.bench.measure import ServerUnusable
from ringserve.bench.offline_results import Round, Side, summarize
from ringserve.bench.offline_sides import Server, ask_offline
from ringserve.bench.offline_tables import print_others, print_round, print_rows
from ringserve.bench.process_cpu import cpu_seconds
from ringserve.bench.processes import machine_cpu_seconds
from ringserve.bench.prompts import TokenIds
from ringserve.bench.report import check_writable, document, write_json
from ringserve.model_source import ModelNotFound
from ringserve.offline.errors import EngineError
from ringserve.offline.llm import LLM
from ringserve.options import OptionError

ENGINE_OPTIONS = ("dtype", "threads", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory")
WARMUP_TOKENS = 8


@dataclass(frozen=True)
class Load:
    """What each batch asks for."""

    prompt_tokens: int
    output_tokens: int
    seed: int
    ids: TokenIds

    def prompts(self, name: str, count: int) -> list[list[int]]:
        """The same name gives the same prompts."""
        rng = Random(f"{self.seed} {name}")
        return [self.ids.draw(rng, self.prompt_tokens) for _ in range(count)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="as for `ringserve serve` (default: the embedded model)")
    add("--num-requests", default="8,32", metavar="N,N", help="sizes of the batches (default: %(default)s)")
    add("--prompt-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--output-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    add("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    add("--seed", type=int, default=0, metavar="N", help="of the random prompts (default: %(default)s)")
    add(
        "--against-serving",
        action="store_true",
        help="also start a server, and send it the same batches over HTTP, streaming, in the same rounds",
    )
    engine = parser.add_argument_group("engine (both sides; defaults as for `ringserve serve`)")
    for name in ENGINE_OPTIONS:
        number = name not in ("dtype", "kv_cache_memory")
        engine.add_argument(f"--{name.replace('_', '-')}", type=int if number else str, metavar="N" if number else "X")
    parser.add_argument_group("results").add_argument(
        "--json", type=Path, metavar="FILE", help="all rounds, the machine and the versions"
    )


def run(given: argparse.Namespace) -> int:
    """Measure; returns the exit status.

    Raises:
        OptionError: an option is out of range.
    """
    sizes = _sizes(given.num_requests)
    for name in ("prompt_tokens", "output_tokens", "rounds"):
        if getattr(given, name) < 1:
            raise OptionError(f"--{name.replace('_', '-')}: {getattr(given, name)} is below 1")
    check_writable(given.json, "--json")
    console = Console()
    rounds: list[Round] = []
    status = 0
    try:
        for one in _rounds(given, sizes):
            rounds.append(one)
            print_round(console, one)
    except (EngineError, ModelNotFound, ServerUnusable) as error:
        print(f"ringserve: error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("\nringserve: stopped", file=sys.stderr)
        status = 130
    if rounds:
        rows = summarize(rounds)
        print_rows(console, rows)
        print_others(console, rounds)
        if given.json is not None:
            write_json(given.json, document(_command(given), summary=rows, rounds=rounds))
    return status


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"--num-requests: {text!r} is not a list of numbers such as 8,32") from None
    if min(sizes) < 1:
        raise OptionError(f"--num-requests: {min(sizes)} is below 1")
    return sizes


def _rounds(given: argparse.Namespace, sizes: Sequence[int]) -> Iterator[Round]:
    """Every size in every round, the two sides one after the other; the first side of a round alternates."""
    engine = {name: getattr(given, name) for name in ENGINE_OPTIONS if getattr(given, name) is not None}
    with contextlib.ExitStack() as stack:
        try:
            llm = stack.enter_context(LLM(given.model, **engine))
        except ValueError as error:
            raise OptionError(str(error)) from None
        ids = TokenIds(llm.vocab_size // 10, llm.vocab_size * 8 // 10)  # the ends hold special and rare tokens
        load = Load(given.prompt_tokens, given.output_tokens, given.seed, ids)
        if load.prompt_tokens + load.output_tokens > llm.max_model_len:
            raise OptionError(
                f"--prompt-tokens and --output-tokens: {load.prompt_tokens} + {load.output_tokens} do not fit into the "
                f"context of {llm.max_model_len} tokens"
            )
        server = stack.enter_context(Server(given.model, engine)) if given.against_serving else None
        warm = load.prompts("warm-up", min(8, max(sizes)))
        ask_offline(llm, warm, WARMUP_TOKENS)
        if server is not None:
            server.ask(warm, WARMUP_TOKENS)
        for number in range(given.rounds):
            for size in sizes:
                yield _one_round(llm, server, load, size, number)


def _one_round(llm: LLM, server: Server | None, load: Load, size: int, number: int) -> Round:
    prompts = load.prompts(f"{number} {size}", size)
    machine, own, started = machine_cpu_seconds(), _our_cpu(llm, server), time.perf_counter()
    if server is not None and number % 2:
        serving: Side | None = server.ask(prompts, load.output_tokens)
        offline = ask_offline(llm, prompts, load.output_tokens)
    else:
        offline = ask_offline(llm, prompts, load.output_tokens)
        serving = None if server is None else server.ask(prompts, load.output_tokens)
    wall = time.perf_counter() - started
    others = machine_cpu_seconds() - machine - (_our_cpu(llm, server) - own)
    return Round(size, number, offline, serving, max(0.0, others) / wall)


def _our_cpu(llm: LLM, server: Server | None) -> float:
    pids = list(llm.pids().values()) + (list(server.pids().values()) if server is not None else [])
    return time.process_time() + sum(map(cpu_seconds, pids))


def _command(given: argparse.Namespace) -> list[str]:
    """The command line that ``given`` came from, defaults written out."""
    words = ["offline"]
    for name, value in vars(given).items():
        if name == "model" or value is None or value is False:
            continue
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words if given.model is None else [*words[:1], given.model, *words[1:]]
