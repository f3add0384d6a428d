"""A resume does what Lightning had still to do: hooks, validations, schedulers, metrics."""

from __future__ import annotations

import re
import signal
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
)
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_core import EverySteps, IncompatibleCheckpointError, KeepBest, KeepLatest, OnPreemption
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

    def __init__(self, scheduler: str = "", *, manual: int = 0, frozen: bool = False) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 1)
        self.scheduler, self.optimizers_by_hand = scheduler, manual
        self.automatic_optimization = not manual
        self.backbone.requires_grad_(not frozen)
        self.mean = torchmetrics.MeanMetric()
        self.by_hand = torchmetrics.MeanMetric()
        self.events: list[Any] = []
        self.events_at_save: dict[int, int] = {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.events_at_save[self.trainer.global_step] = len(self.events)

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
            return [
                torch.optim.SGD(self.head.parameters(), lr=0.01),
                torch.optim.AdamW(self.backbone.parameters()),
            ]
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
    ours: dict[str, Any] | None = field(default_factory=lambda: {"save": EverySteps(1)})
    at: tuple[int, ...] = (2, 4, 6)
    validates: bool = True


def train(
    root: Path, cell: Cell, *, module: Model | None = None, ckpt_path: str | None = None, seed: int = 1
) -> tuple[Any, Model]:
    torch.manual_seed(seed)
    samples = torch.linspace(-1, 1, 2 * BATCHES * 4).reshape(-1, 2)
    loader = StatefulDataLoader(TensorDataset(samples), batch_size=4)
    module = Model(**cell.model) if module is None else module
    ours = [] if cell.ours is None else [ShardedCheckpoint(**{"dirpath": root / "run", **cell.ours})]
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        enable_checkpointing=bool(ours),
        callbacks=[*cell.callbacks(), *ours],
        **{"max_epochs": EPOCHS, "num_sanity_val_steps": 1, **cell.trainer},
    )
    validation = StatefulDataLoader(TensorDataset(samples), batch_size=4) if cell.validates else None
    trainer.fit(module, loader, validation, ckpt_path=ckpt_path)
    return trainer, module


def assert_resumes_exactly(root: Path, cell: Cell, full: Any, path: Path, *, saver: Any = None) -> None:
    """Resume in new objects under another seed; compare with the uninterrupted run.

    Args:
        root: for the resumed run.
        cell: the training.
        full: the uninterrupted run.
        path: the checkpoint.
        saver: the run that saved it, if another.
    """
    unsaved = replace(cell, ours={"save_last": False})
    wanted, found = full[1], train(root / f"resumed-{path.name}", unsaved, ckpt_path=str(path), seed=2)[1]
    step = int(re.search(r"step[-=](\d+)", path.name)[1])
    tail = wanted.events[(full if saver is None else saver)[1].events_at_save[step] :]
    for number, (one, other) in enumerate(zip(tail, found.events, strict=False)):
        assert one == other, f"{path.name}, event {number} of {len(tail)}: wanted {one}, found {other}"
    assert len(found.events) == len(tail) > 0
    for name, value in wanted.state_dict().items():
        assert torch.equal(value, found.state_dict()[name]), name


