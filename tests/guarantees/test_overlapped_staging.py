"""An overlapped save holds the state of the moment of the call, whatever the training does right after it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from ckpt_core import CheckpointManager, SaveError, TrainState
from ckpt_core.staging import Copy, DeferredCopies

TENSORS = 40


def training():
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(TENSORS)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer


def step(model, optimizer):
    model(torch.randn(8, 64)).pow(2).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def values(model, optimizer):
    tensors = [value.clone() for value in model.state_dict().values()]
    return tensors + [v.clone() for s in optimizer.state.values() for v in s.values()]


def same(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_training_that_changes_everything_after_the_call_does_not_reach_the_checkpoint(tmp_path):
    model, optimizer = training()
    state = TrainState(model=model, optimizer=optimizer)
    moments = {}
    with CheckpointManager(tmp_path, staging="overlapped") as checkpoints:
        for number in range(1, 9):
            step(model, optimizer)
            moments[number] = values(model, optimizer)
            checkpoints.save(number, state)
            model(torch.randn(8, 64))  # batch-norm statistics move on before the next step
        for number, expected in moments.items():
            checkpoints.load(state, step=number)
            assert same(values(model, optimizer), expected), f"step {number}"


def test_a_step_waits_for_copies_that_are_not_made():
    """The optimizer's pre-hook holds the step back until the background has copied."""
    source, target = torch.zeros(4), torch.full((4,), -1.0)
    copies = DeferredCopies([Copy("w", source, target)])
    stepped = threading.Event()

    def train():
        copies.wait()
        source.add_(1)
        stepped.set()

    thread = threading.Thread(target=train)
    thread.start()
    assert not stepped.wait(0.05)
    copies.finish()
    thread.join(10)
    assert stepped.is_set()
    assert target.tolist() == [0, 0, 0, 0]


def test_a_change_outside_the_step_is_never_saved_as_a_mixture():
    source, target = torch.zeros(4), torch.zeros(4)
    copies = DeferredCopies([Copy("layer.weight", source, target)])
    source.add_(1)
    with pytest.raises(Exception, match=r"layer\.weight.*blocking"):
        copies.finish()


def test_a_save_spoilt_by_such_a_change_is_reported_and_the_next_one_succeeds(tmp_path):
    model, optimizer = training()
    state = TrainState(model=model, optimizer=optimizer)
    step(model, optimizer)
    held = threading.Event()
    with CheckpointManager(tmp_path, staging="overlapped") as checkpoints:
        # The one background thread is kept busy, so that the copies cannot start before the change.
        checkpoints._saver._flight._pool.submit(held.wait)
        checkpoints.save(1, state)
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        held.set()
        with pytest.raises(SaveError, match="staging") as failed:
            checkpoints.wait()
        assert failed.value.phase == "stage"
        assert checkpoints.checkpoints() == []
        checkpoints.save(2, state)
    assert [info.step for info in checkpoints.checkpoints()] == [2]
