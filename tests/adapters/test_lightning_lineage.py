"""Which checkpoints a fit goes on from, and which it leaves behind."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from ckpt_core import CheckpointManager, EverySteps, KeepBest, KeepLatest
from lightning_ckpt import ShardedCheckpoint

# Lightning warns of small data sets and few workers.
pytestmark = pytest.mark.filterwarnings("ignore")


class Small(pl.LightningModule):
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
        self.fails_at = fails_at
        self.first_step: int | None = None

    def training_step(self, batch, index):
        if self.trainer.global_step == self.fails_at:
            self.fails_at = None
            raise ZeroDivisionError
        if self.first_step is None:
            self.first_step = self.trainer.global_step
        loss = self.net(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("score", -float(self.trainer.global_step))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def data() -> Any:
    return DataLoader(torch.randn(4, 2), batch_size=1)


def trainer_of(*callbacks: Any, **options: Any) -> pl.Trainer:
    """A Trainer of 4 steps an epoch."""
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        **options,
    )


def ours(root: Path, **options: Any) -> ShardedCheckpoint:
    return ShardedCheckpoint(root, **{"save": EverySteps(2), **options})


def train(root: Path, max_steps: int, *, ckpt_path: Any = None, **options: Any) -> Small:
    module = Small()
    trainer_of(ours(root, **options), max_steps=max_steps).fit(module, data(), ckpt_path=ckpt_path)
    return module


def present(root: Path) -> list[int]:
    return [info.step for info in CheckpointManager(root).checkpoints()]


def abandoned(root: Path) -> list[int]:
    infos = CheckpointManager(root).checkpoints(abandoned=True)
    return [info.step for info in infos if info.abandoned]


def lineages(root: Path) -> int:
    return len({info.lineage.id for info in CheckpointManager(root).checkpoints(abandoned=True)})


def warnings_of(caplog: Any) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_fresh_fit_into_a_used_directory_trains_to_its_end_and_says_so_at_its_start(tmp_path, caplog):
    train(tmp_path, 6)
    old = (tmp_path / "step-000000006" / "COMMITTED").read_bytes()
    with caplog.at_level(logging.INFO, "lightning_ckpt"):
        train(tmp_path, 4)

    (warning,) = [text for text in warnings_of(caplog) if "of an earlier run" in text]
    assert "ckpt_path='last'" in warning
    assert "holds 3 of an earlier run, up to step-000000006" in warning
    assert present(tmp_path) == [2, 4]
    assert abandoned(tmp_path) == [2, 4, 6]
    assert (tmp_path / "step-000000006" / "COMMITTED").read_bytes() == old

    resumed = train(tmp_path, 8, ckpt_path="last")
    assert resumed.first_step == 4
    assert present(tmp_path) == [2, 4, 6, 8]
    assert lineages(tmp_path) == 2


def test_folds_in_one_directory_are_one_warning(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "lightning_ckpt"):
        for _ in range(4):
            train(tmp_path, 2)

    said = [each for each in caplog.records if "of an earlier run" in each.getMessage()]
    assert [each.levelno for each in said] == [logging.WARNING, logging.INFO, logging.INFO]
    assert lineages(tmp_path) == 4


def test_retention_and_best_never_count_an_earlier_run(tmp_path):
    keep = KeepLatest(1) | KeepBest("score")
    for max_epochs in (3, 2):
        callback = ours(tmp_path, keep=keep)
        trainer_of(callback, max_epochs=max_epochs).fit(Small(), data(), data())

    assert callback.best_model_score == -8
    assert callback.last_model_path == callback.best_model_path
    assert present(tmp_path) == [8]


@pytest.mark.parametrize("way", ["own path", "theirs", "stock", "other root"])
def test_going_back_by_a_path_leaves_what_came_after_it_behind(tmp_path, caplog, way):
    run = tmp_path / "run"
    theirs = ModelCheckpoint(tmp_path / "theirs", every_n_train_steps=4, save_top_k=-1)
    trainer_of(ours(run), theirs, max_steps=10).fit(Small(), data())
    trainer_of(ours(tmp_path / "other"), max_steps=4).fit(Small(), data())
    stock = trainer_of(max_steps=4, default_root_dir=tmp_path / "stock")
    stock.fit(Small(), data())
    paths = {
        "own path": run / "step-000000004",
        "theirs": tmp_path / "theirs" / "epoch=0-step=4.ckpt",
        "stock": stock.checkpoint_callback.best_model_path,
        "other root": tmp_path / "other",
    }
    caplog.clear()
    resumed = train(run, 8, ckpt_path=str(paths[way]))

    assert resumed.first_step == 4
    shared = [2, 4] if way == "own path" else []
    assert present(run) == [*shared, 6, 8]
    assert abandoned(run) == [step for step in (2, 4, 6, 8, 10) if step not in shared]
    assert any("abandoned" in text for text in warnings_of(caplog))
    assert train(run, 10, ckpt_path="last").first_step == 8


def test_a_trainer_that_fits_again_goes_on_with_its_line(tmp_path, caplog):
    callback = ours(tmp_path, keep=KeepLatest(9) | KeepBest("score"))
    trainer = trainer_of(callback, max_epochs=1)
    module = Small()
    trainer.fit(module, data(), data())
    trainer.fit(module, data(), data())  # nothing left to do
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data(), data())
    trainer.test(module, data(), ckpt_path="best", verbose=False)
    trainer.save_checkpoint(tmp_path / "final")
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, data(), data())

    assert lineages(tmp_path) == 1
    assert present(tmp_path) == [2, 4, 6, 8, 8, 10, 12]
    assert warnings_of(caplog) == []


def test_a_fit_that_broke_is_gone_on_with_by_the_same_trainer(tmp_path, caplog):
    trainer = trainer_of(ours(tmp_path), max_steps=8)
    module = Small(fails_at=5)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, data())
    trainer.fit(module, data())

    assert lineages(tmp_path) == 1
    assert present(tmp_path)[-1] == 8
    assert warnings_of(caplog) == []


def test_another_module_in_the_same_trainer_begins_a_line_of_its_own(tmp_path, caplog):
    trainer = trainer_of(ours(tmp_path), max_steps=4)
    trainer.fit(Small(), data())
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(Small(), data())

    assert present(tmp_path) == [6]
    assert abandoned(tmp_path) == [2, 4]


def test_trainers_one_after_another_in_one_directory_each_save_as_the_first_did(tmp_path):
    kept = []  # as the cells of a notebook do
    for _ in range(3):
        trainer = trainer_of(ours(tmp_path, keep=KeepLatest(2)), max_steps=6)
        trainer.fit(Small(), data())
        kept.append(trainer)
        assert present(tmp_path) == [4, 6]

    assert lineages(tmp_path) == 3


def test_a_lowered_limit_saves_nothing_twice(tmp_path):
    train(tmp_path, 6)
    module = train(tmp_path, 4, ckpt_path="last")

    assert module.first_step is None
    assert present(tmp_path) == [2, 4, 6]
    assert lineages(tmp_path) == 1


def test_lightnings_own_callback_may_share_the_directory(tmp_path):
    for ckpt_path in (None, "last"):
        theirs = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=2, monitor="loss")
        max_steps = 4 if ckpt_path is None else 8
        module = Small()
        trainer_of(ours(tmp_path), theirs, max_steps=max_steps).fit(module, data(), ckpt_path=ckpt_path)

    assert module.first_step == 4
    assert {2, 4, 6, 8} == set(present(tmp_path))
    assert lineages(tmp_path) == 1


def test_what_is_saved_by_path_time_and_again_stays_on_one_line(tmp_path, caplog):
    for max_steps in (2, 4):
        trainer = trainer_of(ours(tmp_path / "run"), max_steps=max_steps)
        trainer.fit(Small(), data(), ckpt_path="last")
        caplog.clear()
        trainer.save_checkpoint(tmp_path / "mine" / f"at-{max_steps}")

    assert present(tmp_path / "mine") == [2, 4]
    assert warnings_of(caplog) == []


class Tuned(Small):
    lr, batch_size = 0.01, 1

    def train_dataloader(self):
        return DataLoader(torch.randn(64, 2), batch_size=self.batch_size)

    val_dataloader = train_dataloader


@pytest.mark.slow
@pytest.mark.parametrize("way", ["lr_find", "scale_batch_size"])
def test_a_run_that_was_tuned_before_saves_as_one_that_was_not(tmp_path, way):
    """The Tuner's own checkpoint is saved, resumed and removed in the run's directory."""
    limits = {"lr_find": {"num_training": 3}, "scale_batch_size": {"max_trials": 1, "steps_per_trial": 1}}
    for _ in range(2):
        trainer = trainer_of(ours(tmp_path), max_steps=4, default_root_dir=tmp_path)
        module = Tuned()
        getattr(Tuner(trainer), way)(module, **limits[way])
        trainer.fit(module)
        assert present(tmp_path) == [2, 4]

    assert lineages(tmp_path) == 2


@pytest.mark.parametrize("leftover", [None, "step-000000002.incomplete-0123456789abcdef", "notes"])
def test_last_starts_afresh_where_nothing_is_committed_and_says_so(tmp_path, caplog, leftover):
    if leftover is not None:
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "__0_0.distcp").write_bytes(b"torn")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = train(tmp_path, 2, ckpt_path="last")

    assert module.first_step == 0
    assert f"nothing is committed to {tmp_path} yet: starting afresh" in warnings_of(caplog)
    assert not any("HINT" in str(each.message) for each in told)
    assert present(tmp_path) == [2]


def test_a_root_can_be_named_from_where_one_stands(tmp_path, monkeypatch):
    (tmp_path / "deeper").mkdir()
    train(tmp_path, 2)
    for here, path, first in ((tmp_path, ".", 2), (tmp_path / "deeper", "..", 4)):
        monkeypatch.chdir(here)
        assert train(Path(path), first + 2, ckpt_path=path).first_step == first


def test_a_fresh_start_names_what_may_have_been_meant(tmp_path, caplog):
    trainer_of(ModelCheckpoint(tmp_path, filename="a", save_last=True), max_steps=2).fit(Small(), data())
    train(tmp_path / "fold-1", 2)
    assert train(tmp_path, 2, ckpt_path="last").first_step == 0

    (told,) = [text for text in warnings_of(caplog) if "starting afresh" in text]
    assert f"call fit(..., ckpt_path='{tmp_path}/last.ckpt')" in told
    assert "fold-1 there hold checkpoints" in told
    assert train(tmp_path, 4, ckpt_path=tmp_path / "last.ckpt").first_step == 2


def test_last_is_lightnings_own_as_long_as_only_that_has_saved(tmp_path):
    folder = tmp_path / "theirs"
    trainer_of(ModelCheckpoint(folder, save_last=True), max_steps=2).fit(Small(), data())
    later = ModelCheckpoint(folder, filename="later", save_last=True, every_n_train_steps=99)
    module = Small()
    trainer_of(ours(tmp_path / "run"), later, max_steps=4).fit(module, data(), ckpt_path="last")

    assert module.first_step == 2