CELLS = {
    "early stopping": Cell(
        callbacks=lambda: [EarlyStopping("val_loss", patience=9), EarlyStopping("loss_epoch", patience=9)],
        model={"scheduler": "plateau of val_loss"},
        ours={"save": EverySteps(2), "keep": KeepLatest(99) | KeepBest("val_loss")},
    ),
    "plateau of steps, validation within epochs": Cell(
        model={"scheduler": "plateau of steps"}, trainer={"val_check_interval": 2}
    ),
    "validation beyond an epoch": Cell(
        model={"scheduler": "steps"},
        trainer={"val_check_interval": 5, "check_val_every_n_epoch": None},
        at=(5, 8),
    ),
    "a growing window": Cell(callbacks=lambda: [GradientAccumulationScheduler({1: 2})], at=(4, 5)),
    "finetuning": Cell(
        callbacks=lambda: [BackboneFinetuning(1, lambda epoch: 1.5, verbose=False)], at=(4, 6)
    ),
    "stochastic averaging": Cell(
        callbacks=lambda: [StochasticWeightAveraging(0.005, 2)], model={"scheduler": "epochs"}, at=(4, 6)
    ),
    "averaging": Cell(
        callbacks=lambda: [EMAWeightAveraging(decay=0.5)], trainer={"val_check_interval": 2}, at=(2, 4)
    ),
    "two optimizers by hand, in double precision": Cell(
        model={"manual": 2}, trainer={"precision": "64-true"}, at=(3,)
    ),
}
MORE_CELLS = {
    "metrics and hooks": Cell(),
    "plateau of an epoch's mean": Cell(model={"scheduler": "plateau"}, validates=False),
    "validation after a part of an epoch": Cell(
        model={"scheduler": "epochs"}, trainer={"val_check_interval": 0.75}, at=(3, 7, 8)
    ),
    "validation every second epoch": Cell(trainer={"check_val_every_n_epoch": 2}, at=(4, 8, 9)),
    "a window that the epoch cuts": Cell(
        model={"scheduler": "plateau of steps"}, trainer={"accumulate_grad_batches": 3}, at=(1, 2, 3)
    ),
    "half precision": Cell(trainer={"precision": "bf16-true", "limit_train_batches": 3}, at=(2, 3)),
    "steps of an averaged epoch": Cell(
        callbacks=lambda: [StochasticWeightAveraging(0.005, 1)], at=(1, 2, 3, 5, 7, 9, 11)
    ),
    "finetuning at every step": Cell(
        callbacks=lambda: [BackboneFinetuning(1, lambda epoch: 1.5, verbose=False)], at=(1, 3, 5, 7, 8, 9, 11)
    ),
}


@pytest.mark.parametrize(
    "cell",
    [
        *(pytest.param(cell, id=name) for name, cell in CELLS.items()),
        *(pytest.param(cell, id=name, marks=pytest.mark.slow) for name, cell in MORE_CELLS.items()),
    ],
)
def test_a_resumed_training_goes_on_as_if_never_stopped(tmp_path, cell):
    full = train(tmp_path / "full", cell)
    for step in cell.at:
        assert_resumes_exactly(tmp_path, cell, full, tmp_path / "full" / "run" / f"step-{step:09d}")


def test_a_training_that_is_watched_is_the_same(tmp_path):
    stock = train(tmp_path / "stock", Cell(ours=None))[1]
    watched = train(tmp_path / "ours", Cell())[1]

    assert watched.events == stock.events


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("batch", marks=pytest.mark.slow),
        "validation",
        pytest.param("epoch", marks=pytest.mark.slow),
    ],
)
def test_what_lightnings_own_callback_saves_in_a_hook_is_trained_on_from_there(tmp_path, moment):
    options = {
        "batch": {"every_n_train_steps": 2},
        "validation": {"every_n_epochs": 1},
        "epoch": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    }[moment]

    def callbacks() -> list[Any]:
        theirs = ModelCheckpoint(tmp_path / "theirs", save_top_k=-1, **options)
        return [EarlyStopping("val_loss", patience=9), theirs]

    cell = Cell(
        callbacks=callbacks,
        model={"scheduler": "plateau of val_loss"},
        trainer={"val_check_interval": 2} if moment == "validation" else {},
        ours={"save_last": False},
    )
    full = train(tmp_path / "full", cell)
    saved = sorted((tmp_path / "theirs").glob("*.ckpt"), key=lambda path: int(path.stem.rpartition("=")[2]))
    assert len(saved) >= 3
    for path in saved[:-1]:
        unsaved = replace(cell, callbacks=lambda: [EarlyStopping("val_loss", patience=9)])
        module = train(tmp_path / path.name, unsaved, ckpt_path=str(path), seed=2)[1]
        wanted, found = batches_of(full[1]), batches_of(module)
        done = int(re.search(r"step=(\d+)", path.name)[1])
        assert [each[0] for each in found] == [each[0] for each in wanted[done:]], path.name
        if done % BATCHES:  # random numbers of an epoch's start are drawn by Lightning's own restart
            assert found[:1] == wanted[done : done + 1], path.name


def batches_of(module: Model) -> list[tuple[Any, ...]]:
    return [(event[6], *event[1:3]) for event in module.events if event[0] == "batch"]


@pytest.mark.parametrize(
    ("limit", "first", "then"), [("max_epochs", 2, 3), ("max_steps", 6, 12), ("max_steps", 8, 12)]
)
def test_a_training_whose_limit_was_raised_goes_on_as_if_it_had_been_so(tmp_path, limit, first, then):
    cell = Cell(model={"scheduler": "plateau of val_loss"}, ours={}, trainer={"max_epochs": -1})
    full = train(tmp_path / "full", replace(cell, trainer={**cell.trainer, limit: then}))
    short = train(tmp_path / "short", replace(cell, trainer={**cell.trainer, limit: first}))

    (path,) = (tmp_path / "short" / "run").glob("step-*")
    raised = replace(cell, trainer={**cell.trainer, limit: then})
    assert_resumes_exactly(tmp_path, raised, full, path, saver=short)


