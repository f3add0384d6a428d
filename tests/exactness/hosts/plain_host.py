"""A loop of one's own, with `TrainState` and `CheckpointManager`."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import distributed as dist

from ckpt_core import CheckpointManager, Counters, TrainState
from tests.exactness.cells import EPOCHS
from tests.exactness.hosts.strategies import model_of, through
from tests.exactness.training import (
    DEADLINE_SECONDS,
    Job,
    Observed,
    Recorder,
    dataset_of,
    loader_of,
    schedule,
    seed_everything,
)


def train(job: Job) -> Observed:
    """Train as the README shows it."""
    cell, rank = job.cell, dist.get_rank() if dist.is_initialized() else 0
    model = model_of(cell, job.place, job.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    seed_everything(job, rank)
    loader, sampler = _data(job, rank)
    progress = Counters(epoch=0, step=0)
    tracked = {} if job.role == "stock" else {"dataloader": loader}
    state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler, progress=progress, **tracked)
    recorder = Recorder(job)
    with contextlib.ExitStack() as stack:
        manager = None
        if job.role != "stock":
            manager = stack.enter_context(CheckpointManager(job.root, deadline_seconds=DEADLINE_SECONDS))
        if job.role == "resumed":
            assert manager is not None
            manager.resume(state)
        for epoch in range(progress.epoch, EPOCHS):
            if sampler is not None:
                sampler.set_epoch(epoch)
            _epoch(job, recorder, (state, progress, loader, scheduler), manager)
            progress.epoch = epoch + 1
            if job.saves and cell.point == "edge" and epoch == 0:
                assert manager is not None
                manager.save(progress.step, state)
                recorder.saved()
    return recorder.ends(model, optimizer, scheduler)


def _epoch(job: Job, recorder: Recorder, parts: tuple[Any, ...], manager: Any) -> None:
    state, progress, loader, scheduler = parts
    (optimizer,) = state.optimizers
    cell, waiting = job.cell, 0
    done = 0
    for batch in loader:
        recorder.begins_batch(state.model, optimizer)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cell.precision == "bf16"):
            loss = through(state.model, batch, 1 / cell.accumulation)
        recorder.saw(batch["ids"], loss, optimizer.param_groups[0]["lr"])
        done, waiting = done + 1, waiting + 1
        if waiting == cell.accumulation:
            waiting = 0
            _step(optimizer, scheduler, progress)
        due = (progress.epoch, done) == cell.saves_after and cell.point != "edge"
        if job.saves and due:
            manager.save(progress.step, state)
            recorder.saved()
    if waiting:
        _step(optimizer, scheduler, progress)


def _step(optimizer: Any, scheduler: Any, progress: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    progress.step += 1


def _data(job: Job, rank: int) -> tuple[Any, Any]:
    """The loader, and the sampler that must know the epoch."""
    cell, place = job.cell, job.place
    replica, replicas = place.replica(rank), place.replicas
    dataset = dataset_of(cell, replica, replicas)
    options: dict[str, Any] = {}
    sampler = None
    if "stream" in cell.data:
        pass
    elif cell.place.replicas > 1 or replicas > 1:
        # As a script has it that may be started on any number of ranks.
        if cell.data == "map":
            from torch.utils.data.distributed import DistributedSampler as Sampler
        else:
            from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler as Sampler
        sampler = Sampler(dataset, num_replicas=replicas, rank=replica, shuffle=cell.shuffle)
        options["sampler"] = sampler
    else:
        options["shuffle"] = cell.shuffle
        if cell.place.world > 1:
            # Ranks that must see the same data do not draw equally many other random numbers.
            options["generator"] = torch.Generator().manual_seed(job.seed)
    return loader_of(cell, place, dataset, **options), sampler
