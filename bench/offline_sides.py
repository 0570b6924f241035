"""The two sides of ``ringserve bench offline``: the engine without HTTP, and a server with the same options."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import httpx
import uvloop

from ringserve.bench.bodies import BodyBuilder
from ringserve.bench.hops import hop_sums, mean_microseconds
from ringserve.bench.http_client import HttpClient
from ringserve.bench.load import ClosedLoop, LoadGenerator
from ringserve.bench.measure import ServerUnusable
from ringserve.bench.metrics import compute
from ringserve.bench.offline_results import Side
from ringserve.bench.process_cpu import cpu_by_process, difference, process_name
from ringserve.bench.prompts import Job, Turn
from ringserve.bench.records import RequestRecord
from ringserve.bench.server_command import CommandServer
from ringserve.offline.errors import EngineError
from ringserve.offline.llm import LLM
from ringserve.offline.sampling_params import SamplingParams

START_TIMEOUT = 600.0
REQUEST_TIMEOUT = 3600.0


def ask_offline(llm: LLM, prompts: Sequence[Sequence[int]], output_tokens: int) -> Side:
    """All prompts at once, greedily.

    Raises:
        EngineError: the engine ended, or made another number of tokens.
    """
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    before, started = cpu_by_process(llm.pids()), time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    if made != len(prompts) * output_tokens:
        raise EngineError(f"{made} tokens were generated instead of {len(prompts) * output_tokens}")
    first = [(m.first_token_time or m.finished_time, m) for m in (output.metrics for output in outputs)]
    return Side(
        seconds=seconds,
        output_tokens_per_s=made / seconds,
        ttft_ms_p50=1e3 * statistics.median(at - m.arrival_time for at, m in first),
        tpot_ms_p50=1e3 * statistics.median((m.finished_time - at) / (output_tokens - 1) for at, m in first)
        if output_tokens > 1
        else None,
        cpu_seconds=difference(before, cpu_by_process(llm.pids())),
        hops_us={},
    )


class Server:
    """``ringserve serve`` with the same options."""

    def __init__(self, model: str | None, engine: Mapping[str, object]) -> None:
        flags = [word for name, value in engine.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, "-P", "-m", "ringserve", "serve", *([model] if model else []), *flags]
        self._server = CommandServer([*command, "--port", "{port}", "--log-level", "warning"])
        self._model = ""

    def __enter__(self) -> Server:
        try:
            self._model = self._server.wait_until_ready(START_TIMEOUT)
        except BaseException:
            self._server.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def pids(self) -> dict[str, int]:
        """By the processes' names."""
        return {process_name(pid): pid for pid in self._server.tree.pids()}

    def ask(self, prompts: Sequence[list[int]], output_tokens: int) -> Side:
        """All prompts at once, streaming.

        Raises:
            ServerUnusable: a request failed.
        """
        parameters = {"temperature": 0, "ignore_eos": True}
        builder = BodyBuilder("completions", self._model, parameters=parameters)
        jobs = [Job((Turn(prompt, output_tokens),)) for prompt in prompts]
        before, hops = cpu_by_process(self.pids()), self._hop_sums()
        metrics = compute(uvloop.run(self._send(builder, jobs)), {})
        if metrics.failed or metrics.output_tokens != len(prompts) * output_tokens:
            reason = metrics.errors[0].first_message if metrics.errors else f"{metrics.output_tokens} tokens came"
            raise ServerUnusable(f"a batch over HTTP failed: {reason}")
        used = difference(before, cpu_by_process(self.pids()))
        return Side(
            seconds=metrics.duration_s,
            output_tokens_per_s=metrics.output_tokens_per_s,
            ttft_ms_p50=metrics.ttft_ms.p50 if metrics.ttft_ms is not None else 0.0,
            tpot_ms_p50=metrics.tpot_ms.p50 if metrics.tpot_ms is not None else None,
            cpu_seconds=used,
            hops_us=mean_microseconds(hops, self._hop_sums()),
        )

    async def _send(self, builder: BodyBuilder, jobs: Sequence[Job]) -> list[RequestRecord]:
        client = HttpClient(self._server.endpoint)
        generator = LoadGenerator(client, builder, timeout=REQUEST_TIMEOUT)
        try:
            prepared = [generator.prepare(job) for job in jobs]
            await generator.run(iter(prepared), ClosedLoop(len(jobs)))
        finally:
            client.close()
        return generator.records

    def _hop_sums(self) -> dict[str, tuple[float, float]]:
        """(seconds, count) of each hop so far."""
        try:
            answer = httpx.get(f"http://{self._server.endpoint.address}/metrics", timeout=30, trust_env=False)
        except httpx.HTTPError as error:
            raise ServerUnusable(f"/metrics: {error}\n{self._server.last_output()}".rstrip()) from None
        return hop_sums(answer.text)
