"""The options that describe a load, shared by ``bench serve`` and ``bench compare``."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ringserve.bench.arrivals import arrivals
from ringserve.bench.bodies import Api, BodyBuilder
from ringserve.bench.lengths import FORMS, Lengths
from ringserve.bench.load import ClosedLoop, OpenLoop
from ringserve.bench.metrics import OBJECTIVES
from ringserve.bench.prompts import Conversations, Job, RandomPrompts, TokenIds, Units, Words
from ringserve.bench.traces import Trace
from ringserve.options import OptionError

Dataset = RandomPrompts | Conversations | Trace


class Point(msgspec.Struct, frozen=True):
    """Where on the load axis a run is: a concurrency, a rate, or (neither) a trace's own times."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        if self.rate is not None:
            return f"rate {self.rate:g}/s"
        return f"concurrency {self.concurrency}" if self.concurrency is not None else "trace"


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """A load at any point."""

    api: Api
    dataset: Dataset
    points: tuple[Point, ...]
    num_requests: int | None
    duration: float | None
    warmup: int
    burstiness: float
    ramp: float
    max_concurrency: int | None
    think_time: float
    timeout: float
    ask_usage: bool
    parameters: dict[str, Any]
    objectives: dict[str, float]
    keep_records: bool
    seed: int

    def builder(self, model: str) -> BodyBuilder:
        """Bodies for one model."""
        return BodyBuilder(self.api, model, self.ask_usage, self.parameters)

    def jobs(self, seed: str) -> Iterator[Job]:
        """What is sent, from a seed."""
        return self.dataset.jobs(seed)

    def number_of_jobs(self, point: Point) -> int | None:
        """None: as many as there are, or as the duration allows."""
        if self.num_requests is not None or self.duration is not None or isinstance(self.dataset, Trace):
            return self.num_requests
        return max(16, 4 * point.concurrency) if point.concurrency is not None else 100

    def pace(self, point: Point, seed: str) -> ClosedLoop | OpenLoop:
        """How it is sent."""
        if point.concurrency is not None:
            return ClosedLoop(point.concurrency, self.ramp)
        if point.rate is not None:
            times = arrivals(point.rate, self.burstiness, self.ramp, random.Random(f"{seed} arrivals"))
            return OpenLoop(times, self.max_concurrency)
        return OpenLoop((job.at or 0.0 for job in self._times()), self.max_concurrency)

    def _times(self) -> Iterator[Job]:
        assert isinstance(self.dataset, Trace)
        return (Job((), arrival.at / self.dataset.speed) for arrival in self.dataset.arrivals())


