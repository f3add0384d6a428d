"""What a save costs does not depend on how many checkpoints are kept."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from ckpt_core import CheckpointManager, KeepEvery, KeepLatest
from ckpt_core.commit import Catalog
from ckpt_core.policies import RetentionPolicy
from ckpt_core.testing import FaultyStorage
from tests.unit.commit.checkpoints import bucket_like, posix_like, save

FEW, MANY, SAVES = 3, 80, 2
"""No more saves than that what they drop is alike: the checkpoints that were there before."""


def storage_calls(make, kept: int, keep: RetentionPolicy) -> Counter[str]:
    """What `SAVES` saves ask of storage, by kind, where so many checkpoints are kept."""
    inner = make()
    for step in range(1, kept + 1):
        save(inner, step)
    storage = FaultyStorage(inner)
    # The journal asks for as much with any number kept, at moments of its own.
    with CheckpointManager(storage, keep=keep, journal=False) as manager:
        manager.continue_from()
        manager.save(kept + 1, {"w": torch.zeros(4)})
        manager.wait()
        before = len(storage.operations)
        for step in range(kept + 2, kept + 2 + SAVES):
            manager.save(step, {"w": torch.zeros(4)})
            manager.wait()
        calls = Counter(operation.method for operation in storage.operations[before:])
    assert len(Catalog(inner).committed()) >= kept
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("make", [posix_like, bucket_like])
@pytest.mark.parametrize("drops", [False, True])
def test_a_save_asks_as_much_of_storage_with_many_kept_as_with_three(make, drops):
    few = storage_calls(make, FEW, KeepLatest(FEW) if drops else KeepEvery(1))
    many = storage_calls(make, MANY, KeepLatest(MANY) if drops else KeepEvery(1))
    if drops:
        # With three kept, one that stays is verified at every third save; with many it lasts for longer.
        assert all(many[kind] <= few[kind] for kind in many)
    else:
        assert many == few


def test_a_directory_of_others_beside_the_checkpoints_is_asked_for_a_marker_only_once():
    storage = FaultyStorage(posix_like())
    for number in range(20):
        storage.write_bytes(f"logs-{number}/events", b"x")
    with CheckpointManager(storage, keep=KeepLatest(1)) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": torch.zeros(4)})
            manager.wait()
    asked = Counter(o.key for o in storage.operations if o.key.startswith("logs-") and o.method == "open")
    assert set(asked.values()) == {1}
