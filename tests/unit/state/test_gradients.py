"""A save inside an accumulation window, with its gradients, resumes bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_core import CheckpointManager, ConfigError, TrainState


class Windows:
    """Accumulates 4 batches for each step, with dropout and a scaler; one layer is never used."""

    def __init__(self, seed: int, **options) -> None:
        torch.manual_seed(0)
        self.net = nn.ModuleDict(
            {
                "used": nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)),
                "unused": nn.Linear(2, 2),
            }
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        self.state = TrainState(model=self.net, optimizer=self.optimizer, scaler=self.scaler, **options)
        torch.manual_seed(seed)

    def train(self, first: int, last: int) -> None:
        for batch in range(first, last):
            loss = self.net["used"](torch.randn(2, 4)).pow(2).mean()
            self.scaler.scale(loss).backward()
            if batch % 4 == 3:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()

    def values(self):
        found = [each.detach().clone() for each in self.net.parameters()]
        return found, [None if each.grad is None else each.grad.clone() for each in self.net.parameters()]


def assert_same(one, other) -> None:
    for values, others in zip(one, other, strict=True):
        for value, twin in zip(values, others, strict=True):
            assert (value is None) == (twin is None)
            assert value is None or torch.equal(value, twin)


@pytest.mark.parametrize("saved_at", range(1, 9))
def test_a_save_at_any_batch_of_a_window_resumes_bit_for_bit(tmp_path, saved_at, caplog):
    run = Windows(1, gradients=True)
    run.train(0, saved_at)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(saved_at, run.state).result()
    at_the_save = run.values()
    run.train(saved_at, 12)

    again = Windows(2, gradients=True)
    again.train(0, 3)  # gradients of another window
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.resume(again.state)
    assert_same(again.values(), at_the_save)
    again.train(saved_at, 12)
    assert_same(again.values(), run.values())
    assert not caplog.records


def test_a_parameter_that_is_frozen_since_gets_no_gradient(tmp_path):
    run = Windows(1, gradients=True)
    run.train(0, 2)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, run.state).result()
        run.net["used"][0].requires_grad_(False)
        checkpoints.load(run.state, step=1)
    found = {name: each.grad is not None for name, each in run.net["used"].named_parameters()}
    assert found == {"0.weight": False, "0.bias": False, "2.weight": True, "2.bias": True}


def test_gradients_are_saved_only_where_they_are_asked_for(tmp_path, caplog):
    without, within = Windows(1), Windows(1, gradients=True)
    for run in (without, within):
        run.train(0, 2)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, without.state).result()
        checkpoints.save(2, within.state).result()
        before = within.values()
        checkpoints.load(within.state, step=1)
        assert "saved without gradients=True; gradients are unchanged" in caplog.text
        assert_same(within.values(), before)
        caplog.clear()
        checkpoints.load(without.state, step=2)
        assert "first optimizer step is made of fewer batches" in caplog.text
        caplog.clear()
        checkpoints.load(Windows(3, gradients=True).state, step=2, items=["model"])
    assert not caplog.records


def test_gradients_that_cannot_be_saved_are_refused_with_the_reason(tmp_path):
    net = nn.Embedding(3, 2, sparse=True)
    net(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="gradients must be true or false"):
        TrainState(model=net, gradients=3)
    with CheckpointManager(tmp_path) as checkpoints, pytest.raises(Exception, match="is sparse"):
        checkpoints.save(1, TrainState(model=net, gradients=True)).result()