def api_key(text: str) -> str:
    """A key as argparse takes it: it must fit into a header line."""
    if not (text.isascii() and text.isprintable()):
        raise argparse.ArgumentTypeError("a key has printable ASCII characters only")
    return text


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Add them, grouped."""
    add = parser.add_argument_group("HTTP").add_argument
    add("--api", choices=("completions", "chat"), default="completions", help="default: %(default)s")
    add(
        "--prompt-format",
        choices=("ids", "text"),
        help="random and trace prompts as token ids or as common words, about a token each (default: ids for "
        "completions of one turn, else text)",
    )
    add("--warmup", type=int, default=1, metavar="N", help="requests before, not counted (default: %(default)s)")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="for each request (default: %(default)g)")
    add_shape_arguments(parser)

    add = parser.add_argument_group("sampling").add_argument
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="ask for exactly the output length (default: unless sharegpt)",
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="default: %(default)g")
    add("--sampling-seed", type=int, metavar="N", help="`seed` in each request")
    add("--extra-body", default="{}", metavar="JSON", help="more fields for each request")
    add("--usage", action=argparse.BooleanOptionalAction, default=True, help="ask for token counts (stream_options)")


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that need no server: what is asked for, when, and within which time."""
    add = parser.add_argument_group("requests").add_argument
    add(
        "--dataset",
        choices=("random", "sharegpt", "mooncake", "azure"),
        default="random",
        help="random tokens; a JSON file of conversations; a trace in Mooncake's JSON lines or Azure's CSV "
        "(default: %(default)s)",
    )
    add("--dataset-path", type=Path, metavar="FILE", help="for sharegpt, mooncake and azure")
    add("--token-ids", default="256:30000", metavar="LOW:HIGH", help="ids to draw from (default: %(default)s)")
    add("--prompt-tokens", default="128", metavar="LENGTH", help=f"{FORMS} (default: %(default)s)")
    add("--output-tokens", metavar="LENGTH", help="same forms (default: 64; sharegpt: estimated from the answers)")
    add("--prefix-tokens", type=int, default=0, metavar="N", help="shared prefix in front of random prompts")
    add("--num-prefixes", type=int, default=1, metavar="N", help="different shared prefixes (default: %(default)s)")
    add("--turns", type=int, default=1, metavar="N", help="requests of a conversation, each with all before it")
    add("--think-time", type=float, default=0.0, metavar="SECONDS", help="between an answer and the next turn")
    add("--max-prompt-tokens", type=int, metavar="N", help="cut a trace's longer prompts")
    add("--max-output-tokens", type=int, metavar="N", help="cut a trace's longer answers")
    add("--seed", type=int, default=0, metavar="N", help="of prompts, lengths and arrivals (default: %(default)s)")

    add = parser.add_argument_group("pace").add_argument
    add("--concurrency", type=int, metavar="N", help="closed loop: N requests at once (default: 8)")
    add("--rate", type=float, metavar="R", help="open loop: R requests per second; inf sends all at once")
    add("--burstiness", type=float, default=1.0, metavar="K", help="shape of gamma arrivals; 1: Poisson (default)")
    add("--max-concurrency", type=int, metavar="N", help="open loop: hold back what would exceed N at once")
    add("--ramp", type=float, default=0.0, metavar="SECONDS", help="grow linearly to the full concurrency or rate")
    add("--trace-speed", type=float, default=1.0, metavar="F", help="replay a trace F times as fast")
    add("--sweep", metavar="AXIS=A,B,...", help="one run each for concurrency=1,8,32 or rate=0.5,1,2")
    add(
        "--num-requests",
        type=int,
        metavar="N",
        help="conversations, where --turns is above 1 (default: 4 for each of the concurrency, at least 16; 100 with "
        "--rate; all of a trace)",
    )
    add("--duration", type=float, metavar="SECONDS", help="start no more after that; the last ones end")

    add = parser.add_argument_group("figures").add_argument
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests within these: ttft:200 tpot:50 e2e:5000",
    )


def read_load_options(given: argparse.Namespace, *, keep_records: bool = False) -> LoadOptions:
    """From parsed arguments.

    Raises:
        OptionError: something is out of range or does not go together.
    """
    _check_ranges(given)
    points = _points(given)
    return LoadOptions(
        api=given.api,
        dataset=_dataset(given),
        points=points,
        num_requests=given.num_requests,
        duration=given.duration,
        warmup=given.warmup,
        burstiness=given.burstiness,
        ramp=given.ramp,
        max_concurrency=given.max_concurrency,
        think_time=given.think_time,
        timeout=given.timeout,
        ask_usage=given.usage,
        parameters=_parameters(given),
        objectives=_objectives(given.goodput),
        keep_records=keep_records,
        seed=given.seed,
    )


