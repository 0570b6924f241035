"""A step's rows: who advances by how many tokens, who starts, and who must go when pages run out.

A step takes the running sequences in the policy's order, those that decode before those in the middle of a prompt, then
admits from the head of the queue. The victim of preemption is the last in that order; the first is never preempted:
something always advances.

Pages are taken so that nobody is thrown out again at once:

* A sequence starts only with the pages of all its known tokens, so a prompt once begun is never stuck half-way; with
  ``kv_reservation`` "sequence" even with those of everything it may still generate, and nobody is ever preempted for
  pages.
* Every running sequence will soon want another page: unless nothing runs, one for each stays free.
* One that was preempted resumes only where it, and all that run, can go on for ``preemption_resume_steps`` steps.

This module knows no clock and no message.
"""

from __future__ import annotations

from collections.abc import Sequence as Order

from ringserve.config import SchedulerConfig
from ringserve.engine.policy import Policy
from ringserve.engine.residents import Residents
from ringserve.engine.scheduler_step import StepPlan
from ringserve.engine.sequence import Sequence, SequenceStatus
from ringserve.engine.token_budget import TokenBudget


class StepPlanner:
    """Plans one step after another over the same queue and residents."""

    def __init__(self, residents: Residents, policy: Policy, budget: TokenBudget, config: SchedulerConfig) -> None:
        self._residents = residents
        self._kv = residents.kv
        self._waiting = policy
        self._budget = budget
        self._reserves_everything = config.kv_reservation == "sequence"
        self._resume_steps = config.preemption_resume_steps
        self._misfit: tuple[Sequence, int] | None = None
        """The head of the queue that did not fit, and the residents' version then."""
        self._order: Order[Sequence] = ()
        self._order_version = 0
        self.num_preemptions = 0
        self.num_resumptions = 0
        self.num_tokens_lost = 0
        """Tokens computed again after preemption."""

    def plan(self) -> StepPlan:
        """The next step; empty where nothing can be computed now."""
        plan = StepPlan(self._budget.max_num_tokens)
        page_size = self._kv.page_size
        in_prompt = []
        running = SequenceStatus.RUNNING
        for sequence in self._in_order():
            if sequence.status is not running:
                continue  # preempted for an earlier one in this loop
            known = sequence.num_known_tokens
            num_tokens = known - sequence.num_computed_tokens
            if num_tokens == 0 or known >= sequence.max_total_tokens:
                continue  # all that its length allows is drawn or being drawn
            if num_tokens > 1:
                in_prompt.append(sequence)
            elif plan.budget > 0:
                if known > len(sequence.block_table) * page_size:
                    if (pages := self._kv.grow_by_one(sequence.block_table)) is None:
                        self._advance(sequence, plan)  # at somebody's expense
                        continue
                    plan.new_pages[sequence] = pages
                plan.num_tokens[sequence] = 1
                plan.budget -= 1
        if in_prompt or len(self._waiting):
            self._budget.limit_prompts(plan)
        for sequence in in_prompt:
            self._admit(plan, sequence)
            if sequence.status is running:
                self._advance(sequence, plan)
        self._admit(plan, None)
        return plan

    def _in_order(self) -> Order[Sequence]:
        """The running sequences in the policy's order, which stays while nobody enters or leaves."""
        if self._order_version != self._residents.version:
            self._order = self._waiting.in_order(self._residents.running)
            self._order_version = self._residents.version
        return self._order

    def _advance(self, sequence: Sequence, plan: StepPlan) -> None:
        num_tokens = sequence.num_schedulable_tokens
        num_tokens = plan.chunk(sequence.num_computed_tokens, num_tokens) if num_tokens > 1 else min(1, plan.budget)
        if num_tokens == 0:
            return
        kv = self._kv
        while (pages := kv.grow(sequence.block_table, sequence.num_computed_tokens + num_tokens)) is None:
            victim = self._in_order()[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return
        plan.add(sequence, num_tokens, pages)

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        """Take a sequence's pages away; later they come back from the host, or are computed again from its tokens.

        Tokens that steps in flight draw for it are kept when they arrive, so it is not sent again before that.
        """
        self.num_preemptions += 1
        victim.num_preemptions += 1
        plan.remove(victim)
        victim.num_thrown_away = victim.num_computed_tokens
        self._residents.preempt(victim)
        self._waiting.add(victim)

    def _admit(self, plan: StepPlan, before: Sequence | None) -> None:
        """Start sequences from the head of the queue; a head that has to wait lets no later one pass.

        With ``before``, a running sequence, only those that the policy serves before it.
        What the prefix cache or the host has is not computed again.
        """
        while plan.budget > 0 and (sequence := self._waiting.head()) is not None:
            if before is not None and not self._waiting.precedes(sequence, before):
                return
            if sequence.num_pending_tokens or self._misfit == (sequence, self._residents.version):
                return
            cached = self._residents.prefixes.lookup(sequence)
            if cached is None:
                return
            # Those in the prefix cache, or in pages that come back from the host.
            num_computed = max(self._residents.prefixes.num_cached(sequence, cached), sequence.num_swapped_tokens)
            if plan.chunks is not None and plan.chunks.limit(num_computed) == 0:
                return  # before anybody is thrown out for it
            if not self._make_room(sequence, cached, plan):
                self._misfit = (sequence, self._residents.version)
                return
            self._waiting.remove(sequence)
            num_tokens = plan.chunk(num_computed, sequence.num_known_tokens - num_computed)
            self._start(sequence, cached, num_tokens, plan)

    def _make_room(self, sequence: Sequence, cached: list[int], plan: StepPlan) -> bool:
        """See that there are a slot and pages for a waiting sequence, at the expense of those that it displaces."""
        residents, kv = self._residents, self._kv
        num_new_pages = kv.pages_for(self._tokens_to_hold(sequence)) - len(cached)
        victims = None
        while True:
            # Cached pages that only victims hold become idle with them: free by their number, and not to be had.
            missing = num_new_pages + kv.num_idle(cached) - kv.num_free_pages
            if residents.running:
                missing += self._headroom(sequence)
            if residents.free_slots and missing <= 0:
                return True
            if victims is None:
                order = self._in_order()
                victims = [running for running in order if self._waiting.displaces(sequence, running)]
                if missing > 0 and not self._would_do(victims, sequence, cached, missing):
                    return False
            if not victims:
                return False
            self._preempt(victims.pop(), plan)

    def _would_do(self, victims: list[Sequence], sequence: Sequence, cached: list[int], missing: int) -> bool:
        """Whether ``missing`` pages come free if all of these go, so that nobody goes in vain: those that nobody else
        holds, nor ``sequence`` starts with, and what was kept for their growth."""
        if len(victims) == len(self._residents.running):
            return True  # alone, everybody fits
        missing -= sum(self._kept_for(victim, sequence) for victim in victims)
        tables = [victim.block_table for victim in victims]
        if missing > sum(map(len, tables)):
            return False  # the usual case, told at little cost
        return missing <= self._kv.num_freed(tables, cached)

    def _tokens_to_hold(self, sequence: Sequence) -> int:
        """Tokens whose pages a sequence takes as it starts."""
        if self._reserves_everything:
            return sequence.max_total_tokens
        return sequence.num_known_tokens

    def _headroom(self, sequence: Sequence) -> int:
        """Pages that must stay free beside those that a sequence takes, if others run."""
        if not sequence.num_preemptions and not self._reserves_everything:
            return len(self._residents.running) + 1  # the sum below
        return sum(self._kept_for(each, sequence) for each in (sequence, *self._residents.running))

    def _kept_for(self, each: Sequence, newcomer: Sequence) -> int:
        """Pages that stay free for the growth of a running sequence, or of the newcomer itself."""
        if self._reserves_everything:
            return 0
        if not newcomer.num_preemptions:
            return 1
        num_tokens = min(each.num_known_tokens + self._resume_steps, each.max_total_tokens)
        held = len(each.block_table) or self._kv.pages_for(each.num_known_tokens)
        return max(1, self._kv.pages_for(num_tokens) - held)

    def _start(self, sequence: Sequence, cached: list[int], num_tokens: int, plan: StepPlan) -> None:
        pages = self._residents.enter(sequence, cached, self._tokens_to_hold(sequence))
        if sequence.num_thrown_away:
            self.num_resumptions += 1
            self.num_tokens_lost += max(0, sequence.num_thrown_away - sequence.num_computed_tokens)
            sequence.num_thrown_away = 0
        if not sequence.first_scheduled_ns:
            self._waiting.charge_prompt(sequence, sequence.request.num_prompt_tokens - sequence.num_cached_tokens)
        plan.admitted[sequence] = sequence.num_computed_tokens
        plan.add(sequence, num_tokens, pages)
