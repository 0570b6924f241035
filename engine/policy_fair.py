"""Fair shares between tenants: the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024, algorithm 2), with weights.

Each tenant has a counter of the service it got: prompt tokens and output tokens at their prices, divided by its weight.
Whoever has the smallest counter of those that wait starts next. A tenant that comes back after a pause is lifted to
where the others are: nobody saves up service by being away.

While two tenants always have requests waiting, the service either got (over its weight) in any interval differs by at
most 2 x max(input price x longest prompt, output price x tokens that the running sequences can hold).

What the prefix cache spared is not charged; what a preemption throws away is not charged again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from ringserve.engine.policy_ranked import ByArrival, RankedPolicy
from ringserve.engine.sequence import Sequence

MAX_ACCOUNTS = 1024
"""Beyond it idle accounts are dropped: tenants' names are the clients' to choose."""


@dataclass(slots=True)
class Tenant:
    """One tenant's account."""

    weight: float
    counter: float
    waiting: RankedPolicy = field(default_factory=lambda: RankedPolicy(ByArrival()))


class FairPolicy:
    """One queue for each tenant, in the order of arrival."""

    def __init__(self, input_price: float, output_price: float, weights: Mapping[str, float]) -> None:
        self._input_price = input_price
        self._output_price = output_price
        self._weights = dict(weights)
        self._tenants: dict[str, Tenant] = {}
        self._waiting: dict[str, Tenant] = {}
        """Those of them that have something waiting."""
        self._floor = 0.0
        """Where a tenant starts that had nothing waiting. Never falls."""

    def counters(self) -> dict[str, float]:
        """Service by tenant, over its weight."""
        return {name: tenant.counter for name, tenant in self._tenants.items()}

    def __len__(self) -> int:
        return sum(len(tenant.waiting) for tenant in self._waiting.values())

    def __iter__(self) -> Iterator[Sequence]:
        for tenant in self._waiting.values():
            yield from tenant.waiting

    def add(self, sequence: Sequence) -> None:
        name = sequence.request.tenant
        tenant = self._tenant(name)
        if name not in self._waiting:
            # One that was preempted was never away: its tenant's account went on.
            if sequence.num_preemptions == 0:
                tenant.counter = max(tenant.counter, self._floor)
            self._waiting[name] = tenant
        tenant.waiting.add(sequence)
        self._raise_floor()

    def remove(self, sequence: Sequence) -> None:
        name = sequence.request.tenant
        tenant = self._tenant(name)
        tenant.waiting.remove(sequence)
        if not tenant.waiting:
            del self._waiting[name]
            if not self._waiting:  # the last one to leave: where the next ones start
                self._floor = max(self._floor, tenant.counter)

    def head(self) -> Sequence | None:
        if not self._waiting:
            return None
        self._raise_floor()
        # Of equal accounts the one whose turn it has been for longest.
        return min(self._waiting.values(), key=_turn).waiting.head()

    def ahead_of(self, sequence: Sequence) -> list[Sequence]:
        """Its tenant's queue, and as many of each other tenant: accounts take turns."""
        own = self._waiting.get(sequence.request.tenant)
        ahead = own.waiting.ahead_of(sequence) if own is not None else []
        turns = len(ahead) + 1
        for tenant in self._waiting.values():
            if tenant is not own:
                ahead += islice(tenant.waiting, turns)
        return ahead

    def in_order(self, running: Iterable[Sequence]) -> list[Sequence]:
        return list(running)

    def precedes(self, head: Sequence, running: Sequence) -> bool:
        return False

    def displaces(self, head: Sequence, running: Sequence) -> bool:
        return False

    def charge_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        self._charge(sequence.request.tenant, self._input_price * num_tokens)

    def charge_outputs(self, sequences: Iterable[Sequence]) -> None:
        for name, num_tokens in Counter([sequence.request.tenant for sequence in sequences]).items():
            self._charge(name, self._output_price * num_tokens)

    def _charge(self, name: str, price: float) -> None:
        tenant = self._tenant(name)
        tenant.counter += price / tenant.weight

    def check_integrity(self, running: Iterable[Sequence]) -> list[str]:
        problems = []
        for name, tenant in self._tenants.items():
            problems += tenant.waiting.check_integrity(())
            if bool(tenant.waiting) != (name in self._waiting):
                problems.append(f"tenant {name!r} has {len(tenant.waiting)} waiting and is in the wrong group")
            problems += [f"{s} waits with tenant {name!r}" for s in tenant.waiting if s.request.tenant != name]
        return problems

    def _tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= MAX_ACCOUNTS:
                self._forget()
            tenant = self._tenants[name] = Tenant(self._weights.get(name, 1.0), self._floor)
        return tenant

    def _forget(self) -> None:
        """Drop the idle accounts that say least: those that are hardly above where their tenants would start anew."""
        idle = [name for name in self._tenants if name not in self._waiting]
        idle.sort(key=lambda name: self._tenants[name].counter)
        for name in idle[: MAX_ACCOUNTS // 2]:
            del self._tenants[name]

    def _raise_floor(self) -> None:
        self._floor = max(self._floor, min(tenant.counter for tenant in self._waiting.values()))


def _turn(tenant: Tenant) -> tuple[float, int]:
    head = tenant.waiting.head()
    return tenant.counter, head.arrival if head is not None else 0
