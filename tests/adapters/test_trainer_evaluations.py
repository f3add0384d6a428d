"""What a Trainer's checkpoint says is still to come: evaluations, decisions and logs, made once each."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

import accelerate_ckpt
from ckpt_core import EveryEpochs, EverySteps, KeepBest, OnPreemption
from tests.adapters.accelerate_jobs import forget_accelerators
from tests.adapters.trainer_data_jobs import DataJob, Numbered, data_trainer

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

LUCK = {"metric_for_best_model": "luck", "greater_is_better": False, "logging_steps": 2}
STEPS = {**LUCK, "eval_strategy": "steps", "eval_steps": 5}
EPOCHS = {**LUCK, "eval_strategy": "epoch"}
PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "mode": "min"},
}


class Sigterm(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Announces a preemption in one event of one step, or in a later one of its kind."""

    def __init__(self, event: str, step: int, number: int = 1) -> None:
        self._left = number

        def told(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._left -= state.global_step == step
            if state.global_step == step and self._left == 0:
                os.kill(os.getpid(), signal.SIGTERM)

        setattr(self, event, told)


class Heard(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Notes the steps at which evaluations are told."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


def told(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in entry.items() if "runtime" not in name and "per_second" not in name
    }


def train(
    job: DataJob, *callbacks: TrainerCallback, several: bool = False, patience: int | None = None
) -> dict[str, Any]:
    """Train, and tell what was measured, decided and logged; metrics depend on the random numbers."""
    made = data_trainer(job)
    made.compute_metrics = lambda found: {"luck": torch.rand(()).item()}
    if several:
        made.eval_dataset = {"a": Numbered(4), "b": Numbered(8)}
    heard = Heard()
    for each in (heard, *callbacks):
        made.add_callback(each)
    if patience is not None:
        made.add_callback(EarlyStoppingCallback(patience))
    made.train(resume_from_checkpoint=job.resume)
    preempted = accelerate_ckpt.trainer_checkpoints(made).preempted
    accelerate_ckpt.disable_trainer(made)
    forget_accelerators()
    stopping = [each for each in made.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]
    return {
        "preempted": preempted,
        "heard": heard.steps,
        "logs": [told(entry) for entry in made.state.log_history if "train_loss" not in entry],
        "best": (made.state.best_metric, made.state.best_global_step),
        "rate": made.optimizer.param_groups[0]["lr"],
        "weights": {name: value.tolist() for name, value in made.model.state_dict().items()},
        "random": torch.get_rng_state().tolist(),
        "patience": [each.early_stopping_patience_counter for each in stopping],
        "step": made.state.global_step,
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for what in ("logs", "best", "rate", "patience", "step", "weights", "random"):
        assert one[what] == other[what], what


PREEMPTED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[Any, ...], bool]] = {
    "due at the step": ({**STEPS, **PLATEAU}, {}, ("on_step_end", 10), False),
    "cut short": ({**STEPS, **PLATEAU}, {}, ("on_prediction_step", 10), False),
    "cut short at the first step of all": ({**STEPS, "eval_steps": 1}, {}, ("on_prediction_step", 1), False),
    "due at the last step of an epoch": ({**STEPS, "eval_steps": 6}, {}, ("on_step_end", 6), False),
    "at the end of an epoch": (
        {**EPOCHS, "gradient_accumulation_steps": 2},
        {},
        ("on_prediction_step", 6),
        False,
    ),
    "right before the end of an epoch": (
        EPOCHS,
        {"save": EveryEpochs(1) | OnPreemption()},
        ("on_step_end", 6),
        False,
    ),
    "within an epoch, policy by epochs": (
        EPOCHS,
        {"save": EveryEpochs(1) | OnPreemption()},
        ("on_step_end", 4),
        False,
    ),
    "the last of all": ({**STEPS, "max_steps": 13}, {}, ("on_prediction_step", 13), False),
    "a second data set": (
        STEPS | {"metric_for_best_model": "a_luck"},
        {},
        ("on_prediction_step", 10, 2),
        True,
    ),
    "a new best": (
        STEPS,
        {"save": EverySteps(4) | OnPreemption(), "keep": KeepBest("eval_luck")},
        ("on_prediction_step", 5),
        False,
    ),
}


@pytest.mark.parametrize("case", PREEMPTED)
def test_an_evaluation_that_a_preemption_left_is_made_once_before_the_next_step(
    tmp_path: Path, case: str
) -> None:
    arguments, options, when, several = PREEMPTED[case]
    job = DataJob(root=f"{tmp_path}/run", arguments=arguments, options={"save": OnPreemption(), **options})
    patience = 3
    whole = train(job.but(root=f"{tmp_path}/whole"), several=several, patience=patience)
    first = train(job, Sigterm(*when), several=several, patience=patience)
    assert first["preempted"], "the test does preempt"
    again = train(job.but(resume=True), several=several, patience=patience)
    same(again, whole)
    assert first["heard"] + again["heard"] == whole["heard"] or several


def test_a_preemption_in_the_evaluation_that_is_made_up_for_leaves_it_for_the_next_life(
    tmp_path: Path,
) -> None:
    """In a bucket, which replaces nothing, and with a policy that saves the best again."""
    options = {"save": OnPreemption(), "keep": KeepBest("eval_luck")}
    job = DataJob(
        root=f"{tmp_path}/run", arguments=STEPS, options={**options, "root": "memory://evaluations"}
    )
    whole = train(job.but(options={**options, "root": "memory://whole-evaluations"}))
    lives = [train(job, Sigterm("on_prediction_step", 5))]
    lives += [train(job.but(resume=True), Sigterm("on_prediction_step", 5))]
    assert [life["heard"] for life in lives] == [[], []]
    again = train(job.but(resume=True))
    same(again, whole)
    assert again["heard"] == whole["heard"]


KILLED: dict[str, tuple[dict[str, Any], list[int]]] = {
    # The saved step is the last of its epoch, or of the training: the end of the epoch is still to come.
    "logs and evaluations of epochs": ({**EPOCHS, "logging_strategy": "epoch"}, [6, 8]),
    "the last step, within an epoch": ({**EPOCHS, "logging_strategy": "epoch", "max_steps": 8}, [8]),
    "windows of accumulation": ({**EPOCHS, "gradient_accumulation_steps": 4, "logging_steps": 3}, [2]),
}


@pytest.mark.parametrize("case", KILLED)
def test_a_killed_run_is_resumed_to_the_same_logs_and_evaluations(tmp_path: Path, case: str) -> None:
    arguments, steps = KILLED[case]
    job = DataJob(root=f"{tmp_path}/run", arguments=arguments, save_at=steps)
    whole = train(job)
    for step in steps:
        again = train(job.but(root=f"{tmp_path}/{step}", resume=f"{job.root}/checkpoint-{step}"))
        same(again, whole)


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_early_stopping_counts_on_and_its_decision_at_the_saved_step_stands(
    tmp_path: Path, strategy: str
) -> None:
    arguments = {
        **LUCK, "eval_strategy": strategy, "save_strategy": strategy, "eval_steps": 4, "save_steps": 4,
        "num_train_epochs": 12, "logging_strategy": "epoch",
    }  # fmt: skip
    job = DataJob(root=f"{tmp_path}/run", arguments=arguments)
    whole = train(job, patience=2)
    last = whole["step"]
    assert last < 72, "it is stopped early"
    for step in (last - 4 if strategy == "steps" else last - 6, last):
        again = train(job.but(root=f"{tmp_path}/{step}", resume=f"{job.root}/checkpoint-{step}"), patience=2)
        same(again, whole)
    longer = job.but(
        root=f"{tmp_path}/more",
        resume=f"{job.root}/checkpoint-{last}",
        arguments={**arguments, "num_train_epochs": 30},
    )
    assert train(longer, patience=2)["step"] > last, "who makes it longer wants it to go on"


class Limit(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Ends a training where a job has no more time, as many scripts do."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            control.should_save = control.should_training_stop = True


def test_a_stop_that_no_evaluation_has_decided_holds_for_one_job_alone(tmp_path: Path) -> None:
    job = DataJob(root=f"{tmp_path}/run", arguments=STEPS)
    whole = train(job.but(root=f"{tmp_path}/whole"))
    assert train(job, Limit())["step"] == 5
    same(train(job.but(resume=True)), whole)
