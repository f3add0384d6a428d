"""Lightning's Trainer with `ShardedCheckpoint`, and the loaders that its users write."""

from __future__ import annotations

from typing import Any

import lightning as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from ckpt_core import AtSteps
from lightning_ckpt import ShardedCheckpoint
from tests.adapters.lightning_jobs import CPUFSDPStrategy
from tests.exactness.cells import EPOCHS, Place
from tests.exactness.hosts.strategies import TENSOR_PLAN, mesh_of_replicas
from tests.exactness.training import (
    DEADLINE_SECONDS,
    Batch,
    Job,
    Net,
    Observed,
    Recorder,
    dataset_of,
    loader_of,
    schedule,
    seed_everything,
)


class Module(pl.LightningModule):
    def __init__(self, job: Job, recorder: Recorder) -> None:
        super().__init__()
        self.job, self.recorder = job, recorder
        self.net = Net(job.cell, seed=job.seed)

    def configure_model(self) -> None:
        if isinstance(self.net.layers["0"].weight, DTensor):
            return
        if self.job.place.strategy in {"tp", "fsdp2+tp"}:
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], TENSOR_PLAN)
        if self.job.place.strategy in {"fsdp2", "fsdp2+tp"}:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
        if self.job.place.strategy == "hsdp":
            fully_shard(self.net, mesh=mesh_of_replicas(self.job.place.world))

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        del index
        loss = self.net(**batch)["loss"]
        self.recorder.saw(batch["ids"], loss, self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.trainer.model.parameters(), lr=0.01)
        schedules = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        return [optimizer], [{"scheduler": schedules, "interval": "step"}]


class Watch(pl.Callback):
    """Calls the recorder where something happens."""

    def __init__(self, job: Job, recorder: Recorder, at: int) -> None:
        self.job, self.recorder, self.at = job, recorder, at
        self.done: Observed | None = None

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.recorder.begins_batch(trainer.strategy.model, trainer.optimizers[0])

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.job.saves and trainer.global_step == self.at and self.job.cell.point != "edge":
            self.recorder.saved()
            self.at = -1

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if self.job.saves and self.job.cell.point == "edge" and trainer.current_epoch == 0:
            self.recorder.saved()

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        (config,) = trainer.lr_scheduler_configs
        self.done = self.recorder.ends(trainer.strategy.model, trainer.optimizers[0], config.scheduler)


def train(job: Job) -> Observed:
    """Train as the README shows it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    recorder, steps = Recorder(job), _step_of_save(job)
    watch = Watch(job, recorder, steps)
    callbacks: list[pl.Callback] = [watch]
    if job.role != "stock":
        due = AtSteps([steps]) if job.saves else None
        callbacks.append(
            ShardedCheckpoint(job.root, save=due, save_last=False, deadline_seconds=DEADLINE_SECONDS)
        )
    torch.manual_seed(job.seed)
    module = Module(job, recorder)
    seed_everything(job, rank)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=job.place.world,
        strategy=_strategy(job.place),
        precision="bf16-mixed" if job.cell.precision == "bf16" else "32-true",
        max_epochs=EPOCHS,
        accumulate_grad_batches=job.cell.accumulation,
        callbacks=callbacks,
        enable_checkpointing=job.role != "stock",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.root,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, _loader(job, rank), ckpt_path="last" if job.role == "resumed" else None)
    assert watch.done is not None
    return watch.done


def _step_of_save(job: Job) -> int:
    epoch, batches = job.cell.saves_after
    return (epoch * job.cell.batches + batches) // job.cell.accumulation


def _strategy(place: Place) -> Any:
    match place.strategy:
        case "fsdp1":
            return CPUFSDPStrategy(state_dict_type="sharded")
        case "fsdp2" | "hsdp" | "tp" | "fsdp2+tp":
            tensor = place.world // place.replicas
            return ModelParallelStrategy(data_parallel_size=place.replicas, tensor_parallel_size=tensor)
        case "ddp":
            return "ddp"
        case _:
            return "auto"


def _loader(job: Job, rank: int) -> Any:
    """What users write: Lightning puts a distributed sampler into it by itself."""
    cell, place = job.cell, job.place
    dataset = dataset_of(cell, place.replica(rank), place.replicas)
    options = {} if "stream" in cell.data else {"shuffle": cell.shuffle}
    return loader_of(cell, place, dataset, **options)
