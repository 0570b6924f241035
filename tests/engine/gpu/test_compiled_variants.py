"""What a model compiles while it serves: nothing that the warm-up has not compiled. For GPUs that are not here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton
from blank_decoder import blank_weights
from fake_gpu import SM_90, compile_only

from ringserve.engine.decoder_weights import DecoderShape
from ringserve.engine.gpu.device import HostDevice
from ringserve.engine.gpu.graphs import graph_buckets, warm_up_tokens
from ringserve.engine.gpu.llama_model import LlamaModel, decoder_layers
from ringserve.engine.gpu.step_inputs import StepInputs
from ringserve.engine.kv_pool import KVPool

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 announces 3.10's default

SHAPE = DecoderShape(128, 64, 96, 2, 4, 2, 64, 1e-5, 0.125)
MAX_NUM_SEQS, MAX_TOKENS = 12, 300


@pytest.fixture(autouse=True)
def _kept_cache(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled kernels are kept between runs, where pytest keeps what it remembers."""
    assert pytestconfig.cache is not None
    with triton.knobs.cache.scope():
        monkeypatch.setattr(triton.knobs.cache, "dir", str(pytestconfig.cache.mkdir("triton")))
        yield


def make_model(quantization: str) -> LlamaModel:
    device = HostDevice()
    weights = blank_weights(SHAPE, device, quantization)
    pool = KVPool(decoder_layers(weights), 4, 16, "bfloat16")
    rotary = (torch.zeros(64, 32), torch.zeros(64, 32))
    return LlamaModel(weights, rotary, [0, 32], pool, device, MAX_NUM_SEQS)


def step(decodes: int, chunks: tuple[int, ...], width: int, shift: int) -> StepInputs:
    """Inputs that begin anywhere in larger arrays, as a runner's do."""
    rows, tokens = decodes + len(chunks), decodes + sum(chunks)

    def part(count: int) -> torch.Tensor:
        return torch.zeros(count + shift, dtype=torch.int32)[shift:]

    return StepInputs(
        token_ids=part(tokens),
        positions=part(tokens),
        slot_mapping=part(tokens),
        block_table=part(rows * width).view(rows, width),
        seq_lens=part(rows),
        num_decodes=decodes,
        chunk_lens=chunks,
        chunk_start=part(len(chunks) + 1),
        wanted=torch.arange(rows),
    )


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_warm_up_compiles_everything(quantization: str) -> None:
    model = make_model(quantization)
    with compile_only(SM_90) as compiled:
        for bucket in reversed(graph_buckets(MAX_NUM_SEQS)):
            model.forward(step(bucket, (), 4, 0))
        for tokens in warm_up_tokens(MAX_TOKENS):
            model.forward(step(0, (tokens,), 4, 0))
        known = {kernel.variant for kernel in compiled}
        names = {kernel.name for kernel in compiled}
        assert {"_decode_runs", "_merge_runs", "_prefill", "_rope_kv_write", "_head_rms_norm", "_add_rms_norm"} <= names
        before = len(compiled)
        for shift, width, decodes in ((0, 16, 3), (1, 7, 5), (1, 4, 7), (3, 4, 11)):
            model.forward(step(decodes, (), width, shift))
        for shift, decodes, chunks in ((1, 0, (1,)), (0, 3, (15, 16)), (3, 5, (64, 17, 1)), (0, 8, (257,))):
            model.forward(step(decodes, chunks, 7, shift))
        late = [kernel for kernel in compiled[before:] if kernel.variant not in known]
    assert not late, sorted({kernel.name for kernel in late})
