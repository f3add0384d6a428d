"""What Accelerate, a Trainer, Fabric and their users pickle or copy can be with ours attached."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import lightning as pl
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

import accelerate_ckpt
from ckpt_core import EverySteps
from ckpt_core.hosting import attached_to
from lightning_ckpt import setup_fabric

WAYS = [lambda value: pickle.loads(pickle.dumps(value)), copy.deepcopy]

pytestmark = pytest.mark.parametrize("way", WAYS, ids=["pickle", "deepcopy"])


@pytest.fixture(autouse=True)
def _no_loader_of_another_test() -> None:
    """Forget weak references to loaders that were left within an epoch, which stock cannot pickle."""
    GradientState._reset_state()


def prepared(root: Any, **how: Any) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**how))
    accelerate_ckpt.enable(accelerator, root)
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.arange(8.0)[:, None]), batch_size=2, shuffle=True)
    return (
        accelerator,
        *accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader),
    )


def values(loader: Any) -> list[float]:
    return [value for (batch,) in loader for value in batch.flatten().tolist()]


@pytest.mark.parametrize("how", [{}, {"dispatch_batches": True}, {"use_seedable_sampler": True}])
def test_a_copy_of_what_was_prepared_is_stocks_and_the_original_stays_ours(tmp_path, way, how):
    accelerator, model, optimizer, loader = prepared(tmp_path, **how)
    for _ in range(2):  # before and after an epoch
        rest = accelerator.skip_first_batches(loader, 1)
        for each, samples in ((way(loader), 8), (way(rest), 6)):
            assert len(values(each)) == samples
        ended = accelerate_ckpt.checkpoints(accelerator).progress.loaders.positions()[0]["iteration"]
        assert len(values(loader)) == 8
        now = accelerate_ckpt.checkpoints(accelerator).progress.loaders.positions()[0]["iteration"]
        assert now == ended + 1, "the copies' epochs are not the original's"
        assert way(optimizer).param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert type(way(model)) is type(model)


def test_a_copy_of_an_enabled_accelerator_saves_and_loads_as_stock(tmp_path, way):
    accelerator, *_ = prepared(tmp_path / "ours")
    if way is copy.deepcopy:
        assert way(accelerator) is accelerator  # as in stock
        return
    made = way(accelerator)
    assert attached_to(made) is None
    made.save_state(str(tmp_path / "stock"))
    assert (tmp_path / "stock" / "model.safetensors").is_file()
    made.load_state(str(tmp_path / "stock"))
    accelerate_ckpt.disable(accelerate_ckpt.enable(made, tmp_path / "again"))
    accelerator.save_state(str(tmp_path / "ours" / "one"))
    accelerate_ckpt.checkpoints(accelerator).wait()
    assert (tmp_path / "ours" / "one" / "COMMITTED").is_file()


def test_a_loader_that_waits_to_go_on_from_a_checkpoint_can_be_copied(tmp_path, way):
    accelerator, _, _, loader = prepared(tmp_path)
    iterator = iter(loader)
    next(iterator)
    accelerator.save_state(str(tmp_path / "one"))
    list(iterator)
    accelerator.load_state(str(tmp_path / "one"))
    assert len(values(way(loader))) == 8
    assert len(values(accelerator.skip_first_batches(loader, 1))) == 6


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 2)

    def forward(self, x: Any = None, labels: Any = None) -> Any:
        return {"loss": self.net(x).pow(2).sum()}


def test_a_copy_of_an_enabled_trainer_trains_as_stock(tmp_path, way):
    arguments = TrainingArguments(
        tmp_path, report_to="none", max_steps=2, use_cpu=True, disable_tqdm=True, save_steps=2
    )
    data = [{"x": torch.ones(2), "labels": torch.zeros(1)}] * 8
    trainer = accelerate_ckpt.enable_trainer(Trainer(Net(), arguments, train_dataset=data))
    copies = [way(trainer)]
    trainer.train()
    if way is copy.deepcopy:  # after a training stock cannot be pickled
        copies.append(way(trainer))
        copy.deepcopy(trainer.callback_handler.callbacks)
    for index, made in enumerate(copies):
        made.args.output_dir = str(tmp_path / f"copy{index}")
        made.train()
        assert (tmp_path / f"copy{index}" / "checkpoint-2" / "optimizer.pt").is_file()
    assert (tmp_path / "checkpoint-2" / "COMMITTED").is_file()


def test_a_copy_of_a_fabric_saves_as_stock(tmp_path, way):
    fabric = pl.Fabric(accelerator="cpu", devices=1)
    setup_fabric(fabric, tmp_path / "ours", save=EverySteps(1))
    made = way(fabric)
    made.save(tmp_path / "stock.ckpt", {"step": 1})
    assert made.load(tmp_path / "stock.ckpt")["step"] == 1
