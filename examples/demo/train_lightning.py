"""Train one rank with Lightning: FSDP2 on several ranks, unwrapped on one."""

from __future__ import annotations

import logging
import os
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import lightning_ckpt
from ckpt_core import EverySteps, KeepLatest
from ckpt_core.names import step_name
from examples.demo.data import Batch, make_loader, make_sampler
from examples.demo.hold import open_root
from examples.demo.model import make_deterministic, make_model, make_optimizer, make_scheduler
from examples.demo.plan import RESHARDED, Task
from examples.demo.record import EventLog, LossLog, write_state


class Training(LightningModule):
    """An ordinary module, without any code for checkpoints."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.gpt = make_model()

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is not None and mesh["data_parallel"].size() > 1:
            for block in self.gpt.blocks:
                fully_shard(block, mesh=mesh["data_parallel"])
            fully_shard(self.gpt, mesh=mesh["data_parallel"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        del batch_idx
        loss: Tensor = self.gpt(*batch)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self)
        scheduler = make_scheduler(optimizer, self.task.plan)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Recorder(Callback):
    """Records the losses for the comparison, and seeds once everything is built."""

    def __init__(self, task: Task, rank: int) -> None:
        self._task = task
        self._rank = rank
        self._losses = LossLog(task.file("losses", rank))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._task.phase == RESHARDED:
            self._write_state(trainer, pl_module)
        if not self._task.resumes:
            make_deterministic(self._rank)

    def on_train_batch_end(  # noqa: PLR0917 - Lightning's signature
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        del pl_module, batch, batch_idx
        self._losses.write(trainer.global_step, outputs["loss"])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._task.phase != RESHARDED:
            self._write_state(trainer, pl_module)

    def _write_state(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizer = getattr(trainer.optimizers[0], "_optimizer", trainer.optimizers[0])
        write_state(self._task.folder, pl_module, optimizer, rank=self._rank)


def main() -> None:
    task = Task.from_environment()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    make_deterministic(rank)
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy_for(world_size),
        max_steps=task.steps,
        callbacks=[Recorder(task, rank), *checkpointing(task, rank)],
        enable_checkpointing=task.saves,
        default_root_dir=task.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = make_loader(make_sampler(task.plan, rank=rank, world_size=world_size))
    trainer.fit(Training(task), loader, ckpt_path="last" if task.saves else None)


def strategy_for(world_size: int) -> ModelParallelStrategy | str:
    if world_size == 1:
        return "auto"
    return ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)


def checkpointing(task: Task, rank: int) -> list[Callback]:
    """Return the callback that saves and resumes."""
    if not task.saves:
        return []
    held = None if task.held_step is None else step_name(task.held_step)
    callback: Callback = lightning_ckpt.ShardedCheckpoint(
        # The demo needs a storage whose writes can be held; usually this is a path.
        open_root(task, rank, held),
        save=EverySteps(task.plan.save_every),
        keep=KeepLatest(3),
        sinks=[EventLog(task.file("telemetry", rank))],
    )
    return [callback]
