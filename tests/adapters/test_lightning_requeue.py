"""SLURM's auto-requeue, against a scheduler that only records what it is asked."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import lightning as pl
import pytest
from lightning.pytorch.plugins.environments import SLURMEnvironment

from ckpt_core import CheckpointManager, EverySteps
from lightning_ckpt import ShardedCheckpoint, _ckpt_path
from tests.adapters.lightning_jobs import Model, digest, loader_of

pytestmark = pytest.mark.filterwarnings("ignore")


class Scheduler(pl.Callback):
    """Announces the end of the job at one step."""

    def __init__(self, at: int | None) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == self.at:
            os.kill(os.getpid(), signal.SIGUSR1)


def script(root: Path, *, signal_at: int | None = None) -> tuple[Model, str]:
    """The user's script: the same for every start."""
    pl.seed_everything(7, verbose=False)
    module = Model()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=9, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=root, plugins=[SLURMEnvironment()],
        callbacks=[Scheduler(signal_at), ShardedCheckpoint(root / "run", save=EverySteps(3))],
    )  # fmt: skip
    trainer.fit(module, loader_of("plain"))
    return module, digest(trainer)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts the script as a job of SLURM, for the so many time."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    variables = {
        "JOB_ID": "4711",
        "NTASKS": "1",
        "PROCID": "0",
        "LOCALID": "0",
        "NODEID": "0",
        "JOB_NAME": "train",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)

    def begin(root: Path, *, restarts: int = 0, **options: int) -> tuple[Model, str]:
        monkeypatch.setattr(_ckpt_path, "_begun", set())  # as in a new process
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        return script(root, **options)

    return begin


def test_a_job_saves_requeues_once_and_its_second_start_goes_on_exactly(tmp_path, start):
    before = signal.getsignal(signal.SIGUSR1)
    whole, weights = start(tmp_path / "whole")
    assert not (tmp_path / "asked").exists()

    first, _ = start(tmp_path / "cut", signal_at=4)
    assert (tmp_path / "asked").read_text() == "requeue 4711\n"
    assert [info.step for info in CheckpointManager(tmp_path / "cut" / "run").checkpoints()] == [3, 5]
    assert list((tmp_path / "cut").glob("hpc_ckpt*")) == []

    second, resumed = start(tmp_path / "cut", restarts=1)
    assert {**first.losses, **second.losses} == whole.losses
    assert min(second.losses) == 5
    assert resumed == weights
    assert signal.getsignal(signal.SIGUSR1) is before
    assert (tmp_path / "asked").read_text() == "requeue 4711\n"


def test_only_the_very_job_goes_on_by_itself(tmp_path, start, monkeypatch):
    start(tmp_path, signal_at=2)
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    other, _ = start(tmp_path, restarts=1)
    assert min(other.losses) == 0


def test_a_scheduler_that_refuses_is_told_and_the_checkpoint_is_there(tmp_path, start, caplog):
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    start(tmp_path, signal_at=2)
    assert "requeue it with `scontrol requeue 4711`" in caplog.text
    assert [info.step for info in CheckpointManager(tmp_path / "run").checkpoints()] == [3]
