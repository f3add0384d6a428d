"""What is rarer than a strategy: fresh optimizers, odd state and dtypes, more ranks, two mesh dimensions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckpt_core.state import TrainState
from tests.distributed.test_state_strategies import bare, build, itself, train, whole
from tests.kit.ranks import run_ranks
from tests.unit.state.round_trip import Written, assert_equal, load, save

pytestmark = pytest.mark.distributed

Make = Callable[[int], tuple[nn.Module, torch.optim.Optimizer]]
SHARDED = ("fsdp2", "fsdp1", "fsdp1_flat")


class Rows(torch.optim.Optimizer):
    """Momentum of its own dtype, and a statistic for every row, of another shape than the parameter."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
                if isinstance(parameter, DTensor):
                    state["rows"] = torch.zeros_like(parameter.reshape(parameter.shape[0], -1).sum(1))
            state["momentum"] += parameter.grad.float() / 3
            if "rows" in state:
                state["rows"] += parameter.grad.reshape(parameter.shape[0], -1).sum(1)
            parameter.sub_(self.param_groups[0]["lr"] * state["momentum"].to(parameter.dtype))


def fresh_optimizers(folder: Path) -> None:
    """Capture makes no state on any rank, nor does a load of what had none."""
    for strategy in SHARDED:
        net, optimizer = build(strategy, seed=0)
        state = TrainState(model=net, optimizer=optimizer)
        written = save(state, folder / strategy)
        assert not optimizer.state
        train(net, optimizer, 0)
        twin, other = build(strategy, seed=0)
        train(twin, other, 0)
        assert_equal(whole(net, optimizer), whole(twin, other))
        load(state, written)
        assert not optimizer.state


def resumes(make: Make, step: Callable[[nn.Module, torch.optim.Optimizer, int], None], folder: Path) -> Any:
    """What `make(0)` is after two steps, which `make(1)` must also be after loading it in between."""
    net, optimizer = make(0)
    step(net, optimizer, 0)
    written = save(TrainState(model=net, optimizer=optimizer), folder)
    step(net, optimizer, 1)
    again = make(1)
    load(TrainState(model=again[0], optimizer=again[1]), written)
    step(*again, 1)
    expected = whole(net, optimizer)
    assert_equal(whole(*again), expected)
    return expected


def odd_state(folder: Path) -> None:
    """State of another dtype or shape than its parameter's, into an optimizer that has not seen a step."""

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        net(batch.bfloat16()).square().mean().backward()
        optimizer.step()

    for strategy in SHARDED:

        def make(seed: int, strategy: str = strategy) -> tuple[nn.Module, torch.optim.Optimizer]:
            net = build(strategy, seed)[0].to(torch.bfloat16)
            return net, Rows(net.parameters())

        found = resumes(make, step, folder / strategy)
        assert found["optimizer"]["0.weight"]["momentum"].dtype == torch.float32


def groups_and_wrappers(folder: Path) -> None:
    """FSDP1 with parameter groups, in another order when loaded, behind torch.compile's wrapper."""

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = FullyShardedDataParallel(bare(seed), device_id=torch.device("cpu"), use_orig_params=True)
        weights = [p for name, p in net.named_parameters() if "weight" in name]
        biases = [p for name, p in net.named_parameters() if "bias" in name]
        groups = [{"params": weights, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0.0}]
        return torch.compile(net, backend="eager"), torch.optim.AdamW(
            groups[::-1] if seed else groups, lr=0.01
        )

    found = resumes(make, lambda net, *rest: train(net._orig_mod, *rest), folder)
    assert "0.weight" in found["optimizer"]


def two_ranks(folder: Path) -> None:
    fresh_optimizers(folder / "fresh")
    odd_state(folder / "odd")
    groups_and_wrappers(folder / "groups")


@pytest.mark.slow
def test_fresh_optimizers_odd_state_groups_and_wrappers_survive_sharding(tmp_path):
    run_ranks(two_ranks, 2, tmp_path, timeout_seconds=120)


def grow(written: Written) -> list[tuple[list[str], float, float]]:
    if dist.get_rank() >= (written.world_size or 0):
        written = replace(written, per_rank="{}")
    drawn = []
    for seed in (1, 2):
        net, optimizer = build("fsdp2", seed)
        notes = load(TrainState(model=net, optimizer=optimizer), written)
        drawn.append((notes, random.random(), torch.rand(()).item()))
    return drawn


def test_more_ranks_than_saved_get_random_numbers_of_their_own(tmp_path):
    net, optimizer = build("single", seed=0)
    train(net, optimizer, 0)
    written = save(TrainState(model=net, optimizer=optimizer), tmp_path)
    expected = ([], random.random(), torch.rand(()).item())
    (first, again), (derived, once_more) = run_ranks(grow, 2, written)
    assert first == again == expected
    assert derived == once_more
    assert "rank 1 was not among the 1 that saved" in derived[0][0]
    assert derived[1:] != expected[1:]


def two_dimensions(folder: Path) -> None:
    itself("hsdp", folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = parallelize_module(bare(seed), mesh["model"], {"3": ColwiseParallel(), "4": RowwiseParallel()})
        fully_shard(net, mesh=mesh["data"])
        return net, torch.optim.AdamW(net.parameters(), lr=0.01)

    resumes(make, train, folder / "2d")


@pytest.mark.slow
def test_hybrid_sharding_and_tensor_parallelism_under_fsdp2(tmp_path):
    run_ranks(two_dimensions, 4, tmp_path, timeout_seconds=120)
