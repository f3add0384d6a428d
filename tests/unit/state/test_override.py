"""A resume may change hyperparameters: everywhere, with the schedule, and recorded as a branch."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch.optim import lr_scheduler

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.cli import main
from ckpt_core.errors import CheckpointNotFoundError, ConfigError

LEAST = 1e-4
SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=20, cycle_momentum=False),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "warm-up, then cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 6), lr_scheduler.CosineAnnealingLR(o, 10)], [6]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 6), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, 3, cycle_momentum=False),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
}
FALLING = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 8, eta_min=LEAST),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, eta_min=LEAST),
}


def made(schedule=None, **options):
    model = torch.nn.Linear(2, 2)
    weights = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}]
    optimizer = torch.optim.AdamW(weights, lr=0.01, **options)
    scheduler = schedule(optimizer) if callable(schedule) else None
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler), optimizer, scheduler


def train(optimizer, scheduler, steps=1):
    rates = []
    for _ in range(steps):
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        elif scheduler is not None:
            scheduler.step()
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
    return rates


def saved(root, schedule=None, **options):
    state, optimizer, scheduler = made(schedule, **options)
    train(optimizer, scheduler, 4)
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(4, state).result()
    return optimizer, scheduler


def annotations(folder):
    return json.loads((folder / "manifest.json").read_text())["annotations"]


def check_goes_on(root, schedule, least, caplog):
    """The distances of all later rates from the least one are scaled by one factor."""
    optimizer, scheduler = saved(root, schedule)
    before = [group["lr"] for group in optimizer.param_groups]
    expected = train(optimizer, scheduler, 12)

    state, optimizer, scheduler = made(schedule)
    with CheckpointManager(root) as checkpoints:
        assert checkpoints.resume(state, override={"lr": 2e-3}) == 4
    assert [group["lr"] for group in optimizer.param_groups] == [2e-3, 2e-3]
    assert scheduler.get_last_lr() == pytest.approx([2e-3, 2e-3])
    for rates, others in zip(train(optimizer, scheduler, 12), expected, strict=True):
        scaled = [
            least + (other - least) * (2e-3 - least) / (first - least)
            for other, first in zip(others, before, strict=True)
        ]
        assert rates == pytest.approx(scaled)
    assert not caplog.records


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_goes_on_from_the_rate_that_is_given(tmp_path, schedule, caplog):
    check_goes_on(tmp_path, SCHEDULES[schedule], 0.0, caplog)


@pytest.mark.parametrize("schedule", FALLING)
def test_a_schedule_falls_to_its_least_rate_from_the_one_that_is_given(tmp_path, schedule, caplog):
    check_goes_on(tmp_path, FALLING[schedule], LEAST, caplog)


def test_a_plateau_scheduler_reduces_the_rate_that_is_given(tmp_path):
    def plateau(optimizer):
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    saved(tmp_path, plateau)
    state, optimizer, scheduler = made(plateau)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.resume(state, override={"lr": 1e-4})
    assert scheduler.get_last_lr() == pytest.approx([1e-4, 1e-4])
    scheduler.step(9.0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([5e-5, 5e-5])


def test_a_schedule_that_would_undo_a_change_is_named(tmp_path, caplog):
    """As one of a user's own, which computes rates from numbers that nobody else knows."""

    class Own(lr_scheduler.LRScheduler):
        def get_lr(self):
            return [0.3 / (1 + self.last_epoch)] * len(self.base_lrs)

    def momentum(optimizer):
        return lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)

    for schedule, change, told in (
        (Own, {"lr": 1e-4}, "a scheduler sets lr of parameter group 0 to 0.05"),
        (momentum, {"betas": (0.5, 0.9)}, "a scheduler sets betas of parameter group 0 to"),
    ):
        root = tmp_path / told.split()[3]
        saved(root, schedule)
        state, optimizer, scheduler = made(schedule)
        caplog.clear()
        with CheckpointManager(root) as checkpoints:
            checkpoints.resume(state, override=change)
        assert told in caplog.text
        assert scheduler.last_epoch == 4
        assert optimizer.param_groups[0]["betas"] == change.get("betas", (0.9, 0.999))


def test_the_narrower_name_of_a_hyperparameter_wins(tmp_path):
    models = {name: torch.nn.Linear(2, 2) for name in ("gen", "critic")}
    optimizers = {
        name: torch.optim.SGD([{"params": [m.weight]}, {"params": [m.bias]}], lr=0.5, momentum=0.1)
        for name, m in models.items()
    }
    state = TrainState(model=models, optimizer=optimizers)
    change = {
        "param_groups.1.lr": 3.0,
        "optimizer.gen.param_groups.0.lr": 4.0,
        "optimizer.critic.lr": 2.0,
        "lr": 1.0,
        "optimizer.gen.momentum": 0.9,
    }
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state).result()
        checkpoints.resume(state, override=change)
    found = {name: [(g["lr"], g["momentum"]) for g in each.param_groups] for name, each in optimizers.items()}
    assert found == {"gen": [(4.0, 0.9), (3.0, 0.9)], "critic": [(2.0, 0.1), (2.0, 0.1)]}


