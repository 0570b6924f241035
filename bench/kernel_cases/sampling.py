"""Sampling kernels against the definition and against the CPU's sampler."""

# Kernels have no Python types.
# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from ringserve.bench.kernel_cases.outcome import Outcome
from ringserve.kernels.gpu.draw import draw
from ringserve.kernels.gpu.philox import philox_word, uniform
from ringserve.kernels.gpu.process_logits import process_logits
from ringserve.kernels.gpu.sampler_state import IN_PROMPT, SamplerState
from ringserve.kernels.gpu.token_logprobs import token_logprobs
from ringserve.kernels.logprobs import row_logprobs
from ringserve.kernels.philox import philox4x32, uniforms
from ringserve.kernels.sampling import clean
from ringserve.kernels.sampling import draw as draw_on_cpu
from ringserve.kernels.sampling_reference import draw_reference, process_reference

MARGIN = 1e-5
"""Nearer to a boundary another token is right too."""

_WORD = 0xFFFFFFFF


def _row(random: Random, size: int) -> NDArray[np.float32]:
    """Normal, peaked, with many ties, flat, mostly hidden, broken."""
    rng = np.random.default_rng(random.getrandbits(32))
    normal = rng.standard_normal(size) * 3
    match random.randrange(8):
        case 0:
            normal[rng.integers(size, size=5)] += 12
        case 1:
            normal = np.asarray(rng.integers(-4, 5, size=size) * 1.5, dtype=np.float64)
        case 2:
            normal = np.zeros(size)
        case 3:
            normal = np.where(rng.random(size) < 0.9, -np.inf, normal)
            normal[rng.integers(size)] = 1.0
        case 4:
            normal[rng.integers(size, size=3)] = np.nan
        case 6:
            # The smallest numbers there are: halves of them are zero.
            normal = np.asarray(rng.integers(-3, 4, size=size) * 1.4e-45, dtype=np.float64)
        case 5 if random.random() < 0.3:
            normal = np.full(size, random.choice([np.nan, -np.inf]))
        case _:
            pass
    row: NDArray[np.float32] = normal.astype(np.float32)
    return row


