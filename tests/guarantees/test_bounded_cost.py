"""P7: however many saves there were, nothing grows."""

from __future__ import annotations

import gc
import threading

import psutil
import torch
from torch import nn

from ckpt_core import CheckpointManager, KeepLatest, TrainState

SAVES = 200
WARM_UP = 50


def resources():
    gc.collect()
    process = psutil.Process()
    return threading.active_count(), process.num_fds(), process.memory_info().rss


def test_no_growth_over_many_saves(tmp_path):
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = TrainState(model=model, optimizer=optimizer)
    with CheckpointManager(tmp_path, keep=KeepLatest(2)) as checkpoints:
        for step in range(SAVES):
            if step == WARM_UP:
                checkpoints.wait()
                threads, files, memory = resources()
            checkpoints.save(step, state)
        checkpoints.wait()
        threads_after, files_after, memory_after = resources()
    assert threads_after <= threads
    assert files_after <= files
    # One state is 36 KiB: had every save left its copy or its files behind, it would show.
    assert memory_after - memory < 8 << 20
    assert len(list(tmp_path.glob("step-*"))) == 2
