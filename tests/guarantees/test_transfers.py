"""What differs once, and is whole when it is asked for again, is no damage."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.errors import CheckpointError
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage, Operation

FILES = [
    "COMMITTED",
    "manifest.json",
    ".metadata",
    "chunks-00000.json.z",
    "rank-00000.json",
    "__0_0.distcp",
    "__0_1.distcp",
]


def live(value: float) -> tuple[torch.nn.Module, TrainState]:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=value / 100)
    model(torch.ones(64)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model, TrainState(model=model, optimizer=optimizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("saved")
    with CheckpointManager(place) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, live(step)[1]).result()
    return place


@pytest.fixture
def root(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


def flipped(sound: bytes) -> bytes:
    """Change a bit of the weights, or in the middle of a small file."""
    place = sound.find(torch.full((8,), 2.0).numpy().tobytes())
    changed = bytearray(sound)
    changed[len(sound) // 2 if place < 0 else place + 5] ^= 1
    return bytes(changed)


def fragile(root: Path, name: str, *, remote: bool) -> FaultyStorage:
    """The root, where the first read of a file of step 2 finds a byte changed in the transfer."""
    path = root / "step-000000002" / name
    sound = path.read_bytes()

    def leave(content: bytes, operation: Operation) -> None:
        path.write_bytes(content)

    fault = Fault(
        method="read*",
        key=f"step-000000002/{name}",
        nth=0,
        before=partial(leave, flipped(sound)),
        after=partial(leave, sound),
    )
    storage = FaultyStorage(LocalStorage(root), [fault])
    if remote:
        storage.rereads_from_memory = False
    return storage


@pytest.mark.parametrize(("verify", "remote"), [(None, True), ("read", False)])
@pytest.mark.parametrize("name", FILES)
def test_a_transfer_that_failed_once_costs_no_checkpoint(root, name, verify, remote):
    storage = fragile(root, name, remote=remote)
    model, state = live(9)
    with CheckpointManager(storage, verify=verify) as checkpoints:
        assert checkpoints.resume(state) == 2
        assert model.weight.unique().tolist() == [2.0]
        assert [each.damaged for each in checkpoints.checkpoints()] == [None, None]


@pytest.mark.parametrize("name", FILES[1:])
def test_neither_does_one_that_fails_in_a_verification(root, name):
    storage = fragile(root, name, remote=True)
    with CheckpointManager(storage) as checkpoints:
        assert checkpoints.verify(2) == []
        assert [each.damaged for each in checkpoints.checkpoints()] == [None, None]


@pytest.mark.parametrize("name", FILES)
def test_what_differs_every_time_is_damage(root, name):
    path = root / "step-000000002" / name
    path.write_bytes(flipped(path.read_bytes()))
    model, state = live(9)
    with CheckpointManager(root) as checkpoints:
        assert checkpoints.resume(state) == 1
        assert model.weight.unique().tolist() == [1.0]
        with pytest.raises(CheckpointError):
            checkpoints.load(state, name="step-000000002")
