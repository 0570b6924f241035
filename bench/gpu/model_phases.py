"""A whole model from the kernels: right against float64, the same in graphs, and how fast at the size of 8B."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import torch

from ringserve.bench.gpu.decode_model import LLAMA_8B, PAGE, TINY, DecodeModel, ModelShape
from ringserve.bench.gpu.device import Device

BUCKETS = (1, 2, 4, *range(8, 257, 8))
GRAPH_SHAPE = ModelShape(2, 1024, 8, 2, 128, 2048, 32_000)
DRY_BATCHES = ((1, 20), (2, 20))
BATCHES = ((1, 2048), (8, 2048), (64, 2048), (256, 1024))
"""(sequences, context) of the decode measurements."""


def check_model(device: Device) -> dict[str, object]:
    """Chunked prefill, then greedy decoding, against float64: the largest error of the logits."""
    shape = TINY if device.dry else GRAPH_SHAPE
    model = DecodeModel(shape, slots=2, max_len=64, device=device)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(shape.vocab, (length,), generator=generator) for length in (21, 5)]
    worst = 0.0
    for slot, ids in enumerate(sequences):
        for start in range(0, len(ids), 13):
            logits = model.prefill(slot, ids[start : start + 13].to(device.torch), start)
        expected = model.reference_logits(ids)[-1]
        worst = max(worst, float((logits[0].double().cpu() - expected).norm() / expected.norm()))
        model.state.last_tokens[slot] = int(logits[0].argmax())
        model.state.lengths[slot] = len(ids) + 1
        sequences[slot] = torch.cat([ids, logits[0].argmax()[None].cpu()])
    model.slots[:2] = torch.tensor([1, 0], dtype=torch.int32)
    for _ in range(2 if device.dry else 12):
        model.decode(2)
        for row, slot in ((0, 1), (1, 0)):
            expected = model.reference_logits(sequences[slot])[-1]
            worst = max(worst, float((model.logits[row].double().cpu() - expected).norm() / expected.norm()))
            token = int(model.tokens[row])
            if model.logits[row, token] != model.logits[row].max():
                raise AssertionError(f"row {row}: greedy drew {token}")
            sequences[slot] = torch.cat([sequences[slot], torch.tensor([token])])
    limit = 1e-5 if device.dry else 3e-2
    if not worst < limit:
        raise AssertionError(f"logits are off by {worst:.2e}, more than {limit:.0e}")
    return {"relative_error": worst}


def check_graphs(device: Device) -> dict[str, object]:
    """For every bucket, with lengths that grow and shrink and with padding: a graph draws what eager steps draw."""
    buckets = (1, 4) if device.dry else BUCKETS
    shape, max_len = (TINY, 64) if device.dry else (GRAPH_SHAPE, 1024)
    model = DecodeModel(shape, slots=max(buckets), max_len=max_len, device=device)
    model.pages.normal_()
    random = Random(0)
    graphs = {}
    for bucket in sorted(buckets, reverse=True):
        model.slots.fill_(-1)
        model.slots[:bucket] = torch.arange(bucket, dtype=torch.int32)
        model.state.lengths.fill_(1)
        graphs[bucket] = device.capture(partial(model.decode, bucket))
    model.state.temperatures.fill_(0.8)
    model.state.top_ps.fill_(0.9)
    for bucket in buckets:
        for longest in (max_len - 1, 5) if device.dry else (50, max_len - 1, 5, 300, 1):
            live = random.randint(1, bucket)
            order = random.sample(range(max(buckets)), live) + [-1] * (bucket - live)
            lengths = torch.tensor([random.randint(1, longest) for _ in range(max(buckets))], dtype=torch.int32)
            drawn = []
            for run in (partial(model.decode, bucket), graphs[bucket]):
                model.slots[:bucket] = torch.tensor(order, dtype=torch.int32)
                model.state.lengths.copy_(lengths)
                model.state.last_tokens.zero_()
                run()
                device.synchronize()
                drawn.append((model.tokens[:live].tolist(), model.logits[:live].clone()))
            if drawn[0][0] != drawn[1][0] or not torch.equal(drawn[0][1], drawn[1][1]):
                raise AssertionError(f"bucket {bucket}, lengths up to {longest}: the graph differs from an eager step")
    return {"buckets": len(buckets)}


def _repeat(run: Callable[[], None], times: int) -> None:
    for _ in range(times):
        run()


def measure_model(device: Device) -> dict[str, object]:
    """Decode and prefill tokens a second of an 8B-shaped model, graphs replayed back to back."""
    shape = TINY if device.dry else LLAMA_8B
    result: dict[str, object] = {"parameters": shape.parameters}
    for batch, context in DRY_BATCHES if device.dry else BATCHES:
        kv_bytes = batch * (context + PAGE) * shape.layers * 2 * shape.kv_heads * shape.head_dim * device.dtype.itemsize
        needed = shape.parameters * device.dtype.itemsize + kv_bytes + (2 << 30)
        if not device.dry and needed > device.free_bytes():
            result[f"decode_{batch}"] = f"needs {needed >> 30} GiB"
            continue
        steps = 1 if device.dry else 20
        model = DecodeModel(shape, slots=batch, max_len=context + PAGE * 4, device=device)
        model.pages.normal_()
        model.slots.copy_(torch.arange(batch, dtype=torch.int32))
        model.state.lengths.fill_(context)
        run = device.capture(partial(model.decode, batch))
        model.state.lengths.fill_(context)
        seconds = device.seconds(partial(_repeat, run, steps), repeats=2, warm_up=0) / steps
        result[f"decode_{batch}"] = {"context": context, "tokens_per_second": batch / seconds, "step_ms": seconds * 1e3}
        if batch == 1:
            count = 16 if device.dry else context
            ids = torch.randint(shape.vocab, (count,), device=device.torch)
            seconds = device.seconds(partial(model.prefill, 0, ids, 0), repeats=3, warm_up=1)
            result["prefill"] = {"tokens": count, "tokens_per_second": count / seconds}
        del model, run  # before the next one asks for memory
        if not device.dry:
            torch.cuda.empty_cache()
    return result
