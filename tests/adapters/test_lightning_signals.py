"""A signal reaches somebody who acts on it, whatever the Trainer is doing."""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning as pl
import pytest
import torch
from torch.utils.data import DataLoader

from ckpt_core import CheckpointManager, EverySteps, OnPreemption
from lightning_ckpt import ShardedCheckpoint
from tests.adapters.lightning_jobs import committed

# Lightning warns of small data sets and few workers.
pytestmark = pytest.mark.filterwarnings("ignore")


class Watching(pl.LightningModule):
    """Notes who would hear a SIGTERM, and sends one where it is told to."""

    def __init__(self, signal_in: str = "") -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
        self.signal_in = signal_in
        self.handlers: dict[str, Any] = {}
        self.trained = 0

    def note(self, hook: str) -> None:
        self.handlers[hook] = signal.getsignal(signal.SIGTERM)
        if hook == self.signal_in:
            self.signal_in = ""
            os.kill(os.getpid(), signal.SIGTERM)

    def setup(self, stage):
        self.note("setup")

    def training_step(self, batch, index):
        self.note("train")
        self.trained += 1
        return self.net(batch).pow(2).mean()

    def validation_step(self, batch, index):
        self.note("validate")

    def test_step(self, batch, index):
        self.note("test")

    def predict_step(self, batch, index):
        self.note("predict")

    def on_train_end(self):
        self.note("on_train_end")

    def configure_optimizers(self):
        self.note("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.01)


def data() -> Any:
    return DataLoader(torch.randn(4, 2), batch_size=1)


def trainer_of(callback: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        max_steps=4,
        enable_checkpointing=callback is not None,  # its own would go to where the tests are started
        callbacks=[] if callback is None else [callback],
    )


def owner(handler: Any) -> str:
    """Whose code a handler is."""
    return type(getattr(handler, "__self__", handler)).__module__.partition(".")[0]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trainer_of(ShardedCheckpoint(folder)).fit(Watching(), data())
    return folder


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
@pytest.mark.parametrize("ckpt_path", [None, "last"])
def test_outside_a_fit_no_signal_is_caught_by_us(root, verb, ckpt_path):
    stock, module = Watching(), Watching()
    before = signal.getsignal(signal.SIGTERM)
    getattr(trainer_of(None), verb)(stock, data())
    trainer = trainer_of(ShardedCheckpoint(root, save=EverySteps(2) | OnPreemption()))
    getattr(trainer, verb)(module, data(), ckpt_path=ckpt_path)

    assert {hook: owner(each) for hook, each in module.handlers.items()} == {
        hook: owner(each) for hook, each in stock.handlers.items()
    }
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_fit_without_a_preemption_policy_catches_no_signal(tmp_path):
    stock, module = Watching(), Watching()
    trainer_of(None).fit(stock, data(), data())
    trainer_of(ShardedCheckpoint(tmp_path, save=EverySteps(2))).fit(module, data(), data())

    assert {owner(each) for each in module.handlers.values()} == {
        owner(each) for each in stock.handlers.values()
    }


@pytest.mark.parametrize("hook", ["setup", "configure_optimizers", "validate"])
def test_a_signal_while_the_fit_is_set_up_ends_it_before_its_first_step(tmp_path, hook):
    module = Watching(hook)
    callback = ShardedCheckpoint(tmp_path, save=OnPreemption())
    trainer_of(callback).fit(module, data(), data())

    assert callback.preempted
    assert module.trained == 0
    assert committed(tmp_path) == []


def test_a_signal_after_the_last_look_of_the_training_is_still_told(tmp_path):
    module = Watching("on_train_end")
    callback = ShardedCheckpoint(tmp_path, save=OnPreemption())
    trainer_of(callback).fit(module, data())

    assert callback.preempted
    assert [info.step for info in CheckpointManager(tmp_path).checkpoints()] == [4]


def test_a_save_by_path_after_the_fit_catches_no_signal(tmp_path):
    seen = []

    class Noting(pl.Callback):
        def state_dict(self):
            seen.append(signal.getsignal(signal.SIGTERM))
            return {}

    callback = ShardedCheckpoint(tmp_path / "run", save=OnPreemption())
    trainer = trainer_of(callback)
    trainer.callbacks.insert(0, Noting())
    before = signal.getsignal(signal.SIGTERM)
    trainer.fit(Watching(), data())
    seen.clear()
    trainer.save_checkpoint(tmp_path / "run" / "final")
    trainer.save_checkpoint(tmp_path / "mine" / "final")

    assert {owner(each) for each in seen} == {owner(before)}
    assert signal.getsignal(signal.SIGTERM) is before
