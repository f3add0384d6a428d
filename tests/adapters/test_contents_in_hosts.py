"""`contents="trainable"` in every host: an exact resume without the frozen base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import lightning as pl
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.utils.data import DataLoader

import accelerate_ckpt
from ckpt_core import ConfigError, IncompatibleCheckpointError
from lightning_ckpt import ShardedCheckpoint, load_from_checkpoint, setup_fabric
from tests.adapters.accelerate_jobs import forget_accelerators

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = torch.arange(48.0).reshape(12, 4) / 48
SAVED = {"head.weight", "head.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


class Tuned(pl.LightningModule):
    """A frozen backbone, statistics, dropout, and a head that is trained."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Linear(4, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.head = nn.Linear(6, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.dropout(self.norm(self.backbone(rows)), 0.2))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.1)


def names_in(part: Path, prefix: str = "model.") -> set[str]:
    entries = FileSystemReader(part).read_metadata().state_dict_metadata
    return {name.removeprefix(prefix) for name in entries if name.startswith(prefix)}


def equal(one: nn.Module, other: nn.Module) -> bool:
    there = other.state_dict()
    return all(torch.equal(value, there[name]) for name, value in one.state_dict().items())


def fitted(root: Path, steps: int, *, seed: int = 0, **options: Any) -> Tuned:
    model = Tuned(seed)
    callback = ShardedCheckpoint(str(root), save={"every_steps": 2}, **{"contents": "trainable", **options})
    trainer = pl.Trainer(
        max_steps=steps,
        callbacks=[callback],
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(ROWS, batch_size=2), ckpt_path="last")
    return model


def test_lightning_resumes_exactly_what_is_trained(tmp_path, caplog):
    whole = fitted(tmp_path / "whole", 4)
    fitted(tmp_path / "run", 2)
    assert equal(fitted(tmp_path / "run", 4), whole)
    checkpoint = tmp_path / "run" / "step-000000004"
    assert names_in(checkpoint) == SAVED
    with pytest.raises(IncompatibleCheckpointError, match=r"another base.*backbone\.weight"):
        fitted(tmp_path / "run", 6, seed=1)
    caplog.clear()
    with pytest.raises(RuntimeError, match=r"backbone\.weight"):
        load_from_checkpoint(Tuned, checkpoint)
    assert "strict=False" in caplog.text
    assert equal(load_from_checkpoint(Tuned, checkpoint, strict=False), whole)


def test_lightning_refuses_other_contents(tmp_path):
    with pytest.raises(ConfigError, match="contents"):
        ShardedCheckpoint(str(tmp_path), contents="adapters")


def test_fabric_resumes_exactly_what_is_trained(tmp_path):
    def run(steps: int, *, seed: int = 0) -> Tuned:
        fabric = Fabric(accelerator="cpu", devices=1)
        checkpoints = setup_fabric(fabric, tmp_path / "run", contents="trainable")
        model = Tuned(seed)
        module, optimizer = fabric.setup(model, model.configure_optimizers())
        state = {"model": module, "optimizer": optimizer, "step": 0}
        assert fabric.load("last", state) == {}
        for step in range(state["step"] + 1, steps + 1):
            fabric.backward(module(ROWS[step : step + 3]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            fabric.save(tmp_path / "run" / f"at-{step}", {**state, "step": step})
        checkpoints.close()
        return model

    run(2)
    resumed = run(4)
    assert names_in(tmp_path / "run" / "at-4") == SAVED
    (tmp_path / "run").rename(tmp_path / "first")
    assert equal(run(4), resumed)
    with pytest.raises(IncompatibleCheckpointError, match="another base"):
        run(5, seed=1)


@pytest.mark.usefixtures("fresh_accelerate")
def test_accelerate_resumes_exactly_what_is_trained(tmp_path, monkeypatch):
    monkeypatch.setenv("CKPT_SUITE_CONTENTS", "trainable")

    def run(root: Path, steps: int, *, seed: int = 0) -> Tuned:
        forget_accelerators()
        made = accelerate_ckpt.enable(accelerate.Accelerator(cpu=True), root)
        model, teacher = Tuned(seed), Tuned(7).requires_grad_(False)
        module, _, optimizer = made.prepare(model, teacher, model.configure_optimizers())
        made.load_state()
        for step in range(accelerate_ckpt.checkpoints(made).step + 1, steps + 1):
            made.backward(module(ROWS[step : step + 3]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        made.save_state()
        made.end_training()
        return model

    run(tmp_path / "run", 2)
    resumed = run(tmp_path / "run", 4)
    assert equal(run(tmp_path / "whole", 4), resumed)
    assert names_in(tmp_path / "run" / "checkpoint_1" / "pytorch_model_fsdp_0") == SAVED
    with pytest.raises(IncompatibleCheckpointError, match="another base"):
        run(tmp_path / "run", 6, seed=1)
