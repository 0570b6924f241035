"""The samplers with the compiled arithmetic draw what they draw with numpy's."""

from __future__ import annotations

import numpy as np
import pytest

from ringserve.engine.sampler import Sampler
from ringserve.kernels.cpu.row_sampler import CpuRowSampler
from ringserve.messages.columns import pack_f32, pack_i32, unpack_f32
from ringserve.messages.sampling import SamplingParams

VOCAB = 3000
PARAMETERS = [
    SamplingParams(0, temperature=0.0, logprobs=3),
    SamplingParams(0, temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7),
    SamplingParams(11, temperature=0.8),
    SamplingParams(12, temperature=1.2, top_k=20, top_p=0.8, min_p=0.02, logprobs=0),
    SamplingParams(2**64 - 1, top_p=0.5, repetition_penalty=0.7, logprobs=5),
    SamplingParams(14, min_p=0.1, min_tokens=6, stop_token_ids=pack_i32([7, 9])),
    SamplingParams(15, logit_bias_ids=pack_i32([3, 11]), logit_bias_values=pack_f32([30.0, 31.0]), logprobs=1),
]


@pytest.mark.parametrize("padded", [False, True])
def test_draws_the_same_tokens(padded: bool) -> None:
    samplers = [Sampler(VOCAB, (3, 5), 8), Sampler(VOCAB, (3, 5), 8, CpuRowSampler(VOCAB))]
    slots = list(range(len(PARAMETERS) + 1))
    for sampler in samplers:
        for slot, sampling in enumerate([*PARAMETERS, SamplingParams(16)]):
            sampler.reset(slot, sampling, 2, [1, 2, 2, 400], 4)
    rng = np.random.default_rng(0)
    for step in range(12):
        # Rows may be wider than the vocabulary: whole panels of the head.
        wide = (rng.standard_normal((len(slots), VOCAB + 72 * padded)) * 3).astype(np.float32)
        logits = wide[:, :VOCAB]
        logits[-1] = np.nan
        plain, compiled = (sampler.sample(slots, logits) for sampler in samplers)
        assert compiled.token_ids == plain.token_ids, step
        assert compiled.failed == plain.failed
        assert [slot for slot, _ in compiled.failed] == [slots[-1]]
        assert plain.logprobs is not None
        assert compiled.logprobs is not None
        assert compiled.logprobs.counts == plain.logprobs.counts
        assert compiled.logprobs.token_ids == plain.logprobs.token_ids
        assert compiled.logprobs.ranks == plain.logprobs.ranks
        values = [np.asarray(unpack_f32(result.logprobs.values)) for result in (compiled, plain) if result.logprobs]
        np.testing.assert_allclose(values[0], values[1], atol=1e-5)
