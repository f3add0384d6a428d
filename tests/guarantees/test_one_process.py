"""Several managers and threads of one process: each saves as the first did, and none refuses itself."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

from ckpt_core import CheckpointManager, ConfigError, KeepLatest, RootBusyError
from ckpt_core.commit import Lease
from ckpt_core.storage import LocalStorage
from tests.kit.memory import MemoryStorage
from tests.unit.commit.checkpoints import bucket_like, posix_like
from tests.unit.training import LONG, Gate


def state_of(step):
    return {"w": torch.full((4,), float(step))}


def steps(manager):
    return [info.step for info in manager.checkpoints()]


@pytest.mark.parametrize("make", [posix_like, bucket_like, "local"])
def test_a_second_manager_of_the_process_takes_over_and_the_first_says_so(make, tmp_path, caplog):
    storage = LocalStorage(tmp_path) if make == "local" else make()
    first = CheckpointManager(storage, keep=KeepLatest(1))
    first.save(1, state_of(1))
    first.wait()
    with CheckpointManager(storage) as second:
        assert second.resume(state_of(0)) == 1
        assert "taken over" in caplog.text
        second.save(2, state_of(2)).result()
        for refused in (lambda: first.save(3, state_of(3)), first.prune, lambda: first.resume(state_of(0))):
            with pytest.raises(ConfigError, match="another CheckpointManager of this process"):
                refused()
        assert first.load(state_of(0)).step == 2
        first.close()
        second.save(3, state_of(3)).result()
        assert steps(second) == [1, 2, 3]


def test_a_save_in_flight_of_the_first_is_waited_for(tmp_path):
    gate = Gate()
    first = CheckpointManager(gate.before(LocalStorage(tmp_path)))
    handle = first.save(1, state_of(1))
    assert gate.reached.wait(LONG)
    taken: list[int | None] = []
    second = CheckpointManager(tmp_path)
    other = threading.Thread(target=lambda: taken.append(second.resume(state_of(0))))
    other.start()
    assert not handle.done()
    gate.open()
    other.join(LONG)
    assert (taken, handle.result().step) == ([1], 1)
    second.close()
    first.close()


@pytest.mark.slow
def test_a_manager_that_was_collected_without_close_is_in_nobodys_way(tmp_path):
    for step in range(1, 6):
        manager = CheckpointManager(tmp_path)
        manager.resume(state_of(0))
        manager.save(step, state_of(step))
        manager.wait()
        del manager
        gc.collect()
    with CheckpointManager(tmp_path) as manager:
        assert steps(manager) == [1, 2, 3, 4, 5]


def test_roots_of_the_same_name_in_memory_are_not_the_same_root():
    with CheckpointManager(MemoryStorage()) as one, CheckpointManager(MemoryStorage()) as other:
        for manager in (one, other, one, other):
            manager.save(1 + (manager.latest().step if manager.latest() else 0), state_of(1))
            manager.wait()
        assert steps(one) == steps(other) == [1, 2]


def test_a_closed_first_manager_leaves_nothing_to_take_over(tmp_path, caplog):
    for step in (1, 2):
        with CheckpointManager(tmp_path) as manager:
            manager.resume(state_of(0))
            manager.save(step, state_of(step))
    assert "taken over" not in caplog.text


def test_a_busy_root_is_never_blamed_on_the_process_itself(tmp_path):
    with Lease.acquire(LocalStorage(tmp_path), "job"), CheckpointManager(tmp_path) as manager:
        with pytest.raises(RootBusyError, match="held by job in this very process") as told:
            manager.save(1, state_of(1))
        assert str(os.getpid()) not in str(told.value)


def test_threads_that_save_at_once_are_told_to_use_one(tmp_path):
    inside, leave = threading.Event(), threading.Event()

    class Slow:
        def state_dict(self):
            inside.set()
            leave.wait(LONG)
            return {"n": 1}

        def load_state_dict(self, state):
            del state

    with CheckpointManager(tmp_path) as manager:
        thread = threading.Thread(target=lambda: manager.save(1, {"slow": Slow()}))
        thread.start()
        assert inside.wait(LONG)
        for step in (2, 3):
            with pytest.raises(ConfigError, match="another thread of this process is in save"):
                manager.save(step, state_of(step))
        leave.set()
        thread.join(LONG)
        manager.wait()
        assert steps(manager) == [1]
