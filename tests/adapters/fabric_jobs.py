"""A small training with Fabric, as its users write it; also on every rank of the tests on several ranks."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from ckpt_core.storage import Storage
from lightning_ckpt import FabricCheckpoints, setup_fabric


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 2))


@dataclass
class Training:
    """One loop with dropout, batch norm, a schedule and random data: only an exact resume fits."""

    root: str | Path | Storage
    strategy: str = "auto"
    package: str = "lightning.fabric"
    devices: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    fabric: Any = field(init=False)
    checkpoints: FabricCheckpoints = field(init=False)
    state: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        host: Any = importlib.import_module(self.package)
        self.fabric = host.Fabric(accelerator="cpu", devices=self.devices, strategy=self._strategy(host))
        self.fabric.launch()
        self.checkpoints = setup_fabric(self.fabric, self.root, **self.options)
        torch.manual_seed(self.seed)
        model = net()
        torch.manual_seed(self.seed + 7 * self.fabric.global_rank)
        if self.strategy in {"fsdp", "fsdp2"}:
            model = self.fabric.setup_module(model)
            optimizer = self.fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
        else:
            model, optimizer = self.fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.05))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}

    def _strategy(self, host: Any) -> Any:
        strategies: Any = importlib.import_module(f"{self.package}.strategies")
        if self.strategy == "fsdp":
            return _on_cpu(strategies.FSDPStrategy)
        if self.strategy == "fsdp2":
            return strategies.ModelParallelStrategy(
                _sharded, data_parallel_size=self.devices, tensor_parallel_size=1
            )
        return self.strategy

    def run(self, steps: int) -> list[float]:
        """Train for so many steps; return the losses."""
        losses = []
        for _ in range(steps):
            loss = self.state["model"](torch.randn(3, 4)).pow(2).mean()
            self.fabric.backward(loss)
            self.state["optimizer"].step()
            self.state["optimizer"].zero_grad()
            self.state["schedule"].step()
            self.state["step"] += 1
            losses.append(loss.item())
        return losses


def _on_cpu(strategy: type[Any]) -> Any:
    """FSDP as Fabric builds it for GPUs, on the CPU, which Fabric refuses by type."""

    class OnCPU(strategy):
        def setup_module(self, module: nn.Module) -> nn.Module:
            return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)

    return OnCPU()


def _sharded(model: nn.Module, device_mesh: Any) -> nn.Module:
    return fully_shard(model, mesh=device_mesh["data_parallel"])


def whole(model: nn.Module) -> str:
    """A digest of the weights, from whatever shards there are."""
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=options)
    content = b"".join(weights[name].cpu().numpy().tobytes() for name in sorted(weights))
    return hashlib.sha256(content).hexdigest()[:16] if content else ""


def resumed_on_ranks(root: str, cases: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Train, save and resume under each strategy, and load under others, in one set of processes."""
    return {strategy: _resumed(root, strategy, others) for strategy, others in cases.items()}


def _resumed(root: str, strategy: str, others: list[str]) -> dict[str, Any]:
    world = int(os.environ["WORLD_SIZE"])
    first = Training(Path(root) / strategy, strategy, devices=world)
    first.run(3)
    first.fabric.save(f"{root}/{strategy}/three", first.state)
    saved, losses = whole(first.state["model"]._forward_module), first.run(3)
    first.checkpoints.close()

    again = Training(Path(root) / strategy, strategy, devices=world, seed=99)
    remainder = again.fabric.load("last", again.state)
    exact = again.state["step"] == 3 and again.run(3) == losses and remainder == {}
    again.checkpoints.close()
    found: dict[str, Any] = {"exact": exact, "saved": saved}
    for other in others:
        there = Training(Path(root) / other, other, devices=world, seed=5)
        there.fabric.load(f"{root}/{strategy}/three", there.state)
        found[other] = whole(there.state["model"]._forward_module)
        there.run(1)
        there.checkpoints.close()
    return found
