"""``bench.kernel_cases`` in Triton's interpreter, repaired. Start with TRITON_INTERPRET=1."""

from __future__ import annotations

import sys

from triton_interpreter import repair

if __name__ == "__main__":
    repair()
    from ringserve.bench.kernel_cases.run import main

    sys.exit(main(sys.argv[1:]))
