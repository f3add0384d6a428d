"""P7: however many saves there were, nothing grows."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from ckpt_core import CheckpointManager, KeepLatest, TrainState

SAVES = 80
WARM_UP = 20


def resources(root: Path):
    gc.collect()
    process = psutil.Process()
    files = [each for each in process.open_files() if Path(each.path).is_relative_to(root)]
    return len(threads_of_ours()), len(files), process.memory_info().rss


def threads_of_ours():
    """Others of this process, such as the test runner, may start threads, and open files, meanwhile."""
    return {each for each in threading.enumerate() if each.name.startswith("ckpt-")}


@pytest.mark.slow
def test_no_growth_over_many_saves(tmp_path):
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = TrainState(model=model, optimizer=optimizer)
    with CheckpointManager(tmp_path, keep=KeepLatest(2)) as checkpoints:
        for step in range(SAVES):
            if step == WARM_UP:
                checkpoints.wait()
                threads, files, memory = resources(tmp_path)
            checkpoints.save(step, state)
        checkpoints.wait()
        threads_after, files_after, memory_after = resources(tmp_path)
    assert threads_after <= threads + 1  # the watch of a save that has just ended may be ending, too
    assert files_after <= files
    # One state is 516 KiB: had each of 60 saves left its copy or its files behind, it would show.
    assert memory_after - memory < 16 << 20
    assert len(list(tmp_path.glob("step-*"))) == 2
