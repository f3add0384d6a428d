"""The loggers of every host receive what each save has cost, at its step, unless told otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from lightning.fabric import Fabric
from lightning.pytorch.loggers import Logger
from torch import nn
from transformers import TrainerCallback

import accelerate_ckpt
from ckpt_core import EverySteps
from lightning_ckpt import setup_fabric
from tests.adapters.accelerate_jobs import forget_accelerators
from tests.adapters.lightning_jobs import Job, fit
from tests.adapters.trainer_jobs import TrainerJob, trainer

pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = {f"checkpoint/{name}" for name in ("stall_ms", "durable_s", "bytes", "overhead")}


class Recorder(Logger):
    """A logger as users write one, of Lightning and of Fabric."""

    name, version = "recorder", 0

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, float]]] = []
        self.finalized = False

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert not self.finalized
        if NAMES & set(metrics):
            self.logged.append((step, metrics))

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None: ...

    def finalize(self, status: str) -> None:
        self.finalized = True


def check(logged: list[tuple[int | None, dict[str, float]]], *steps: int) -> None:
    assert [step for step, _ in logged] == list(steps)
    for _, numbers in logged:
        assert set(numbers) >= NAMES
        assert numbers["checkpoint/bytes"] > 0
        assert numbers["checkpoint/stall_ms"] > 0 < numbers["checkpoint/durable_s"]
        assert 0 <= numbers["checkpoint/overhead"] < 1


@pytest.mark.parametrize("plugin", [False, True], ids=["callback", "plugin"])
def test_lightnings_loggers(tmp_path, plugin):
    logger, options = Recorder(), {"save": EverySteps(2)}
    fit(Job(root=str(tmp_path), plugin=plugin, max_steps=5, options=options, trainer={"logger": logger}))
    check(logger.logged, 2, 4, 5)


def test_lightnings_loggers_are_spared_if_asked_for(tmp_path):
    logger, options = Recorder(), {"save": EverySteps(2), "log_costs": False}
    fit(Job(root=str(tmp_path), max_steps=3, options=options, trainer={"logger": logger}))
    assert logger.logged == []


@pytest.mark.parametrize("log_costs", [True, False])
def test_fabrics_loggers(tmp_path, log_costs):
    logger = Recorder()
    fabric = Fabric(accelerator="cpu", devices=1, loggers=[logger])
    checkpoints = setup_fabric(fabric, tmp_path / "run", step="step", log_costs=log_costs)
    model = fabric.setup(nn.Linear(3, 3))
    for step in (1, 2):
        fabric.save(tmp_path / "run" / f"step-{step:09d}", {"model": model, "step": step})
    checkpoints.close()
    check(logger.logged, *([1, 2] if log_costs else []))


class Tracker(GeneralTracker):
    """A tracker as users write one."""

    name, requires_logging_directory, main_process_only = "recorder", False, True

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    @property
    def tracker(self) -> list[Any]:
        return self.logged

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        self.logged.append((step, values))


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("log_costs", [True, False])
def test_accelerates_trackers(tmp_path, log_costs):
    tracker = Tracker()
    made = Accelerator(cpu=True, log_with=tracker)
    made.init_trackers("run")
    accelerate_ckpt.enable(made, tmp_path / "run", log_costs=log_costs)
    net = nn.Linear(3, 3)
    model, optimizer = made.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(2):
        made.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        made.save_state()
    made.end_training()
    if log_costs:
        assert len(tracker.logged) == 2
        check(tracker.logged, *[step for step, _ in tracker.logged if step is not None])
    else:
        assert tracker.logged == []


class Reports(TrainerCallback):
    """A callback that reports, as those of W&B and TensorBoard."""

    def __init__(self) -> None:
        self.logged: list[tuple[int | None, dict[str, float]]] = []
        self.losses = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if NAMES & set(logs):
            self.logged.append((int(logs["checkpoint/step"]), logs))
        self.losses += "loss" in logs


@pytest.mark.parametrize("log_costs", [True, False])
def test_the_trainers_callbacks(tmp_path, log_costs):
    reports = Reports()
    made = trainer(TrainerJob(root=str(tmp_path), steps=4, save_steps=2, enabled=False))
    made.args.report_to = ["recorder"]
    made.add_callback(reports)
    accelerate_ckpt.enable_trainer(made, log_costs=log_costs)
    made.train()
    accelerate_ckpt.disable_trainer(made)
    check(reports.logged, *([2, 4] if log_costs else []))
    assert reports.losses == 4
    assert not any(NAMES & set(each) for each in made.state.log_history)
    forget_accelerators()
