"""A load on an engine under a policy: what one simulated run needs, put together from options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import msgspec

from ringserve.bench.load_options import LoadOptions, Point
from ringserve.bench.prompts import Job, RandomPrompts, TokenIds
from ringserve.bench.traces import Trace
from ringserve.config import SchedulerConfig
from ringserve.simulate.client import Client, Tenant
from ringserve.simulate.engine import simulate
from ringserve.simulate.figures import Figures, compute
from ringserve.simulate.rate_search import HighestRate, highest_rate
from ringserve.simulate.step_time import Calibration, Engine


@dataclass(frozen=True)
class Scenario:
    """Everything but the policy and the point of load."""

    load: LoadOptions
    engine: Engine
    config: SchedulerConfig
    calibration: Calibration
    tenants: Mapping[str, Tenant]
    sessions: bool = False
    """Each conversation is a session."""

    def run(self, policy: str, point: Point, seed: str) -> Figures:
        """One run; the same seed gives the same requests whatever the policy.

        Raises:
            DatasetError: the load's file is not what it should be.
        """
        config = msgspec.structs.replace(self.config, scheduling_policy=policy)
        client = Client(
            jobs=self._jobs(point, seed),
            pace=self.load.pace(point, seed),
            seed=seed,
            tenants=self.tenants,
            sessions=self.sessions,
            think_time_s=self.load.think_time,
            overhead_s=self.calibration.request_overhead_s,
            duration_s=self.load.duration,
        )
        outcome = simulate(self.engine, config, self.calibration.step_time, client)
        return compute(outcome, policy, point, self.load.objectives)

    def highest_rate(self, policy: str, part: float) -> HighestRate:
        """The highest rate of arrivals at which ``part`` of the requests meets the objectives. A trace is replayed
        faster or slower.

        Raises:
            DatasetError: the load's file is not what it should be.
        """
        seed = f"{self.load.seed} rate"
        dataset = self.load.dataset
        if not isinstance(dataset, Trace):
            return highest_rate(policy, part, 1.0, lambda rate: self.run(policy, Point(rate=rate), seed))
        arrivals = dataset.arrivals()
        count = len(arrivals) if self.load.num_requests is None else min(len(arrivals), self.load.num_requests)
        lasting = arrivals[count - 1].at
        recorded = count / lasting if lasting > 0 else float(count)

        def replay(rate: float) -> Figures:
            faster = dataclasses.replace(dataset, speed=rate / recorded)
            there = dataclasses.replace(self, load=dataclasses.replace(self.load, dataset=faster))
            return there.run(policy, Point(), seed)

        return highest_rate(policy, part, recorded, replay)

    def _jobs(self, point: Point, seed: str) -> Iterator[Job]:
        dataset = self.load.dataset
        if isinstance(dataset, RandomPrompts) and not isinstance(dataset.units, TokenIds):
            # Later turns are sent as words, about a token each: here they are tokens.
            dataset = dataclasses.replace(dataset, units=TokenIds(0, 1 << 15))
        return islice(dataset.jobs(seed), self.load.number_of_jobs(point))
