"""A resume does what Lightning had still to do: hooks, validations, schedulers, metrics, as if never stopped."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_core import EverySteps, KeepBest, KeepLatest, OnPreemption
from lightning_ckpt import ShardedCheckpoint

# Lightning warns of small data sets and few workers.
pytestmark = pytest.mark.filterwarnings("ignore")

BATCHES, EPOCHS = 4, 3
SCHEDULERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "plateau": lambda optimizer: {
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
        "monitor": "loss",
    },
    "plateau of steps": lambda optimizer: {
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=0.5),
        "monitor": "loss",
        "interval": "step",
    },
    "plateau of val_loss": lambda optimizer: {
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
        "monitor": "val_loss",
    },
    "steps": lambda optimizer: {
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
        "interval": "step",
    },
    "epochs": lambda optimizer: {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)},
}


class Model(pl.LightningModule):
    """Records what happens; draws random numbers wherever it can."""

    def __init__(self, scheduler: str = "", *, manual: int = 0) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 1)
        self.scheduler, self.optimizers_by_hand = scheduler, manual
        self.automatic_optimization = not manual
        self.mean = torchmetrics.MeanMetric()
        self.by_hand = torchmetrics.MeanMetric()
        self.events: list[Any] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = (self.head(self.backbone(batch[0])) - batch[0].sum(1, keepdim=True)).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.mean(loss.detach())
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        self.by_hand.update(loss.detach())
        lrs = [group["lr"] for each in self.trainer.optimizers for group in each.param_groups]
        trained = [name for name, each in self.named_parameters() if each.requires_grad]
        window = self.trainer.accumulate_grad_batches
        self.note("batch", index, loss.item(), lrs, window, trained, self.trainer.global_step)
        if self.optimizers_by_hand:
            self._step_by_hand(loss)
        return loss

    def _step_by_hand(self, loss: torch.Tensor) -> None:
        optimizers = self.optimizers()
        each = optimizers[self.trainer.global_step % 2] if isinstance(optimizers, list) else optimizers
        each.zero_grad()
        self.manual_backward(loss)
        each.step()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", (self.head(self.backbone(batch[0])).mean() + torch.rand(())).abs())

    def on_validation_end(self) -> None:
        self.note("validated", _plain(self.trainer.callback_metrics))

    def on_train_epoch_start(self) -> None:
        self.note("epoch starts", torch.rand(()).item(), self.trainer.current_epoch)

    def on_train_epoch_end(self) -> None:
        self.log("by_hand", self.by_hand.compute())
        self.by_hand.reset()
        self.note("epoch ends", torch.rand(()).item(), _plain(self.trainer.callback_metrics))

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.note("metrics", _plain(self.trainer.callback_metrics))

    def note(self, *event: Any) -> None:
        if not self.trainer.sanity_checking:
            self.events.append(event)

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        if self.optimizers_by_hand == 2:
            return [torch.optim.SGD(self.head.parameters(), lr=0.01), torch.optim.AdamW(self.backbone.parameters())]
        optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.5)
        if not self.scheduler:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": SCHEDULERS[self.scheduler](optimizer)}


def _plain(metrics: Any) -> dict[str, float]:
    return {name: value.item() for name, value in sorted(metrics.items())}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training, and the steps from which it is resumed."""

    model: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list
    ours: dict[str, Any] = field(default_factory=lambda: {"save": EverySteps(1)})
    at: tuple[int, ...] = tuple(range(1, BATCHES * EPOCHS))
    validates: bool = True


def train(root: Path, cell: Cell, *, ckpt_path: str | None = None, seed: int = 1) -> tuple[Any, Model]:
    torch.manual_seed(seed)
    samples = torch.linspace(-1, 1, 2 * BATCHES * 4).reshape(-1, 2)
    loader = StatefulDataLoader(TensorDataset(samples), batch_size=4)
    module = Model(**cell.model)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        callbacks=[*cell.callbacks(), ShardedCheckpoint(root / "run", **cell.ours)],
        **{"max_epochs": EPOCHS, "num_sanity_val_steps": 1, **cell.trainer},
    )
    validation = StatefulDataLoader(TensorDataset(samples), batch_size=4) if cell.validates else None
    trainer.fit(module, loader, validation, ckpt_path=ckpt_path)
    return trainer, module


