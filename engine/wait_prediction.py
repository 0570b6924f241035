"""How long a request will wait, and when it will be done: from what waits before it and the measured rates.

A fluid picture of the queue. Each running sequence leaves its slot when its answer is as long as answers have been of
late (or as long as it may get), each one ahead takes the slot that is free first and holds it for its own answer, and
every prompt ahead takes the time that its chunks add to the steps. Step times come from the step-time model; slots are
those that the pages allow for sequences of such lengths.

Predictions are for decisions (refuse now rather than late) and for ``Retry-After``; they know nothing of early stops,
of what comes later, or of prompts in the prefix cache but for the request's own.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ringserve.engine.sequence import Request, Sequence
from ringserve.engine.step_time import StepCosts, StepShape, StepTimeModel


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a request that comes now; seconds from now."""

    wait: float
    """Until its first step."""
    first_token: float
    finish: float
    time_per_token: float
    """Between its tokens, while those run that run then."""


class WaitPredictor:
    """Predicts from the queue as it is."""

    def __init__(self, model: StepTimeModel, max_num_seqs: int, max_num_batched_tokens: int, capacity: int) -> None:
        self._model = model
        self._max_num_seqs = max_num_seqs
        self._chunk = max_num_batched_tokens
        self._capacity = capacity
        """Tokens that the KV pool holds."""
        self._mean_answer = 0.0
        """Tokens of recent answers; 0: none yet."""

    def on_finish(self, num_output_tokens: int) -> None:
        """An answer came to its own end, or to its limit."""
        if self._mean_answer:
            self._mean_answer += 0.05 * (num_output_tokens - self._mean_answer)
        else:
            self._mean_answer = float(num_output_tokens)

    def expected_answer(self, request: Request) -> float:
        """Tokens that each of its choices will probably have: what answers have been of late, at most what it may
        have."""
        most = float(max(1, request.max_total_tokens - request.num_prompt_tokens))
        return min(most, max(1.0, self._mean_answer)) if self._mean_answer else most

    def predict(
        self,
        request: Request,
        running: Collection[Sequence],
        ahead: Iterable[Sequence],
        num_cached_tokens: int = 0,
    ) -> Prediction | None:
        """When ``request`` would be served, behind these; None while too little was measured to say."""
        if not self._model.is_fitted:
            return None
        costs = self._model.costs
        ahead = list(ahead)
        length = request.num_prompt_tokens + self.expected_answer(request)
        lengths = [s.request.num_prompt_tokens + self.expected_answer(s.request) for s in (*running, *ahead)]
        mean_length = (sum(lengths) + length) / (len(lengths) + 1)
        lanes = max(1, min(self._max_num_seqs, int(self._capacity / mean_length)))

        busy = min(lanes, len(running) + len(ahead))
        decoding = StepShape(busy, busy, 0, int(busy * mean_length))
        step_seconds = costs.predict(decoding)
        prompts = sum(self._prefill_seconds(costs, each, each.num_swapped_tokens, busy) for each in ahead)
        prompts += sum(
            self._prefill_seconds(costs, each, each.num_computed_tokens, busy)
            for each in running
            if each.num_schedulable_tokens > 1
        )
        wait = self._steps_until_free(lanes, running, ahead) * step_seconds + prompts

        beside = min(lanes - 1, len(running) + len(ahead))
        decoding = StepShape(beside, beside, 0, int(beside * mean_length))
        num_new = request.num_prompt_tokens - num_cached_tokens
        num_chunks = max(1, -(-num_new // max(1, self._chunk - beside)))
        middle = num_cached_tokens + num_new // 2
        first_token = wait + num_chunks * costs.predict(decoding.with_chunk(middle, -(-num_new // num_chunks)))
        time_per_token = costs.predict(decoding.with_chunk(int(length), 1))
        finish = first_token + (self.expected_answer(request) - 1) * time_per_token
        return Prediction(wait, first_token, finish, time_per_token)

    def _prefill_seconds(self, costs: StepCosts, sequence: Sequence, num_computed: int, num_decoding: int) -> float:
        """What a prompt adds to the steps of those that decode; all of their time if nobody does."""
        num_tokens = sequence.num_known_tokens - num_computed
        num_chunks = -(-num_tokens // max(1, self._chunk - num_decoding))
        seconds = costs.of_row(num_computed + num_tokens // 2, -(-num_tokens // max(1, num_chunks)))
        if not num_decoding:
            seconds += costs.base
        return num_chunks * seconds

    def _steps_until_free(self, lanes: int, running: Collection[Sequence], ahead: Iterable[Sequence]) -> float:
        """Decode steps until a slot is left for one behind those ``ahead``."""
        ends = [self._steps_left(sequence) for sequence in running]
        heapq.heapify(ends)
        while len(ends) > lanes:  # more run than pages allow for long: who ends first makes no room
            heapq.heappop(ends)
        for sequence in ahead:
            answer = self._steps_left(sequence)
            if len(ends) < lanes:
                heapq.heappush(ends, answer)
            else:
                heapq.heapreplace(ends, ends[0] + answer)
        return ends[0] if len(ends) >= lanes else 0.0

    def _steps_left(self, sequence: Sequence) -> float:
        """Of an answer that is longer than most already, a quarter of what most have."""
        request = sequence.request
        expected = self.expected_answer(request)
        left = max(expected - len(sequence.output_token_ids), expected / 4)
        most = request.max_total_tokens - request.num_prompt_tokens - len(sequence.output_token_ids)
        return max(0.0, min(left, float(most)))
