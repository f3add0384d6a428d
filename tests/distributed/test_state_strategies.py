"""Every strategy into itself, bit for bit; into others and into one process, tensor for tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ckpt_core.state import TrainState, model_state, optimizer_state
from tests.kit.ranks import run_ranks
from tests.unit.state.round_trip import Written, assert_equal, full, load, save

pytestmark = pytest.mark.distributed

STRATEGIES = ("ddp", "fsdp2", "fsdp1", "fsdp1_flat", "fsdp1_mesh", "tensor_parallel")
CPU = torch.device("cpu")


def bare(seed: int) -> nn.Sequential:
    """No first dimension of 5 is a multiple of the ranks; the last bias has fewer elements than ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 6), nn.Linear(6, 1))


def build(strategy: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    net: nn.Module = bare(seed)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if strategy == "ddp":
        net = DistributedDataParallel(net)
    elif strategy == "fsdp2":
        mesh = init_device_mesh("cpu", (world,))
        fully_shard([net[0], net[1]], mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif strategy == "hsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    elif strategy.startswith("fsdp1"):
        net = FullyShardedDataParallel(
            net,
            device_id=CPU,
            use_orig_params=strategy != "fsdp1_flat",
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            device_mesh=init_device_mesh("cpu", (world,)) if strategy == "fsdp1_mesh" else None,
        )
    elif strategy == "tensor_parallel":
        # The first layers stay plain tensors beside the DTensors.
        plan = {"3": ColwiseParallel(), "4": RowwiseParallel()}
        net = parallelize_module(net, init_device_mesh("cpu", (world,)), plan)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    optimizer.zero_grad()
    net(torch.randn(8, 4, generator=generator)).square().mean().backward()
    optimizer.step()


def whole(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return full({"model": model_state(net), "optimizer": optimizer_state(net, optimizer)["state"]})


def itself(strategy: str, folder: Path) -> tuple[Written, dict[str, Any]]:
    """Train, save, train on; the same from the checkpoint, in a fresh model and in the one that went on."""
    net, optimizer = build(strategy, seed=0)
    for step in range(2):
        train(net, optimizer, step)
    written, then = save(TrainState(model=net, optimizer=optimizer), folder / strategy), whole(net, optimizer)
    train(net, optimizer, 2)
    expected = whole(net, optimizer)
    for again in (build(strategy, seed=1), (net, optimizer)):
        load(TrainState(model=again[0], optimizer=again[1]), written)
        train(*again, 2)
        assert_equal(whole(*again), expected)
    return written, then


def on_every_rank(strategies: tuple[str, ...], folder: Path) -> dict[str, tuple[Written, dict[str, Any]]]:
    saved = {strategy: itself(strategy, folder) for strategy in strategies}
    for source, target in others(strategies):
        written, then = saved[source]
        net, optimizer = build(target, seed=2)
        load(TrainState(model=net, optimizer=optimizer), written)
        assert_equal(by_name(whole(net, optimizer)), by_name(then), f"{source}->{target}")
    return saved


def others(strategies: tuple[str, ...]) -> list[tuple[str, str]]:
    """Each strategy as a source and as a target of its neighbour and of the one across.

    All pairs of what differs on disk are loaded by `test_strategies`.
    """
    count = len(strategies)
    return [
        (source, strategies[(at + way) % count])
        for way in (1, count // 2)
        for at, source in enumerate(strategies)
    ]


def by_name(state: dict[str, Any]) -> dict[str, Any]:
    """In one order, for strategies differ in theirs."""
    return {part: {name: values[name] for name in sorted(values)} for part, values in state.items()}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Saved by two ranks; every load and comparison among two ranks has passed by then."""
    return run_ranks(on_every_rank, 2, STRATEGIES, tmp_path_factory.mktemp("two"), timeout_seconds=180)[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_single_process_loads_what_any_strategy_saved(two_ranks, strategy):
    written, then = two_ranks[strategy]
    net, optimizer = build("single", seed=3)
    load(TrainState(model=net, optimizer=optimizer, rng=False), written)
    assert_equal(by_name(whole(net, optimizer)), by_name(then))
