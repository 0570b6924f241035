"""From ``exec`` to the last byte of a one-token chat answer over HTTP, on the default model.

    python -P -m ringserve.bench.startup --output bench/results/startup.json

Each run starts a server when none is running; the page cache is warm after the first, which is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import httpx

from ringserve.bench.machine import OtherLoad, describe, tree_seconds
from ringserve.bench.server import BenchServer


def main() -> int:
    """Measure, print, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    one_run()
    runs = [one_run() for _ in range(options.runs)]
    result = {
        "command": " ".join(["python -P -m ringserve.bench.startup", *sys.argv[1:]]),
        "machine": describe(),
        "seconds_to_ready": [round(run[0], 2) for run in runs],
        "seconds_to_first_answer": [round(run[1], 2) for run in runs],
        "median_seconds_to_first_answer": round(statistics.median(run[1] for run in runs), 2),
        "other_processes_cores": [round(run[2], 3) for run in runs],
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    return 0


def one_run() -> tuple[float, float, float]:
    """(seconds to the ready line, seconds to the answer's last byte, cores used by others)."""
    load = OtherLoad()
    own = time.process_time()
    started = time.perf_counter()
    with BenchServer() as server:
        ready = time.perf_counter() - started
        body = {"model": server.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        answered = time.perf_counter() - started
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 1
        others = load.cores(time.process_time() - own + tree_seconds(server.pids()))
    return ready, answered, others


if __name__ == "__main__":
    sys.exit(main())