def _check_ranges(given: argparse.Namespace) -> None:
    for name in ("concurrency", "num_requests", "max_concurrency", "turns", "num_prefixes"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise OptionError(f"{_flag(name)}: {value} is below 1")
    for name in ("rate", "burstiness", "duration", "timeout", "trace_speed", "max_prompt_tokens", "max_output_tokens"):
        value = getattr(given, name)
        if value is not None and not value > 0:
            raise OptionError(f"{_flag(name)}: {value:g} is not above 0")
    for name in ("ramp", "think_time", "warmup", "prefix_tokens"):
        if not getattr(given, name) >= 0:
            raise OptionError(f"{_flag(name)}: {getattr(given, name)} is not 0 or above")
    if given.burstiness < 1e-3:
        raise OptionError(f"--burstiness: {given.burstiness:g} is below 0.001")
    for name in ("burstiness", "ramp", "think_time", "temperature"):
        if not math.isfinite(getattr(given, name)):
            raise OptionError(f"{_flag(name)}: {getattr(given, name)} is not a finite number")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _points(given: argparse.Namespace) -> tuple[Point, ...]:
    chosen = [name for name in ("concurrency", "rate", "sweep") if getattr(given, name) is not None]
    if len(chosen) > 1:
        raise OptionError(f"{_flag(chosen[0])} and {_flag(chosen[1])} exclude each other")
    if given.sweep is not None:
        return _sweep(given.sweep)
    if given.rate is not None:
        return (Point(rate=given.rate),)
    if given.concurrency is None and given.dataset in ("mooncake", "azure"):
        return (Point(),)
    return (Point(concurrency=given.concurrency or 8),)


def _sweep(text: str) -> tuple[Point, ...]:
    axis, _, listed = text.partition("=")
    try:
        values = [float(value) for value in listed.split(",")]
    except ValueError:
        values = []
    if axis == "concurrency" and values and all(value >= 1 and value.is_integer() for value in values):
        return tuple(Point(concurrency=int(value)) for value in values)
    if axis == "rate" and values and all(value > 0 for value in values):
        return tuple(Point(rate=value) for value in values)
    raise OptionError(f"--sweep: {text!r} is not like concurrency=1,8,32 or rate=0.5,1,2")


def _dataset(given: argparse.Namespace) -> Dataset:
    output = _lengths("--output-tokens", given.output_tokens) if given.output_tokens else None
    if given.dataset != "random" and given.dataset_path is None:
        raise OptionError(f"--dataset {given.dataset}: needs --dataset-path")
    if given.dataset == "random" and given.dataset_path is not None:
        raise OptionError("--dataset-path: needs --dataset, which says what the file is")
    if given.dataset == "sharegpt":
        return Conversations(given.dataset_path, output, given.turns)
    units = _units(given)
    if given.dataset in ("mooncake", "azure"):
        if given.turns > 1:
            raise OptionError("--turns: a trace's requests are single turns")
        return Trace(
            given.dataset_path,
            given.dataset,
            units,
            given.trace_speed,
            given.max_prompt_tokens,
            given.max_output_tokens,
        )
    return RandomPrompts(
        units,
        _lengths("--prompt-tokens", given.prompt_tokens),
        output or Lengths("fixed", 64),
        given.prefix_tokens,
        given.num_prefixes,
        given.turns,
    )


def _units(given: argparse.Namespace) -> Units:
    only_text = given.api == "chat" or given.turns > 1
    if given.prompt_format == "ids" and only_text:
        raise OptionError("--prompt-format ids: only for completions of one turn; chat and later turns are text")
    ids = read_token_ids(given.token_ids)
    return Words() if given.prompt_format == "text" or only_text else ids


def read_token_ids(text: str) -> TokenIds:
    """From LOW:HIGH.

    Raises:
        OptionError: no such range.
    """
    low, _, high = text.partition(":")
    try:
        ids = TokenIds(int(low), int(high))
    except ValueError:
        ids = TokenIds(0, 0)
    if not 0 <= ids.low < ids.high:
        raise OptionError(f"--token-ids: {text!r} is not LOW:HIGH with 0 <= LOW < HIGH")
    return ids


def _lengths(flag: str, text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise OptionError(f"{flag}: {error}") from None


def _parameters(given: argparse.Namespace) -> dict[str, Any]:
    ignore_eos = given.ignore_eos if given.ignore_eos is not None else given.dataset != "sharegpt"
    parameters: dict[str, Any] = {"temperature": given.temperature}
    if ignore_eos:
        parameters["ignore_eos"] = True
    if given.sampling_seed is not None:
        parameters["seed"] = given.sampling_seed
    try:
        extra = msgspec.json.decode(given.extra_body)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"--extra-body: not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise OptionError("--extra-body: not a JSON object")
    return {**parameters, **extra}


def _objectives(given: list[str]) -> dict[str, float]:
    found = {}
    for text in given:
        name, _, limit = text.partition(":")
        if name in found:
            raise OptionError(f"--goodput: {name} is given twice")
        try:
            found[name] = float(limit)
        except ValueError:
            found[name] = math.nan
        if name not in OBJECTIVES or not 0 < found[name] < math.inf:
            raise OptionError(f"--goodput: {text!r} is not {', '.join(f'{each}:MS' for each in OBJECTIVES)}")
    return found
