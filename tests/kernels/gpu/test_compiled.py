"""What the kernels compile to, for GPUs that are not here: shared memory, spills, pipelining, number of variants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import triton
from fake_gpu import GFX942, SM_80, SM_90, SM_100, Compiled, compile_only
from hot_launches import (
    launch_decode,
    launch_linear,
    launch_page_copies,
    launch_prefill,
    launch_rope,
    launch_rows,
    launch_sampling,
    launch_step_inputs,
)
from triton.backends.compiler import GPUTarget

from ringserve.bench.kernel_cases import decode as decode_cases
from ringserve.bench.kernel_cases import linear as linear_cases
from ringserve.bench.kernel_cases import prefill as prefill_cases
from ringserve.bench.kernel_cases.run import run_family
from ringserve.kernels.gpu import paged_decode, paged_prefill
from ringserve.kernels.gpu.architecture import Architecture
from ringserve.kernels.gpu.kv_format import KVFormat

TARGETS = {
    "sm_80": (SM_80, Architecture.COMPACT),
    "sm_90": (SM_90, Architecture.LARGE),
    "sm_100": (SM_100, Architecture.LARGE),
    "gfx942": (GFX942, Architecture.CDNA),
}

NATIVE, INT8, E4M3 = KVFormat

FEW = [
    ("sm_80", 128, NATIVE),
    ("sm_80", 128, E4M3),
    ("sm_90", 64, NATIVE),
    ("sm_90", 128, NATIVE),
    ("sm_90", 128, INT8),
    ("sm_90", 128, E4M3),
    ("sm_90", 256, NATIVE),
    ("sm_100", 128, NATIVE),
    ("sm_100", 128, E4M3),
    ("gfx942", 128, NATIVE),
]
"""Compiled in every run; ``make test-all`` compiles all."""

ALL = [(target, dim, kind) for target in TARGETS for dim in (64, 80, 128, 192, 256) for kind in KVFormat]

COMPACT_LIMIT = 101_376
"""Shared memory of sm_86, sm_89 and sm_120, which have the configurations of sm_80."""

FEW_SPILLS = 16
"""Bytes: some versions of the compiler spill two to four registers of 8-bit prefill on sm_80 and sm_100, and of decode
with heads of 80 on sm_100."""

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 announces 3.10's default


@pytest.fixture(autouse=True)
def _kept_cache(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled kernels are kept between runs, where pytest keeps what it remembers."""
    assert pytestconfig.cache is not None
    with triton.knobs.cache.scope():
        monkeypatch.setattr(triton.knobs.cache, "dir", str(pytestconfig.cache.mkdir("triton")))
        yield


def _compile(target: GPUTarget, launch: Callable[[], None]) -> list[Compiled]:
    with compile_only(target) as compiled:
        launch()
    assert compiled
    return compiled


def _check_attention(target_name: str, dim: int, kind: KVFormat, window: int | None, softcap: float | None) -> None:
    target, architecture = TARGETS[target_name]
    options = {"kind": kind, "window": window, "softcap": softcap}
    for launch, config in (
        (launch_decode, paged_decode.CONFIGS[architecture, 2 if kind is NATIVE else 1, dim > 128]),
        (launch_prefill, paged_prefill.CONFIGS[architecture, 2 if kind is NATIVE else 1, dim > 128]),
    ):
        attention, *merge = _compile(target, partial(launch, architecture, dim, **options))  # type: ignore[arg-type]
        for kernel in (attention, *merge):
            assert kernel.fits, f"{kernel.name}: {kernel.shared} bytes of shared memory"
            hot = target is SM_90 or (kind is NATIVE and dim in (64, 128))
            assert kernel.stack <= (0 if hot else FEW_SPILLS), f"{kernel.name} spills {kernel.stack} bytes"
        if architecture is Architecture.COMPACT:
            assert attention.shared <= COMPACT_LIMIT
        if target.backend == "cuda":
            # Keys and values: loads of later tiles run while this one is computed.
            padded = triton.next_power_of_2(dim)
            buffers = attention.buffers(config.block_n, padded)
            pipelined = [count for count in buffers if count >= config.num_stages - 1]
            assert len(pipelined) >= 2, f"{attention.name} has buffers {buffers} at {config.num_stages} stages"
            assert "cp.async.c" in attention.asm["ptx"]
        if target is SM_90 and launch is launch_prefill:
            assert "wgmma.mma_async" in attention.asm["ptx"]
        if target is SM_100 and launch is launch_prefill:
            assert "tcgen05.mma" in attention.asm["ptx"]


@pytest.mark.parametrize(("target", "dim", "kind"), FEW)
def test_attention(target: str, dim: int, kind: KVFormat) -> None:
    _check_attention(target, dim, kind, None, None)


def test_attention_with_a_window_and_softcap() -> None:
    _check_attention("sm_90", 128, NATIVE, 4096, 50.0)


