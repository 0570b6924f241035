"""How many KV pages a device gets.

CPUs, by default: what ``max_num_seqs`` sequences of ``max_model_len`` need, at most 4 GiB and a quarter of the memory
that is left to this process. GPUs: what weights and warm-up have left of a part of the memory. Knows numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ringserve.engine.model_error import ModelError

GIB = 1 << 30
DEFAULT_LIMIT = 4 * GIB
UNLIMITED = 1 << 60
"""Version 1 control groups write "no limit" as a number near 2**63."""


@dataclass(frozen=True)
class KVBudget:
    """The pool's size."""

    num_pages: int
    """Usable pages."""
    max_model_len: int
    """Perhaps reduced to what the pages hold."""
    note: str | None
    """One line for the log where ``max_model_len`` was reduced."""


def free_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: of the machine, and of its control group (version 2 or 1)."""
    free = UNLIMITED
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    groups = (
        (cgroup / "memory.max", cgroup / "memory.current", cgroup / "memory.stat", "inactive_file"),
        (
            cgroup / "memory" / "memory.limit_in_bytes",
            cgroup / "memory" / "memory.usage_in_bytes",
            cgroup / "memory" / "memory.stat",
            "total_inactive_file",
        ),
    )
    for limit, usage, stat, reclaimable in groups:
        if not (limit.exists() and usage.exists()):
            continue
        text = limit.read_text().strip()
        if text == "max" or int(text) >= UNLIMITED:
            continue
        used = int(usage.read_text())
        if stat.exists():  # pages of files (the model's own among them) are given back when asked for
            for line in stat.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == reclaimable:
                    used -= int(value)
        free = min(free, int(text) - used)
    return max(free, 0)


def device_kv_memory(total_bytes: int, free_bytes: int, utilization: float) -> int:
    """Bytes for a GPU's KV pool, so that ``utilization`` of its memory is in use, by this process and others together.

    ``free_bytes`` as the driver says after the weights were loaded and the largest step was run once.
    """
    in_use = total_bytes - free_bytes
    memory = int(total_bytes * utilization) - in_use
    if memory <= 0:
        raise ModelError(
            f"no GPU memory is left for the KV cache: {in_use} of {total_bytes} bytes are in use after loading the "
            f"model; raise --gpu-memory-utilization above {utilization:g}, or take a smaller model"
        )
    return memory


def check_page_size(page_size: int) -> int:
    """A power of two from 8 to 128."""
    if not (8 <= page_size <= 128) or page_size & (page_size - 1):
        raise ModelError(f"block_size {page_size} is not a power of two from 8 to 128; leave --block-size out for 64")
    return page_size


def plan_kv(
    *,
    bytes_per_page: int,
    page_size: int,
    max_num_seqs: int,
    max_model_len: int,
    max_model_len_asked: bool,
    kv_cache_memory: int | None,
    free_bytes: int,
) -> KVBudget:
    """Pages for the pool. At least one sequence of ``max_model_len`` must fit; where the user did not ask for that
    length it is reduced instead."""
    pages_per_sequence = -(-max_model_len // page_size)
    if kv_cache_memory is not None:
        memory = kv_cache_memory
        num_pages = memory // bytes_per_page
    else:
        memory = min(DEFAULT_LIMIT, free_bytes // 4)
        num_pages = min(max_num_seqs * pages_per_sequence, memory // bytes_per_page)
    if num_pages >= pages_per_sequence:
        return KVBudget(num_pages, max_model_len, None)
    held = num_pages * page_size
    given = num_pages * bytes_per_page
    needed = pages_per_sequence * bytes_per_page
    if num_pages < 1:
        raise ModelError(
            f"the KV cache's {memory} bytes hold no page of {page_size} tokens ({bytes_per_page} bytes); set "
            f"--kv-cache-memory to at least {needed} for one sequence of max_model_len {max_model_len}"
        )
    if max_model_len_asked:
        raise ModelError(
            f"the KV cache holds {held} tokens ({given} bytes) but one sequence of max_model_len {max_model_len} needs "
            f"{needed} bytes; set --kv-cache-memory to at least that, or --max-model-len to at most {held}"
        )
    note = (
        f"max_model_len is {held} instead of {max_model_len}: the KV cache holds no longer sequence "
        f"(--kv-cache-memory {needed} would)"
    )
    return KVBudget(num_pages, held, note)
