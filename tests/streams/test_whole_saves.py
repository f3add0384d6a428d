"""Whole saves and loads of tensors on a simulated device, with the real threads, in random orders."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.dcp import _plan
from tests.streams.explore import simulated
from tests.streams.world import SimTensor, World


class OnDevice(nn.Module):
    """One parameter and one buffer."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.weight = nn.Parameter(world.tensor(1, 2))
        self.register_buffer("seen", world.tensor(10, 20))


@pytest.fixture(autouse=True)
def _like_those_of_torch(monkeypatch):
    """Let a simulated tensor pass for one of torch's own classes, as that of a device is."""
    monkeypatch.setattr(_plan, "PLAIN", _plan.PLAIN | {SimTensor})
    monkeypatch.setattr(_plan, "check_kind", lambda *_: None)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("staging", ["overlapped", "blocking"])
def test_a_training_on_a_device_gets_back_what_it_saved(tmp_path, staging, seed):
    numbers = random.Random(seed)
    with simulated(lambda world, options: numbers.randrange(options)) as world:
        model = OnDevice(world)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
        state = TrainState(model=model, optimizer=optimizer)
        with CheckpointManager(tmp_path, staging=staging, arenas=2) as checkpoints:
            for step in (1, 2, 3):
                checkpoints.save(step, state)
                model.seen.add_(1)
                model.weight.grad = world.tensor(-100, -100)
                optimizer.step()
            for step in (2, 1, 3):
                checkpoints.load(state, step=step)
                model.seen.add_(0.5)  # queued at once, as the next batch is
                world.drain()
                assert model.weight.values.tolist() == [100 * step - 99, 100 * step - 98]
                assert model.seen.values.tolist() == [step + 9.5, step + 19.5]