@pytest.mark.slow_all
@pytest.mark.parametrize(("target", "dim", "kind"), ALL)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4096, None), (4096, 50.0)])
def test_all_attention(target: str, dim: int, kind: KVFormat, window: int | None, softcap: float | None) -> None:
    _check_attention(target, dim, kind, window, softcap)


@pytest.mark.parametrize("dim", [128, 256])
def test_float32_fits_everywhere(dim: int) -> None:
    """On the smallest GPUs as well, whose configurations are those of sm_80."""
    for launch in (launch_decode, launch_prefill):
        kernel, *_ = _compile(SM_80, partial(launch, Architecture.COMPACT, dim, torch.float32))
        assert kernel.shared <= COMPACT_LIMIT, f"{kernel.name}: {kernel.shared} bytes of shared memory"


def _check_others(name: str) -> None:
    target, architecture = TARGETS[name]

    def launch() -> None:
        launch_rope()
        launch_rope(E4M3)
        launch_rows()
        launch_sampling()
        launch_step_inputs()
        launch_page_copies()
        for kind in (INT8, E4M3):
            for rows in (1, 64):
                launch_linear(architecture, rows, kind)

    for kernel in _compile(target, launch):
        assert kernel.fits, f"{kernel.name}: {kernel.shared} bytes of shared memory"
        assert kernel.stack == 0, f"{kernel.name} spills"


def test_other_kernels() -> None:
    _check_others("sm_90")


@pytest.mark.slow_all
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_other_kernels_everywhere(target: str) -> None:
    _check_others(target)


def test_linear_layers_are_pipelined() -> None:
    for kind in (INT8, E4M3):
        runs, _ = _compile(SM_90, partial(launch_linear, Architecture.LARGE, 16, kind))
        assert runs.buffers(64, 128)[0] >= 3
        assert "cp.async.c" in runs.asm["ptx"]


def test_serving_compiles_nothing_twice() -> None:
    """Neither the batch nor lengths nor the width of the page table make another variant: compiling takes a second,
    and every running request would wait for it."""

    def launch() -> None:
        for batch in (1, 2, 16, 33):
            for max_pages in (1, 7, 16, 2048):
                launch_decode(Architecture.LARGE, batch=batch, max_pages=max_pages)
                launch_prefill(Architecture.LARGE, batch=batch, max_pages=max_pages)
            launch_rope(tokens=batch)
            launch_rows(rows=batch)
            launch_sampling(rows=batch)
            launch_step_inputs(rows=batch, max_pages=batch)
            launch_page_copies(pages=batch)
        for rows in (1, 2, 3, 16):
            launch_linear(Architecture.LARGE, rows)

    variants: dict[str, set[str]] = {}
    for kernel in _compile(SM_90, launch):
        variants.setdefault(kernel.name, set()).add(kernel.variant)
    assert {name: len(found) for name, found in variants.items()} == {
        "_decode_runs": 1,
        "_merge_runs": 1,
        "_prefill": 1,
        "_rope_kv_write": 1,
        "_add_rms_norm": 1,
        "_head_rms_norm": 1,
        "_silu_mul": 1,
        "_process_logits": 1,
        "_draw": 1,
        "_token_logprobs": 1,
        "_step_rows": 1,
        "_write_words": 1,
        "_move_pages": 3,  # within the slab, out of it, into it
        "_linear_runs": 1,
        "_add_runs": 1,
    }


CHECKED = {"casts": 1, "philox": 1, "quantize": 2, "sampling": 2, "logprobs": 1, "rope_kv_write": 2, "page_copy": 1}
"""Families of ``kernel_cases`` with kernels or sizes of their own; the others launch what is compiled above."""


def test_what_checks_the_kernels_compiles() -> None:
    """The interpreter runs Python that the compiler does not take; a GPU's first sight of a kernel must not be its
    last. Nothing is computed, so the cases' verdicts mean nothing."""
    with compile_only(SM_90, resources=False) as compiled:
        for family, number in CHECKED.items():
            before = len(compiled)
            run_family(family, "cpu", range(number))
            assert len(compiled) >= before + number, family
    assert all(kernel.fits for kernel in compiled)


@pytest.mark.parametrize("name", ["sm_80", "sm_90"])
def test_what_checks_attention_on_a_device_fits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the cases take the configurations that serve, on long contexts too."""
    target, architecture = TARGETS[name]
    for module in (decode_cases, prefill_cases, linear_cases):
        monkeypatch.setattr(module, "served_on", lambda device: architecture)
    with compile_only(target, resources=False) as compiled:
        for family in ("decode", "prefill", "quantized_linear"):
            run_family(family, "cpu", range(5, 7))  # bfloat16, and float32 with the widest heads
    assert len(compiled) >= 8
    assert all(kernel.fits for kernel in compiled)
