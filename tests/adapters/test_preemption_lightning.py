"""What a preemption in a validation must not touch, and who hears signals when."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning as pl
import pytest
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader

from ckpt_core import CheckpointManager, OnPreemption
from ckpt_core.commit import Catalog
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from tests.adapters.lightning_jobs import BATCH, Job, Model, Numbers, loader_of, make_trainer

pytestmark = [pytest.mark.reliability, pytest.mark.filterwarnings("ignore")]


class Signalled(Model):
    """Gets SIGTERM in the second batch of a validation."""

    def __init__(self, *, validation: int) -> None:
        super().__init__()
        self.validation = validation
        self.begun = 0

    def on_validation_start(self) -> None:
        self.begun += 1

    def validation_step(self, batch: Any, index: int) -> None:
        super().validation_step(batch, index)
        if (self.begun, index) == (self.validation, 1):
            os.kill(os.getpid(), signal.SIGTERM)


def preempted_in(validation: int, root: Path, *callbacks: pl.Callback) -> tuple[Signalled, Any]:
    job = Job(
        root=str(root), options={"save": OnPreemption()},
        trainer={"val_check_interval": 3, "callbacks": list(callbacks)}, max_steps=20,
    )  # fmt: skip
    trainer, checkpoint = make_trainer(job)
    module = Signalled(validation=validation)
    trainer.fit(module, loader_of("sampler"), DataLoader(Numbers(), batch_size=BATCH))
    return module, checkpoint


def test_a_validation_that_is_cut_short_does_not_count(tmp_path):
    stopping = EarlyStopping("val_loss", patience=5)
    module, checkpoint = preempted_in(2, tmp_path, stopping)

    (info,) = CheckpointManager(tmp_path / "run").checkpoints()
    assert info.step == 6
    assert checkpoint.preempted
    assert module.validations == 12 + 2
    # The first validation, which went to its end, measured step 3 and not this one.
    assert float(stopping.best_score) > 0
    assert "val_loss" not in info.metrics
    assert stopping.wait_count == 0


def test_a_first_validation_that_is_cut_short_leaves_no_metric(tmp_path):
    module, _ = preempted_in(1, tmp_path)

    (info,) = CheckpointManager(tmp_path / "run").checkpoints()
    assert info.step == 3
    assert module.validations == 2
    assert "val_loss" not in info.metrics


def test_a_signal_while_the_fit_is_set_up_stops_it_before_the_first_batch(tmp_path):
    before = signal.getsignal(signal.SIGTERM)

    class Early(Model):
        def configure_optimizers(self) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().configure_optimizers()

    trainer, checkpoint = make_trainer(Job(root=str(tmp_path), options={"save": OnPreemption()}))
    module = Early()
    trainer.fit(module, loader_of("sampler"))

    assert checkpoint.preempted
    assert module.losses == {}
    assert Catalog(LocalStorage(tmp_path / "run")).committed() == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_signal_while_the_last_save_is_waited_for_is_not_lightnings_either(tmp_path):
    """Its handler would wait for a collective that nobody else takes part in."""

    def at_write(_operation: object) -> None:
        while not waiting_in_teardown():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    storage = FaultyStorage(LocalStorage(tmp_path / "run"), [Fault(method="create", before=at_write)])
    options = {"dirpath": storage, "save": OnPreemption()}
    trainer, checkpoint = make_trainer(Job(root=str(tmp_path), options=options))
    trainer.fit(Model(signal_at=(0, 4)), loader_of("sampler"))

    assert checkpoint.preempted
    assert not trainer.received_sigterm
    assert [info.step for info in Catalog(storage).committed()] == [5]


def waiting_in_teardown() -> bool:
    """Whether the main thread waits for the last save."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None:
        if frame.f_code.co_name == "finish" and frame.f_code.co_filename.endswith("_session.py"):
            return True
        frame = frame.f_back
    return False
