"""The executor's half of swapping: the pages that a step's message moves between the KV pool and the host.

The same on every device. What differs (the array namespace, the lane of transfers, the two kernels) is given when the
swap pool is made (``swap_pool.make_swap_pool``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringserve.engine.model_error import ModelError
from ringserve.messages.columns import unpack_i32
from ringserve.messages.steps import SchedulerOutput

if TYPE_CHECKING:
    from ringserve.engine.swap_pool import SwapPool


@dataclass(frozen=True)
class SwapInfo:
    """What the scheduler is told of the swap space, in ``ExecutorReady``."""

    num_host_pages: int = 0
    bytes_per_page: int = 0
    bytes_per_second: float = 0.0


def choose_swap_space(asked: int | None, default: int, free_bytes: int) -> int:
    """Bytes of the host's memory: what was asked for, else the device's default, at most a quarter of what is free.

    Raises ModelError where more was asked for than is free.
    """
    if asked is None:
        return min(default, free_bytes // 4)
    if asked > free_bytes:
        raise ModelError(swap_space_too_large(asked, free_bytes))
    return asked


def check_swap_space(asked: int | None, bytes_per_page: int) -> None:
    """Raises ModelError where a swap space was asked for that holds nothing."""
    if asked and asked < bytes_per_page:
        raise ModelError(
            f"--swap-space {asked} holds no KV page ({bytes_per_page} bytes); set at least that, or 0 to do without"
        )


def measure_swaps(swap_pool: SwapPool | None) -> SwapInfo:
    """Size and speed of the swap space, by copying a few pages there and back. At the end of the warm-up: nothing may
    be in use yet."""
    if swap_pool is None:
        return SwapInfo()
    statistics = swap_pool.statistics()
    return SwapInfo(statistics.num_pages, statistics.bytes_per_page, swap_pool.measure())


def apply_swaps(swap_pool: SwapPool | None, output: SchedulerOutput) -> None:
    """Ask for a step's transfers. To be called before anything that the step computes is submitted, and after
    everything of the steps before it was.

    Pages go out before any come in: what comes in may lie in a page that something else has just gone out of. Raises
    RuntimeError where there is no swap pool, ValueError for pages that do not exist: the two processes disagree.
    """
    swaps = output.swaps
    if swaps is None:
        return
    if swap_pool is None:
        raise RuntimeError(f"step {output.step_id}: pages are to be swapped and there is no swap space")
    if swaps.out_pages:
        swap_pool.swap_out(unpack_i32(swaps.out_pages).tolist(), unpack_i32(swaps.out_host_pages).tolist())
    if swaps.in_pages:
        swap_pool.swap_in(unpack_i32(swaps.in_host_pages).tolist(), unpack_i32(swaps.in_pages).tolist())


def swap_space_too_large(swap_space: int, free_bytes: int | None) -> str:
    """The line for the user."""
    free = "" if free_bytes is None else f" ({free_bytes} bytes are free)"
    return f"--swap-space {swap_space} does not fit into the host's memory{free}; set a smaller one"