@dataclass(frozen=True)
class _Request:
    """A slot's parameters."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice: int
    prompt: list[int]
    generated: list[int]
    bias: dict[int, float]
    ends: list[int]
    min_tokens: int
    repetition: float
    presence: float
    frequency: float

    @property
    def has_penalties(self) -> bool:
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)


def _request(random: Random, vocab: int) -> _Request:
    penalties = random.random() < 0.5
    return _Request(
        temperature=random.choice([0.0, 1.0, 1.0, 0.3, 1.7, 1e-4, 1e-40]),
        top_k=random.choice([0, 0, 1, 7, 60, 4000, vocab]),
        top_p=random.choice([1.0, 1.0, 0.95, 0.3, 1e-6]),
        min_p=random.choice([0.0, 0.0, 0.05, 1.0]),
        seed=random.getrandbits(64),
        choice=random.choice([0, 1, 300]),
        prompt=[random.randrange(vocab) for _ in range(random.choice([1, 5, 200]))],
        generated=[random.randrange(min(vocab, 20)) for _ in range(random.choice([0, 3, 100]))],
        bias={random.randrange(vocab): random.uniform(-8, 8) for _ in range(random.choice([0, 0, 3, 20]))},
        ends=[random.randrange(vocab) for _ in range(random.choice([0, 1, 4]))],
        min_tokens=random.choice([0, 2, 1000]),
        repetition=random.choice([1.0, 1.3, 0.8]) if penalties else 1.0,
        presence=random.choice([0.0, 0.7, -0.5]) if penalties else 0.0,
        frequency=random.choice([0.0, 0.1, -0.2]) if penalties else 0.0,
    )


def _put(state: SamplerState, slot: int, request: _Request, count_row: int) -> None:
    signed = request.seed - (1 << 64) if request.seed >> 63 else request.seed
    state.temperatures[slot] = request.temperature
    state.top_ks[slot] = request.top_k
    state.top_ps[slot] = request.top_p
    state.min_ps[slot] = request.min_p
    state.seeds[slot] = signed
    state.choices[slot] = request.choice
    state.lengths[slot] = len(request.prompt) + len(request.generated)
    state.hide_ends_before[slot] = len(request.prompt) + request.min_tokens
    state.num_ends[slot] = len(request.ends)
    for i, token in enumerate(request.ends):
        state.end_ids[slot, i] = token
    state.num_biases[slot] = len(request.bias)
    for i, (token, value) in enumerate(request.bias.items()):
        state.bias_ids[slot, i] = token
        state.bias_values[slot, i] = value
    state.count_rows[slot] = count_row if request.has_penalties else -1
    state.repetition[slot] = request.repetition
    state.presence[slot] = request.presence
    state.frequency[slot] = request.frequency
    counts = state.token_counts[count_row].cpu()
    counts.zero_()
    counts[request.prompt] = IN_PROMPT
    for token in request.generated:
        counts[token] += 1
    state.token_counts[count_row] = counts.to(state.token_counts.device)


def check_sampling(seed: int, device: str) -> Outcome:
    """Processing and drawing of a few rows, padding among them; the slots' state afterwards."""
    random = Random(seed)
    vocab = random.choice([1, 2, 100, 1000, 5003, 9001])
    dtype = random.choice([torch.float32, torch.float32, torch.bfloat16])
    slots = random.sample(range(6), 3)
    padding = random.randrange(3)
    slots[padding] = -1
    state = SamplerState.allocate(6, vocab, torch.device(device), count_rows=3, most_ends=4, most_biases=20)
    requests = [_request(random, vocab) for _ in slots]
    logits = torch.from_numpy(np.stack([_row(random, vocab) for _ in slots])).to(dtype)
    for i, (slot, request) in enumerate(zip(slots, requests, strict=True)):
        if slot >= 0:
            _put(state, slot, request, i)
    on_device = logits.to(device)
    slot_tensor = torch.tensor(slots, dtype=torch.int32, device=device)
    processed = torch.full((3, vocab), torch.nan, device=device)
    process_logits(on_device, slot_tensor, state, processed)
    out = torch.full((3,), -7, dtype=torch.int32, device=device)
    draw(processed, slot_tensor, state, out)
    wrong = []
    for i, (slot, request) in enumerate(zip(slots, requests, strict=True)):
        token = int(out[i])
        if slot < 0:
            if token != -7:
                wrong.append(f"row {i}: padding was drawn")
            continue
        problem = _judge(logits[i].float().numpy(), processed[i].cpu().numpy(), token, request)
        if problem:
            wrong.append(f"row {i} of {dtype} [{vocab}]: {problem} in {request}")
        advanced = token >= 0
        length = len(request.prompt) + len(request.generated)
        if int(state.lengths[slot]) != length + advanced or (advanced and int(state.last_tokens[slot]) != token):
            wrong.append(f"row {i}: the slot did not advance")
        if request.has_penalties and advanced:
            count = int(state.token_counts[i, token]) & (IN_PROMPT - 1)
            if count != request.generated.count(token) + 1:
                wrong.append(f"row {i}: the count is {count}")
    return Outcome(float("nan") if wrong else 0.0, 0.0, "; ".join(wrong))


def _judge(logits: NDArray[np.float32], processed: NDArray[np.float32], token: int, request: _Request) -> str | None:
    """What is wrong with a row."""
    length = len(request.prompt) + len(request.generated)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = process_reference(
            logits,
            request.prompt,
            request.generated,
            bias=request.bias,
            repetition=request.repetition,
            presence=request.presence,
            frequency=request.frequency,
            hidden=request.ends if len(request.generated) < request.min_tokens else [],
        )
        cleaned = np.nan_to_num(expected, nan=-np.inf, posinf=float(np.finfo(np.float32).max), neginf=-np.inf)
    if not np.array_equal(cleaned, processed):
        return f"processed logits differ at {np.flatnonzero(cleaned != processed)[:5].tolist()}"
    word = philox4x32(
        np.array([[length, request.choice, 0, 0]], dtype=np.uint32),
        np.array([[request.seed & _WORD, request.seed >> 32]], dtype=np.uint32),
    )
    u = float(uniforms(word[0, :1])[0])
    parameters = (max(request.temperature, 1e-30), request.top_k, request.top_p, request.min_p, u)
    if request.temperature == 0.0:
        parameters = (0.0, *parameters[1:])
    with np.errstate(over="ignore"):
        exact = draw_reference(expected, *parameters)
    if (exact.token_id if exact.token_id is not None else -1) != token and exact.margin > MARGIN:
        return f"drew {token}, not {exact.token_id} (margin {exact.margin:.1e})"
    row = clean(cleaned)
    if row is not None and request.temperature > 0.0 and exact.margin > MARGIN:
        on_cpu = draw_on_cpu(row, *parameters)
        if on_cpu != token:
            return f"drew {token}, the CPU {on_cpu}"
    return None


