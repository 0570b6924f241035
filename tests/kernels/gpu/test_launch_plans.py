"""What launchers decide on the host: splits, blocks of a prefill, layouts."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ringserve.kernels.gpu import quantized_linear
from ringserve.kernels.gpu.architecture import Architecture, architecture_of
from ringserve.kernels.gpu.paged_decode import CONFIGS as DECODE_CONFIGS
from ringserve.kernels.gpu.paged_decode import MAX_SPLITS, choose_splits, decode_config
from ringserve.kernels.gpu.paged_prefill import CONFIGS, PrefillConfig, prefill_blocks, prefill_config
from ringserve.kernels.page_copy import PageLayout

LARGE_LINEAR = quantized_linear.CONFIGS[Architecture.LARGE]


def test_architectures() -> None:
    assert [architecture_of(major).value for major in (8, 9, 10, 12)] == ["compact", "large", "large", "compact"]
    assert architecture_of(9, hip=True) is Architecture.CDNA
    with pytest.raises(ValueError, match="are not supported"):
        architecture_of(7)


@pytest.mark.parametrize(
    ("batch", "kv_heads", "multiprocessors", "expected"),
    [(1, 8, 132, 64), (1, 8, 108, 32), (4, 8, 132, 16), (64, 8, 132, 1), (1, 1, 132, MAX_SPLITS)],
)
def test_splits_fill_the_device(batch: int, kv_heads: int, multiprocessors: int, expected: int) -> None:
    assert choose_splits(batch, kv_heads, multiprocessors) == expected


def test_splits_of_linear_layers_keep_enough_inputs() -> None:
    for inputs in (64, 512, 1024, 4096, 14336):
        for outputs in (64, 1024, 4096, 28672):
            splits = quantized_linear.choose_splits(inputs, outputs, 132, LARGE_LINEAR)
            assert splits == 1 or inputs // splits >= quantized_linear.MIN_SPLIT
    assert quantized_linear.choose_splits(4096, 1024, 132, LARGE_LINEAR) == 8
    assert quantized_linear.choose_splits(4096, 28672, 132, LARGE_LINEAR) == 1


def test_more_rows_than_a_linear_launch_takes_are_refused() -> None:
    assert [quantized_linear.padded_rows(rows) for rows in (1, 16, 17, 64)] == [16, 16, 32, 64]
    with pytest.raises(ValueError, match="65 rows"):
        quantized_linear.padded_rows(65)


def test_prefill_blocks_cover_every_query_once() -> None:
    lengths = [0, 1, 16, 17, 40]
    blocks = prefill_blocks(lengths, 16, pad_to=12)
    assert blocks.sequences.dtype == blocks.offsets.dtype == torch.int32
    pairs = list(zip(blocks.sequences.tolist(), blocks.offsets.tolist(), strict=True))
    assert len(pairs) == 12
    assert sorted(pair for pair in pairs if pair[0] >= 0) == [
        (sequence, offset) for sequence, length in enumerate(lengths) for offset in range(0, length, 16)
    ]
    assert pairs[-5:] == [(-1, 0)] * 5
    assert prefill_blocks([], 16).sequences.shape == (0,)


def test_every_group_has_a_query_in_a_block() -> None:
    for config in CONFIGS.values():
        assert all(config.rows_per_block(group) >= 1 for group in range(1, 17))
    pages = torch.empty(2, 1, 16, 256, dtype=torch.bfloat16)
    assert prefill_config(Architecture.LARGE, pages, 256) is CONFIGS[Architecture.LARGE, 2, True]
    assert prefill_config(Architecture.LARGE, pages[..., :128], 128) is CONFIGS[Architecture.LARGE, 2, False]
    assert decode_config(Architecture.CDNA, pages.float(), 64) is DECODE_CONFIGS[Architecture.CDNA, 4, True]
    assert PrefillConfig(64, 32, 4, 2).rows_per_block(5) == 12


def test_a_page_layout_adds_up() -> None:
    layout = PageLayout.create([0, 100, 300], [10, 20, 30], torch.device("cpu"))
    assert layout.starts.tolist() == [0, 10, 30]
    assert (layout.largest, layout.page_words) == (30, 60)


def test_the_cpu_path_does_not_import_triton() -> None:
    code = (
        "import sys, ringserve.kernels.paged_attention, ringserve.engine.sampler, ringserve.engine.kv_pool\n"
        "sys.exit(any(name.split('.')[0] in ('triton', 'cupy') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False, timeout=120).returncode == 0
