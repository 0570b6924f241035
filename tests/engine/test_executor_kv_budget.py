"""How many pages a CPU gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringserve.engine.kv_budget import GIB, KVBudget, check_page_size, device_kv_memory, free_memory, plan_kv
from ringserve.engine.model_error import ModelError

MIB = 1 << 20


def plan(**changes: Any) -> KVBudget:
    arguments: dict[str, Any] = {
        "bytes_per_page": MIB,
        "page_size": 64,
        "max_num_seqs": 8,
        "max_model_len": 1000,
        "max_model_len_asked": False,
        "kv_cache_memory": None,
        "free_bytes": 64 * GIB,
    }
    return plan_kv(**{**arguments, **changes})


def test_default_is_what_all_sequences_need() -> None:
    assert plan() == KVBudget(8 * 16, 1000, None)


def test_default_is_at_most_four_gib_and_a_quarter_of_the_memory() -> None:
    assert plan(max_num_seqs=4096).num_pages == 4096
    assert plan(max_num_seqs=4096, free_bytes=2 * GIB).num_pages == 512


def test_memory_asked_for_is_taken_as_it_is() -> None:
    assert plan(kv_cache_memory=100 * GIB, free_bytes=GIB).num_pages == 100 * 1024
    assert plan(kv_cache_memory=16 * MIB + 5).num_pages == 16


def test_too_little_for_one_sequence() -> None:
    budget = plan(kv_cache_memory=15 * MIB)
    assert (budget.num_pages, budget.max_model_len) == (15, 960)
    assert budget.note is not None
    assert "960 instead of 1000" in budget.note
    assert plan(free_bytes=40 * MIB).max_model_len == 640
    with pytest.raises(ModelError, match=r"holds 960 tokens .* 1000 needs 16777216 bytes"):
        plan(kv_cache_memory=15 * MIB, max_model_len_asked=True)
    with pytest.raises(ModelError, match="--kv-cache-memory"):
        plan(kv_cache_memory=MIB - 1)


@pytest.mark.parametrize("size", [8, 16, 32, 64, 128])
def test_page_sizes(size: int) -> None:
    assert check_page_size(size) == size


def test_memory_that_holds_no_page() -> None:
    words = r"1048575 bytes hold no page of 64 tokens \(1048576 bytes\); .* at least 16777216 for one sequence"
    with pytest.raises(ModelError, match=words):
        plan(kv_cache_memory=MIB - 1)
    with pytest.raises(ModelError, match=words):
        plan(free_bytes=4 * MIB - 4)


@pytest.mark.parametrize("size", [0, 1, 4, 12, 100, 256, -8])
def test_bad_page_sizes(size: int) -> None:
    with pytest.raises(ModelError, match="power of two"):
        check_page_size(size)


def machine(root: Path, available: int) -> tuple[Path, Path]:
    proc, cgroup = root / "proc", root / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable:   {available // 1024} kB\n")
    return proc, cgroup


def test_free_memory_of_the_machine(tmp_path: Path) -> None:
    proc, cgroup = machine(tmp_path, 8 * GIB)
    assert free_memory(proc, cgroup) == 8 * GIB
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("5\n")
    assert free_memory(proc, cgroup) == 8 * GIB


def test_free_memory_of_the_control_group(tmp_path: Path) -> None:
    proc, cgroup = machine(tmp_path, 8 * GIB)
    (cgroup / "memory.max").write_text(f"{4 * GIB}\n")
    (cgroup / "memory.current").write_text(f"{3 * GIB}\n")
    assert free_memory(proc, cgroup) == GIB
    (cgroup / "memory.stat").write_text(f"anon 1\nfile 2\ninactive_file {GIB}\nactive_file 7\n")
    assert free_memory(proc, cgroup) == 2 * GIB
    (cgroup / "memory.current").write_text(f"{9 * GIB}\n")
    assert free_memory(proc, cgroup) == 0


def test_free_memory_of_an_old_control_group(tmp_path: Path) -> None:
    proc, cgroup = machine(tmp_path, 8 * GIB)
    (cgroup / "memory").mkdir()
    (cgroup / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (cgroup / "memory" / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    assert free_memory(proc, cgroup) == 8 * GIB
    (cgroup / "memory" / "memory.limit_in_bytes").write_text(f"{3 * GIB}\n")
    assert free_memory(proc, cgroup) == 2 * GIB


def test_free_memory_here() -> None:
    assert free_memory() > 0


def test_a_gpu_gives_what_weights_and_warm_up_left() -> None:
    gib = 1 << 30
    assert device_kv_memory(80 * gib, 60 * gib, 0.9) == 72 * gib - 20 * gib
    assert device_kv_memory(80 * gib, 80 * gib, 0.5) == 40 * gib
    with pytest.raises(ModelError, match="raise --gpu-memory-utilization above"):
        device_kv_memory(80 * gib, 60 * gib, 0.2)
