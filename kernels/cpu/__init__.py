"""Kernels for CPUs, compiled at first use by numba (LLVM): no compiler is needed on the machine.

Nothing here is imported unless the executor computes on a CPU: importing numba takes a third of a second. Functions
that run inside compiled code take addresses as int64 and sizes in elements unless their docstring says bytes.
"""
