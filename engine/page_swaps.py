"""The executor's half of swapping: the pages that a step's message moves between the KV pool and the host.

The same on every device. What differs (the array namespace, the lane of transfers, the two kernels) is given when the
swap pool is made.
"""

from __future__ import annotations

from ringserve.engine.array_namespace import ArrayNamespace
from ringserve.engine.kv_pool import KVPool
from ringserve.engine.model_error import ModelError
from ringserve.engine.swap_pool import Gather, SwapPool
from ringserve.engine.transfer_lane import TransferLane
from ringserve.messages import SchedulerOutput, unpack_i32


def make_swap_pool(
    pool: KVPool,
    swap_space: int,
    free_bytes: int,
    namespace: ArrayNamespace,
    lane: TransferLane,
    gather_pages: Gather,
    scatter_pages: Gather,
) -> SwapPool | None:
    """As many host pages as fit into ``swap_space`` bytes; None for 0 bytes. ``free_bytes``: what the host has left.

    Raises ModelError with one line where that is no page, or more than the host has.
    """
    if swap_space == 0:
        return None
    page = pool.statistics().bytes_per_page
    if swap_space < page:
        raise ModelError(
            f"--swap-space {swap_space} holds no KV page ({page} bytes); set at least that, or 0 to do without"
        )
    refused = f"--swap-space {swap_space} does not fit into the memory ({free_bytes} bytes are free); set a smaller one"
    if swap_space > free_bytes:
        raise ModelError(refused)
    try:
        return SwapPool(pool, swap_space // page, namespace, lane, gather_pages, scatter_pages)
    except MemoryError as error:
        raise ModelError(refused) from error


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
