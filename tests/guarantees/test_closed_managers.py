"""After `CheckpointManager.close()` no thread and no file descriptor of ours is left, whatever else stays."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ckpt_core import CheckpointManager, EverySteps, OnPreemption
from tests.guarantees.test_process_group import make_group
from tests.kit.ranks import run_ranks

SAVING = 20
"""Every so many managers, one saves."""

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts /proc/self/fd")


def alive(before: Collection[threading.Thread] = ()) -> list[str]:
    """The names of our threads that run now and did not run before."""
    threads = [each for each in threading.enumerate() if each.name.startswith("ckpt-") and each not in before]
    for thread in threads:
        # A preemption file may be on a filesystem that hangs: `close` does not wait for that thread.
        if thread.name == "ckpt-preemption":
            thread.join(30)
    return [each.name for each in threads if each.is_alive()]


def opened() -> Counter[str]:
    """What this process has open: sockets and pipes without their numbers."""
    found = Counter[str]()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[str(entry.readlink()).partition(":[")[0]] += 1
        except FileNotFoundError:
            continue  # that of the listing itself
    return found


def managers_made_and_closed(root: str, count: int) -> tuple[list[str], dict[str, int]]:
    """What all managers have left: our threads, and what is open now and was not before."""
    threads = threading.enumerate()  # other tests of this process may have left some

    def make(number: int, name: str) -> CheckpointManager:
        policy = EverySteps(1) | OnPreemption(file=f"{root}/stop")
        checkpoints = CheckpointManager(Path(root) / name, save=policy, deadline_seconds=60)
        assert checkpoints.due(1) is not None
        if number % SAVING == 0:
            checkpoints.save(1, {"x": torch.full((1000,), float(number))})
        checkpoints.close()
        return checkpoints

    kept = [make(0, "warm")]  # opens what a process opens only once
    before = opened()
    kept += [make(number, f"run-{number}") for number in range(count)]
    assert len(kept) == 1 + count  # close has to release what it holds, not the garbage collector
    return alive(threads), dict(opened() - before)


@needs_proc
def test_two_hundred_closed_managers_leave_no_thread_and_no_file_open(tmp_path):
    assert managers_made_and_closed(str(tmp_path), 200) == ([], {})
    assert not [path for path in tmp_path.rglob("writer.json") if os.path.lexists(path)]


@needs_proc
@pytest.mark.distributed
def test_closed_managers_of_two_ranks_leave_no_thread_and_no_file_open(tmp_path):
    found = run_ranks(managers_made_and_closed, 2, str(tmp_path), 200, timeout_seconds=200)
    assert found == [([], {}), ([], {})]


def over_several_groups(root: str) -> tuple[list[int], list[str]]:
    """Threads to the store while a manager of each group saves, and after the last `close`."""
    counts: list[int] = []
    for step in range(4):
        make_group()
        with CheckpointManager(root, deadline_seconds=60) as checkpoints:
            checkpoints.save(step, {"x": torch.ones(3)})
            counts.append(alive().count("ckpt-store"))
            if step % 2:
                dist.destroy_process_group()
        if not step % 2:
            dist.destroy_process_group()
    return counts, alive()


@pytest.mark.distributed
def test_managers_of_one_process_group_after_another_leave_no_thread(tmp_path):
    for counts, left in run_ranks(over_several_groups, 2, str(tmp_path), process_group=False):
        assert max(counts) <= 2
        assert left == []
