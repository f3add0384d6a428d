"""Trainings that run on every rank of the tests of the Lightning adapter."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from ckpt_core import EverySteps
from lightning_ckpt import ShardedCheckpoint, ShardedCheckpointIO

SAMPLES, FEATURES, BATCH = 48, 8, 4


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(FEATURES, dtype=torch.float32) / 10 + index / SAMPLES


class Stream(IterableDataset[torch.Tensor]):
    """Samples without a length; the position is the loader's to know."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.done = 0

    def __iter__(self) -> Any:
        rank, _ = rank_and_world()
        while self.done < self.samples:
            self.done += 1
            yield torch.full((FEATURES,), float(self.done + 100 * rank) / 100)
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class Model(pl.LightningModule):
    """Dropout, batch norm and a schedule, so that nothing but an exact resume gives the same losses."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, FEATURES)
        )
        self.losses: dict[int, float] = {}
        self.validations = 0

    def configure_model(self) -> None:
        if self.options.get("fsdp2") and not hasattr(self.net, "set_requires_gradient_sync"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self._act(index)
        loss = (self.net(batch) - batch).pow(2).mean() + torch.rand(()) / 10
        self.losses[int(self.trainer.fit_loop.total_batch_idx)] = loss.item()
        self.log("loss", loss, on_step=True, on_epoch=self.options.get("epoch_loss", False))
        return loss

    def _act(self, index: int) -> None:
        del index
        step, rank = self.trainer.global_step, self.trainer.global_rank
        if self.options.get("signal_at") == (rank, step):
            os.kill(os.getpid(), signal.SIGTERM)
        if self.options.get("raise_at") == (rank, step):
            raise ZeroDivisionError(f"rank {rank} broke at step {step}")

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        del index
        self.validations += 1
        sign = 1 if self.trainer.global_rank else -1
        self.log("own_val", float(sign * self.trainer.global_step))
        self.log("val_loss", (self.net(batch) - batch).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.options.get("estimate"):
            assert self.trainer.estimated_stepping_batches > 0
        optimizer = torch.optim.AdamW(self.trainer.model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class CPUFSDPStrategy(FSDPStrategy):
    """FSDP as Lightning builds it for GPUs, on the CPU, which Lightning refuses by type."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        wrapped = FullyShardedDataParallel(module=model, device_id=torch.device("cpu"), use_orig_params=True)
        self.kwargs["use_orig_params"] = True
        return wrapped


def rank_and_world() -> tuple[int, int]:
    """Lightning deletes the launcher's variables when a fit ends, but leaves the process group."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def tokens_of(batch: torch.Tensor) -> int:
    """Ranks whose batches are of different lengths."""
    return len(batch) * (1 + rank_and_world()[0])


def strategy_named(name: str, world: int) -> Any:
    if name == "fsdp":
        return CPUFSDPStrategy(state_dict_type="sharded")
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    return {"single": "auto", "ddp": "ddp"}[name]


def loader_of(kind: str, workers: int = 0) -> Any:
    rank, world = rank_and_world()
    if kind == "stream":
        return StatefulDataLoader(Stream(24), batch_size=BATCH, num_workers=workers)
    if kind == "plain":
        return DataLoader(Numbers(), batch_size=BATCH, shuffle=True)
    sampler = StatefulDistributedSampler(Numbers(), num_replicas=world, rank=rank, shuffle=True, seed=3)
    return StatefulDataLoader(Numbers(), batch_size=BATCH, sampler=sampler, num_workers=workers)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One `Trainer.fit`; picklable, so that it can be sent to ranks."""

    root: str
    strategy: str = "single"
    max_steps: int = 8
    ckpt_path: str | None = None
    plugin: bool = False
    loader: str = "sampler"
    workers: int = 0
    validate: bool = False
    expect: str | None = None
    options: dict[str, Any] = field(default_factory=lambda: {"save": EverySteps(3)})
    trainer: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rank saw."""

    losses: dict[int, float]
    weights: str
    step: int
    preempted: bool
    error: str
    best: str
    last: str
    validations: int


def fit(job: Job) -> Outcome:
    """Run a job on this rank; the error that it expects becomes part of the outcome."""
    rank, world = rank_and_world()
    torch.manual_seed(7)
    module = Model(fsdp2=job.strategy == "fsdp2", **job.model)
    torch.manual_seed(7 + rank)
    trainer, checkpoint = make_trainer(job, world)
    error = ""
    try:
        trainer.fit(
            module,
            loader_of(job.loader, job.workers),
            DataLoader(Numbers(), batch_size=BATCH) if job.validate else None,
            ckpt_path=job.ckpt_path,
        )
    except BaseException as caught:
        if type(caught).__name__ != job.expect:
            raise
        error = f"{type(caught).__name__}: {caught}"
    return Outcome(
        losses=module.losses,
        weights="" if error else digest(trainer),
        step=trainer.global_step,
        preempted=checkpoint.preempted if checkpoint is not None else False,
        error=error,
        best=getattr(checkpoint, "best_model_path", ""),
        last=getattr(checkpoint, "last_model_path", ""),
        validations=module.validations,
    )


def make_trainer(job: Job, world: int = 1) -> tuple[pl.Trainer, Any]:
    options = {"dirpath": f"{job.root}/run", **job.options}
    if isinstance(options["dirpath"], str):
        options["dirpath"] = options["dirpath"].format(rank=rank_and_world()[0])
    checkpoint = None if job.plugin else ShardedCheckpoint(**options)
    extra: dict[str, Any] = dict(job.trainer)
    if job.plugin:
        extra = {"plugins": [ShardedCheckpointIO(**options)], "enable_checkpointing": False, **extra}
    callbacks = [*extra.pop("callbacks", []), *([] if checkpoint is None else [checkpoint])]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy_named(job.strategy, world),
        max_steps=job.max_steps,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.root,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **extra,
    )
    return trainer, checkpoint


def digest(trainer: pl.Trainer) -> str:
    """The whole weights of the trained model, from whatever shards there are."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = trainer.strategy.model
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if not weights:
        return ""
    content = b"".join(weights[name].cpu().numpy().tobytes() for name in sorted(weights))
    return hashlib.sha256(content).hexdigest()[:16]


def fit_all(*jobs: Job) -> list[Outcome]:
    """Several fits in one process, as a notebook does."""
    outcomes = []
    for job in jobs:
        outcomes.append(fit(job))
        sys.stdout.flush()
    return outcomes


class Parallel(pl.LightningModule):
    """Two layers split over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def configure_model(self) -> None:
        if not isinstance(self.first.weight, DTensor):
            plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
            parallelize_module(self, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.second(self.first(batch)).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def averaged(root: str, runs: list[tuple[int, bool]]) -> list[str]:
    """Digests of the averaged weights after so many steps each, uninterrupted or resumed."""
    digests = []
    for max_steps, resumes in runs:
        torch.manual_seed(1)
        callbacks: list[Any] = [EMAWeightAveraging(decay=0.5)]
        if resumes:
            callbacks.append(ShardedCheckpoint(root, save=EverySteps(4)))
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
            max_steps=max_steps,
            callbacks=callbacks,
            enable_checkpointing=resumes,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        data = StatefulDataLoader(Numbers(), batch_size=BATCH)
        trainer.fit(Parallel(), data, ckpt_path="last" if resumes else None)
        digests.append(digest(trainer))
    return digests


def committed(root: Path) -> list[str]:
    return sorted(marker.parent.name for marker in root.glob("*/COMMITTED"))
