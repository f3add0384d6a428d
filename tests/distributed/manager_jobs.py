"""Training jobs that run on every rank of the distributed tests of `CheckpointManager`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ckpt_core import CheckpointManager, EverySteps, KeepLatest, TrainState
from ckpt_core.state import model_state, optimizer_state

WIDTH = 12
STEP = 4
ONE_STREAM = ("tp", "fsdp2_tp")
"""Strategies in which ranks hold parts of the same activations and must draw the same random numbers."""


TENSOR_PLAN = {
    "up": ColwiseParallel(output_layouts=Replicate()),
    "down": RowwiseParallel(input_layouts=Replicate()),
}


class Block(nn.Module):
    """Small, with the shapes that hurt: odd sizes, a bias of one element, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.up = nn.Linear(WIDTH, 24)
        self.norm = nn.BatchNorm1d(24)
        self.down = nn.Linear(24, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.dropout = nn.Dropout(0.2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.relu(self.norm(self.up(self.embed(tokens).mean(1)))))
        return self.head(self.down(hidden)).sum() * self.frozen.sum()


def build(strategy: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model: nn.Module = Block()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if strategy == "ddp":
        model = DistributedDataParallel(model)
    elif strategy == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif strategy == "hsdp":
        fully_shard(
            model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        )
    elif strategy == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif strategy == "tp":
        parallelize_module(model, init_device_mesh("cpu", (world,)), TENSOR_PLAN)
    elif strategy == "fsdp2_tp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], TENSOR_PLAN)
        fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return model, optimizer, scheduler


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> str:
    loss = model(torch.randint(0, 7, (4, 5)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return loss.item().hex()


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every model and optimizer tensor in full, on every rank."""
    flat: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, value in model_state(model).items():
            flat[f"model.{name}"] = _full(value)
        for fqn, values in optimizer_state(model, optimizer)["state"].items():
            for key, value in values.items():
                flat[f"optimizer.{fqn}.{key}"] = _full(value)
    return flat


def _full(value: Any) -> torch.Tensor:
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if isinstance(value, ShardedTensor):
        out = torch.empty(value.size(), dtype=value.dtype) if dist.get_rank() == 0 else None
        value.gather(0, out)
        holder = [out]
        dist.broadcast_object_list(holder, src=0)
        assert holder[0] is not None
        return holder[0]
    return torch.as_tensor(value).clone()


def train_and_save(root: str, strategy: str) -> list[str]:
    """Six steps, saved at every second, the state after the fourth kept beside; the last two losses."""
    model, optimizer, scheduler = build(strategy)
    torch.manual_seed(100 + (0 if strategy in ONE_STREAM else _rank()))
    state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler)
    losses = []
    with CheckpointManager(root, save=EverySteps(2), keep=KeepLatest(2), deadline_seconds=60) as checkpoints:
        assert checkpoints.resume(state) is None
        for step in range(1, 7):
            losses.append(train_step(model, optimizer, scheduler))
            checkpoints.maybe_save(step, state)
            if step == STEP and (expected := full_state(model, optimizer)) and _rank() == 0:
                torch.save(expected, expected_file(root))
        checkpoints.wait()
        # The coordinator prunes after the commit; other ranks may look before it has.
        assert _rank() or [info.step for info in checkpoints.checkpoints()] == [4, 6]
    return losses[STEP:]


def expected_file(root: str) -> Path:
    return Path(root).parent / f"{Path(root).name}.expected"


def load_and_compare(root: str, strategy: str, steps: int) -> tuple[list[str], list[str]]:
    """Names of tensors that differ from those saved, and the losses of so many more steps."""
    model, optimizer, scheduler = build(strategy)
    torch.manual_seed(999)
    state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler)
    with CheckpointManager(root, deadline_seconds=60) as checkpoints:
        checkpoints.load(state, step=STEP)
        loaded = full_state(model, optimizer)
        losses = [train_step(model, optimizer, scheduler) for _ in range(steps)]
    expected = torch.load(expected_file(root), weights_only=True)
    different = sorted(loaded.keys() ^ expected.keys())
    for name in loaded.keys() & expected.keys():
        own = ".running_" in name and _rank() > 0  # batch-norm statistics are every rank's own
        if not own and not torch.equal(loaded[name], expected[name]):
            different.append(name)
    return different, losses


def strategies_job(root: str, own: list[str], loads: list[tuple[str, str]]) -> dict[str, Any]:
    """Save under the own strategies; then load each source into its target, and go on from what is its own.

    Both are `<strategy>@<ranks>`. Everything in one process group, which is what takes long to make.
    """
    logging.basicConfig(level=logging.ERROR)
    trained = {name: train_and_save(f"{root}/{name}", strategy_of(name)) for name in own}
    compared, resumed = {}, {}
    for source, target in loads:
        steps = 2 if source == target else 0
        compared[source, target], losses = load_and_compare(f"{root}/{source}", strategy_of(target), steps)
        if steps:
            resumed[source] = losses
    return {"trained": trained, "resumed": resumed, "loads": compared}


def strategy_of(name: str) -> str:
    return name.partition("@")[0]
