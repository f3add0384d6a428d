"""`upload=` in every host: what it saves by itself is in the further tier when it ends."""

from __future__ import annotations

from pathlib import Path

import lightning as pl
import pytest
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

import accelerate_ckpt
from ckpt_core import ConfigError
from lightning_ckpt import ShardedCheckpoint, setup_fabric
from tests.adapters.accelerate_jobs import Job, accelerator, prepared, step
from tests.adapters.test_contents_in_hosts import ROWS, Tuned
from tests.adapters.trainer_jobs import TrainerJob, run

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_accelerate")]


def names(root: Path) -> list[str]:
    return sorted(marker.parent.name for marker in root.glob("*/COMMITTED"))


def test_lightning_uploads_its_own_saves_and_none_that_are_by_path(tmp_path: Path) -> None:
    upload = {"to": str(tmp_path / "tier"), "every": 2, "keep": {"latest": 5}}
    callback = ShardedCheckpoint(str(tmp_path / "run"), save={"every_steps": 2}, upload=upload)
    made = pl.Trainer(
        max_steps=9,
        max_epochs=10,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    made.fit(Tuned(), DataLoader(ROWS, batch_size=4))
    assert names(tmp_path / "tier") == [f"step-{number:09d}" for number in (4, 8, 9)]
    made.save_checkpoint(tmp_path / "by-path" / "one")
    assert len(names(tmp_path / "tier")) == 3


def test_fabric_uploads_what_it_saves(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup(nn.Linear(2, 2))
    checkpoints = setup_fabric(fabric, tmp_path / "run", upload=str(tmp_path / "tier"))
    fabric.save(tmp_path / "run" / "one", {"model": model, "step": 1})
    checkpoints.close()
    assert names(tmp_path / "tier") == ["one"]


def test_accelerate_uploads_what_has_automatic_names_and_refuses_other_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_SUITE_UPLOAD", f"{{to: {tmp_path / 'tier'}, every: 1}}")
    made, net, *rest = prepared(Job(strategy="single", world=1, root=str(tmp_path / "run")))
    step(made, net, *rest)
    made.save_state()
    made.save_state(str(tmp_path / "elsewhere" / "mine"))
    made.end_training()
    assert names(tmp_path / "tier") == names(tmp_path / "run")
    assert names(tmp_path / "tier")


def test_a_trainer_uploads_its_checkpoints(tmp_path: Path) -> None:
    upload = {"to": str(tmp_path / "tier")}
    run(TrainerJob(root=str(tmp_path / "run"), steps=3, options={"upload": upload}))
    assert names(tmp_path / "tier") == ["checkpoint-3"]


def test_an_upload_needs_a_root_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"upload.* need dirpath="):
        ShardedCheckpoint(upload=str(tmp_path))
    made = accelerate_ckpt.enable(
        accelerator(Job(strategy="single", world=1, root=str(tmp_path))), upload=str(tmp_path / "tier")
    )
    with pytest.raises(ConfigError, match="upload= is for the checkpoints of one root"):
        made.save_state(str(tmp_path / "elsewhere" / "mine"))
