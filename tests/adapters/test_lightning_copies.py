"""What Lightning and its users pickle or copy can be with ours in it: before, in and after a fit."""

from __future__ import annotations

import copy
import io
import pickle
from types import MethodType
from typing import Any

import lightning as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from ckpt_core import EverySteps, KeepBest, KeepLatest, OnPreemption
from lightning_ckpt import ShardedCheckpoint, ShardedCheckpointIO

# Lightning warns of small data sets and few workers.
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(pl.LightningModule):
    def __init__(self, trainer_options: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(2, 2)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(batch).pow(2).mean()

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val_loss", self.net(batch).pow(2).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def data() -> Any:
    return DataLoader(torch.ones(4, 2), batch_size=1, shuffle=True)


def trainer_of(*callbacks: Any, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **{"max_steps": 4, **options},
    )


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def saved(value: Any) -> Any:
    target = io.BytesIO()
    torch.save(value, target)
    target.seek(0)
    return torch.load(target, weights_only=False)


class Copier(pl.Callback):
    """Copies in the hooks of a fit, as loggers, tuners and forecasting libraries do."""

    def __init__(self) -> None:
        self.copies = list[Any]()
        self.trainers = list[Any]()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            self.trainers = [way(trainer) for way in (pickled, saved, copy.deepcopy)]
            for way in (pickled, saved, copy.deepcopy, copy.copy):
                theirs = [each for each in trainer.callbacks if each is not self]
                self.copies.append([way(each) for each in theirs])
            self.copies.append([*copy.deepcopy(theirs), *pickled(theirs)])


def ours(way: str, root: Any) -> tuple[list[Any], dict[str, Any]]:
    options = {
        "save": EverySteps(1) | OnPreemption(),
        "keep": KeepLatest(9) | KeepBest("val_loss"),
    }
    if way == "callback":
        return [ShardedCheckpoint(root, **options)], {}
    return [], {"plugins": [ShardedCheckpointIO(root, **options)]}


@pytest.mark.parametrize("way", ["callback", "plugin"])
def test_what_a_trainer_holds_can_be_copied_before_in_and_after_a_fit(tmp_path, way):
    callbacks, options = ours(way, tmp_path / "run")
    copier = Copier()
    trainer = trainer_of(*callbacks, copier, ModelCheckpoint(tmp_path / "theirs"), **options)
    before = copy.deepcopy([each for each in trainer.callbacks if each is not copier])
    assert [type(each) for each in saved(before)] == [type(each) for each in before]

    trainer.fit(Net(), data(), data())

    assert len(copier.copies) == 5
    held = {type(each).__name__ for each in trainer.callbacks if each is not copier}
    for copies in copier.copies:
        assert {type(each).__name__ for each in copies} == held
    for each in copier.trainers:
        assert type(each.strategy) is SingleDeviceStrategy
        assert type(each.fit_loop.epoch_loop.on_advance_end) is MethodType
    copier.copies.clear()
    copier.trainers.clear()
    for each in (saved(trainer), copy.deepcopy(trainer), pickled(trainer)):
        assert type(each.strategy) is SingleDeviceStrategy
        assert each.global_step == 4
        again = Net()
        each.fit_loop.epoch_loop.max_steps = 6
        each.fit(again, data(), data(), ckpt_path=str(tmp_path / "run" / "step-000000004"))
        assert each.global_step == 6
    assert (tmp_path / "run" / "step-000000006" / "COMMITTED").exists()


def test_hyperparameters_may_hold_the_callback(tmp_path):
    checkpoint = ShardedCheckpoint(tmp_path / "run", save=EverySteps(2), allow_pickle=True)
    trainer_of(checkpoint).fit(Net({"callbacks": [checkpoint]}), data())

    resumed = trainer_of(ShardedCheckpoint(tmp_path / "run", allow_pickle=True), max_steps=6)
    module = Net({"callbacks": [checkpoint]})
    resumed.fit(module, data(), ckpt_path="last")
    assert resumed.global_step == 6


def test_a_copy_of_a_strategy_is_stocks_and_trains_by_itself(tmp_path):
    trainer = trainer_of(ShardedCheckpoint(tmp_path / "run"))
    trainer.fit(Net(), data())
    for strategy in (copy.copy(trainer.strategy), copy.deepcopy(trainer.strategy), pickled(trainer.strategy)):
        assert type(strategy) is SingleDeviceStrategy
        strategy._accelerator = None
        stock = trainer_of(strategy=strategy, enable_checkpointing=False)
        stock.fit(Net(), data())
        stock.save_checkpoint(tmp_path / "stock.ckpt")
        assert (tmp_path / "stock.ckpt").is_file()
