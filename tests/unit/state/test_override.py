"""A resume may change hyperparameters: everywhere, with the schedule, and recorded as a branch."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch.optim import lr_scheduler

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.errors import ConfigError

SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=20, cycle_momentum=False),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


def made(schedule=None, **options):
    model = torch.nn.Linear(2, 2)
    weights = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}]
    optimizer = torch.optim.AdamW(weights, lr=0.01, **options)
    scheduler = None if schedule is None else SCHEDULES[schedule](optimizer)
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler), optimizer, scheduler


def train(optimizer, scheduler, steps=1):
    rates = []
    for _ in range(steps):
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
    return rates


def saved(root, schedule=None, **options):
    state, optimizer, scheduler = made(schedule, **options)
    train(optimizer, scheduler, 4)
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(4, state)
    return optimizer, scheduler


def annotations(folder):
    return json.loads((folder / "manifest.json").read_text())["annotations"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_goes_on_from_the_rate_that_is_given(tmp_path, schedule):
    optimizer, scheduler = saved(tmp_path, schedule)
    before = [group["lr"] for group in optimizer.param_groups]
    expected = train(optimizer, scheduler, 6)

    state, optimizer, scheduler = made(schedule)
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume(state, override={"lr": 1e-4}) == 4
    assert [group["lr"] for group in optimizer.param_groups] == [1e-4, 1e-4]
    assert scheduler.get_last_lr() == pytest.approx([1e-4, 1e-4])
    for rates, others in zip(train(optimizer, scheduler, 6), expected, strict=True):
        scaled = [other * 1e-4 / first for other, first in zip(others, before, strict=True)]
        assert rates == pytest.approx(scaled)


def test_every_group_key_can_be_changed_and_tensors_stay_tensors(tmp_path):
    saved(tmp_path)
    state, optimizer, _ = made()
    change = {"lr": 3e-3, "weight_decay": 0.5, "betas": [0.8, 0.9], "amsgrad": True}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.resume(state, override=change)
    for group in optimizer.param_groups:
        assert (group["lr"], group["weight_decay"], group["betas"]) == (3e-3, 0.5, (0.8, 0.9))
        assert group["amsgrad"] is True

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    state = TrainState(model=model, optimizer=optimizer)
    with CheckpointManager(tmp_path / "tensor") as checkpoints:
        checkpoints.save(1, state).result()
        checkpoints.resume(state, override={"lr": 0.5})
    assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.5))


def test_the_next_save_records_it_and_branches_off_without_abandoning_anything(tmp_path, caplog):
    saved(tmp_path)
    state, optimizer, scheduler = made()
    with caplog.at_level(logging.WARNING), CheckpointManager(tmp_path) as checkpoints:
        checkpoints.resume(state, override={"lr": 1e-4})
        for step in (5, 6):
            train(optimizer, scheduler)
            checkpoints.save(step, state, annotations={"own": step}).result()
        first, second, third = checkpoints.checkpoints()
    assert not caplog.records
    assert annotations(tmp_path / second.name) == {"override": {"lr": 1e-4}, "own": 5}
    assert annotations(tmp_path / third.name) == {"own": 6}
    assert second.lineage == third.lineage
    assert second.lineage.number == first.lineage.number + 1
    assert second.lineage.includes(first.lineage, first.step)


def test_a_resume_without_one_continues_the_lineage(tmp_path):
    saved(tmp_path)
    state, *_ = made()
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.resume(state, override={})
        checkpoints.save(5, state).result()
        first, second = checkpoints.checkpoints()
    assert first.lineage == second.lineage


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"learning_rate": 1}, "no optimizer has learning_rate; there are amsgrad, betas, "),
        ({"lr": "fast"}, "lr is 0.02, which 'fast' cannot replace"),
        ({"lr": True}, "cannot replace"),
        ({"betas": [0.9]}, "cannot replace"),
        (["lr"], "override must be a mapping"),
    ],
)
def test_what_cannot_be_changed_is_refused_before_anything_is_loaded(tmp_path, change, told):
    saved(tmp_path)
    state, optimizer, _ = made()
    before = optimizer.param_groups[0]["params"][0].clone()
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(ConfigError, match=told):
            checkpoints.resume(state, override=change)
        with pytest.raises(ConfigError, match="of a TrainState, not of a dict"):
            checkpoints.resume({"w": torch.zeros(2)}, override={"lr": 1})
    assert torch.equal(optimizer.param_groups[0]["params"][0], before)
