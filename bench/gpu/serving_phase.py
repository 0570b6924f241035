"""The whole server on loopback: a model of random weights, many streams at once."""

from __future__ import annotations

import json
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ringserve.bench.gpu.device import Device
from ringserve.bench.server import BenchServer


def _save_model(directory: Path, dry: bool) -> None:
    """A Llama with one token for each byte, in Hugging Face layout."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64 if dry else 2048,
        intermediate_size=96 if dry else 8192,
        num_hidden_layers=2 if dry else 16,
        num_attention_heads=2 if dry else 32,
        num_key_value_heads=1 if dry else 8,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


class _Stream(threading.Thread):
    """One completion, streamed."""

    def __init__(self, server: BenchServer, number: int, tokens: int) -> None:
        super().__init__()
        self._server, self._tokens = server, tokens
        self._prompt = f"{number}: " + "once upon a time " * 20
        self.first_token_s = 0.0
        self.completion_tokens = 0
        self.problem: str | None = None

    def run(self) -> None:
        try:
            self._ask()
        except (OSError, ValueError, KeyError) as error:
            self.problem = repr(error)

    def _ask(self) -> None:
        body = {
            "model": "default",
            "prompt": self._prompt,
            "max_tokens": self._tokens,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = HTTPConnection(self._server.host, self._server.port, timeout=120)
        start = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            self.problem = f"status {answer.status}: {answer.read()[:300]!r}"
            return
        for line in answer:
            if line.startswith(b"data: {"):
                self.first_token_s = self.first_token_s or time.monotonic() - start
                usage = json.loads(line[6:]).get("usage")
                if usage:
                    self.completion_tokens = usage["completion_tokens"]
        connection.close()


def measure_serving(device: Device) -> dict[str, object]:
    """64 streams at once through HTTP: every one gets all of its tokens; tokens a second of all together."""
    streams_at_once, tokens = (3, 6) if device.dry else (64, 256)
    with TemporaryDirectory() as directory:
        _save_model(Path(directory), device.dry)
        arguments = ["--device", "cpu", "--threads", "1"] if device.dry else ["--device", "cuda"]
        with BenchServer(directory, *arguments, "--served-model-name", "default") as server:
            for count in (1, streams_at_once):  # The first one warms up.
                streams = [_Stream(server, number, tokens) for number in range(count)]
                start = time.monotonic()
                for stream in streams:
                    stream.start()
                for stream in streams:
                    stream.join()
                seconds = time.monotonic() - start
                problems = [stream.problem for stream in streams if stream.problem]
                short = [s.completion_tokens for s in streams if s.completion_tokens != tokens]
                if problems or short:
                    raise AssertionError(f"{problems[:3]} {short[:3]}")
    first = sorted(stream.first_token_s for stream in streams)
    return {
        "streams": streams_at_once,
        "tokens_per_second": streams_at_once * tokens / seconds,
        "median_first_token_s": first[len(first) // 2],
    }
