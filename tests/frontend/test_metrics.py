"""The metrics against what clients saw."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import msgspec
import pytest
from frontend_harness import MODEL, RawClient, RunningFrontend, chat_body
from prometheus_client.parser import text_string_to_metric_families

from ringserve.frontend import buckets
from ringserve.frontend.metrics import Metrics
from ringserve.messages.stats import EngineStats
from ringserve.messages.text_outputs import TextOutputs

MINIMUM = {
    "e2e_request_latency_seconds_count",
    "generation_tokens_total",
    "inter_token_latency_seconds_count",
    "iteration_tokens_total_count",
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens_total",
    "request_decode_time_seconds_count",
    "request_generation_tokens_count",
    "request_max_num_generation_tokens_count",
    "request_prefill_time_seconds_count",
    "request_prompt_tokens_count",
    "request_queue_time_seconds_count",
    "request_success_total",
    "request_time_per_output_token_seconds_count",
    "time_to_first_token_seconds_count",
}

Samples = dict[tuple[str, str], float]


def parse(text: str) -> Samples:
    """(name, finished_reason or "") -> value; every vLLM metric must have the labels of its dashboards."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                assert sample.labels["model_name"] == MODEL
                assert sample.labels["engine"] == "0"
            samples[sample.name.removeprefix("vllm:"), sample.labels.get("finished_reason", "")] = sample.value
    return samples


@pytest.fixture(scope="module")
def seen() -> Iterator[tuple[Samples, dict[str, int]]]:
    """Samples after a known load, and what the clients counted."""
    counts = {"prompt": 0, "completion": 0, "choices": 0, "prompts": 0, "several": 0}
    with RunningFrontend() as frontend, httpx.Client(base_url=frontend.url) as http:
        for max_tokens, n in ((1, 1), (5, 1), (8, 2), (2, 3)):
            usage = http.post("/v1/chat/completions", json=chat_body(max_tokens=max_tokens, n=n)).json()["usage"]
            counts["prompt"] += usage["prompt_tokens"]
            counts["completion"] += usage["completion_tokens"]
            counts["choices"] += n
            counts["prompts"] += 1
            counts["several"] += n if max_tokens > 1 else 0
        assert (
            http.post("/v1/completions", json={"prompt": [1] * 512}).status_code == 400
        )  # refused: counted nowhere here
        frontend.fake.hold = True
        leaver = RawClient(frontend)
        leaver.post("/v1/completions", {"prompt": "a b", "max_tokens": 50})
        frontend.wait_until(lambda: bool(frontend.fake.running))
        leaver.close()
        frontend.wait_until(lambda: frontend.actor.dispatcher.statistics()["journal_entries"] == 0)
        yield parse(http.get("/metrics").text), counts


def test_the_minimum_set_exists(seen: tuple[Samples, dict[str, int]]) -> None:
    samples, _ = seen
    assert {name for name, _ in samples} >= MINIMUM


def test_counters_equal_what_clients_saw(seen: tuple[Samples, dict[str, int]]) -> None:
    samples, counts = seen
    assert samples["prompt_tokens_total", ""] == counts["prompt"] + 2  # the leaver's, too
    assert samples["generation_tokens_total", ""] == counts["completion"]
    assert samples["request_success_total", "length"] == counts["choices"]
    assert samples["request_success_total", "abort"] == 1
    assert samples["time_to_first_token_seconds_count", ""] == counts["choices"]
    assert samples["inter_token_latency_seconds_count", ""] == counts["completion"] - counts["choices"]
    assert samples["e2e_request_latency_seconds_count", ""] == counts["choices"] + 1
    assert samples["request_queue_time_seconds_count", ""] == counts["choices"] + 1
    assert samples["request_prefill_time_seconds_count", ""] == counts["choices"]
    assert samples["request_decode_time_seconds_count", ""] == counts["choices"]
    assert samples["request_time_per_output_token_seconds_count", ""] == counts["several"]
    assert samples["request_prompt_tokens_count", ""] == counts["prompts"] + 1
    assert samples["request_generation_tokens_sum", ""] == counts["completion"]
    assert samples["request_max_num_generation_tokens_sum", ""] == 1 + 5 + 8 + 2
    assert samples["request_success_total", "error"] == 0
    assert samples["ringserve_client_disconnects_total", ""] == 1
    assert samples["ringserve_refused_requests_total", ""] == 1


def test_gauges_are_the_engine_stats(seen: tuple[Samples, dict[str, int]]) -> None:
    samples, _ = seen
    assert samples["num_requests_waiting", ""] == 3
    assert samples["num_requests_running", ""] == 0
    assert samples["kv_cache_usage_perc", ""] == 0.25
    assert samples["ringserve_steps_total", ""] > 0


def stats(num_steps: int, num_preemptions: int) -> TextOutputs:
    engine = EngineStats(0, 0, 1, 1, num_preemptions, 0, num_steps, 0)
    return TextOutputs(b"", b"", (), b"", b"", (), (), (), None, engine, 0, 0, 0)


def test_engine_counters_go_on_after_a_restart() -> None:
    metrics = Metrics(MODEL, "1")
    for num_steps, num_preemptions in ((10, 3), (20, 5), (2, 1), (3, 1)):
        metrics.on_text_outputs(stats(num_steps, num_preemptions), 0)
    assert parse(metrics.render().decode())["num_preemptions_total", ""] == 6


def test_swaps() -> None:
    """Counters and gauges; a scheduler that swaps nothing shows zeros."""
    metrics = Metrics(MODEL, "1")
    metrics.on_text_outputs(stats(1, 0), 0)
    names = ("pages_swapped_out_total", "pages_swapped_in_total", "swapped_tokens_total", "swapped_pages")
    samples = parse(metrics.render().decode())
    assert [samples[f"ringserve_{name}", ""] for name in (*names, "swap_space_pages")] == [0] * 5
    for num_steps, (out, back, tokens, held) in enumerate([(5, 0, 0, 5), (9, 5, 70, 4)], start=2):
        engine = EngineStats(
            *(0, 0, 1, 1, 0, 0, num_steps, 0),
            swapped_out_pages=out,
            swapped_in_pages=back,
            swapped_in_tokens=tokens,
            num_swapped_pages=held,
            num_host_pages=50,
        )
        metrics.on_text_outputs(msgspec.structs.replace(stats(1, 0), stats=engine), 0)
    samples = parse(metrics.render().decode())
    assert [samples[f"ringserve_{name}", ""] for name in (*names, "swap_space_pages")] == [9, 5, 70, 4, 50]


def test_buckets() -> None:
    assert buckets.one_two_five(130) == (1, 2, 5, 10, 20, 50, 100)
    assert buckets.one_two_five(1000)[-1] == 1000
    for bounds in (
        buckets.TIME_TO_FIRST_TOKEN,
        buckets.INTER_TOKEN,
        buckets.LATENCY,
        buckets.ITERATION_TOKENS,
        buckets.HOP,
    ):
        assert sorted(set(bounds)) == list(bounds)
