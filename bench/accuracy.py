"""What rounding does to the default model's distribution: the fast path, or another, against float32, on six texts.

    python -P -m ringserve.bench.accuracy --quantization int8 --output bench/results/accuracy-int8.json

For each text, in windows of 512 tokens, at most four: the perplexity in float32 (transformers' own eager pass), the
mean Kullback-Leibler divergence of the path's distribution of the next token from it, in nats, and how often the best
token is the same; at last these over all tokens. The texts are a licence, technical prose, two speeches of 1863 and
1865, and what the model itself writes: answers to questions, greedy, and stories at temperature 0.7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ringserve.bench.machine import describe
from ringserve.bench.module_command import module_parser, run_module
from ringserve.bench.report import check_writable, write_json
from ringserve.config import ModelSource, TokenizerSettings
from ringserve.engine.dtypes import DType
from ringserve.engine.fast_decoder import FastDecoder
from ringserve.engine.fast_packing import Packer
from ringserve.engine.fast_startup import prepare_fast
from ringserve.engine.kv_pool import KVPool
from ringserve.engine.model_loader import load_model
from ringserve.engine.self_check import eager_logits
from ringserve.engine.tokenizer_loader import load_tokenizer
from ringserve.model_source import resolve_model
from ringserve.options import OptionError

NUM_TOKENS = 512
MAX_WINDOWS = 4
PAGE_SIZE = 64
STEP_TOKENS = 256
SAMPLES = Path(__file__).resolve().parent / "samples" / "accuracy"


@dataclass(frozen=True)
class Agreement:
    """A text's figures."""

    text: str
    tokens: int
    perplexity: float
    mean_kl: float
    same_best: float
    """A part of 1."""


def texts(source: ModelSource) -> dict[str, list[list[int]]]:
    """Token ids of the texts, in windows of ``NUM_TOKENS``."""
    tokenizer = load_tokenizer(TokenizerSettings(source, None, None)).backend

    def encode(path: Path) -> list[int]:
        ids: list[int] = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids
        return ids

    licence = encode(SAMPLES / "licence.txt")
    found = {
        "a licence": licence,
        "technical prose": encode(SAMPLES / "prose.txt"),
        "two famous speeches": encode(SAMPLES / "speeches.txt"),
        "the model's own chat answers, greedy": encode(SAMPLES / "answers.txt"),
        "the model's own stories, temperature 0.7": encode(SAMPLES / "stories.txt"),
        "256 tokens of a licence, twice": licence[40 : 40 + NUM_TOKENS // 2] * 2,
    }
    return {name: list(windows(ids)) for name, ids in found.items()}


def windows(ids: Sequence[int]) -> Iterator[list[int]]:
    """Whole ones."""
    for start in range(0, min(len(ids) // NUM_TOKENS, MAX_WINDOWS) * NUM_TOKENS, NUM_TOKENS):
        yield list(ids[start : start + NUM_TOKENS])


Compute = Callable[[Sequence[int]], torch.Tensor]
"""Token ids -> the log probabilities of what follows each, float64 [tokens, vocab_size]."""


def fast_path(source: ModelSource, quantization: str) -> Compute:
    """The default model's way to its tokens."""
    loaded = load_model(source, "bfloat16", lambda stage, fraction: None)
    packer = Packer(quantization)
    model = prepare_fast(loaded, quantization, PAGE_SIZE, NUM_TOKENS, 1 << 62, lambda *_: None, packer=lambda: packer)
    pool = KVPool(model.layers, 1 + NUM_TOKENS // PAGE_SIZE, PAGE_SIZE, "bfloat16")
    decoder = model.decoder(pool, 1, STEP_TOKENS, NUM_TOKENS)
    return lambda ids: log_probabilities(decoder, ids)


def eager(source: ModelSource, dtype: DType) -> Compute:
    """transformers' own pass."""
    model = load_model(source, dtype, lambda stage, fraction: None).model
    return lambda ids: eager_logits(model, [torch.tensor(ids)])[0].double().log_softmax(-1)


def measure(source: ModelSource, compute: Compute, chosen: Sequence[str] = ()) -> Iterator[Agreement]:
    """Text after text, all or the ``chosen`` ones. Needs room for the model in float32 beside ``compute``'s."""
    exact = eager(source, "float32")
    for name, parts in texts(source).items():
        if chosen and name not in chosen:
            continue
        yield together(name, [agreement(name, ids, exact(ids), compute(ids)) for ids in parts])


def log_probabilities(decoder: FastDecoder, ids: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab_size], computed in chunks, through pages 1, 2, ..."""
    table, pages = np.array([ids], np.int32), np.arange(1, 1 + NUM_TOKENS // PAGE_SIZE, dtype=np.int32)[None].copy()
    slot, parts = np.zeros(1, np.int32), []
    for start in range(0, len(ids), STEP_TOKENS):
        count = min(STEP_TOKENS, len(ids) - start)
        wanted = np.arange(count, dtype=np.int32)
        done = np.array([start], np.int64)
        logits = decoder.forward(slot, np.array([count], np.int32), done, table, pages, wanted)
        parts.append(torch.from_numpy(logits.astype(np.float64)))
    return torch.cat(parts).log_softmax(-1)


def agreement(text: str, ids: Sequence[int], exact: torch.Tensor, found: torch.Tensor) -> Agreement:
    """Of two arrays of log probabilities, [tokens, vocab_size]."""
    following = exact[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    return Agreement(
        text,
        len(ids),
        float(following.neg().mean().exp()),
        float((exact.exp() * (exact - found)).sum(1).mean()),
        float((exact.argmax(1) == found.argmax(1)).double().mean()),
    )


def together(text: str, parts: Sequence[Agreement]) -> Agreement:
    """Over all tokens of ``parts``."""
    tokens = np.array([part.tokens for part in parts])

    def mean(values: Iterable[float]) -> float:
        return float(np.average(list(values), weights=tokens))

    return Agreement(
        text,
        int(tokens.sum()),
        math.exp(mean(math.log(part.perplexity) for part in parts)),
        mean(part.mean_kl for part in parts),
        mean(part.same_best for part in parts),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and keep the result."""
    parser = module_parser(__file__, __doc__)
    parser.add_argument("--model")
    parser.add_argument("--quantization", choices=("none", "int8"), help="of the fast path (default: int8)")
    parser.add_argument(
        "--model-impl",
        choices=("fast", "transformers"),
        default="fast",
        help="transformers: its own code in bfloat16, for comparison",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result as JSON")
    options = parser.parse_args(arguments)
    plain = options.model_impl == "transformers"
    if plain and options.quantization == "int8":
        raise OptionError("--quantization int8 is for --model-impl fast; leave one of them out")
    check_writable(options.output, "--output")
    torch.set_num_threads(1)
    source = resolve_model(options.model, None, None)
    quantization = "none" if plain else options.quantization or "int8"
    compute = eager(source, "bfloat16") if plain else fast_path(source, quantization)
    results: list[Agreement] = []
    for found in measure(source, compute):
        results.append(found)
        _print(found)
    results.append(together("all", results))
    _print(results[-1])
    if options.output is not None:
        write_json(
            options.output,
            {
                "machine": describe(),
                "model_impl": options.model_impl,
                "quantization": quantization,
                "texts": [vars(found) for found in results],
            },
        )
    return 0


def _print(found: Agreement) -> None:
    print(
        f"{found.text:40} {found.tokens:5} tokens   perplexity {found.perplexity:5.1f}   mean KL {found.mean_kl:.5f}   "
        f"same best token {100 * found.same_best:.1f} %",
        flush=True,
    )


if __name__ == "__main__":
    run_module(main)
