"""What the manifests of each host say of parent, data and configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as pl
import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import accelerate_ckpt
from ckpt_core import EverySteps
from ckpt_core.commit import Catalog
from ckpt_core.storage import LocalStorage
from ckpt_core.types import DataPosition, Provenance
from lightning_ckpt import ShardedCheckpoint
from tests.adapters.trainer_data_jobs import DataJob, run_data

pytestmark = pytest.mark.filterwarnings("ignore")


def known(root: Path) -> dict[int, Provenance]:
    catalog = Catalog(LocalStorage(root))
    return {info.step: catalog.manifest(info.name).provenance for info in catalog.committed(abandoned=True)}


class Module(pl.LightningModule):
    def __init__(self, rate: float, api_key: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["rate"])


def fit(root: Path, max_steps: int, rate: float = 0.1, *, api_key: str = "", ckpt_path: Any = None) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=max_steps,
        callbacks=[ShardedCheckpoint(root, save=EverySteps(3))],
    )
    loader = DataLoader(torch.randn(9, 2), batch_size=2)
    trainer.fit(Module(rate, api_key), loader, ckpt_path=ckpt_path)


def test_lightning(tmp_path: Path) -> None:
    fit(tmp_path / "one", 6)
    one = known(tmp_path / "one")
    assert one[3].data == {"training": DataPosition(epoch=0, samples=6, of=9)}
    assert one[6].data == {"training": DataPosition(epoch=1, samples=2, of=9)}
    assert (one[3].parent, one[6].parent and one[6].parent.step) == (None, 3)
    fit(tmp_path / "other", 12, ckpt_path=str(tmp_path / "one" / "step-000000006"))
    other = known(tmp_path / "other")
    assert other[9].parent is not None
    assert (other[9].parent.step, other[9].parent.elsewhere) == (6, True)
    assert other[12].parent is not None
    assert (other[12].parent.step, other[12].parent.elsewhere) == (9, False)
    assert other[12].data == {"training": DataPosition(epoch=2, samples=4, of=9)}
    fit(tmp_path / "rate", 3, 0.2)
    fit(tmp_path / "secret", 3, api_key="another")
    assert known(tmp_path / "rate")[3].configuration_sha256 != one[3].configuration_sha256
    assert known(tmp_path / "secret")[3].configuration_sha256 == one[3].configuration_sha256


@pytest.mark.usefixtures("fresh_accelerate")
def test_accelerate(tmp_path: Path) -> None:
    accelerator = accelerate_ckpt.enable(Accelerator(cpu=True), tmp_path / "one")
    net = torch.nn.Linear(2, 1)
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(torch.randn(5, 2), batch_size=2)
    )
    for _ in range(2):
        for batch in loader:
            accelerator.backward(net(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            accelerator.save_state()
    accelerator.save_state(str(tmp_path / "other" / "end"))
    accelerator.load_state(str(tmp_path / "one" / "checkpoint_3"))
    accelerator.save_state(str(tmp_path / "third" / "again"))
    accelerator.end_training()
    found = [each.data["dataloader"] for each in known(tmp_path / "one").values()]
    counts = [(each.epoch, each.samples, each.of) for each in found]
    assert counts == [(0, 2, 5), (0, 4, 5), (0, 5, 5), (1, 2, 5), (1, 4, 5), (1, 5, 5)]
    (third,) = known(tmp_path / "third").values()
    assert third.parent is not None
    assert (third.parent.name, third.parent.elsewhere) == ("checkpoint_3", True)


@pytest.mark.usefixtures("fresh_accelerate")
def test_trainer(tmp_path: Path) -> None:
    job = DataJob(root=str(tmp_path / "one"), samples=10, save_at=(2, 4), arguments={"max_steps": 4})
    run_data(job)
    one = known(tmp_path / "one")
    assert one[2].data == {"training": DataPosition(epoch=0, samples=8, of=10)}
    assert one[4].data == {"training": DataPosition(epoch=1, samples=4, of=10)}
    resume = str(tmp_path / "one" / "checkpoint-4")
    run_data(job.but(root=str(tmp_path / "other"), resume=resume, save_at=(5,), arguments={"max_steps": 5}))
    other = known(tmp_path / "other")
    assert other[5].parent is not None
    assert (other[5].parent.step, other[5].parent.elsewhere) == (4, True)
    assert len({one[2].configuration_sha256, other[5].configuration_sha256}) == 2  # other steps in all
    assert other[5].run_id != one[4].run_id
