"""A metric in a checkpoint was measured at its step, and the best evaluations have checkpoints."""

from __future__ import annotations

import logging
import math
from typing import Any

import lightning as pl
import pytest
import torch
from torch.utils.data import DataLoader

from ckpt_core import CheckpointManager, EverySteps, KeepBest, KeepLatest
from lightning_ckpt import ShardedCheckpoint, ShardedCheckpointIO
from tests.adapters.lightning_jobs import Job, fit

# Lightning warns of small data sets and few workers.
pytestmark = pytest.mark.filterwarnings("ignore")

BATCHES = 4


class Scripted(pl.LightningModule):
    """Logs the values that it is given, whatever is trained."""

    def __init__(self, validations: list[float] = (), epochs: list[float] = ()) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
        self.validations = iter(validations)
        self.epochs = iter(epochs)

    def training_step(self, batch, index):
        step = float(self.trainer.global_step + 1)
        self.log("of_step", step)
        self.log("mean", step, on_step=False, on_epoch=True)
        if self.trainer.global_step % 3 == 0:
            self.log("sometimes", step)
        return self.net(batch).pow(2).mean()

    def on_train_epoch_end(self):
        if (value := next(self.epochs, None)) is not None:
            self.log("at_end", value)

    def validation_step(self, batch, index):
        pass

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.log("score", next(self.validations, math.inf))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(
    root: Any,
    module: Scripted,
    *,
    plugin: bool = False,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Train 4 steps an epoch; return the callback or plugin."""
    ours = (ShardedCheckpointIO if plugin else ShardedCheckpoint)(root, **options)
    host = {"plugins": [ours], "enable_checkpointing": False} if plugin else {"callbacks": [ours]}
    data = DataLoader(torch.randn(BATCHES, 2), batch_size=1)
    pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **host,
        **{"max_epochs": 4, **(trainer or {})},
    ).fit(module, data, data)
    return ours


def metrics(root: Any, name: str) -> dict[int, float]:
    infos = CheckpointManager(root).checkpoints()
    return {info.step: info.metrics[name] for info in infos if name in info.metrics}


def steps(root: Any) -> list[int]:
    return [info.step for info in CheckpointManager(root).checkpoints()]


def test_a_metric_is_stored_with_the_step_at_which_it_was_measured_only(tmp_path):
    every_second = {"check_val_every_n_epoch": 2, "max_epochs": 4}
    train(tmp_path, Scripted([0.5, 0.25], [7, 8, 9, 10]), save=EverySteps(1), trainer=every_second)

    assert steps(tmp_path) == list(range(1, 17))
    assert metrics(tmp_path, "of_step") == {step: step for step in range(1, 17)}
    assert metrics(tmp_path, "sometimes") == {step: step for step in range(1, 17, 3)}
    assert metrics(tmp_path, "score") == {8: 0.5, 16: 0.25}
    assert metrics(tmp_path, "at_end") == {4: 7, 8: 8, 12: 9, 16: 10}


def test_a_save_waits_for_the_validation_of_its_step_if_it_is_ranked_by_it(tmp_path):
    keep = KeepLatest(99) | KeepBest("score")
    every_second = {"check_val_every_n_epoch": 2}
    train(tmp_path, Scripted([0.5, 0.25]), save=EverySteps(1), keep=keep, trainer=every_second)

    assert metrics(tmp_path, "score") == {8: 0.5, 16: 0.25}


@pytest.mark.parametrize("plugin", [False, True], ids=["callback", "plugin"])
@pytest.mark.parametrize(
    ("mode", "scores", "kept"),
    [
        ("min", [3.0, 1.0, 2.0, math.nan], {8: 1.0}),
        ("max", [3.0, 1.0, 4.0, 2.0], {12: 4.0}),
        ("min", [math.nan, math.nan, 5.0, 6.0], {12: 5.0}),
        ("max", [-math.inf, math.nan, -math.inf, -1.0], {16: -1.0}),
    ],
)
def test_a_best_evaluation_is_saved_although_the_policy_does_not_save_it(
    tmp_path, plugin, mode, scores, kept
):
    keep = KeepBest("score", mode=mode)
    ours = train(tmp_path, Scripted(scores), plugin=plugin, keep=keep, save_last=False)

    (step,) = kept
    assert metrics(tmp_path, "score") == kept
    if not plugin:
        assert ours.best_model_path == f"{tmp_path}/step-{step:09d}"
        assert ours.best_model_score == kept[step]


def test_as_many_of_the_best_are_there_as_the_policy_keeps(tmp_path):
    scores = [5.0, 2.0, 4.0, 3.0, 6.0, 1.0]
    keep = KeepBest("score", n=3)
    train(tmp_path, Scripted(scores), keep=keep, save=EverySteps(5), trainer={"max_epochs": 6})

    assert metrics(tmp_path, "score") == {8: 2.0, 16: 3.0, 24: 1.0}


def test_a_metric_of_a_whole_epoch_ranks_the_checkpoint_of_its_last_step(tmp_path):
    train(tmp_path, Scripted(), keep=KeepLatest(9) | KeepBest("mean"), save=EverySteps(2))
    assert metrics(tmp_path, "mean") == {4: 2.5, 8: 6.5, 12: 10.5, 16: 14.5}


def test_a_metric_logged_when_the_epoch_has_ended_ranks_the_checkpoint_of_its_last_step(tmp_path):
    keep = KeepLatest(9) | KeepBest("at_end", mode="max")
    train(tmp_path, Scripted(epochs=[1, 3, 2, 4]), keep=keep, save=EverySteps(4))

    assert metrics(tmp_path, "at_end").items() >= {4: 1, 8: 3, 16: 4}.items()
    assert steps(tmp_path) == [4, 8, 12, 16]


@pytest.mark.slow
@pytest.mark.parametrize("validate", [False, True], ids=["", "validated"])
def test_a_checkpoint_of_a_best_epoch_resumes_exactly(tmp_path, validate):
    job = {"validate": validate, "model": {"epoch_loss": True}}
    options = {"keep": KeepBest("loss_epoch"), "save_last": False}
    full = fit(Job(root=str(tmp_path / "full"), max_steps=30, options={"save_last": False}, **job))
    fit(Job(root=str(tmp_path), max_steps=26, options=options, **job))
    at = steps(tmp_path / "run")
    resumed = fit(Job(root=str(tmp_path), max_steps=30, options=options, ckpt_path="best", **job))

    assert at[-1] % 12 == 0
    assert min(resumed.losses) == at[-1]
    assert resumed.losses.items() <= full.losses.items()
    assert resumed.weights == full.weights


def test_a_metric_that_nobody_logs_is_named_once_with_those_that_are(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "lightning_ckpt"):
        train(tmp_path, Scripted([1.0, 2.0]), keep=KeepBest("scor") | KeepBest("mean"), save=EverySteps(2))

    (warning,) = [record.getMessage() for record in caplog.records if "ranks" in record.getMessage()]
    assert "'scor'" in warning
    assert "Did you mean 'score'" in warning
    assert "Logged are: of_step, score, sometimes" in warning


@pytest.mark.parametrize("metric", ["score", "mean", "of_step", "sometimes"])
def test_no_word_is_said_of_a_metric_that_is_logged(tmp_path, caplog, metric):
    halfway = {"val_check_interval": 2, "max_epochs": 1}
    with caplog.at_level(logging.WARNING, "lightning_ckpt"):
        train(tmp_path, Scripted([1.0, 2.0]), keep=KeepBest(metric), trainer=halfway)

    assert not caplog.records


def test_the_best_of_a_run_that_was_resumed_is_still_known(tmp_path):
    keep = KeepLatest(1) | KeepBest("score")
    train(tmp_path, Scripted([1.0, 2.0]), keep=keep, trainer={"max_epochs": 2})
    ours = ShardedCheckpoint(tmp_path, keep=keep)
    data = DataLoader(torch.randn(BATCHES, 2), batch_size=1)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[ours], max_epochs=4
    )
    trainer.fit(Scripted([1.5, 0.5]), data, data, ckpt_path="last")

    assert metrics(tmp_path, "score") == {16: 0.5}


def test_what_is_saved_by_path_has_the_metrics_of_its_step_only(tmp_path):
    class Saving(Scripted):
        def on_train_batch_start(self, batch, index):
            if self.trainer.global_step == 6:
                self.trainer.save_checkpoint(tmp_path / "mine" / "six")

    train(tmp_path / "run", Saving([0.5, 0.25, 3.0, 4.0]))

    (info,) = CheckpointManager(tmp_path / "mine").checkpoints()
    assert info.step == 6
    assert "score" not in info.metrics
