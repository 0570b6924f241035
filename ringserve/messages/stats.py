"""What is measured: a step's times and the scheduler's counters, which travel with the outputs up to the frontend."""

from __future__ import annotations

from ringserve.messages.structs import Part


class StepTimes(Part, frozen=True):
    """Where one step spent its time (``time.monotonic_ns()``)."""

    step_id: int
    scheduled_ns: int
    """Scheduler: the step was planned and put into the executor's ring."""
    executor_received_ns: int
    executor_started_ns: int
    """Executor: the forward pass began."""
    executor_finished_ns: int
    """Executor: tokens are sampled, the result is about to be sent."""
    result_received_ns: int = 0
    """Scheduler."""
    num_tokens: int = 0
    num_sequences: int = 0


class EngineStats(Part, frozen=True):
    """Counters since the scheduler started, and gauges, as of the step that carries them."""

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    """Usable pages (page 0 is never given out and not counted)."""
    num_preemptions: int
    preempted_tokens: int
    """Tokens computed again after preemption; what the prefix cache still had is not among them."""
    num_steps: int
    num_computed_tokens: int
    num_prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    num_prefix_hits: int = 0
    num_sessions: int = 0
    executor_busy_ns: int = 0
    """The executor computed steps."""
    executor_idle_ns: int = 0
    """It had none although sequences were to be computed: the gaps between a step's end and the next one's start."""
    swapped_out_pages: int = 0
    """KV pages of preempted sequences copied to the host."""
    swapped_in_pages: int = 0
    """Those that came back; the others were aborted meanwhile, or the prefix cache still had them."""
    swapped_in_tokens: int = 0
    """Tokens that were not computed again after preemption, since they came back from the host."""
    num_swapped_pages: int = 0
    """Host pages in use now."""
    num_host_pages: int = 0
    step_costs: tuple[float, ...] = ()
    """What the step-time model has come to, once it is worth acting on: seconds, in the order of ``STEP_COSTS``."""


STEP_COSTS = ("base", "sequence", "token", "prompt_token", "context_token", "pair")
"""Terms of a step's time: what it costs as such, and for each of these (``engine/step_time.py``)."""
