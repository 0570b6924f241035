"""Run cases by family and seed: ``main(["cpu", "decode:0:100", "prefill:0:100"])``.

On a CPU this needs Triton's interpreter (TRITON_INTERPRET=1 before Triton is imported) with the repairs that the tests
make.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from ringserve.bench.kernel_cases.casts import check_casts
from ringserve.bench.kernel_cases.decode import check_decode, check_far_decode
from ringserve.bench.kernel_cases.linear import check_quantized_linear
from ringserve.bench.kernel_cases.outcome import Check
from ringserve.bench.kernel_cases.pages import check_page_copy, check_quantize, check_rope_kv_write
from ringserve.bench.kernel_cases.prefill import check_far_prefill, check_prefill
from ringserve.bench.kernel_cases.rows import check_add_rms_norm, check_head_rms_norm, check_silu_mul
from ringserve.bench.kernel_cases.sampling import check_logprobs, check_philox, check_sampling

FAMILIES: dict[str, Check] = {
    "casts": check_casts,
    "decode": check_decode,
    "prefill": check_prefill,
    "far_decode": check_far_decode,
    "far_prefill": check_far_prefill,
    "rope_kv_write": check_rope_kv_write,
    "quantize": check_quantize,
    "add_rms_norm": check_add_rms_norm,
    "head_rms_norm": check_head_rms_norm,
    "silu_mul": check_silu_mul,
    "page_copy": check_page_copy,
    "quantized_linear": check_quantized_linear,
    "philox": check_philox,
    "sampling": check_sampling,
    "logprobs": check_logprobs,
}


def run_family(name: str, device: str, seeds: range) -> list[str]:
    """One line for each case that failed."""
    failures = []
    for seed in seeds:
        outcome = FAMILIES[name](seed, device)
        if not outcome.passed:
            failures.append(
                f"{name} {seed}: error {outcome.error:.2e} over {outcome.tolerance:.0e} in {outcome.description}"
            )
    return failures


def main(arguments: Sequence[str]) -> int:
    """``device family:first-seed:number ...``; the status says whether all passed."""
    device, *families = arguments
    torch.set_num_threads(1)
    failures = []
    for family in families:
        name, first, number = family.split(":")
        failed = run_family(name, device, range(int(first), int(first) + int(number)))
        print(f"{name}: {len(failed)} of {number} cases failed")
        failures += failed
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
