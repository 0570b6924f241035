"""What choosing a device imports."""

from __future__ import annotations

import subprocess
import sys


def test_no_kernels_of_a_cpu_before_a_cpu_is_chosen() -> None:
    """numba and the CPU's kernels cost a second of a start on another device, which has no use for them."""
    program = (
        "import sys\n"
        "import ringserve.engine.executor_startup, ringserve.engine.devices, ringserve.engine.ready_engine\n"
        "print(sorted(n for n in sys.modules if n.startswith(('numba', 'llvmlite', 'transformers', 'cupy', 'triton'))\n"
        "      or n == 'ringserve.engine.cpu_startup'))\n"
    )
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
