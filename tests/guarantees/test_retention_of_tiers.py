"""What an upload keeps from removal in the root is removed when the upload has ended."""

from __future__ import annotations

import threading

import torch

from ckpt_core import CheckpointManager, KeepLatest, Upload
from ckpt_core.commit import Catalog
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from tests.kit.memory import MemoryStorage


def manager(root, fault: Fault) -> CheckpointManager:
    """Save four steps while nothing reaches the tier."""
    tier = FaultyStorage(MemoryStorage("tier"), [fault])
    upload = Upload(tier, when_busy="queue", deadline_seconds=30)
    manager = CheckpointManager(root, keep=KeepLatest(1), upload=upload)
    for step in range(1, 5):
        manager.save(step, {"w": torch.full((9,), float(step))}).result(60)
    return manager


def steps(root) -> list[int]:
    return [info.step for info in Catalog(LocalStorage(root)).committed()]


def test_a_job_that_ends_leaves_what_retention_says_although_its_uploads_were_late(tmp_path):
    go = threading.Event()
    checkpoints = manager(tmp_path, Fault(method="create", key="*.distcp", before=lambda _: go.wait(60)))
    go.set()
    checkpoints.close()
    assert steps(tmp_path) == [4]


def test_what_is_left_to_the_next_run_to_upload_stays(tmp_path):
    checkpoints = manager(tmp_path, Fault(method="create", key="*.distcp", error=OSError("down")))
    checkpoints.close(wait_for_uploads=False)
    left = steps(tmp_path)
    assert left[-1] == 4
    assert len(left) > 1
    with CheckpointManager(tmp_path, keep=KeepLatest(1)) as later:
        assert later.resume({"w": torch.zeros(9)}) == 4
