"""torch's settings in the executor's process, where it is needed at all."""

from __future__ import annotations

import torch


def set_threads(threads: int) -> None:
    """Size torch's pools; no gradients are ever wanted in this process."""
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:  # torch takes it once only
        torch.set_num_interop_threads(1)
    torch.set_grad_enabled(False)
