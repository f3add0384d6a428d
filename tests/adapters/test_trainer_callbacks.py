"""Callbacks of the Trainer that have a state, such as a moving average of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

import accelerate_ckpt
from ckpt_core import SaveError
from tests.adapters.accelerate_jobs import forget_accelerators
from tests.adapters.trainer_jobs import TrainerJob, _whole, trainer
from tests.kit.ranks import run_ranks


class Average(TrainerCallback):
    """A moving average that is made as training begins."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.average: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.average = {name: each.detach().clone() for name, each in model.named_parameters()}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for name, each in model.named_parameters():
            self.average[name].lerp_(each.detach(), 1 - self.decay)


class SavedAverage(Average):
    """The same, with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, each in self.average.items():
            each.copy_(state["average"][name])


class AverageOfTorch(TrainerCallback):
    """Torch's own, without a state."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.model, self.average = model, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))


class Exported(Average, ExportableState):
    """With a state as transformers would have it."""

    def state(self) -> dict[str, Any]:
        return {"args": {"decay": self.decay}, "attributes": {"average": self.average}}


def averages(job: TrainerJob, *, early: bool = True) -> list[Any]:
    """Train with two averages, added before or after `enable_trainer`, and tell them."""
    made, found = trainer(job.but(enabled=False)), [SavedAverage(0.5), SavedAverage(0.9)]
    for each in found if early else ():
        made.add_callback(each)
    if job.enabled:
        accelerate_ckpt.enable_trainer(made)
    for each in () if early else found:
        made.add_callback(each)
    made.train(resume_from_checkpoint=job.resume)
    if job.enabled:
        accelerate_ckpt.disable_trainer(made)
    forget_accelerators()
    return [{name: _whole(value) for name, value in each.average.items()} for each in found]


def three_trainings(job: TrainerJob) -> list[Any]:
    """One without us, one that saves, and one that resumes from that, where each added its averages."""
    stock = averages(job.but(root=f"{job.root}-stock", enabled=False))
    return [stock, averages(job), averages(job.but(resume=True), early=False)]


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_moving_average_of_a_callback_goes_on_as_if_never_interrupted(tmp_path):
    stock, saving, resumed = three_trainings(TrainerJob(root=str(tmp_path / "run"), steps=5))
    assert stock[0] != stock[1]
    assert stock == saving == resumed


@pytest.mark.slow
@pytest.mark.distributed
def test_a_sharded_moving_average_of_a_callback_goes_on(tmp_path):
    job = TrainerJob(root=str(tmp_path / "run"), steps=5, world=2, strategy="fsdp2")
    for stock, saving, resumed in run_ranks(three_trainings, 2, job, timeout_seconds=120):
        assert stock[0] != stock[1]
        assert stock == saving == resumed


@pytest.mark.usefixtures("fresh_accelerate")
def test_state_of_a_callback_that_the_trainer_cannot_store_is_refused_at_the_first_save(tmp_path):
    made = trainer(TrainerJob(root=str(tmp_path), steps=1, save_steps=1))
    made.add_callback(Exported(0.5))
    with pytest.raises(SaveError, match="callback Exported is no JSON"):
        made.train()


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("kind", [lambda: Average(0.5), AverageOfTorch], ids=["by name", "module"])
def test_weights_of_a_callback_that_no_checkpoint_has_are_named(tmp_path: Path, caplog, kind):
    made = trainer(TrainerJob(root=str(tmp_path), steps=2, save_steps=1))
    callback = kind()
    made.add_callback(callback)
    made.train()
    said = [each.getMessage() for each in caplog.records if "in no checkpoint" in each.getMessage()]
    assert len(said) == 1
    assert f"callback {type(callback).__name__} holds weights, average," in said[0]
