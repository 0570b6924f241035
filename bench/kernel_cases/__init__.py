"""Random cases of the GPU kernels against float64, for Triton's interpreter (tests) and for devices (`gpu_check`).

Whatever a kernel must not read, pages that no sequence owns, unwritten slots, outputs, scratch, starts as NaN.
"""