def assert_resumes_exactly(root: Path, cell: Cell, full: tuple[Any, Model], path: Path) -> None:
    """Resume in new objects under another seed; compare with the uninterrupted run."""
    wanted, found = full[1], train(root / path.name, cell, ckpt_path=str(path), seed=2)[1]
    tail = wanted.events[len(wanted.events) - len(found.events) :]
    for number, (one, other) in enumerate(zip(tail, found.events, strict=True)):
        assert one == other, f"event {number} of {len(tail)}: wanted {one}, found {other}"
    for name, value in wanted.state_dict().items():
        assert torch.equal(value, found.state_dict()[name]), name
    done = sum(event[0] == "batch" for event in wanted.events) - sum(event[0] == "batch" for event in found.events)
    return done


CELLS = {
    "nothing else": Cell(),
    "early stopping": Cell(callbacks=lambda: [EarlyStopping("val_loss", patience=1, min_delta=0.5)]),
    "early stopping of the epoch's mean": Cell(callbacks=lambda: [EarlyStopping("loss_epoch", patience=1)], validates=False),
    "plateau": Cell(model={"scheduler": "plateau"}),
    "plateau of steps": Cell(model={"scheduler": "plateau of steps"}),
    "plateau of val_loss": Cell(model={"scheduler": "plateau of val_loss"}),
    "steps": Cell(model={"scheduler": "steps"}),
    "epochs": Cell(model={"scheduler": "epochs"}),
    "val interval 2": Cell(trainer={"val_check_interval": 2}),
    "val interval 3": Cell(trainer={"val_check_interval": 3}),
    "val interval .5": Cell(trainer={"val_check_interval": 0.5}, model={"scheduler": "plateau of steps"}),
    "val interval beyond": Cell(trainer={"val_check_interval": 5, "check_val_every_n_epoch": None}),
    "val every 2 epochs": Cell(trainer={"check_val_every_n_epoch": 2}),
    "keep best": Cell(
        trainer={"val_check_interval": 2}, ours={"save": EverySteps(1), "keep": KeepLatest(99) | KeepBest("val_loss")},
        callbacks=lambda: [EarlyStopping("val_loss", patience=9)],
    ),
    "accumulate scheduler": Cell(callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2})], at=(2, 4, 5, 6, 7)),
    "accumulate 3": Cell(trainer={"accumulate_grad_batches": 3}, at=(1, 2, 3, 4, 5), model={"scheduler": "plateau of steps"}),
    "finetuning": Cell(
        callbacks=lambda: [BackboneFinetuning(1, lambda epoch: 1.5, verbose=False)], at=(2, 4, 6, 8, 9)
    ),
    "swa": Cell(callbacks=lambda: [StochasticWeightAveraging(0.005, 1)]),
    "swa scheduler": Cell(callbacks=lambda: [StochasticWeightAveraging(0.005, 2)], model={"scheduler": "epochs"}),
    "ema": Cell(callbacks=lambda: [EMAWeightAveraging(decay=0.5)]),
    "averaging": Cell(callbacks=lambda: [WeightAveraging()], trainer={"val_check_interval": 2}),
    "manual": Cell(model={"manual": 1}),
    "two optimizers": Cell(model={"manual": 2}),
    "bf16": Cell(trainer={"precision": "bf16-mixed"}),
    "bf16-true": Cell(trainer={"precision": "bf16-true"}),
    "64-true": Cell(trainer={"precision": "64-true"}),
    "limits": Cell(trainer={"limit_train_batches": 3}, at=tuple(range(1, 9))),
}


@pytest.mark.parametrize("name", CELLS)
def test_cells(tmp_path, name, caplog):
    cell = CELLS[name]
    full = train(tmp_path / "full", cell)
    wrong = {}
    steps = sorted((tmp_path / "full" / "run").glob("step-*"))
    for path in steps:
        step = int(path.name[5:14])
        if step not in cell.at: continue
        try:
            done = assert_resumes_exactly(tmp_path, cell, full, path)
        except Exception as error:
            lines = str(error).splitlines()
            wrong[step] = f"{type(error).__name__}: " + " / ".join(lines[:3])[:300]
    assert wrong == {}, "\n".join(f"{k}: {v}" for k, v in wrong.items())
