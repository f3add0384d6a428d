"""A script under Accelerate, resumed as its examples are: with `skip_first_batches`."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.tensor.parallel import parallelize_module

import accelerate_ckpt
from tests.adapters import accelerate_jobs
from tests.exactness.cells import EPOCHS, Place
from tests.exactness.hosts.strategies import TENSOR_PLAN
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
    """Train as Accelerate's examples do."""
    cell = job.cell
    accelerator = _accelerator(job)
    model = parallelized(Net(cell, seed=job.seed), accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    seed_everything(job, accelerator.process_index)
    options = {} if "stream" in cell.data else {"shuffle": cell.shuffle}
    loader = loader_of(cell, job.place, dataset_of(cell), **options)
    if job.role != "stock":
        accelerate_ckpt.enable(accelerator, job.root, deadline_seconds=DEADLINE_SECONDS)
    prepared = accelerator.prepare(model, optimizer, scheduler, loader)
    recorder = Recorder(job)
    first, skip = 0, 0
    if job.role == "resumed":
        accelerator.load_state()
        first, skip = _where(job)
    for epoch in range(first, EPOCHS):
        _epoch(job, recorder, (accelerator, *prepared), epoch, skip)
        skip = 0
        if job.saves and cell.point == "edge" and epoch == 0:
            accelerator.save_state(f"{job.root}/edge")
            recorder.saved()
    observed = recorder.ends(prepared[0], prepared[1].optimizer, prepared[2].scheduler)
    accelerator.end_training()
    return observed


def _epoch(job: Job, recorder: Recorder, parts: tuple[Any, ...], epoch: int, skip: int) -> None:
    accelerator, model, optimizer, scheduler, loader = parts
    cell = job.cell
    # A stateful loader goes on by itself.
    skips = skip and not cell.data.startswith("stateful")
    batches = accelerator.skip_first_batches(loader, skip) if skips else loader
    for done, batch in enumerate(batches, start=skip + 1):
        recorder.begins_batch(model, optimizer.optimizer)
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = model(**batch)["loss"]
            recorder.saw(batch["ids"], loss, optimizer.param_groups[0]["lr"])
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if job.saves and (epoch, done) == cell.saves_after and cell.point != "edge":
            accelerator.save_state(f"{job.root}/{done}")
            recorder.saved()


def _where(job: Job) -> tuple[int, int]:
    """The epoch, and how many of its batches a script skips on the ranks that there are now."""
    cell, place = job.cell, job.place
    epoch, batches = cell.saves_after
    if cell.point == "edge" or (cell.point == "last batch" and cell.data.startswith("stateful")):
        return epoch + 1, 0
    samples = batches * cell.place.replicas * cell.place.batch
    return epoch, samples // (place.replicas * place.batch)


def _accelerator(job: Job) -> Any:
    """An accelerator on the CPU; accelerate itself never selects FSDP there."""
    stateful = "stateful" if job.cell.data.startswith("stateful") else "skip"
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if job.cell.precision == "bf16" else "no"
    place = job.place
    kind = {"hsdp": "fsdp2", "tp": "ddp", "fsdp2+tp": "fsdp2"}.get(place.strategy, place.strategy)
    accelerator = accelerate_jobs.accelerator(
        accelerate_jobs.Job(strategy=kind, root=job.root, data=stateful, accumulation=job.cell.accumulation)
    )
    choose_mesh(accelerator, place)
    return accelerator


def choose_mesh(accelerator: Any, place: Place) -> None:
    """What Accelerate does for a `ParallelismConfig` on a GPU; on the CPU it refuses one."""
    if place.strategy not in {"hsdp", "tp", "fsdp2+tp"}:
        return
    from accelerate import ParallelismConfig

    replicas = 2 if place.strategy == "hsdp" else 1
    config = ParallelismConfig(
        dp_replicate_size=replicas,
        dp_shard_size=place.replicas // replicas,
        tp_size=place.world // place.replicas,
    )
    accelerator.state.parallelism_config = config
    accelerator.state.device_mesh = config.get_device_mesh("cpu")


def parallelized(net: Net, accelerator: Any) -> Net:
    """The net, spread over a tensor parallel group if there is one: Accelerate leaves that to its user."""
    config = accelerator.parallelism_config
    if config is None or not config.tp_enabled:
        return net
    parallelize_module(net, accelerator.torch_device_mesh["tp"], TENSOR_PLAN)
    net.tp_size = config.tp_size  # type: ignore[assignment]
    return net
