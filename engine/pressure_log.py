"""One line when sequences are preempted, not one for each: what it cost, and what helps."""

from __future__ import annotations

import logging

from ringserve.engine.scheduler import Scheduler

logger = logging.getLogger(__name__)

INTERVAL_NS = 60_000_000_000
"""Between two lines."""


class PressureLog:
    """Watches a scheduler's counters."""

    def __init__(self) -> None:
        self._num_preemptions = 0
        self._num_resumptions = 0
        self._num_tokens = 0
        self._num_swapped_tokens = 0
        self._next_ns = 0

    def look(self, scheduler: Scheduler, now_ns: int) -> None:
        """Warn if preempted sequences have resumed since the last line, which was some time ago."""
        if scheduler.num_resumptions == self._num_resumptions or now_ns < self._next_ns:
            return
        stats = scheduler.stats()
        swapped = ""
        if stats.num_host_pages:
            num_tokens = stats.swapped_in_tokens - self._num_swapped_tokens
            swapped = (
                f" and {num_tokens} brought back from the host ({stats.num_swapped_pages} of "
                f"{stats.num_host_pages} pages of the swap space in use)"
            )
        logger.warning(
            "%d preempted (priority, or KV pages ran out), %d tokens computed again%s for it since the last such line; "
            "%d of %d pages free, %d running, %d waiting. A larger --kv-cache-memory or a smaller --max-num-seqs "
            "helps; --kv-reservation sequence rules it out.",
            stats.num_preemptions - self._num_preemptions,
            stats.preempted_tokens - self._num_tokens,
            swapped,
            stats.num_free_pages,
            stats.num_pages,
            stats.num_running,
            stats.num_waiting,
        )
        self._num_preemptions, self._num_tokens = stats.num_preemptions, stats.preempted_tokens
        self._num_swapped_tokens = stats.swapped_in_tokens
        self._num_resumptions = scheduler.num_resumptions
        self._next_ns = now_ns + INTERVAL_NS
