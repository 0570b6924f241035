"""Collects the rows of one ``TextOutputs``."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ringserve.messages.columns import pack_i32, pack_u64
from ringserve.messages.logprobs import TokenLogprob
from ringserve.messages.requests import FinishReason
from ringserve.messages.stats import EngineStats, StepTimes
from ringserve.messages.text_outputs import TextFinish, TextLogprobs, TextOutputs, TextStart


class TextBatch:
    """Rows for one frontend."""

    def __init__(self) -> None:
        self._request_ids: list[int] = []
        self._choices: list[int] = []
        self._texts: list[str] = []
        self._token_counts: list[int] = []
        self._token_ids: list[int] = []
        self._starts: list[TextStart] = []
        self._finishes: list[TextFinish] = []
        self._logprobs: list[TextLogprobs] = []

    @property
    def next_row(self) -> int:
        return len(self._request_ids)

    def add(
        self,
        request_id: int,
        choice: int,
        text: str = "",
        token_ids: Sequence[int] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        start: TextStart | None = None,
        finish: TextFinish | None = None,
    ) -> None:
        """Append a row; ``start`` and ``finish`` were made with ``next_row``."""
        if logprobs:
            self._logprobs.append(TextLogprobs(self.next_row, logprobs))
        if start is not None:
            self._starts.append(start)
        if finish is not None:
            self._finishes.append(finish)
        self._request_ids.append(request_id)
        self._choices.append(choice)
        self._texts.append(text)
        self._token_counts.append(len(token_ids))
        self._token_ids.extend(token_ids)

    def add_final(
        self,
        request_id: int,
        choice: int,
        reason: FinishReason,
        num_output_tokens: int = 0,
        stop_reason: str | int | None = None,
        text: str = "",
    ) -> None:
        """Append the last row of a choice that ended without the scheduler."""
        finish = TextFinish(self.next_row, reason, stop_reason, num_output_tokens)
        self.add(request_id, choice, text, finish=finish)

    def message(
        self,
        times: StepTimes | None = None,
        stats: EngineStats | None = None,
        tokens_sent_ns: int = 0,
        received_ns: int = 0,
    ) -> TextOutputs:
        """The message, stamped as sent now."""
        return TextOutputs(
            request_ids=pack_u64(self._request_ids),
            choices=pack_i32(self._choices),
            texts=tuple(self._texts),
            token_counts=pack_i32(self._token_counts),
            token_ids=pack_i32(self._token_ids),
            starts=tuple(self._starts),
            finishes=tuple(self._finishes),
            logprobs=tuple(self._logprobs),
            times=times,
            stats=stats,
            tokens_sent_ns=tokens_sent_ns,
            received_ns=received_ns,
            sent_ns=time.monotonic_ns(),
        )