def test_a_restart_with_the_same_option_changes_nothing_more(tmp_path, caplog):
    """Also after a crash before the first save, and when the schedule has gone on."""
    schedule, option = SCHEDULES["step"], {"lr": 1e-3, "betas": (0.8, 0.9)}
    saved(tmp_path, schedule)
    state, *_ = made(schedule)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.resume(state, override=option)  # crashes before it saves

    state, optimizer, scheduler = made(schedule)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.resume(state, override=option)
        rates = train(optimizer, scheduler, 3)
        checkpoints.save(7, state).result()
        assert not caplog.records
        checkpoints.load(state, step=7)  # a rollback of the same process
        rates += train(optimizer, scheduler)
        checkpoints.save(8, state).result()
    rates += train(optimizer, scheduler, 4)

    state, optimizer, scheduler = made(schedule)
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume(state, override={"betas": [0.8, 0.9], "lr": 1e-3}) == 8
        assert "in force already" in caplog.text
        again = train(optimizer, scheduler, 4)
        checkpoints.save(12, state).result()
        first, *others = checkpoints.checkpoints()
    assert again == rates[-4:]
    assert len({info.lineage for info in others}) == 1
    assert others[0].lineage.ancestry == ((first.lineage.id, 4),)

    state, optimizer, _ = made(schedule)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.resume(state, override={"lr": 1e-3})  # another change
        checkpoints.save(13, state).result()
        assert checkpoints.latest().lineage.number == first.lineage.number + 2
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_a_change_of_a_run_without_checkpoints_is_refused(tmp_path):
    state, *_ = made()
    with (
        CheckpointManager(tmp_path) as checkpoints,
        pytest.raises(CheckpointNotFoundError, match="changes a training midway, and nothing"),
    ):
        checkpoints.resume(state, override={"lr": 1})


def test_a_checkpoint_that_is_named_can_be_changed_as_a_whole_only(tmp_path):
    saved(tmp_path)
    state, optimizer, _ = made()
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(ConfigError, match="leave out items="):
            checkpoints.load(state, step=4, items=["model"], override={"lr": 1e-4})
        checkpoints.load(state, step=4, override={"lr": "1e-4"})  # as YAML reads it
        checkpoints.save(5, state).result()
    assert optimizer.param_groups[1]["lr"] == 1e-4
    assert annotations(tmp_path / "step-000000005") == {"override": {"lr": 1e-4}}


def test_every_group_key_can_be_changed_and_tensors_stay_tensors(tmp_path):
    saved(tmp_path)
    state, optimizer, _ = made()
    change = {"lr": 3e-3, "weight_decay": 0.5, "betas": [0.8, 0.9], "maximize": True}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.resume(state, override=change)
    for group in optimizer.param_groups:
        assert (group["lr"], group["weight_decay"], group["betas"]) == (3e-3, 0.5, (0.8, 0.9))
        assert group["maximize"] is True

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    state = TrainState(model=model, optimizer=optimizer)
    with CheckpointManager(tmp_path / "tensor") as checkpoints:
        checkpoints.save(1, state).result()
        checkpoints.resume(state, override={"lr": 0.5})
    assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.5))


def test_the_next_save_records_it_and_branches_off_without_abandoning_anything(tmp_path, caplog, capsys):
    saved(tmp_path)
    state, optimizer, scheduler = made()
    with (
        caplog.at_level(logging.WARNING),
        CheckpointManager(tmp_path, on_stale="ignore") as checkpoints,  # steps of gradients that are zero
    ):
        checkpoints.resume(state, override={"lr": 1e-4})
        for step in (5, 6):
            train(optimizer, scheduler)
            checkpoints.save(step, state, annotations={"own": step}).result()
        first, second, third = checkpoints.checkpoints()
    assert not caplog.records
    assert annotations(tmp_path / second.name) == {"override": {"lr": 1e-4}, "own": 5}
    assert annotations(tmp_path / third.name) == {"override": {"lr": 1e-4}, "own": 6}
    assert second.lineage == third.lineage
    assert second.lineage.number == first.lineage.number + 1
    assert second.lineage.includes(first.lineage, first.step)
    assert main(["show", str(tmp_path / third.name)]) == 0
    shown = capsys.readouterr().out
    assert "annotations: override={'lr': 0.0001}, own=6" in shown
    assert f"{second.lineage.number} ({second.lineage.id}), from step 4 of {first.lineage.id}" in shown


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
        ({"lr": "fast"}, "lr must be a finite number, true or false, or a list of numbers, not 'fast'"),
        ({"lr": float("inf")}, "finite"),
        ({"lr": [0.1]}, "lr is 0.01, which"),
        ({"param_groups.2.lr": 1}, "no optimizer has param_groups.2.lr; there are .* as param_groups.1.lr"),
        ({"optimizer.gen.lr": 1}, "no optimizer has optimizer.gen.lr"),
        ({"fused": True}, "no optimizer has fused"),
        ({"lr": True}, "cannot replace"),
        ({"lr": -1e-3}, "-0.001 is out of range for lr"),
        ({"betas": [0.9, 1.0]}, "out of range for betas"),
        ({"amsgrad": True}, "amsgrad=True needs a state that this optimizer, made with False, does not have"),
        ({"betas": [0.9]}, "cannot replace"),
        (["lr"], "override must be a mapping"),
    ],
)
def test_what_cannot_be_changed_is_refused_before_anything_is_loaded(tmp_path, change, told):
    saved(tmp_path)
    state, optimizer, _ = made()
    before = optimizer.param_groups[0]["params"][0].clone()
    with CheckpointManager(tmp_path) as checkpoints:
        for load in (checkpoints.resume, lambda *args, **options: checkpoints.load(*args, step=4, **options)):
            with pytest.raises(ConfigError, match=told):
                load(state, override=change)
        with pytest.raises(ConfigError, match="of a TrainState, not of a dict"):
            checkpoints.resume({"w": torch.zeros(2)}, override={"lr": 1})
    assert torch.equal(optimizer.param_groups[0]["params"][0], before)
