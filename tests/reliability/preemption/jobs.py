"""What every training has that is preempted: its settings, its data, its network; and the plain loop."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

from ckpt_core import CheckpointManager, EverySteps, OnPreemption, TrainState
from tests.reliability.preemption.signalling import Line

STOCK = "stock lightning"
HOSTS = ("accelerate", "lightning", "loop", "trainer")
"""Under what trainings run; each is a module `host_…`, but for the loop."""
SAMPLES, WIDTH, BATCH, EVALUATIONS = 48, 8, 4, 4


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training; an epoch has six batches on each of two ranks.

    Attributes:
        host: one of `HOSTS`, or `STOCK`.
        strategy: `ddp` or `fsdp2`.
        steps: how many optimizer steps it makes.
        evaluate_every: steps between evaluations, 0 for none.
        accumulation: batches per step.
        save: arguments of `OnPreemption`.
        every: steps between other saves, 0 for none.
    """

    host: str
    strategy: str = "ddp"
    steps: int = 9
    evaluate_every: int = 0
    accumulation: int = 1
    save: dict[str, Any] = field(default_factory=dict)
    every: int = 0

    @property
    def policy(self) -> Any:
        """When it saves."""
        preemption = OnPreemption(**self.save)
        return EverySteps(self.every) | preemption if self.every else preemption


class Numbers(Dataset[torch.Tensor]):
    """Samples that are a function of their index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(WIDTH, dtype=torch.float32) * (index + 1))


def network() -> nn.Module:
    """The same weights on every rank; dropout, so that only an exact resume gives the same losses."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, WIDTH))
    torch.manual_seed(8 + dist.get_rank() if dist.is_initialized() else 8)
    return net


def loader() -> Any:
    """A loader that knows its position."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(
        Numbers(), num_replicas=2, rank=int(os.environ.get("LOCAL_RANK", "0")), shuffle=True, seed=3
    )
    return StatefulDataLoader(Numbers(), batch_size=BATCH, sampler=sampler)


def digest(weights: dict[str, Any]) -> str:
    """A short name for whole weights, from whatever shards there are."""
    whole = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in weights.items()}
    content = b"".join(whole[name].detach().cpu().numpy().tobytes() for name in sorted(whole))
    return hashlib.sha256(content).hexdigest()[:16]


def train(job: Job, root: Path, line: Line, *, resume: bool) -> dict[str, Any]:
    """A plain loop over the core."""
    if not dist.is_initialized():  # else what starts the rank has done it
        dist.init_process_group("gloo")
    net: Any = network()
    if job.strategy == "fsdp2":
        fully_shard(net)
    model = net if job.strategy == "fsdp2" else nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = loader()
    losses: dict[int, float] = {}
    with CheckpointManager(line.storage(root), save=job.policy, deadline_seconds=90) as checkpoints:
        line.point("start")
        state = TrainState(model=model, optimizer=optimizer, dataloader=batches)
        step = began = (checkpoints.resume(state) if resume else None) or 0
        for batch in _forever(batches):
            if step >= job.steps or (checkpoints.due() and checkpoints.preempted):
                break
            line.point(f"step {step}")
            loss = (model(batch) - batch).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.item()
            step += 1
            checkpoints.maybe_save(step, state)
            if job.evaluate_every and step % job.evaluate_every == 0 and not checkpoints.preempted:
                evaluate(model, line, checkpoints.due)
                checkpoints.maybe_save(step, state)
        preempted = checkpoints.preempted
    weights = digest(net.state_dict())
    dist.destroy_process_group()
    return {"began": began, "step": step, "preempted": preempted, "losses": losses, "weights": weights}


def _forever(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def evaluate(model: nn.Module, line: Line, look: Callable[[], Any]) -> None:
    """A few batches, between which a preemption is looked for."""
    model.eval()
    for index in range(EVALUATIONS):
        line.point(f"evaluation {index}")
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
        if look():
            break
    model.train()
