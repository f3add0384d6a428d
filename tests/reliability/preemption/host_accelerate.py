"""A loop under Accelerate that calls `save_state` for every batch, to be preempted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader

import accelerate_ckpt
from ckpt_core.storage import LocalStorage
from tests.reliability.preemption.jobs import BATCH, Job, Numbers, digest, evaluate, network
from tests.reliability.preemption.signalling import Line


def train(job: Job, root: Path, line: Line, *, resume: bool) -> dict[str, Any]:
    """A loop under Accelerate that calls `save_state` for every batch."""
    made = _accelerator(job)
    accelerate_ckpt.enable(made, line.storage(root), save=job.policy, deadline_seconds=90)
    ours = accelerate_ckpt.checkpoints(made)
    line.point("start")
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net, optimizer, batches = made.prepare(
        net, optimizer, DataLoader(Numbers(), batch_size=BATCH, shuffle=True)
    )
    if resume and LocalStorage(root).list(""):
        made.load_state()
    losses: dict[int, float] = {}
    began = ours.step
    done = began * job.accumulation
    while ours.step < job.steps and not ours.check_preemption():
        within = done % len(batches)
        for batch in made.skip_first_batches(batches, within) if within else batches:
            line.point(f"batch {done}")
            line.point(f"step {ours.step}")
            with made.accumulate(net):
                loss = (net(batch) - batch).pow(2).mean()
                made.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses[done] = loss.item()
            done += 1
            made.save_state()
            boundary = made.sync_gradients and job.evaluate_every
            if boundary and ours.step % job.evaluate_every == 0 and not ours.preempted:
                evaluate(net, line, ours.check_preemption)
                made.save_state()
            if ours.preempted or ours.step >= job.steps:
                break
    preempted, step = ours.preempted, ours.step
    weights = digest(made.unwrap_model(net).state_dict())
    made.end_training()
    return {"began": began, "step": step, "preempted": preempted, "losses": losses, "weights": weights}


def _accelerator(job: Job) -> Any:
    """An accelerator on the CPU; accelerate itself never selects FSDP there."""
    os.environ.update(ACCELERATE_USE_CPU="true", ACCELERATE_TORCH_DEVICE="cpu")
    made = Accelerator(cpu=True, gradient_accumulation_steps=job.accumulation)
    if job.strategy == "fsdp2":
        made.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, reshard_after_forward=True, state_dict_type="SHARDED_STATE_DICT"
        )
        made.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return made
