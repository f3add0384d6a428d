"""Weights in the place of whole checkpoints, in an object store that is of this process alone."""

from __future__ import annotations

import threading

import fsspec
import pytest
import torch

from ckpt_core import CheckpointManager, KeepEvery, KeepLatest, KeepWeights, TrainState
from ckpt_core.cli import main
from ckpt_core.commit import Catalog
from ckpt_core.storage import object_storage
from ckpt_core.testing import Fault, FaultyStorage

KEEP = KeepLatest(1) | KeepWeights(KeepEvery(1))


@pytest.fixture
def bucket():
    yield "memory://weights/run"
    fsspec.filesystem("memory").rm("/weights", recursive=True)


def there(root):
    return [(info.step, info.weights_of is not None) for info in Catalog(root).survey().everything]


def save(manager, state, step):
    manager.save(step, state)
    manager.wait()


def test_weights_are_made_here_where_no_other_process_sees_the_root(bucket, capsys):
    state = TrainState(model=torch.nn.Linear(4, 4))
    with CheckpointManager(bucket, keep=KEEP) as manager:
        save(manager, state, 1)
        save(manager, state, 2)
        manager.prune()
        assert there(manager.storage) == [(1, True), (2, False)]
    assert main(["show", f"{bucket}@1"]) == 0
    assert "weights of:  step-000000001; no resume takes them" in capsys.readouterr().out


def test_weights_that_a_prune_saw_half_written_count_once_they_are_committed(bucket):
    state, half, seen = TrainState(model=torch.nn.Linear(4, 4)), threading.Event(), threading.Event()

    def pause(_):
        half.set()
        assert seen.wait(60)

    fault = Fault(method="close", key="*.weights/manifest.json", nth=0, after=pause)
    storage = FaultyStorage(object_storage(bucket), [fault])
    with CheckpointManager(storage, keep=KEEP) as manager:
        save(manager, state, 1)
        save(manager, state, 2)
        assert half.wait(60)
        save(manager, state, 3)  # its prune sees the draft
        seen.set()
        for _ in range(2):
            manager.prune()
    assert there(storage) == [(1, True), (2, True), (3, False)]
