"""A loop of one's own under Lightning Fabric, with `setup_fabric`."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from lightning_ckpt import setup_fabric
from tests.exactness.cells import EPOCHS, Place
from tests.exactness.hosts.strategies import TENSOR_PLAN, mesh_of_replicas
from tests.exactness.training import (
    DEADLINE_SECONDS,
    Job,
    Net,
    Observed,
    Recorder,
    dataset_of,
    loader_of,
    schedule,
    seed_everything,
)


def train(job: Job) -> Observed:
    """Train as Fabric's examples do."""
    cell, place = job.cell, job.place
    fabric = Fabric(
        accelerator="cpu",
        devices=place.world,
        strategy=_strategy(place),
        precision="bf16-mixed" if cell.precision == "bf16" else "32-true",
    )
    fabric.launch()
    checkpoints = None
    if job.role != "stock":
        checkpoints = setup_fabric(fabric, job.root, deadline_seconds=DEADLINE_SECONDS)
    model = fabric.setup_module(Net(cell, seed=job.seed))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    seed_everything(job, fabric.global_rank)
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, schedule),
        "loader": fabric.setup_dataloaders(_loader(job, fabric.global_rank)),
        "epoch": 0,
        "step": 0,
    }
    recorder = Recorder(job)
    if job.role == "resumed":
        fabric.load("last", state)
    for epoch in range(state["epoch"], EPOCHS):
        _epoch(job, recorder, fabric, state)
        state["epoch"] = epoch + 1
        if job.saves and cell.point == "edge" and epoch == 0:
            fabric.save(f"{job.root}/edge", state)
            recorder.saved()
    if checkpoints is not None:
        checkpoints.close()
    return recorder.ends(model._forward_module, optimizer.optimizer, state["schedule"])


def _epoch(job: Job, recorder: Recorder, fabric: Fabric, state: dict[str, Any]) -> None:
    cell, waiting = job.cell, 0
    model, optimizer = state["model"], state["optimizer"]
    for done, batch in enumerate(state["loader"], 1):
        recorder.begins_batch(model._forward_module, optimizer.optimizer)
        loss = model(**batch)["loss"]
        recorder.saw(batch["ids"], loss, optimizer.param_groups[0]["lr"])
        fabric.backward(loss / cell.accumulation)
        waiting += 1
        if waiting == cell.accumulation:
            waiting = 0
            _step(state)
        if job.saves and (state["epoch"], done) == cell.saves_after and cell.point != "edge":
            fabric.save(f"{job.root}/{done}", state)
            recorder.saved()
    if waiting:
        _step(state)


def _step(state: dict[str, Any]) -> None:
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["schedule"].step()
    state["step"] += 1


class _CPUFSDPStrategy(FSDPStrategy):
    """FSDP as Fabric builds it for GPUs, on the CPU, which Fabric refuses by type."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


def _strategy(place: Place) -> Any:
    if place.strategy == "fsdp1":
        return _CPUFSDPStrategy()
    if place.strategy in {"fsdp2", "hsdp", "tp", "fsdp2+tp"}:
        tensor = place.world // place.replicas
        spread = _replicate if place.strategy == "hsdp" else _spread
        return ModelParallelStrategy(spread, data_parallel_size=place.replicas, tensor_parallel_size=tensor)
    return "ddp" if place.strategy == "ddp" else "auto"


def _spread(model: nn.Module, device_mesh: Any) -> nn.Module:
    if device_mesh["tensor_parallel"].size() > 1:
        parallelize_module(model, device_mesh["tensor_parallel"], TENSOR_PLAN)
    if device_mesh["data_parallel"].size() > 1:
        fully_shard(model, mesh=device_mesh["data_parallel"])
    return model


def _replicate(model: nn.Module, device_mesh: Any) -> nn.Module:
    return fully_shard(model, mesh=mesh_of_replicas(device_mesh.size()))


def _loader(job: Job, rank: int) -> Any:
    """What users write: Fabric puts a distributed sampler into it by itself."""
    cell, place = job.cell, job.place
    dataset = dataset_of(cell, place.replica(rank), place.replicas)
    options = {} if "stream" in cell.data else {"shuffle": cell.shuffle}
    return loader_of(cell, place, dataset, **options)
