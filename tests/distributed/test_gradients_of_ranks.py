"""Saves inside an accumulation window on several ranks: exact, or refused with the reason."""

from __future__ import annotations

from contextlib import nullcontext
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
from torch.nn.parallel import DistributedDataParallel

from ckpt_core import CheckpointManager, ConfigError, IncompatibleCheckpointError, SaveError, TrainState
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed

SYNCHRONISED = ("ddp", "fsdp1", "fsdp1 flat", "fsdp2", "tp")


class Run:
    """Windows of 4 batches, every rank with batches of its own, but under tensor parallelism."""

    def __init__(self, strategy: str, seed: int) -> None:
        torch.manual_seed(0)
        self.strategy, self.seed = strategy, seed
        net: Any = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 1))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if strategy == "fsdp2":
            net = fully_shard(net, mesh=mesh)
        elif strategy.startswith("fsdp1"):
            net = FullyShardedDataParallel(
                net, use_orig_params=strategy == "fsdp1", device_id=torch.device("cpu")
            )
        elif strategy == "tp":
            net = parallelize_module(net, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
            net[1] = nn.Identity()
        elif strategy == "ddp":
            net = DistributedDataParallel(net)
        self.net, self.optimizer = net, torch.optim.AdamW(net.parameters(), 0.1)
        self.state = TrainState(model=net, optimizer=self.optimizer, gradients=True)

    def train(self, first: int, last: int, *, synchronised: bool) -> None:
        for batch in range(first, last):
            own = 0 if self.strategy == "tp" else dist.get_rank()
            data = torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * batch + own + self.seed))
            ends = batch % 4 == 3
            unsynchronised = not synchronised and not ends
            if self.strategy == "fsdp2":
                self.net.set_requires_gradient_sync(not unsynchronised)
            alone = unsynchronised and hasattr(self.net, "no_sync")
            with self.net.no_sync() if alone else nullcontext():
                self.net(data).pow(2).mean().backward()
            if ends:
                self.optimizer.step()
                self.optimizer.zero_grad()

    def values(self) -> list[Any]:
        found = []
        for parameter in self.net.parameters():
            for each in (parameter, parameter.grad):
                local = each.to_local() if isinstance(each, DTensor) else each
                found.append(None if local is None else local.detach().flatten().tolist())
        return found


def resumed(folder: Path, strategy: str, *, synchronised: bool) -> tuple[Any, Any]:
    run = Run(strategy, 0)
    run.train(0, 6, synchronised=synchronised)
    with CheckpointManager(folder) as checkpoints:
        checkpoints.save(6, run.state).result()
    run.train(6, 12, synchronised=synchronised)
    again = Run(strategy, 0)
    again.seed = 7
    again.train(0, 3, synchronised=True)
    with CheckpointManager(folder) as checkpoints:
        checkpoints.resume(again.state)
    again.seed = 0
    again.train(6, 12, synchronised=synchronised)
    return run.values(), again.values()


def every_strategy(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        strategy: resumed(folder / strategy, strategy, synchronised=True) for strategy in SYNCHRONISED
    }
    found["ddp alone"] = resumed(folder / "ddp alone", "ddp", synchronised=False)
    for strategy in ("fsdp1", "fsdp2"):
        run = Run(strategy, 0)
        run.train(0, 2, synchronised=False)
        with CheckpointManager(folder / "refused") as checkpoints:
            try:
                checkpoints.save(2, run.state).result()
            except SaveError as error:
                found[f"{strategy} alone"] = str(error)
    found["override"] = overridden(folder / "ddp")
    return found


def overridden(folder: Path) -> list[Any]:
    """What a resume says to values that differ between ranks, and the rates of one that does not."""
    run, rank = Run("ddp", 0), dist.get_rank()
    said: list[Any] = []
    for change in ({"lr": 0.1 * rank}, {"lr": 1} if rank else None, {"momentum": 1} if rank else {"lr": 1}):
        with CheckpointManager(folder) as checkpoints:
            try:
                checkpoints.resume(run.state, override=change)
            except ConfigError as error:
                said.append(str(error))
    with CheckpointManager(folder) as checkpoints:
        checkpoints.resume(run.state, override={"lr": 1e-3})
    return [*said, run.optimizer.param_groups[0]["lr"]]


def on_one_rank(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp1", "fsdp2", "ddp alone"):
        run = Run("ddp", 0)
        with CheckpointManager(folder / strategy) as checkpoints:
            try:
                checkpoints.resume(run.state)
                found[strategy] = [each.grad.flatten().tolist() for each in run.net.parameters()]
            except IncompatibleCheckpointError as error:
                found[strategy] = str(error)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What two ranks say, and where they have saved."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(every_strategy, 2, folder), folder


def test_an_override_that_differs_between_ranks_is_refused_on_all(trained):
    for found in trained[0]:
        differs, only_one, unknown, rate = found["override"]
        for said in (differs, only_one):
            assert "resume: ranks ask for different things, and must agree: rank 0: " in said
        assert unknown.startswith("rank 1: override: no optimizer has momentum")
        assert rate == 1e-3


def test_a_save_inside_a_window_is_exact_on_the_same_ranks_or_refused(trained):
    results, folder = trained
    for found in results:
        for strategy in (*SYNCHRONISED, "ddp alone"):
            whole, again = found[strategy]
            assert whole == again, strategy
        assert "FSDP1 accumulates them without synchronisation" in found["fsdp1 alone"]
        assert "FSDP2 accumulates them without synchronisation" in found["fsdp2 alone"]
        assert "save when the optimizer has made its step" in found["fsdp2 alone"]

    (alone,) = run_ranks(on_one_rank, 1, folder)
    assert "gradients that 2 ranks had each by itself, and there are 1 now" in alone["ddp alone"]
    for strategy in ("fsdp1", "fsdp2"):
        for one, other in zip(alone["ddp"], alone[strategy], strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
