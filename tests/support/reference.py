"""What plain transformers makes of the default model: the reference for greedy output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from engine_core import default_model
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from ringserve.config import ModelSource, TokenizerSettings
from ringserve.engine.gguf_weights import load_llama, open_gguf
from ringserve.engine.tokenizer_loader import load_tokenizer

PROMPT_LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 63, 64, 65, 100, 128, 200, 257, 400, 513, 700, 1100)
"""Tokens of the twenty prompts: around page borders, and to beyond a thousand."""


NEW_TOKENS = 32


@dataclass(frozen=True)
class Reference:
    """A prompt and what ``generate`` continues it with."""

    prompt: list[int]
    token_ids: list[int]
    gaps: list[float]
    """At each new token: difference of the two best logits, as a part of the logits' range."""


def plain_model(source: ModelSource, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """transformers' own model with its own attention; the weights are those that ringserve reads from the GGUF file
    (``test_model_gguf.py`` compares them with transformers' reading)."""
    return load_llama(open_gguf(Path(source.path)), dtype, "sdpa", lambda _fraction: None)


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Twenty slices of an English text, fixed once and for all."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    start = 40
    found = []
    for length in PROMPT_LENGTHS:
        found.append(ids[start : start + length])
        start = (start + 97) % 1000
    assert [len(prompt) for prompt in found] == list(PROMPT_LENGTHS)
    return found


def generate(model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Reference]:
    """Greedy ``generate``, one prompt after the other, with its cache, to the full length."""
    references = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        gaps = []
        for logits in output.logits:
            best = logits[0].topk(2).values
            gaps.append(float((best[0] - best[1]) / (logits.max() - logits.min())))
        references.append(Reference(list(prompt), output.sequences[0, len(prompt) :].tolist(), gaps))
    return references


def default_references() -> list[Reference]:
    """The twenty prompts and their greedy continuations in float32, on one thread."""
    torch.set_num_threads(1)
    source = default_model()
    tokenizer = load_tokenizer(TokenizerSettings(source, None, None)).backend
    return generate(plain_model(source), prompts(tokenizer), NEW_TOKENS)


def first_difference(reference: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that differs; None: equal."""
    if list(reference) == list(got):
        return None
    for index, (left, right) in enumerate(zip(reference, got, strict=False)):
        if left != right:
            return index
    return min(len(reference), len(got))


def assert_equal_but_for_ties(references: Sequence[Reference], got: Sequence[Sequence[int]]) -> None:
    """Token for token equal; one prompt may differ from where the reference's two best logits are nearly equal."""
    ties = []
    for index, (reference, tokens) in enumerate(zip(references, got, strict=True)):
        assert len(tokens) == len(reference.token_ids)
        at = first_difference(reference.token_ids, tokens)
        if at is None:
            continue
        gap = reference.gaps[at]
        assert gap < 1e-4, f"prompt {index} differs at token {at}, where the two best logits are {gap:.2e} apart"
        ties.append(index)
        print(f"prompt {index} differs at token {at}: a tie, the two best logits are {gap:.2e} of their range apart")
    assert len(ties) <= 1, f"prompts {ties} differ"
