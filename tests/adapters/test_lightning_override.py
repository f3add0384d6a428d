"""Hyperparameters that a resumed fit of Lightning changes: once, recorded, and for all restarts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as pl
import pytest
import torch
from jsonargparse import ArgumentParser
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from ckpt_core import CheckpointManager, ConfigError, EverySteps
from lightning_ckpt import ShardedCheckpoint

# Lightning warns of small data sets and few workers.
pytestmark = pytest.mark.filterwarnings("ignore")

CHANGE = {"lr": 5e-3, "weight_decay": 0.1}


class Schedules:
    """One scheduler of each kind, and how often Lightning steps it."""

    cycle = (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40), {"interval": "step"})
    plateau = (
        lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
        {"interval": "epoch", "monitor": "level"},
    )


class Scheduled(pl.LightningModule):
    """Trains with dropout, and notes the learning rate of every batch."""

    def __init__(self, schedule: str = "cycle") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        self.schedule, self.fails_at = schedule, -1
        self.rates: dict[int, float] = {}

    def training_step(self, batch, index):
        step = self.trainer.global_step
        if step == self.fails_at:
            raise ZeroDivisionError
        self.rates[step] = self.optimizers().param_groups[0]["lr"]
        self.log("level", 1.0)
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        make, options = getattr(Schedules, self.schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **options}}


class Pair(Scheduled):
    automatic_optimization = False

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.net(batch).pow(2).mean().backward()
            optimizer.step()

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.net[0].parameters(), 0.1),
            torch.optim.SGD(self.net[2].parameters(), 0.2),
        ]


def fit(root: Path, module: Any, steps: int, *, ckpt_path: Any = None, fails_at: int = -1, **options: Any):
    pl.seed_everything(3)
    module.fails_at = fails_at
    callback = ShardedCheckpoint(root, save=EverySteps(2), **options)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=steps,
        callbacks=[callback],
    )
    loader = DataLoader(torch.randn(4, 2, generator=torch.Generator().manual_seed(1)), shuffle=True)
    try:
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    except ZeroDivisionError:
        assert fails_at >= 0
    return module


def annotations(root: Path) -> dict[int, Any]:
    found = CheckpointManager(root).checkpoints()
    return {
        info.step: json.loads((root / info.name / "manifest.json").read_text())["annotations"].get("override")
        for info in found
    }


@pytest.mark.parametrize("schedule", ["cycle", "plateau"])
def test_a_crash_after_an_override_resumes_as_if_never_stopped(tmp_path, schedule):
    """The schedule continues from the given rate; the restart has the same option in its script."""
    plain, whole, cut = (Scheduled(schedule) for _ in range(3))
    fit(tmp_path / "a", plain, 4)
    fit(tmp_path / "b", Scheduled(schedule), 4)
    unchanged = fit(tmp_path / "c", Scheduled(schedule), 4) and fit(
        tmp_path / "c", Scheduled(schedule), 14, ckpt_path="last"
    )
    fit(tmp_path / "a", whole, 14, ckpt_path="last", override=CHANGE)
    fit(tmp_path / "b", cut, 14, ckpt_path="last", override=CHANGE, fails_at=9)
    again = fit(tmp_path / "b", Scheduled(schedule), 14, ckpt_path="last", override=CHANGE)

    assert min(again.rates) == 8
    assert {**cut.rates, **again.rates} == whole.rates
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    scale = 5e-3 / unchanged.rates[4]
    assert whole.rates == {step: pytest.approx(rate * scale) for step, rate in unchanged.rates.items()}
    assert annotations(tmp_path / "b") == {2: None, 4: None, **dict.fromkeys(range(6, 15, 2), CHANGE)}
    lineages = [info.lineage for info in CheckpointManager(tmp_path / "b").checkpoints()]
    assert len(set(lineages)) == 2
    assert lineages[-1].ancestry == ((lineages[0].id, 4),)


def test_one_of_several_optimizers_is_changed_by_its_number(tmp_path):
    fit(tmp_path, Pair(), 4)
    module = fit(tmp_path, Pair(), 6, ckpt_path="last", override={"optimizer.1.lr": 0.5})
    assert [each.param_groups[0]["lr"] for each in module.trainer.optimizers] == [0.1, 0.5]


def test_what_cannot_be_overridden_is_refused_before_anything_is_loaded(tmp_path):
    fit(tmp_path / "run", Scheduled(), 4)
    fit(tmp_path / "other", Scheduled(), 4)
    for root, options, told in (
        (
            "run",
            {"ckpt_path": "last", "override": {"learning_rate": 1}},
            "no optimizer has learning_rate; there",
        ),
        ("run", {"ckpt_path": "last", "override": {"betas": 1}}, "betas is .0.9.*, which 1 cannot replace"),
        ("run", {"override": {"lr": 1}}, "this fit resumes nothing"),
        ("fresh", {"ckpt_path": "last", "override": {"lr": 1}}, "this fit resumes nothing"),
        ("run", {"ckpt_path": tmp_path / "other", "override": {"lr": 1}}, "is of another"),
        ("run", {"override": {"lr": "fast"}}, "must be a finite number"),
    ):
        module = Scheduled()
        before = [each.clone() for each in module.parameters()]
        with pytest.raises(ConfigError, match=told):
            fit(tmp_path / root, module, 6, **options)
        assert all(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))
    assert [info.step for info in CheckpointManager(tmp_path / "run").checkpoints()] == [2, 4]
    resumed = fit(tmp_path / "run", Scheduled(), 6, ckpt_path="last", override={"lr": 1e-3})
    resumed.trainer.fit_loop.epoch_loop.max_steps = 8
    with pytest.raises(ConfigError, match="this fit resumes nothing"):
        resumed.trainer.fit(resumed)  # its optimizers would be new, and without the change
    with pytest.raises(ConfigError, match="override= needs dirpath="):
        ShardedCheckpoint(override={"lr": 1})


@pytest.mark.parametrize("given", ["override={lr: 1e-4}", "override.lr=1e-4"])
def test_the_command_line_takes_an_override(tmp_path, given):
    parser = ArgumentParser()
    parser.add_class_arguments(ShardedCheckpoint, "callback")
    parsed = parser.parse_args([f"--callback.dirpath={tmp_path}", f"--callback.{given}"])
    assert parser.instantiate_classes(parsed).callback.settings.override.values == {"lr": 1e-4}


def test_a_fit_from_a_named_checkpoint_of_the_run_is_changed_too(tmp_path):
    fit(tmp_path, Scheduled(), 6)
    module = fit(tmp_path, Scheduled(), 8, ckpt_path=tmp_path / "step-000000004", override=CHANGE)
    assert module.rates[4] == 5e-3
    assert annotations(tmp_path) == {2: None, 4: None, 6: CHANGE, 8: CHANGE}