class Announcing(pl.Callback):
    """Raises SIGTERM once, in a hook after so many calls of it."""

    def __init__(self, hook: str, calls: int) -> None:
        self.left = calls
        setattr(self, hook, self._act)

    def _act(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow
def test_a_preempted_validation_is_made_by_the_resume(tmp_path):
    cell = Cell(
        callbacks=lambda: [EarlyStopping("val_loss", patience=9)],
        model={"scheduler": "plateau of val_loss"},
        trainer={"val_check_interval": 2},
        ours={"save": OnPreemption()},
    )
    full = train(tmp_path / "full", cell)
    for hook, calls, saved in (
        ("on_train_batch_end", 1, 1),  # mid-epoch, before any metric of a validation
        ("on_train_batch_end", 2, 2),  # a validation is due
        ("on_train_batch_end", 4, 4),  # a validation and the end of the epoch are due
        ("on_validation_batch_start", 2 * BATCHES + 2, 6),
        ("on_validation_batch_start", 3 * BATCHES + 2, 8),
        ("on_train_epoch_end", 1, 4),
    ):
        root = tmp_path / f"{hook}-{calls}"
        callbacks = [*cell.callbacks(), Announcing(hook, calls)]
        cut = train(root, replace(cell, callbacks=lambda callbacks=callbacks: callbacks))
        (path,) = (root / "run").glob("step-*")
        assert path.name == f"step-{saved:09d}"
        assert_resumes_exactly(root, cell, full, path, saver=cut)


class Early(pl.Callback):
    """Needs its state in `on_fit_start`."""

    def __init__(self) -> None:
        self.loaded: Any = None
        self.seen: list[Any] = []

    def state_dict(self) -> dict[str, int]:
        return {"x": 5}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(self.loaded)


class Growing(Model):
    """A layer that grows while it trains; a checkpoint tells its size."""

    def on_train_epoch_start(self) -> None:
        pass

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.table = nn.Parameter(torch.empty(checkpoint["state_dict"]["table"].shape))

    def configure_optimizers(self) -> Any:
        self.configured_with = {name: value.clone() for name, value in self.state_dict().items()}
        return super().configure_optimizers()


def test_hooks_and_callbacks_are_loaded_where_lightning_loads_them(tmp_path):
    cell = Cell(trainer={"max_steps": 2}, ours={})
    grown = Growing()
    grown.table = nn.Parameter(torch.ones(7))
    train(tmp_path, cell, module=grown)
    early, small = Early(), Growing()
    small.table = nn.Parameter(torch.ones(3))
    cell = replace(cell, trainer={"max_steps": 3}, callbacks=lambda: [early])
    train(tmp_path, replace(cell, trainer={"max_steps": 3}), module=small, ckpt_path="last")
    assert small.table.shape == (7,)
    assert torch.equal(small.configured_with["head.weight"], grown.head.weight)
    train(tmp_path, replace(cell, trainer={"max_steps": 4}), module=small, ckpt_path="last")

    assert early.seen == [None, {"x": 5}]


def test_optimizers_of_other_parameters_stay_as_they_are(tmp_path):
    train(tmp_path, Cell(trainer={"max_steps": 2}, ours={}))
    module = Model(frozen=True)

    with pytest.raises(IncompatibleCheckpointError, match="not in the live optimizer: backbone") as caught:
        train(tmp_path, Cell(trainer={"max_steps": 3}, ours={}), module=module, ckpt_path="last")

    assert "its weights were loaded before the optimizers were made, and nothing else" in str(caught.value)
    assert module.trainer.optimizers[0].state_dict()["state"] == {}


def test_a_window_that_the_script_changes_is_its_own(tmp_path):
    train(tmp_path, Cell(trainer={"max_steps": 2}, ours={}))
    cell = Cell(trainer={"max_steps": 5, "accumulate_grad_batches": 2}, ours={})
    module = train(tmp_path, cell, ckpt_path="last")[1]

    assert {event[4] for event in module.events if event[0] == "batch"} == {2}
