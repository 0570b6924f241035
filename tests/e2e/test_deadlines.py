"""Deadlines through the whole server: refused with a prediction, or served as any other."""

from __future__ import annotations

import httpx
from server_process import Server

MODEL = "SmolLM2-135M-Instruct"


def test_a_deadline_is_kept_or_refused(server: Server) -> None:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=server.url, timeout=120) as http:
        plain = http.post("/v1/completions", json=body)
        easy = {"deadline_ms": 3_600_000, "target_ttft_ms": 1_800_000, "target_tpot_ms": 60_000, "priority": 3}
        served = http.post("/v1/completions", json=body | easy)
        assert served.status_code == 200
        assert served.json()["choices"][0]["text"] == plain.json()["choices"][0]["text"]

        # By now the server knows how long its steps take.
        for hopeless in ({"deadline_ms": 0.01}, {"deadline_at": 1_000_000_000 + 0.5}, {"target_tpot_ms": 0.001}):
            refused = http.post("/v1/completions", json=body | hopeless | {"stream": True})
            if "deadline_at" in hopeless:  # years ago: not a deadline at all
                assert refused.status_code == 400
                continue
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "deadline_unreachable"
            assert float(refused.headers["retry-after-ms"]) <= 1000 * float(refused.headers["retry-after"])
            assert "x-ringserve-predicted-wait-ms" in refused.headers
        metrics = http.get("/metrics").text
        labels = f'engine="0",model_name="{MODEL}",reason="deadline_unreachable"'
        assert f"vllm:admission_rejections_total{{{labels}}} 2.0" in metrics
        assert 'term="token"' in metrics
        assert "ringserve_executor_idle_seconds_total" in metrics
        report = http.get("/debug/integrity").json()
        assert report["problems"] == []
