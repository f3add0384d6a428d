"""`on_exception="save"` under hosts: the last whole step is resumed exactly, or the error says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as pl
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import TrainerCallback

import accelerate_ckpt
from ckpt_core import CheckpointManager, ConfigError, EverySteps
from lightning_ckpt import ShardedCheckpoint, setup_fabric
from tests.adapters.accelerate_jobs import forget_accelerators
from tests.adapters.trainer_jobs import TrainerJob, trainer

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, FAILING, EVERY, EPOCH = 10, 7, 4, 8


class TroubleError(RuntimeError):
    """What ends a training here."""


class Model(pl.LightningModule):
    """Fails at one place of one step."""

    def __init__(self, place: str, error: type[BaseException]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.place, self.error = place, error

    def reach(self, place: str, step: int = FAILING - 1) -> None:
        if place == self.place and self.trainer.global_step == step:
            raise self.error(place)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.reach("hook")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        self.reach("forward")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())
        self.reach("validation")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.reach("before the optimizer")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.reach("after the optimizer", FAILING)

    def on_train_batch_end(self, *_: Any) -> None:
        self.reach("after the optimizer", FAILING)

    def on_train_epoch_end(self) -> None:
        self.reach("epoch's end", EPOCH)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(root: Path, place: str = "", error: type[BaseException] = TroubleError, *, last: bool = False) -> Any:
    torch.manual_seed(3)
    model = Model(place, error)
    data = TensorDataset(torch.sin(torch.arange(64.0)).reshape(32, 2))
    loader = StatefulDataLoader(data, batch_size=4, shuffle=True)
    checkpoint = ShardedCheckpoint(root, save=EverySteps(EVERY), on_exception="save")
    made = pl.Trainer(
        max_steps=STEPS, callbacks=[checkpoint], logger=False, accelerator="cpu", devices=1,
        enable_progress_bar=False, enable_model_summary=False, val_check_interval=3,
    )  # fmt: skip
    made.fit(model, loader, DataLoader(data, batch_size=16), ckpt_path="last" if last else None)
    return [each.detach().clone() for each in model.parameters()]


def committed(root: Path) -> list[int]:
    with CheckpointManager(root) as manager:
        return [info.step for info in manager.checkpoints()]


@pytest.fixture(scope="module")
def whole_fit(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(
    ("place", "saved"),
    [
        *(("forward", FAILING - 1), ("hook", FAILING - 1), ("before the optimizer", FAILING - 1)),
        *(("validation", FAILING - 1), ("epoch's end", EPOCH)),
    ],
)
def test_a_fit_saves_the_last_step_that_was_whole(tmp_path, whole_fit, place, saved):
    with pytest.raises(TroubleError) as raised:
        fit(tmp_path, place)
    assert f"step {saved} is saved" in raised.value.__notes__
    assert committed(tmp_path) == [EVERY, saved]
    with CheckpointManager(tmp_path) as manager:
        measured = "val_loss" in manager.latest().metrics
    assert measured is (place not in {"validation", "epoch's end"})  # one that failed is made again
    assert all(map(torch.equal, whole_fit, fit(tmp_path, last=True)))


def test_a_fit_that_is_interrupted_by_the_keyboard_saves_too(tmp_path, whole_fit):
    with pytest.raises(SystemExit):
        fit(tmp_path, "forward", KeyboardInterrupt)
    assert committed(tmp_path) == [EVERY, FAILING - 1]
    assert all(map(torch.equal, whole_fit, fit(tmp_path, last=True)))


def test_a_fit_does_not_save_what_an_optimizer_has_begun_to_change(tmp_path, whole_fit):
    with pytest.raises(TroubleError) as raised:
        fit(tmp_path, "after the optimizer")
    assert f"an optimizer step has begun after step {FAILING - 1}" in raised.value.__notes__[0]
    assert committed(tmp_path) == [EVERY]
    assert all(map(torch.equal, whole_fit, fit(tmp_path, last=True)))


class Failing(TrainerCallback):
    """Fails at one event of one step."""

    def __init__(self, event: str, step: int) -> None:
        self._step = step
        setattr(self, event, self._fail)

    def _fail(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            raise TroubleError


evaluations: list[list[dict[str, float]]] = []


def train(
    root: Path, event: str = "", step: int = 0, *, resume: bool = False, gated: bool = True, **given: Any
) -> Any:
    forget_accelerators()
    options = {"on_exception": "save"} | ({"save": EverySteps(EVERY)} if gated else {})
    made = trainer(TrainerJob(root=str(root), steps=STEPS, options=options, arguments=given))
    if event:
        made.add_callback(Failing(event, step))
    try:
        made.train(resume_from_checkpoint=resume or None)
    finally:
        accelerate_ckpt.disable_trainer(made)
    evaluations.append([each for each in made.state.log_history if "eval_loss" in each])
    return [each.detach().clone() for each in made.model.parameters()]


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_trainer_saves_the_step_before_the_one_that_failed_and_not_one_that_has_begun(tmp_path):
    expected = train(tmp_path / "whole")
    for event, step, saved in [
        ("on_step_begin", FAILING - 1, FAILING - 1),
        ("on_pre_optimizer_step", FAILING - 1, FAILING - 1),
        ("on_optimizer_step", FAILING - 1, None),
    ]:
        root = tmp_path / event
        with pytest.raises(TroubleError) as raised:
            train(root, event, step)
        assert raised.value.__notes__ == [
            f"step {saved} is saved"
            if saved
            else f"the last whole step was not saved: an optimizer step has begun after step {step}"
        ]
        assert committed(root) == ([EVERY, saved] if saved else [EVERY])
        assert all(map(torch.equal, expected, train(root, resume=True)))


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(
    ("strategy", "event", "step", "gated"),
    [
        ("steps", "on_prediction_step", 4, True),
        ("steps", "on_evaluate", 8, False),
        ("epoch", "on_prediction_step", 6, True),
    ],
)
def test_a_trainer_saves_the_step_whose_evaluation_failed_and_makes_it_again(
    tmp_path, strategy, event, step, gated
):
    given = {"eval_strategy": strategy, "eval_steps": 4, "save_steps": EVERY, "gated": gated}
    expected, whole = train(tmp_path / "whole", **given), evaluations[-1]
    with pytest.raises(TroubleError) as raised:
        train(tmp_path / "run", event, step, **given)
    assert raised.value.__notes__ == [f"step {step} is saved"]
    # No file of weights is made at every step for it.
    assert not (tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors").exists()
    assert all(map(torch.equal, expected, train(tmp_path / "run", resume=True, **given)))
    measured = [{name: each[name] for name in ("step", "eval_loss")} for each in evaluations[-1]]
    assert measured == [{name: each[name] for name in ("step", "eval_loss")} for each in whole]


@pytest.mark.usefixtures("fresh_accelerate")
def test_hosts_that_do_not_see_the_error_refuse_the_option(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="Accelerator does not see"):
        accelerate_ckpt.enable(Accelerator(cpu=True), tmp_path, on_exception="save")
    with pytest.raises(ConfigError, match="Fabric does not see"):
        setup_fabric(pl.Fabric(accelerator="cpu", devices=1), tmp_path, on_exception="save")
    monkeypatch.setenv("CKPT_SUITE_ON_EXCEPTION", "save")
    with pytest.raises(ConfigError, match="Accelerator does not see"):
        accelerate_ckpt.enable(Accelerator(cpu=True), tmp_path)
