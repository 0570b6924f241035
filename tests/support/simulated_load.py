"""Loads for tests of the simulator, from command-line words."""

from __future__ import annotations

from ringserve.bench.load_options import read_load_options
from ringserve.config import SchedulerConfig
from ringserve.engine.scheduler import Scheduler
from ringserve.simulate.client import Client, Tenant
from ringserve.simulate.command import build_parser
from ringserve.simulate.engine import Outcome, simulate
from ringserve.simulate.scenario import Scenario
from ringserve.simulate.step_time import Calibration, Engine, StepTimeCurve, straight_line

ENGINE = Engine(num_pages=256, page_size=16, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1024)
TEN_AND_ONE = straight_line(10.0, 1.0)
"""10 ms a step and 1 ms a token."""


def scenario(
    *words: str,
    engine: Engine = ENGINE,
    curve: StepTimeCurve = TEN_AND_ONE,
    config: SchedulerConfig | None = None,
    overhead_s: float = 0.0,
) -> Scenario:
    load = read_load_options(build_parser().parse_args(words))
    return Scenario(load, engine, config or SchedulerConfig(), Calibration(curve, overhead_s), {"": Tenant()})


def outcome(client: Client, engine: Engine = ENGINE, config: SchedulerConfig | None = None) -> Outcome:
    """A run whose books are audited after every step."""

    def audit(scheduler: Scheduler) -> None:
        assert scheduler.check_integrity() == []

    return simulate(engine, config or SchedulerConfig(), TEN_AND_ONE, client, audit)
