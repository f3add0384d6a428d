"""A fit by Lightning's Trainer, to be preempted."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_ckpt.lightning import ShardedCheckpoint
from tests.reliability.preemption.jobs import BATCH, EVALUATIONS, Job, Numbers, digest, loader, network
from tests.reliability.preemption.signalling import Line


class Model(pl.LightningModule):
    """The network, and where it tells that it is."""

    def __init__(self, job: Job, line: Line) -> None:
        super().__init__()
        self.job, self.line = job, line
        self.net: nn.Module = network()
        self.losses: dict[int, float] = {}
        self.began = 0

    def configure_model(self) -> None:
        if self.job.strategy == "fsdp2" and not hasattr(self.net, "set_requires_gradient_sync"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def on_fit_start(self) -> None:
        torch.manual_seed(8 + self.trainer.global_rank)
        self.line.point("start")

    def on_train_start(self) -> None:
        self.began = self.trainer.global_step

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        del index
        batches = int(self.trainer.fit_loop.total_batch_idx)
        self.line.point(f"batch {batches}")
        self.line.point(f"step {self.trainer.global_step}")
        loss = (self.net(batch) - batch).pow(2).mean()
        self.losses[batches] = loss.item()
        return loss

    def on_train_epoch_end(self) -> None:
        self.line.point("epoch end")

    def on_validation_start(self) -> None:
        self.line.point("validation start")

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.line.point(f"evaluation {index}")
        self.log("val_loss", (self.net(batch) - batch).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=0.01)


def train(job: Job, root: Path, line: Line, *, resume: bool) -> dict[str, Any]:
    """Fit on this rank, with our callback."""
    checkpoint = ShardedCheckpoint(line.storage(root), save=job.policy, deadline_seconds=90, save_last=False)
    model = Model(job, line)
    trainer = make_trainer(job, checkpoint)
    path = "last" if resume else None
    trainer.fit(model, loader(), DataLoader(Numbers(), batch_size=BATCH), ckpt_path=path)
    return {
        "began": model.began,
        "step": trainer.global_step,
        "preempted": checkpoint.preempted,
        "losses": model.losses,
        "weights": digest(model.net.state_dict()),
    }


def train_stock(job: Job, root: Path, line: Line, *, resume: bool) -> dict[str, Any]:
    """Fit on this rank as Lightning does without us; a collective gives up after some seconds."""
    del resume
    trainer = make_trainer(job, ModelCheckpoint(root, every_n_train_steps=1000), timeout_seconds=8)
    model = Model(job, line)
    trainer.fit(model, loader())
    return {"began": 0, "step": trainer.global_step, "preempted": trainer.received_sigterm}


def make_trainer(job: Job, checkpoint: Checkpoint, *, timeout_seconds: float = 120) -> pl.Trainer:
    """A Trainer for two ranks, with one checkpoint callback."""
    evaluations: dict[str, Any] = {"limit_val_batches": 0}
    if job.evaluate_every:
        evaluations = {"limit_val_batches": EVALUATIONS, "val_check_interval": job.evaluate_every}
    timeout = timedelta(seconds=timeout_seconds)
    strategy: Any = DDPStrategy(timeout=timeout)
    if job.strategy == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, timeout=timeout)
    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=job.steps,
        accumulate_grad_batches=job.accumulation,
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **evaluations,
    )


def main() -> None:
    """One rank of a job that Lightning's own launcher starts."""
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    line = Line(int(os.environ.get("LOCAL_RANK", "0")))
    line.end(train(Job(**told["job"]), Path(told["root"]), line, resume=told["resume"]))


if __name__ == "__main__":
    main()
