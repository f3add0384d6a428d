"""A resumed run may do to its own step what the run before could, and ends where that would have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import lightning as pl
import pytest
from lightning.pytorch.callbacks import EarlyStopping, Timer

from ckpt_core import CheckpointManager, EverySteps, KeepBest, KeepLatest, OnPreemption
from tests.adapters.test_lightning_restart import Announcing, Cell, Model, train

# Lightning warns of small data sets and few workers.
pytestmark = [pytest.mark.reliability, pytest.mark.filterwarnings("ignore")]

BEST = {"save": OnPreemption(), "keep": KeepLatest(9) | KeepBest("val_loss", n=9)}
OF_TRAINING = {"save": OnPreemption(), "keep": KeepLatest(9) | KeepBest("loss_epoch", n=9)}
WITHIN = {"val_check_interval": 2}
PREEMPTED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, int]]] = {
    "in a validation": (BEST, WITHIN, ("on_validation_batch_start", 6)),
    "in the validation of an epoch's end": (BEST, {}, ("on_validation_batch_start", 6)),
    "in the first validation of all": (
        BEST,
        {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0},
        ("on_validation_batch_start", 2),
    ),
    "right before a validation": (BEST, WITHIN, ("on_train_batch_end", 2)),
    "at an epoch's last step": (OF_TRAINING, {}, ("on_train_batch_end", 4)),
    "at the last step of all": (BEST, {"max_steps": 6, **WITHIN}, ("on_train_batch_end", 6)),
    "in the last validation of all": (BEST, {"max_steps": 6, **WITHIN}, ("on_validation_batch_start", 12)),
    "at the last step, with nothing due": (BEST, {"max_steps": 5, **WITHIN}, ("on_train_batch_end", 5)),
    "without a save of the last step": (BEST | {"save_last": False}, WITHIN, ("on_train_batch_end", 4)),
}


@pytest.fixture(params=["disk", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "disk" else f"memory://{uuid4().hex}/run"


def best(root: str, metric: str) -> dict[int, float]:
    """The values of the metric, by step; of a step that was saved twice, those of the later."""
    infos = CheckpointManager(root).checkpoints()
    return {info.step: info.metrics[metric] for info in infos if metric in info.metrics}


def lives(folder: Path, cell: Cell, *signals: tuple[str, int]) -> list[tuple[Any, Model]]:
    """Train, preempted at each of these moments, until the training ends."""
    found = []
    for number, moment in enumerate([*signals, None]):
        announcing = [] if moment is None else [Announcing(*moment)]
        each = replace(cell, callbacks=lambda more=announcing: [*cell.callbacks(), *more])
        found.append(train(folder, each, ckpt_path="last" if number else None, seed=number + 1))
    return found


def assert_same_end(full: tuple[Any, Model], runs: list[tuple[Any, Model]], *, begun: int = 0) -> None:
    """Compare hooks, batches, rates, validations and metrics of the last run with those of a whole one."""
    wanted, last = full[1].events, runs[-1][1].events
    assert last == wanted[len(wanted) - len(last) :]
    assert sum(len(module.events) for _, module in runs) == len(wanted) - begun
    for name, value in full[1].state_dict().items():
        assert value.equal(runs[-1][1].state_dict()[name]), name


@pytest.mark.parametrize("name", PREEMPTED)
def test_a_run_preempted_anywhere_goes_on_and_keeps_the_best(tmp_path, root, name):
    ours, trainer, moment = PREEMPTED[name]
    cell = Cell(ours={**ours, "dirpath": root}, trainer=trainer)
    full = train(tmp_path, replace(cell, ours={**ours, "dirpath": f"{root}-full"}))
    runs = lives(tmp_path, cell, moment)

    assert_same_end(full, runs)
    metric = "loss_epoch" if ours is OF_TRAINING else "val_loss"
    assert best(root, metric) == best(f"{root}-full", metric) != {}


@pytest.mark.parametrize(
    "second",
    [("on_validation_batch_start", 3), ("on_validation_end", 2), ("on_train_start", 1)],
    ids=["in the validation that is made up for", "at its end", "before it"],
)
def test_a_run_may_be_preempted_again_at_the_step_it_was_resumed_from(tmp_path, root, second):
    cell = Cell(ours={**BEST, "dirpath": root}, trainer=WITHIN)
    full = train(tmp_path, replace(cell, ours={**BEST, "dirpath": f"{root}-full"}))
    runs = lives(tmp_path, cell, ("on_validation_batch_start", 6), second, ("on_train_batch_end", 1))

    assert_same_end(full, runs)
    assert best(root, "val_loss") == best(f"{root}-full", "val_loss")


def test_a_step_that_is_saved_again_replaces_no_checkpoint_of_the_run_before(tmp_path, root):
    cell = Cell(ours={**BEST, "dirpath": root}, trainer=WITHIN)
    lives(tmp_path, cell, ("on_validation_batch_start", 6))

    first, again = [info for info in CheckpointManager(root).checkpoints() if info.step == 4]
    assert first.name == "step-000000004"
    assert again.name.startswith("step-000000004.run-")
    assert (first.lineage, "val_loss" in first.metrics) == (again.lineage, False)
    assert CheckpointManager(root).latest().step == 12


class Deciding(pl.Callback):
    """Ends the training by a decision of its own, in any hook."""

    def __init__(self, hook: str, step: int) -> None:
        setattr(self, hook, lambda trainer, *_: setattr(trainer, "should_stop", trainer.global_step >= step))


def early(**options: Any) -> EarlyStopping:
    return EarlyStopping("val_loss", patience=0, min_delta=9.0, verbose=False, **options)


DECIDED: dict[str, tuple[Callable[[], pl.Callback], dict[str, Any]]] = {
    "in a validation": (early, WITHIN),
    "at an epoch's end": (lambda: early(check_on_train_epoch_end=True), {}),
    "by a callback within a batch": (lambda: Deciding("on_train_batch_end", 3), WITHIN),
    "by a callback at an epoch's end": (lambda: Deciding("on_train_epoch_end", 4), {}),
    "before the least number of epochs": (early, {"min_epochs": 2, **WITHIN}),
    "before the least number of steps": (early, {"min_steps": 7, **WITHIN}),
}


@pytest.mark.parametrize("name", DECIDED)
def test_a_decision_to_end_the_training_outlives_it(tmp_path, name):
    decide, trainer = DECIDED[name]
    cell = Cell(callbacks=lambda: [decide()], trainer=trainer, ours={"save": EverySteps(1)})
    full = train(tmp_path / "full", cell)
    paths = sorted((tmp_path / "full" / "run").glob("step-*"))
    for path in paths:
        unsaved = replace(cell, ours={"save_last": False})
        resumed = train(tmp_path / f"from-{path.name}", unsaved, ckpt_path=str(path), seed=2)
        assert resumed[0].global_step == full[0].global_step, path.name
        assert_same_end(full, [resumed], begun=full[1].events_at_save[int(path.name[5:])])


def test_a_training_goes_on_without_the_callback_that_had_ended_it(tmp_path):
    train(tmp_path, Cell(callbacks=lambda: [early()], ours={}, trainer=WITHIN))
    trainer, _ = train(tmp_path, Cell(ours={}, trainer=WITHIN), ckpt_path="last")

    assert trainer.global_step == 12


@pytest.mark.parametrize("options", [{}, {"max_steps": 8}, WITHIN], ids=["epochs", "steps", "decided"])
def test_a_training_with_nothing_left_has_the_metrics_of_its_end(tmp_path, options):
    decide = [early] if options is WITHIN else []
    cell = Cell(callbacks=lambda: [each() for each in decide], ours={}, trainer=options)
    (first, _), (again, _) = (train(tmp_path, cell, ckpt_path=path) for path in (None, "last"))

    assert again.global_step == first.global_step
    assert dict(again.callback_metrics) == dict(first.callback_metrics)
    assert "val_loss" in again.callback_metrics


def test_a_training_that_was_out_of_time_goes_on_with_more_of_it(tmp_path):
    class Late(Timer):
        """A minute for each step; what earlier fits have taken is loaded with its state."""

        before = 0.0

        def time_elapsed(self, stage: Any = "train") -> float:
            return max(self.before, 60.0 * self.trainer.global_step)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.before = state["time_elapsed"]["train"]

        def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
            self.trainer = trainer

    for seconds, steps in ((180, 3), (180, 3), (300, 5)):
        cell = Cell(callbacks=lambda: [Late({"seconds": seconds}, verbose=False)], ours={})  # noqa: B023
        trainer, _ = train(tmp_path, cell, ckpt_path="last")
        assert trainer.global_step == steps


def test_a_second_fit_has_the_least_number_of_epochs_that_the_first_was_stopped_before(tmp_path):
    ours = {"save": OnPreemption()}
    cell = Cell(ours=ours, callbacks=lambda: [Announcing("on_train_batch_end", 2)], trainer={"min_epochs": 2})
    trainer, _ = train(tmp_path, cell)

    assert (trainer.global_step, trainer.fit_loop.min_epochs) == (2, 2)
