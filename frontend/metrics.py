"""Prometheus metrics: vLLM's names (labels ``model_name``, ``engine``) and ``ringserve_*`` for what is our own.

What counts what: ``request_success``, ``time_to_first_token``, ``e2e_request_latency``, the queue, prefill, decode,
inference and per-token times and ``request_generation_tokens`` have one observation for each choice;
``prompt_tokens``, ``request_prompt_tokens``, ``request_params_*`` and ``request_max_num_generation_tokens`` have one
for each prompt. Everything is derived from the messages of the tokenizer process; nothing is polled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ringserve.frontend import buckets
from ringserve.frontend.ring_metrics import RingMetrics
from ringserve.messages.requests import FinishReason, GenerateRequest, RequestRefused
from ringserve.messages.startup import ExecutorReady
from ringserve.messages.stats import STEP_COSTS, EngineStats, StepTimes
from ringserve.messages.text_outputs import TextOutputs, TextStart
from ringserve.shm import DoorbellObserver, RingObserver

_LABELS = ("model_name", "engine")
_ENGINE = "0"
_NS = 1e-9
REJECTION_REASONS = (
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "max_num_queued_per_tenant",
    "max_predicted_wait",
    "queue_timeout",
    "deadline_unreachable",
)
"""Codes of refusals that are the server's want of time or room, not the request's fault."""
_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


class Metrics:
    """One frontend's metrics."""

    def __init__(self, model_name: str, version: str) -> None:
        self._registry = CollectorRegistry()
        self._values = (model_name, _ENGINE)
        self._last_stats: EngineStats | None = None
        self._last_times: StepTimes | None = None
        self._ready = False

        self._running = self._gauge("vllm:num_requests_running", "Sequences being computed.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Sequences waiting to be computed.")
        self._kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.")
        self._sessions = self._gauge("ringserve_sessions", "Conversations whose pages are kept.")
        self._preemptions = self._counter("vllm:num_preemptions", "Preemptions.")
        self._prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._prefix_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._cached_tokens = self._counter("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        success = self._family_counter("vllm:request_success", "Choices that ended.", "finished_reason")
        self._finished = {reason: success.labels(*self._values, reason) for reason in _FINISH_REASONS}
        self._rejections = self._family_counter(
            "vllm:admission_rejections", "Requests refused for want of time or room.", "reason"
        )
        for reason in REJECTION_REASONS:
            self._rejections.labels(*self._values, reason)

        self._refused = self._family_counter("ringserve_refused_requests", "Refused behind the frontend.", "status")

        latency = buckets.LATENCY
        self._iteration_tokens = self._histogram(
            "vllm:iteration_tokens_total", "Tokens computed in a step.", buckets.ITERATION_TOKENS
        )
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds",
            "From the request's head to its first token.",
            buckets.TIME_TO_FIRST_TOKEN,
        )
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Between tokens.", buckets.INTER_TOKEN)
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", buckets.INTER_TOKEN
        )
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "From head to last token.", latency)
        self._queue_time = self._histogram(
            "vllm:request_queue_time_seconds", "From queued to first scheduled.", latency
        )
        self._prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds", "From first scheduled to first token.", latency
        )
        self._decode_time = self._histogram("vllm:request_decode_time_seconds", "From first to last token.", latency)
        self._inference_time = self._histogram(
            "vllm:request_inference_time_seconds", "From first scheduled to last token.", latency
        )
        self._params_n = self._histogram("vllm:request_params_n", "n.", buckets.CHOICES)

        self._steps = self._counter("ringserve_steps", "Engine steps.")
        self._overlapped_steps = self._counter(
            "ringserve_steps_overlapped",
            "Steps that were in the executor's ring before the last one's result was sent.",
        )
        self._step_sequences = self._counter("ringserve_step_sequences", "Sequences advanced, summed over steps.")
        self._preempted_tokens = self._counter("ringserve_preempted_tokens", "Tokens computed again after preemption.")
        self._swapped_tokens = self._counter(
            "ringserve_swapped_tokens", "Tokens not computed again after preemption: they came back from the host."
        )
        self._swap_space = self._gauge("ringserve_swap_space_pages", "KV pages that the swap space holds.")
        self._swapped_pages = self._gauge("ringserve_swapped_pages", "KV pages in the swap space.")
        self._pages_out = self._counter("ringserve_pages_swapped_out", "KV pages copied to the host.")
        self._pages_in = self._counter("ringserve_pages_swapped_in", "KV pages that came back.")
        self._executor_busy = self._counter("ringserve_executor_busy_seconds", "The executor computed steps.")
        self._executor_idle = self._counter(
            "ringserve_executor_idle_seconds",
            "The executor had no step although sequences were to be computed: gaps between steps.",
        )
        self._step_costs = Gauge(
            "ringserve_step_cost_seconds",
            "The step-time model: what a step costs as such, and for each of these terms.",
            (*_LABELS, "term"),
            registry=self._registry,
        )
        self._disconnects = self._counter(
            "ringserve_client_disconnects", "Clients gone before their answer was complete."
        )
        self._slow_clients = self._counter("ringserve_slow_clients", "Streams cut off since the client did not read.")
        hops = Histogram(
            "ringserve_hop_seconds",
            "Time of a step's data on each way between and through the processes.",
            (*_LABELS, "hop"),
            registry=self._registry,
            buckets=buckets.HOP,
        )
        self._hops = {hop: hops.labels(*self._values, hop) for hop in _HOPS}
        stages = Histogram(
            "ringserve_request_stage_seconds",
            "A request's way to its first step.",
            (*_LABELS, "stage"),
            registry=self._registry,
            buckets=buckets.HOP,
        )
        self._stages = {stage: stages.labels(*self._values, stage) for stage in _STAGES}
        info = Gauge("ringserve_build_info", "Version.", (*_LABELS, "version"), registry=self._registry)
        info.labels(*self._values, version).set(1)

    def observe(self, observers: Sequence[RingObserver | DoorbellObserver]) -> None:
        """Show these rings and doorbells too."""
        self._registry.register(RingMetrics(observers, _LABELS, self._values))

    def on_ready(self, ready: ExecutorReady) -> None:
        """Histograms whose buckets depend on the model, and the cache's description."""
        if self._ready:
            return
        self._ready = True
        sizes = buckets.one_two_five(ready.max_model_len)
        self._request_prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Prompt length.", sizes)
        self._request_generation_tokens = self._histogram("vllm:request_generation_tokens", "Answer length.", sizes)
        self._max_generation_tokens = self._histogram(
            "vllm:request_max_num_generation_tokens", "Longest answer among the n of a request.", sizes
        )
        self._params_max_tokens = self._histogram("vllm:request_params_max_tokens", "max_tokens, clamped.", sizes)
        labels = ("block_size", "num_gpu_blocks", "cache_dtype")
        config = Gauge("vllm:cache_config_info", "KV cache.", (*_LABELS, *labels), registry=self._registry)
        config.labels(*self._values, str(ready.page_size), str(ready.num_pages), ready.kv_dtype).set(1)
        limits = ("page_size", "num_pages", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
        engine = Gauge("ringserve_engine_info", "Sizes.", (*_LABELS, *limits), registry=self._registry)
        engine.labels(*self._values, *(str(getattr(ready, name)) for name in limits)).set(1)

    def render(self) -> bytes:
        """The text exposition."""
        exposition: bytes = generate_latest(self._registry)
        return exposition

    # ------------------------------------------------------------------------------------------ per message

    def on_text_outputs(self, outputs: TextOutputs, now_ns: int) -> None:
        if outputs.stats is not None:
            self._on_stats(outputs.stats)
        times = outputs.times
        if times is None:
            return
        self._steps.inc()
        last = self._last_times
        if last is not None and times.step_id == last.step_id + 1 and times.scheduled_ns < last.executor_finished_ns:
            self._overlapped_steps.inc()
        self._last_times = times
        self._step_sequences.inc(times.num_sequences)
        self._iteration_tokens.observe(times.num_tokens)
        stamps = _stamps(times, outputs, now_ns)
        for hop, (start, end) in zip(_HOPS, pairwise(stamps), strict=True):
            self._hops[hop].observe(max(0, end - start) * _NS)

    def _on_stats(self, stats: EngineStats) -> None:
        last = self._last_stats
        if last is None or stats.num_steps < last.num_steps:  # the first ones, or the scheduler is a new one
            last = EngineStats(0, 0, 0, 0, 0, 0, 0, 0)
        self._running.set(stats.num_running)
        self._sessions.set(stats.num_sessions)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(1 - stats.num_free_pages / stats.num_pages if stats.num_pages else 0.0)
        self._preemptions.inc(max(0, stats.num_preemptions - last.num_preemptions))
        self._preempted_tokens.inc(max(0, stats.preempted_tokens - last.preempted_tokens))
        self._swapped_tokens.inc(max(0, stats.swapped_in_tokens - last.swapped_in_tokens))
        self._pages_out.inc(max(0, stats.swapped_out_pages - last.swapped_out_pages))
        self._pages_in.inc(max(0, stats.swapped_in_pages - last.swapped_in_pages))
        self._swap_space.set(stats.num_host_pages)
        self._swapped_pages.set(stats.num_swapped_pages)
        self._prefix_queries.inc(max(0, stats.num_prefix_queries - last.num_prefix_queries))
        self._prefix_hits.inc(max(0, stats.num_prefix_hits - last.num_prefix_hits))
        self._executor_busy.inc(max(0, stats.executor_busy_ns - last.executor_busy_ns) * _NS)
        self._executor_idle.inc(max(0, stats.executor_idle_ns - last.executor_idle_ns) * _NS)
        if stats.step_costs:
            for term, seconds in zip(STEP_COSTS, stats.step_costs, strict=True):
                self._step_costs.labels(*self._values, term).set(seconds)
        self._last_stats = stats

    # ------------------------------------------------------------------------------------------ per request

    def on_prompt(self, start: TextStart, request: GenerateRequest) -> None:
        """A prompt gave its first output."""
        self._prompt_tokens.inc(start.num_prompt_tokens)
        self._cached_tokens.inc(start.num_cached_tokens)
        self._request_prompt_tokens.observe(start.num_prompt_tokens)
        self._params_n.observe(request.n)
        self._params_max_tokens.observe(start.max_tokens)
        stamps = (
            request.received_ns,
            request.sent_ns,
            start.tokenized_ns,
            start.queued_ns,
            start.first_scheduled_ns,
        )
        for stage, begin, end in zip(_STAGES, stamps[:-1], stamps[1:], strict=True):
            self._stages[stage].observe(max(0, end - begin) * _NS)

    def on_tokens(self, count: int) -> None:
        self._generation_tokens.inc(count)

    def on_first_token(self, received_ns: int, now_ns: int) -> None:
        self._ttft.observe((now_ns - received_ns) * _NS)

    def on_next_token(self, last_ns: int, now_ns: int) -> None:
        self._itl.observe((now_ns - last_ns) * _NS)

    def on_finish(
        self,
        reason: FinishReason,
        num_tokens: int,
        *,
        received_ns: int,
        queued_ns: int,
        first_scheduled_ns: int,
        first_token_ns: int,
        last_token_ns: int,
        now_ns: int,
    ) -> None:
        """A choice's final message; times are 0 for what never happened."""
        self._finished[reason].inc()
        self._request_generation_tokens.observe(num_tokens)
        self._e2e.observe((now_ns - received_ns) * _NS)
        if not first_scheduled_ns:
            return
        self._queue_time.observe(max(0, first_scheduled_ns - queued_ns) * _NS)
        if not first_token_ns:
            return
        self._prefill_time.observe(max(0, first_token_ns - first_scheduled_ns) * _NS)
        self._decode_time.observe((last_token_ns - first_token_ns) * _NS)
        self._inference_time.observe(max(0, last_token_ns - first_scheduled_ns) * _NS)
        if num_tokens > 1:
            self._tpot.observe((last_token_ns - first_token_ns) * _NS / (num_tokens - 1))

    def on_request_finish(self, most_tokens: int) -> None:
        """All choices of a prompt ended; the longest had ``most_tokens``."""
        self._max_generation_tokens.observe(most_tokens)

    def on_refused(self, refused: RequestRefused) -> None:
        """The whole request was refused by a process behind the frontend."""
        self._refused.labels(*self._values, str(refused.status)).inc()
        if refused.code in REJECTION_REASONS:
            self.on_rejected(refused.code)

    def on_rejected(self, reason: str) -> None:
        """For want of time or room."""
        self._rejections.labels(*self._values, reason).inc()

    def on_disconnect(self) -> None:
        self._disconnects.inc()

    def on_slow_client(self) -> None:
        self._slow_clients.inc()

    # -------------------------------------------------------------------------------------------- families

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, _LABELS, registry=self._registry).labels(*self._values)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self._registry).labels(*self._values)

    def _family_counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, (*_LABELS, label), registry=self._registry)

    def _histogram(self, name: str, text: str, upper_bounds: Sequence[float]) -> Histogram:
        family = Histogram(name, text, _LABELS, registry=self._registry, buckets=tuple(upper_bounds))
        return family.labels(*self._values)


_STAGES = ("frontend", "tokenizer", "tokenizer_to_scheduler_ring", "queue")
"""From the request's head to its first step; "tokenizer" has the ring to it."""

_HOPS = (
    "scheduler_to_executor_ring",
    "executor_wait",
    "executor",
    "executor_to_scheduler_ring",
    "scheduler",
    "scheduler_to_tokenizer_ring",
    "tokenizer",
    "tokenizer_to_frontend_ring",
)
"""Between neighbouring stamps of ``_stamps``."""


def _stamps(times: StepTimes, outputs: TextOutputs, now_ns: int) -> tuple[int, ...]:
    """A step's stamps in the order of its way."""
    return (
        times.scheduled_ns,
        times.executor_received_ns,
        times.executor_started_ns,
        times.executor_finished_ns,
        times.result_received_ns,
        outputs.tokens_sent_ns,
        outputs.received_ns,
        outputs.sent_ns,
        now_ns,
    )
