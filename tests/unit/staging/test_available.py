from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_core.staging import free_memory
from ckpt_core.staging._arena import FreeMemory

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    """A proc and a cgroup filesystem of a machine with 64 GiB, 32 of them free."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "meminfo", f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB\n")
    groups.mkdir()
    return proc, groups


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")


def test_without_groups_it_is_what_the_machine_has(machine):
    assert free_memory(*machine) == FreeMemory(available_bytes=32 * GIB, total_bytes=64 * GIB)


def test_the_tightest_group_above_a_process_counts_and_its_cache_is_free(machine):
    proc, groups = machine
    write(proc / "self" / "cgroup", "0::/job/task")
    write(groups / "job" / "memory.max", 8 * GIB)
    write(groups / "job" / "memory.current", 5 * GIB)
    write(groups / "job" / "memory.stat", f"anon 1\ninactive_file {GIB}")
    write(groups / "job" / "task" / "memory.max", "max")
    write(groups / "job" / "task" / "memory.current", 5 * GIB)
    assert free_memory(proc, groups) == FreeMemory(available_bytes=4 * GIB, total_bytes=8 * GIB)


def test_in_a_container_the_limit_is_at_the_top(machine):
    proc, groups = machine
    write(proc / "self" / "cgroup", "0::/../../host/path/that/is/not/here")
    write(groups / "memory.max", 4 * GIB)
    write(groups / "memory.current", GIB)
    assert free_memory(proc, groups) == FreeMemory(available_bytes=3 * GIB, total_bytes=4 * GIB)


def test_groups_of_version_1_count_too(machine):
    proc, groups = machine
    write(proc / "self" / "cgroup", "5:cpu:/x\n4:memory:/docker/abc\n0::/")
    write(groups / "memory" / "memory.limit_in_bytes", 9223372036854771712)
    write(groups / "memory" / "memory.usage_in_bytes", GIB)
    write(groups / "memory" / "docker" / "abc" / "memory.limit_in_bytes", 2 * GIB)
    write(groups / "memory" / "docker" / "abc" / "memory.usage_in_bytes", GIB)
    assert free_memory(proc, groups) == FreeMemory(available_bytes=GIB, total_bytes=2 * GIB)


def test_where_nothing_can_be_told_it_says_so(tmp_path):
    assert free_memory(tmp_path / "proc", tmp_path / "cgroup") is None


@pytest.mark.parametrize(("total", "headroom"), [(4 * GIB, GIB // 2), (100 * GIB, 5 * GIB)])
def test_the_headroom_is_five_percent_and_at_least_512_mib(total, headroom):
    assert FreeMemory(available_bytes=total, total_bytes=total).usable_bytes == total - headroom


def test_where_little_is_left_staging_may_still_take_three_quarters_of_it():
    assert FreeMemory(available_bytes=GIB, total_bytes=64 * GIB).usable_bytes == 3 * GIB // 4


def test_this_machine_has_free_memory():
    found = free_memory()
    assert found is None or 0 < found.usable_bytes < found.available_bytes <= found.total_bytes
