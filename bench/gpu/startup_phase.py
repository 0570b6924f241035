"""A whole start-up from files, as ``ringserve serve --device cuda`` makes it: weights, self-check, pool, graphs.

The self-check inside compares with transformers' own logits, so a start that succeeds says that the model is right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, cast

import torch

from ringserve.bench.gpu.device import Device
from ringserve.config import ExecutorConfig, ExecutorSettings, ModelSource
from ringserve.engine.devices import GPU
from ringserve.engine.gpu.startup import build_gpu_engine

STD = 0.05
"""Of the weights: wide, so that a wrong mask or rotation shows."""

Format = Literal["auto", "int8", "fp8"]

SECONDS = 80.0
"""What is not done by then has failed; what the other starts found is reported."""


def _sizes(dry: bool) -> dict[str, Any]:
    return {
        "vocab_size": 96 if dry else 32_000,
        "hidden_size": 32 if dry else 512,
        "intermediate_size": 48 if dry else 1024,
        "num_hidden_layers": 1 if dry else 4,
        "num_attention_heads": 2 if dry else 8,
        "num_key_value_heads": 1 if dry else 2,
        "max_position_embeddings": 512,
    }


def _models(dry: bool) -> list[tuple[str, dict[str, Any]]]:
    sizes = _sizes(dry)
    models: list[tuple[str, dict[str, Any]]] = [("LlamaConfig", sizes)]
    if not dry:
        wide = {**sizes, "head_dim": 128}
        windows = {"head_dim": 256, "sliding_window": 128, "query_pre_attn_scalar": 256}
        experts = {"head_dim": 64, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2}
        models += [
            ("Qwen2Config", sizes),
            ("Qwen3Config", wide),
            ("MistralConfig", {**wide, "sliding_window": 128}),
            ("Gemma2Config", {**sizes, **windows}),
            ("Qwen3MoeConfig", {**sizes, **experts}),
        ]
    return models


def _write(directory: Path, name: str, arguments: dict[str, Any]) -> None:
    import transformers

    config = getattr(transformers, name)(**arguments, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, STD, generator=generator)
    model.save_pretrained(directory)


def _start(name: str, form: Format, device: Device) -> dict[str, object]:
    """One start, from files that are written first, with gradients off as the executor has them."""
    torch.set_grad_enabled(False)
    dry = device.dry
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / name
        _write(directory, name, dict(_models(dry))[name])
        settings = ExecutorSettings(
            source=ModelSource(str(directory), "directory", name),
            dtype="float32" if dry else "bfloat16",
            max_model_len=32 if dry else 512,
            max_num_seqs=2 if dry else 16,
            max_num_batched_tokens=8 if dry else 512,
            config=ExecutorConfig(
                quantization="none" if form == "auto" else form,
                kv_cache_dtype=form,
                kv_cache_memory=(1 << 20) if dry else (256 << 20),
                swap_space=0,
            ),
        )
        started = time.perf_counter()
        engine = build_gpu_engine(settings, GPU, device.engine, 1, lambda stage, part: None)
        engine.runner.close()
        seconds = round(time.perf_counter() - started, 2)
        return {"model_impl": engine.model_impl, "seconds": seconds}


def check_startup(device: Device) -> dict[str, object]:
    """Each architecture in the model's type; the first one in all 8-bit types, too. Seconds of every start.

    They run side by side, in processes of their own: compiling is nearly all of it.
    """
    names = [name for name, _ in _models(device.dry)]
    cases = [(name, "auto") for name in names] + ([] if device.dry else [(names[0], "int8"), (names[0], "fp8")])
    command = [sys.executable, "-P", "-m", "ringserve.bench.gpu.startup_phase"]
    end = time.monotonic() + SECONDS

    def start(case: tuple[str, str]) -> dict[str, object] | str:
        try:
            result = subprocess.run(
                [*command, *case, *(["--dry"] if device.dry else [])],
                capture_output=True,
                text=True,
                timeout=max(end - time.monotonic(), 0.1),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "not done"
        if result.returncode != 0:
            return result.stderr.strip()[-600:]
        found: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
        return found

    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        outcomes = {"_".join(case): found for case, found in zip(cases, pool.map(start, cases), strict=True)}
    failures = [f"{case}: {found}" for case, found in outcomes.items() if isinstance(found, str)]
    if failures:
        raise AssertionError(f"{len(failures)} of {len(cases)} starts failed: " + " | ".join(failures))
    return dict(outcomes)


if __name__ == "__main__":
    print(json.dumps(_start(sys.argv[1], cast(Format, sys.argv[2]), Device("--dry" in sys.argv))))
