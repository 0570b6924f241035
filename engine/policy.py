"""Who is served first: the queue of waiting sequences, and who must make room.

A policy is the waiting queue itself, since its data structure is what tells one policy from another. The scheduler
asks it for the head, for the order in which running sequences are served, and for a victim when pages run out; it never
looks at priorities, deadlines or tenants. Whoever is first in ``in_order`` is never a victim, so that something always
advances.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Order
from typing import Protocol

from ringserve.config import SchedulerConfig, parse_tenant_weights
from ringserve.engine.policy_fair import FairPolicy
from ringserve.engine.policy_ranked import ByArrival, ByDeadline, ByPriority, RankedPolicy
from ringserve.engine.sequence import Sequence


class Policy(Protocol):
    """The waiting sequences, in an order."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def add(self, sequence: Sequence) -> None:
        """It waits: it is new, or was preempted (and keeps the place it had)."""

    def remove(self, sequence: Sequence) -> None:
        """It waits no more: it starts to run, or is over."""

    def head(self) -> Sequence | None:
        """Who is to start next."""

    def ahead_of(self, sequence: Sequence) -> Order[Sequence]:
        """Those that wait and, as things are, start before this one, which may not wait yet: for predictions."""

    def in_order(self, running: Iterable[Sequence]) -> Order[Sequence]:
        """Running sequences in the order in which they get what a step has; victims are taken from the end."""

    def precedes(self, head: Sequence, running: Sequence) -> bool:
        """A waiting one gets a step's tokens before this running one, which is in the middle of its prompt."""

    def displaces(self, head: Sequence, running: Sequence) -> bool:
        """A waiting one may throw this running one out."""

    def charge_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        """A sequence starts for the first time, with so many tokens of its prompt to be computed."""

    def charge_outputs(self, sequences: Iterable[Sequence]) -> None:
        """Each of these got a token."""

    def check_integrity(self, running: Iterable[Sequence]) -> list[str]:
        """What is wrong with the order; empty when sound."""


def make_policy(config: SchedulerConfig) -> Policy:
    """The policy that ``--scheduling-policy`` names."""
    match config.scheduling_policy:
        case "fcfs":
            return RankedPolicy(ByArrival())
        case "priority":
            return RankedPolicy(ByPriority(int(config.priority_aging * 1e9)))
        case "deadline":
            return RankedPolicy(ByDeadline(int(config.default_deadline * 1e9)))
        case "fair":
            weights = parse_tenant_weights(config.tenant_weights)
            return FairPolicy(config.input_token_price, config.output_token_price, weights)
