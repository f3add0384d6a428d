"""What a save is predicted to take is enough, and not much more than it takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.options import Headroom
from ckpt_core.saving._disk_space import DiskSpace, SpaceNeeded
from ckpt_core.storage import Space
from tests.kit.memory import MemoryStorage

SLACK_BYTES = 100_000


def trained(layers, width):
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)), nn.BatchNorm1d(width))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return TrainState(model=model, optimizer=optimizer)


STATES = {
    "tiny": lambda: trained(1, 4),
    "many small tensors": lambda: trained(100, 16),
    "large tensors": lambda: trained(2, 1024),
    "plain values": lambda: {"text": "x" * 100_000, "numbers": list(range(5000)), "x": torch.ones(3)},
    "empty tensors": lambda: {"x": torch.ones(0), "y": torch.ones(3, 0)},
    "other shapes": lambda: {f"{n:x}.w": torch.ones(1 + n % 300, 1 + n // 300) for n in range(2000)},
    "five dimensions": lambda: {f"a.{n}": torch.ones(1, 2, 1, 1 + n % 7, 1) for n in range(2000)},
    "texts of their own": lambda: {f"n{n}": {f"m{n}": {f"k{n}": torch.ones(2)}} for n in range(2000)},
    "odd sizes": lambda: {f"t{n}": torch.ones(n) for n in range(500, 3000, 100)},
    "no tensor": lambda: {"x": 1},
}


@pytest.fixture
def predicted(monkeypatch):
    """What was predicted before each save."""
    seen = []
    real = DiskSpace.predict
    monkeypatch.setattr(DiskSpace, "predict", lambda *args: seen.append(real(*args)) or seen[-1])
    return seen


def taken(storage, name):
    """Bytes, rounded up to pages as filesystems do, and number of files and directories."""
    sizes = [entry.size_bytes for entry in storage.list(name)]
    return sum(-(-size // 4096) * 4096 for size in sizes), len(sizes) + 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", STATES)
def test_a_prediction_is_enough_and_not_much_too_much(predicted, kind):
    storage = MemoryStorage(capacity_bytes=1 << 40, capacity_files=1 << 20)
    with CheckpointManager(storage) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, STATES[kind]()).result()
            checkpoints.wait()
    for before, name in ((predicted[0], "step-000000001"), (predicted[1], "step-000000002")):
        size_bytes, files = taken(storage, name)
        assert size_bytes <= before.size_bytes <= 1.1 * size_bytes + SLACK_BYTES
        assert files <= before.files <= files + 8


def test_where_nobody_can_tell_what_is_free_everything_fits():
    assert SpaceNeeded(size_bytes=1 << 60, files=1 << 60).fits(MemoryStorage().space(), Headroom(share=0.5))


def test_headroom_is_not_for_saves():
    free, headroom = Space(100, 1000, 3), Headroom(most_bytes=40)
    assert SpaceNeeded(size_bytes=60, files=3).fits(free, headroom)
    assert not SpaceNeeded(size_bytes=61, files=3).fits(free, headroom)
    assert SpaceNeeded(size_bytes=61, files=4).fits(free, headroom, (1, 1))
    assert not SpaceNeeded(size_bytes=60, files=4).fits(free, headroom)
    assert not SpaceNeeded(size_bytes=1, files=1).fits(Space(10, 1000, 3), headroom)
