"""``ringserve simulate``: its options, and what it does with them."""

from __future__ import annotations

import argparse
import math
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ringserve.bench.http_client import Endpoint
from ringserve.bench.load_options import LoadOptions, add_shape_arguments, api_key, read_load_options, read_token_ids
from ringserve.bench.machine import describe
from ringserve.bench.measure import Run, ServerUnusable, find_model, measure
from ringserve.bench.plot import check_plot
from ringserve.bench.processes import find_server
from ringserve.bench.prompts import DatasetError
from ringserve.bench.report import check_writable, notes, wide_console, without_key, write_json
from ringserve.bench.serve import progress_bar
from ringserve.bench.traces import Trace
from ringserve.config import SchedulerConfig
from ringserve.options import OneLineParser, OptionError, add_arguments, build_config, options
from ringserve.simulate.calibration import calibrate
from ringserve.simulate.client import Tenant
from ringserve.simulate.figures import Figures
from ringserve.simulate.plot import plot
from ringserve.simulate.rate_search import HighestRate
from ringserve.simulate.report import print_against, print_calibration, print_figures, print_rates
from ringserve.simulate.scenario import Scenario
from ringserve.simulate.step_time import Calibration, Engine, read_step_time

DEFAULT_PAGE_SIZE = 64
DEFAULT_BATCHED_TOKENS = 256
DEFAULT_MODEL_LEN = 8192
MOST_PAGES = 1 << 23
"""Each has its place in the scheduler's books."""
LONGEST_SECONDS = 1e9
LOWEST_RATE = 1e-6


class Against(msgspec.Struct):
    """A simulated run and a real one of the same load."""

    seed: str
    simulated: Figures
    measured: Run


