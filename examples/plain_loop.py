"""Train in a plain PyTorch loop that resumes after any crash.

    python examples/plain_loop.py runs/plain                          # one process
    torchrun --nproc-per-node 2 examples/plain_loop.py runs/plain     # FSDP2 on two

Kill it at any moment and start it again, on as many ranks as you like.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from ckpt_core import (
    CheckpointManager,
    EverySeconds,
    EverySteps,
    KeepEvery,
    KeepLatest,
    OnPreemption,
    TrainState,
)

STEPS, STEPS_PER_EPOCH, BATCH_SIZE = 40, 16, 8
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def main(root: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    sampler = StatefulDistributedSampler(make_dataset(), num_replicas=WORLD_SIZE, rank=RANK)
    loader = StatefulDataLoader(sampler.dataset, batch_size=BATCH_SIZE, sampler=sampler)

    save, keep = EverySteps(10) | EverySeconds(900) | OnPreemption(), KeepLatest(2) | KeepEvery(20)
    with CheckpointManager(root, save=save, keep=keep) as checkpoints:
        state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler, dataloader=loader)
        step = checkpoints.resume(state) or 0
        print(f"rank {RANK}: resumed from step {step}" if step else f"rank {RANK}: starting afresh")
        while step < STEPS and not checkpoints.preempted:
            sampler.set_epoch(step // STEPS_PER_EPOCH)
            for inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                step += 1
                if checkpoints.maybe_save(step, state, total_steps=STEPS):
                    print(f"rank {RANK}: step {step}, loss {loss.item():.6f}")
                if step == STEPS or checkpoints.preempted:
                    break
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


def make_dataset() -> TensorDataset:
    """Return inputs of 32 numbers, with their sums as targets."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(STEPS_PER_EPOCH * BATCH_SIZE * WORLD_SIZE, 32, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/plain")
