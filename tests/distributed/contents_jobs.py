"""Ranks that save only what is trained; module level, because ranks are spawned processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ckpt_core import CheckpointManager, ConfigError, TrainState
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.state import model_state

KINDS = ("ddp", "fsdp2", "fsdp1", "tp")


def plain(seed: int = 0) -> nn.Module:
    """Odd sizes, so that shards are uneven; frozen and trained tensors side by side."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def wrapped(kind: str, seed: int = 0, *, flat: bool = False) -> nn.Module:
    model = plain(seed)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=not flat)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "tp":
        layers = {
            "0": RowwiseParallel(input_layouts=Replicate()),
            "2": ColwiseParallel(output_layouts=Replicate()),
        }
        return parallelize_module(model, mesh, layers)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def state_of(model: nn.Module) -> tuple[TrainState, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
    return TrainState(model=model, optimizer=optimizer, contents="trainable"), optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, times: int) -> None:
    for _ in range(times):
        model(torch.randn(4, 9)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def shards(model: nn.Module) -> dict[str, list[float]]:
    """This rank's part of every tensor."""
    found: dict[str, list[float]] = {}
    for name, value in model_state(model).items():
        local = [each.tensor for each in value.local_shards()] if hasattr(value, "local_shards") else [value]
        local = [each.to_local() if isinstance(each, DTensor) else each for each in local]
        found[name] = [number for each in local for number in each.flatten().tolist()]
    return found


def save_and_resume(root: Path) -> list[str]:
    """Save under each strategy and go on; resume each under its own and another."""
    problems: list[str] = []
    ends: dict[str, dict[str, list[float]]] = {}
    for kind in KINDS:
        model = wrapped(kind)
        state, optimizer = state_of(model)
        with CheckpointManager(root / kind) as checkpoints:
            train(model, optimizer, 2)
            checkpoints.save(2, state)
            train(model, optimizer, 2)
            checkpoints.save(4, state)
        ends[kind] = shards(model)
    for at, kind in enumerate(KINDS):
        for of in (kind, KINDS[at - 1]):
            model = wrapped(kind)
            state, optimizer = state_of(model)
            with CheckpointManager(root / of) as checkpoints:
                checkpoints.load(state, step=2)
                if kind == of:
                    train(model, optimizer, 2)
                    problems += [] if shards(model) == ends[kind] else [f"{kind} is not exact"]
    return problems + refusals(root)


def refusals(root: Path) -> list[str]:
    """Another base is refused on every rank, and FSDP1's flat parameters are."""
    problems: list[str] = []
    for kind in ("fsdp2", "ddp"):
        model = wrapped(kind, seed=1)
        before = shards(model)
        try:
            with CheckpointManager(root / kind) as checkpoints:
                checkpoints.load(state_of(model)[0])
            problems.append(f"{kind}: another base was loaded")
        except IncompatibleCheckpointError as error:
            problems += [] if "0.weight: saved float32 [17, 9]" in str(error) else [str(error)]
        problems += [] if shards(model) == before else [f"{kind}: it changed"]
    flat: Any = FullyShardedDataParallel(
        nn.Sequential(plain()[2].requires_grad_(False)), device_id=torch.device("cpu")
    )
    try:
        TrainState(model=flat, contents="trainable")
        problems.append("flat parameters were taken")
    except ConfigError as error:
        problems += [] if "use_orig_params" in str(error) else [str(error)]
    return problems
