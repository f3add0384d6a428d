"""Train one rank in a plain loop: FSDP2 on several ranks, unwrapped on one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from ckpt_core import CheckpointManager, EverySteps, KeepLatest, TrainState
from ckpt_core.names import step_name
from examples.demo.data import Batch, make_loader, make_sampler
from examples.demo.hold import open_root
from examples.demo.model import GPT, make_deterministic, make_model, make_optimizer, make_scheduler
from examples.demo.plan import RESHARDED, Task
from examples.demo.record import EventLog, LossLog, write_state


def main() -> None:
    task = Task.from_environment()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        dist.init_process_group("gloo")
    make_deterministic(rank)
    train(task, rank, world_size)
    if world_size > 1:
        dist.destroy_process_group()


def train(task: Task, rank: int, world_size: int) -> None:
    model = make_model()
    if world_size > 1:
        shard(model, world_size)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer, task.plan)
    sampler = make_sampler(task.plan, rank=rank, world_size=world_size)
    loader = make_loader(sampler)
    state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler, dataloader=loader)
    make_deterministic(rank)
    checkpoints = open_manager(task, rank) if task.saves else None
    start = checkpoints.resume(state) if checkpoints else None
    if task.phase == RESHARDED:
        write_state(task.folder, model, optimizer, rank=rank)
    losses = LossLog(task.file("losses", rank))
    for step, (inputs, targets) in batches(loader, sampler, task, start or 0):
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.write(step, loss)
        if checkpoints:
            checkpoints.maybe_save(step, state)
    if checkpoints:
        checkpoints.close()
    if task.phase != RESHARDED:
        write_state(task.folder, model, optimizer, rank=rank)


def batches(
    loader: StatefulDataLoader[Batch], sampler: StatefulDistributedSampler, task: Task, step: int
) -> Iterator[tuple[int, Batch]]:
    """Train from after `step` to the task's last step, epoch by epoch."""
    while step < task.steps:
        sampler.set_epoch(step // task.plan.steps_per_epoch)
        for batch in loader:
            step += 1
            yield step, batch
            if step == task.steps:
                return


def shard(model: GPT, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def open_manager(task: Task, rank: int) -> CheckpointManager:
    held = None if task.held_step is None else step_name(task.held_step)
    return CheckpointManager(
        open_root(task, rank, held),
        save=EverySteps(task.plan.save_every),
        keep=KeepLatest(3),
        sinks=[EventLog(task.file("telemetry", rank))],
    )
