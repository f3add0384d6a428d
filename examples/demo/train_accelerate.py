"""Train one rank with Accelerate: FSDP2 on several ranks, unwrapped on one."""

from __future__ import annotations

import os

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader

import accelerate_ckpt
from ckpt_core import EverySteps, KeepLatest
from examples.demo.data import BATCH_SIZE, make_dataset
from examples.demo.hold import open_root
from examples.demo.model import SEED, Block, make_deterministic, make_model, make_optimizer, make_scheduler
from examples.demo.plan import RESHARDED, Task
from examples.demo.record import EventLog, LossLog, write_state


def main() -> None:
    task = Task.from_environment()
    accelerator = make_accelerator()
    make_deterministic(accelerator.process_index)
    if task.saves:
        enable(accelerator, task)
    train(accelerator, task)
    accelerator.end_training()


def make_accelerator() -> Accelerator:
    """Build an accelerator with FSDP2, which Accelerate itself refuses without a GPU."""
    os.environ |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
    loading = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=SEED)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    if accelerator.num_processes > 1:
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[Block.__name__],
            state_dict_type="SHARDED_STATE_DICT",
        )
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return accelerator


def enable(accelerator: Accelerator, task: Task) -> None:
    """Let `save_state` save every few steps, in the background."""
    rank = accelerator.process_index
    # Accelerate numbers its checkpoints from 0.
    held = None if task.held_step is None else f"checkpoint_{task.held_step // task.plan.save_every - 1}"
    accelerate_ckpt.enable(
        accelerator,
        open_root(task, rank, held),
        save=EverySteps(task.plan.save_every),
        keep=KeepLatest(3),
        sinks=[EventLog(task.file("telemetry", rank))],
    )


def train(accelerator: Accelerator, task: Task) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer, task.plan, calls_per_step=accelerator.num_processes)
    loader = DataLoader(make_dataset(task.plan), batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rank = accelerator.process_index
    make_deterministic(rank)
    step = 0
    if task.resumes:
        accelerator.load_state()
        step = accelerate_ckpt.checkpoints(accelerator).step
    if task.phase == RESHARDED:
        write_state(task.folder, model, optimizer.optimizer, rank=rank)
    losses = LossLog(task.file("losses", rank))
    while step < task.steps:
        loader.set_epoch(step // task.plan.steps_per_epoch)
        for inputs, targets in loader:
            loss = model(inputs, targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            losses.write(step, loss)
            if task.saves:
                accelerator.save_state()
            if step == task.steps:
                break
    if task.phase != RESHARDED:
        write_state(task.folder, model, optimizer.optimizer, rank=rank)