@triton.jit
def _words(counter_ptr, seed_ptr, word_ptr, uniform_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    counters = counter_ptr + i * 3
    word = philox_word(tl.load(counters), tl.load(counters + 1), tl.load(counters + 2), tl.load(seed_ptr + i))
    tl.store(word_ptr + i, word.to(tl.int32, bitcast=True))
    tl.store(uniform_ptr + i, uniform(word))


def check_philox(seed: int, device: str) -> Outcome:
    """Words and uniforms equal the CPU's, whose known answers are tested."""
    rng = np.random.default_rng(seed)
    counters = rng.integers(-(2**31), 2**31, size=(64, 3), dtype=np.int64).astype(np.int32)
    seeds = rng.integers(-(2**63), 2**63, size=64, dtype=np.int64)
    counters[0], seeds[0] = 0, 0
    counters[1], seeds[1] = -1, -1
    words = torch.empty(64, dtype=torch.int32, device=device)
    numbers = torch.empty(64, dtype=torch.float64, device=device)
    _words[(1,)](torch.from_numpy(counters).to(device), torch.from_numpy(seeds).to(device), words, numbers, N=64)
    four = np.concatenate([counters, np.zeros((64, 1), dtype=np.int32)], axis=1).view(np.uint32)
    keys = np.stack([seeds & _WORD, seeds >> 32 & _WORD], axis=1).astype(np.uint32)
    expected = philox4x32(four, keys)[:, 0]
    same = np.array_equal(words.cpu().numpy().view(np.uint32), expected)
    same = same and np.array_equal(numbers.cpu().numpy(), uniforms(expected))
    return Outcome(0.0 if same else float("nan"), 0.0, "words")


def check_logprobs(seed: int, device: str) -> Outcome:
    """Values, order and rank as the CPU has them."""
    random = Random(seed)
    vocab = random.choice([1, 3, 100, 5003, 9001])
    dtype = random.choice([torch.float32, torch.float16, torch.bfloat16])
    logits = torch.from_numpy(np.stack([_row(random, vocab) for _ in range(4)])).to(dtype)
    tokens = [random.randrange(vocab) for _ in range(4)]
    ks = [min(random.choice([0, 1, 5, 20]), vocab) for _ in range(4)]
    tokens[random.randrange(4)] = -1
    ks[random.randrange(4)] = -1
    ids = torch.full((4, 21), -7, dtype=torch.int32, device=device)
    values = torch.full((4, 21), torch.nan, device=device)
    ranks = torch.full((4,), -7, dtype=torch.int32, device=device)
    token_logprobs(
        logits.to(device),
        torch.tensor(tokens, dtype=torch.int32, device=device),
        torch.tensor(ks, dtype=torch.int32, device=device),
        ids,
        values,
        ranks,
    )
    worst = 0.0
    for r, (token, k) in enumerate(zip(tokens, ks, strict=True)):
        if token < 0 or k < 0:
            same = bool((ids[r] == -7).all()) and int(ranks[r]) == -7
        else:
            row = np.nan_to_num(logits[r].float().numpy(), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
            with np.errstate(invalid="ignore"):
                expected = row_logprobs(row, token, k)
            count = len(expected.token_ids)
            same = ids[r, :count].tolist() == expected.token_ids and int(ranks[r]) == expected.rank
            same = same and bool((ids[r, count:] == -7).all())
            differences = np.abs(values[r, :count].cpu().numpy() - np.array(expected.values))
            worst = max(worst, float(differences.max()) if not np.isnan(differences).any() else float("nan"))
        if not same:
            worst = float("nan")
    return Outcome(worst, 5e-6 if device == "cpu" else 2e-5, f"{dtype} {vocab=} {tokens=} {ks=}")