def build_parser() -> argparse.ArgumentParser:
    """What follows ``ringserve simulate``."""
    parser = OneLineParser(
        prog="ringserve simulate",
        description="What a load would see, without computing it: the server's own scheduler against a model of step "
        "times, on a virtual clock.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("step times (one of the first two)").add_argument
    add(
        "--step-time",
        metavar="FILE",
        help="a file that --save-step-time wrote, or linear:STEP_MS:TOKEN_MS[:CONTEXT_US]: so many ms a step and a "
        "token, microseconds a token of context",
    )
    add("--calibrate", metavar="URL", help="fit them to a running ringserve by a short load")
    add("--save-step-time", type=Path, metavar="FILE", help="keep what --calibrate fitted")
    add("--against", metavar="URL", help="send the same load to a running server and show both")
    add("--api-key", type=api_key, metavar="KEY", help="if the server asks for one")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="for each real request (default: %(default)g)")
    add = parser.add_argument_group("engine (default: that of the calibrated server)").add_argument
    add("--block-size", type=int, metavar="N", help=f"tokens in a KV page (default: {DEFAULT_PAGE_SIZE})")
    add("--kv-cache-tokens", type=int, metavar="N", help="size of the KV cache (default: enough for all sequences)")
    add("--max-model-len", type=int, metavar="N", help=f"longest sequence (default: {DEFAULT_MODEL_LEN})")
    add_arguments(parser, only=("scheduler",))
    add = parser.add_argument_group("comparison").add_argument
    add("--policies", metavar="A,B,...", help="scheduling policies side by side (default: --scheduling-policy)")
    add("--find-rate", type=float, metavar="PART", help="the highest rate at which this part keeps the --goodput")
    add("--sessions", action="store_true", help="each conversation (--turns) is a session")
    add("--tenants", metavar="NAME=SHARE,...", help="who sends which share of the requests")
    add("--tenant-priorities", metavar="NAME=N,...", help="`priority` of their requests (default: 0)")
    add("--tenant-deadlines", metavar="NAME=MS,...", help="`deadline_ms` of their requests (default: none)")
    add("--deadline-ms", type=float, default=0.0, metavar="MS", help="`deadline_ms` of all others (default: none)")
    add_shape_arguments(parser)
    parser.set_defaults(
        api="completions",
        prompt_format=None,
        warmup=1,
        ignore_eos=True,
        temperature=0.0,
        sampling_seed=None,
        extra_body="{}",
        usage=True,
    )
    add = parser.add_argument_group("results").add_argument
    add("--json", type=Path, metavar="FILE", help="all figures")
    add("--plot", type=Path, metavar="FILE", help="the policies' latencies, .png or .svg (extra: ringserve[bench])")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Simulate; returns the exit status.

    Raises:
        OptionError: the options do not go together.
        SystemExit: help, or a mistake that argparse tells of.
    """
    given = build_parser().parse_args(arguments)
    for path, flag in ((given.json, "--json"), (given.plot, "--plot"), (given.save_step_time, "--save-step-time")):
        check_writable(path, flag)
    check_plot(given.plot)
    load = read_load_options(given)
    _check_it_ends(load)
    if given.find_rate is not None and not (0 < given.find_rate <= 1 and load.objectives):
        raise OptionError("--find-rate: takes a part of the requests, above 0 and up to 1, and needs --goodput")
    config, policies, tenants = _config(given), _policies(given), _tenants(given)
    target = _endpoint("--against", given.against, given.api_key)
    if target is not None and (given.tenants or given.deadline_ms or given.sessions):
        raise OptionError("--against: the real requests would have no tenants, deadlines or sessions")
    console = wide_console()
    try:
        calibration = _calibration(given, console)
        scenario = Scenario(
            load, _engine(given, config, calibration.engine), config, calibration, tenants, given.sessions
        )
        return _Results(given, arguments, console, scenario).show(policies, target)
    except (ServerUnusable, DatasetError) as error:
        print(f"ringserve: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nringserve: stopped", file=sys.stderr)
        return 130


class _Results:
    """Runs what was asked for, prints and keeps it."""

    def __init__(
        self, given: argparse.Namespace, arguments: Sequence[str], console: Console, scenario: Scenario
    ) -> None:
        self._given = given
        self._arguments = arguments
        self._console = console
        self._scenario = scenario

    def show(self, policies: Sequence[str], target: Endpoint | None) -> int:
        scenario, console = self._scenario, self._console
        runs: list[Figures] = []
        against: list[Against] = []
        for index, point in enumerate(scenario.load.points):
            seed = f"{scenario.load.seed} {index}"  # that of `bench serve`: the same requests
            if target is not None:  # prompts that no earlier run has left in the server's cache
                seed += f" {secrets.token_hex(4)}"
            here = [scenario.run(policy, point, seed) for policy in policies]
            print_figures(console, here)
            runs += here
            if target is not None:
                measured = _measure(target, scenario.load, index, seed)
                print_against(console, here[0], measured.metrics)
                for note in notes(measured):
                    console.print(f"  {note}", markup=False, highlight=False)
                against.append(Against(seed, here[0], measured))
        rates: list[HighestRate] = []
        if self._given.find_rate is not None:
            rates = [scenario.highest_rate(policy, self._given.find_rate) for policy in policies]
            print_rates(console, rates)
        if self._given.json is not None:
            self._write(self._given.json, runs, rates, against)
        if self._given.plot is not None:
            plot(self._given.plot, runs, " / ".join(policies))
        return 0 if all(figures.completed for figures in runs) else 1

    def _write(
        self, path: Path, runs: Sequence[Figures], rates: Sequence[HighestRate], against: Sequence[Against]
    ) -> None:
        scenario = self._scenario
        parts: dict[str, Any] = {
            "engine": scenario.engine,
            "scheduler": scenario.config,
            "calibration": scenario.calibration,
            "runs": runs,
            "highest_rates": rates,
            "against": against,
        }
        head = {"command": shlex.join(["ringserve", "simulate", *without_key(self._arguments)]), "machine": describe()}
        write_json(path, {**head, **{name: msgspec.to_builtins(part) for name, part in parts.items()}})


def _check_it_ends(load: LoadOptions) -> None:
    """On a clock in nanoseconds, and after a number of requests that can be kept."""
    times = {"--duration": load.duration or 0.0, "--think-time": load.think_time, "--ramp": load.ramp}
    for flag, seconds in times.items():
        if seconds > LONGEST_SECONDS:
            raise OptionError(f"{flag}: {seconds:g} seconds are more than can be simulated")
    if any(point.rate is not None and point.rate < LOWEST_RATE for point in load.points):
        raise OptionError(f"--rate: below {LOWEST_RATE:g}/s nothing happens")
    endless = load.num_requests is None and load.duration is not None and not isinstance(load.dataset, Trace)
    if endless and any(point.rate == math.inf for point in load.points):
        raise OptionError("--rate inf: sends all at once, --duration does not say how many; give --num-requests")


def _measure(target: Endpoint, load: LoadOptions, index: int, seed: str) -> Run:
    model = find_model(target, timeout=10.0)
    server = find_server(target.host, target.port)
    with progress_bar(Console(stderr=True)) as progress:
        return measure(target, model, load, load.points[index], seed=seed, server=server, progress=progress)


def _calibration(given: argparse.Namespace, console: Console) -> Calibration:
    if (given.step_time is None) == (given.calibrate is None):
        raise OptionError("give one of --step-time and --calibrate: what do steps take?")
    if given.step_time is not None:
        if given.save_step_time is not None:
            raise OptionError("--save-step-time: keeps what --calibrate fits")
        return read_step_time(given.step_time)
    endpoint = _endpoint("--calibrate", given.calibrate, given.api_key)
    assert endpoint is not None
    ids = read_token_ids(given.token_ids)
    with progress_bar(Console(stderr=True)) as progress:
        task = progress.add_task("calibration", total=1.0)

        def report(what: str, part: float) -> None:
            progress.update(task, completed=part, description=f"calibration: {what}", refresh=True)

        calibration, fit = calibrate(endpoint, ids, given.timeout, report)
    print_calibration(console, calibration, fit)
    if given.save_step_time is not None:
        calibration.save(given.save_step_time)
    return calibration


def _endpoint(flag: str, url: str | None, api_key: str | None) -> Endpoint | None:
    if url is None:
        return None
    try:
        return Endpoint.parse(url, api_key)
    except ValueError as error:
        raise OptionError(f"{flag}: {error}") from None


def _config(given: argparse.Namespace) -> SchedulerConfig:
    names = {option.name for option in options() if option.group == "scheduler"}
    return build_config({name: value for name, value in vars(given).items() if name in names}).scheduler


def _engine(given: argparse.Namespace, config: SchedulerConfig, measured: Engine | None) -> Engine:
    """The measured server's, with what was given instead."""
    for name in ("block_size", "kv_cache_tokens", "max_model_len"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name.replace('_', '-')}: {value} is below 1")
    page_size = given.block_size or (measured.page_size if measured else DEFAULT_PAGE_SIZE)
    max_num_seqs = measured.max_num_seqs if measured and "max_num_seqs" not in given else config.max_num_seqs
    max_model_len = given.max_model_len or (measured.max_model_len if measured else DEFAULT_MODEL_LEN)
    budget = config.max_num_batched_tokens or (measured.max_num_batched_tokens if measured else DEFAULT_BATCHED_TOKENS)
    if given.kv_cache_tokens is not None:
        num_pages = given.kv_cache_tokens // page_size
        if num_pages < 1:
            raise OptionError(f"--kv-cache-tokens: {given.kv_cache_tokens} is below a page of {page_size} tokens")
    elif measured is not None:
        num_pages = max(1, measured.num_pages * measured.page_size // page_size)
    else:
        num_pages = max_num_seqs * -(-max_model_len // page_size)
    if num_pages > MOST_PAGES:
        raise OptionError(f"--kv-cache-tokens: {num_pages} pages are too many to be simulated, {MOST_PAGES} are not")
    return Engine(num_pages, page_size, max_num_seqs, budget, max_model_len)


def _policies(given: argparse.Namespace) -> list[str]:
    (choices,) = (option.choices for option in options() if option.name == "scheduling_policy")
    if given.policies is None:
        return [getattr(given, "scheduling_policy", choices[0])]
    policies = [name.strip() for name in given.policies.split(",")]
    for name in policies:
        if name not in choices:
            raise OptionError(f"--policies: {name!r} is not one of {', '.join(choices)}")
    return list(dict.fromkeys(policies))


def _tenants(given: argparse.Namespace) -> dict[str, Tenant]:
    shares = _numbers("--tenants", given.tenants) or {"": 1.0}
    priorities = _numbers("--tenant-priorities", given.tenant_priorities)
    deadlines = _numbers("--tenant-deadlines", given.tenant_deadlines)
    for flag, named in (("--tenant-priorities", priorities), ("--tenant-deadlines", deadlines)):
        for name in named.keys() - shares.keys():
            raise OptionError(f"{flag}: {name!r} is not one of --tenants")
    for name, priority in priorities.items():
        if not priority.is_integer():
            raise OptionError(f"--tenant-priorities: {name}={priority:g} is not a whole number")
    for flag, limits in (("--tenant-deadlines", deadlines), ("--deadline-ms", {"": given.deadline_ms})):
        if not all(0 <= limit < 1e12 for limit in limits.values()):
            raise OptionError(f"{flag}: a deadline is not below 0")
    for name, share in shares.items():
        if not 0 < share < float("inf"):
            raise OptionError(f"--tenants: the share of {name!r} is not above 0")
    return {
        name: Tenant(share, int(priorities.get(name, 0)), deadlines.get(name, given.deadline_ms))
        for name, share in shares.items()
    }


def _numbers(flag: str, text: str | None) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in filter(None, (text or "").split(",")):
        name, equals, number = part.rpartition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError:
            equals = ""
        if not equals:
            raise OptionError(f"{flag}: {part!r} is not of the form NAME=NUMBER")
    return found
