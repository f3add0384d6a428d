"""Trainings with quantised optimizer states over two ranks, each built alike in one process."""

from __future__ import annotations

import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from ckpt_core import CheckpointManager, TrainState
from ckpt_core._torch_internals import inner_tensors, own_part
from tests.support import low_bit

WIDTH = 32
INSIDE = 256


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (ranks(),))


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, INSIDE), nn.Linear(INSIDE, 4))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


@dataclass
class Training:
    """A training that can make a step of its own."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, number: int) -> None:
        found = self.model(batch(number))
        found = found.full_tensor() if isinstance(found, DTensor) else found
        found.pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> TrainState:
        return TrainState(model=self.model, optimizer=self.optimizer)

    def bits(self) -> dict[str, bytes]:
        """Every byte that this rank holds."""
        found: dict[str, bytes] = {}
        values = [*self.model.parameters(), *self.model.buffers()]
        for number, group in enumerate(self.optimizer.param_groups):
            for at, parameter in enumerate(group["params"]):
                found[f"shape {number} {at}"] = str(tuple(own_part(parameter).shape)).encode()
                values += [v for _, v in sorted(self.optimizer.state[parameter].items())]
        for at, value in enumerate(values):
            for name, inner in inner_tensors(own_part(value.detach())):
                found[f"{at} {name}"] = inner.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return found


def sharded(model: nn.Module) -> nn.Module:
    if ranks() > 1:
        for layer in (*model.children(), model):
            fully_shard(layer, mesh=mesh())
    return model


def quantised(name: str, wrap: Callable[[nn.Module], nn.Module], seed: int) -> Training:
    """An optimizer whose state is made of codes and scales, where a shard has at least 4,096 elements."""
    with low_bit.importable():
        import torchao.optim

    model = wrap(layers(seed))
    return Training(model, getattr(torchao.optim, name)(model.parameters(), lr=0.01))


def columns(model: nn.Module) -> nn.Module:
    if ranks() > 1:
        parallelize_module(model, mesh(), {"0": ColwiseParallel(output_layouts=Replicate())})
    return model


def replicated(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model) if ranks() > 1 else model


QUANTISED: dict[str, Callable[[int], Training]] = {
    "AdamW8bit, FSDP2": lambda seed: quantised("AdamW8bit", sharded, seed),
    "AdamW4bit, FSDP2": lambda seed: quantised("AdamW4bit", sharded, seed),
    "AdamWFp8, FSDP2": lambda seed: quantised("AdamWFp8", sharded, seed),
    "AdamW8bit, tensor parallel": lambda seed: quantised("AdamW8bit", columns, seed),
    "AdamW4bit, DDP": lambda seed: quantised("AdamW4bit", replicated, seed),
}


@contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings of libraries, and without the compilation that torchao's optimizers ask for."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield
    os.environ.pop("TORCHDYNAMO_DISABLE", None)


def saves(root: Path) -> dict[str, str]:
    """Train, save, go on; the same from the checkpoint. Return what is wrong, by layout."""
    found: dict[str, str] = {}
    for name, build in QUANTISED.items():
        with quietly(), CheckpointManager(root / name / "two", deadline_seconds=60) as checkpoints:
            try:
                live = build(0)
                for number in range(2):
                    live.step(number)
                checkpoints.save(1, live.state)
                checkpoints.wait()
                (root / f"{name}-{dist.get_rank()}").write_bytes(pickle.dumps(live.bits()))
                other = build(1)
                checkpoints.resume(other.state)
                same = live.bits() == other.bits()
                for each in (live, other):
                    each.step(2)
                found[name] = "" if same and live.bits() == other.bits() else "differs"
            except Exception:  # the table tells which
                found[name] = traceback.format_exc()
    return found


def passes_on(root: Path) -> dict[str, str]:
    """In one process: resume what two ranks have saved, and save it again."""
    found: dict[str, str] = {}
    for name, build in QUANTISED.items():
        with quietly():
            try:
                live = build(2)
                with CheckpointManager(root / name / "two") as checkpoints:
                    checkpoints.resume(live.state)
                with CheckpointManager(root / name / "one") as checkpoints:
                    checkpoints.save(1, live.state)
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
    return found


def resumes(root: Path) -> dict[str, str]:
    """Resume what one process has passed on: the bytes of each rank are those that it saved."""
    found: dict[str, str] = {}
    for name, build in QUANTISED.items():
        with quietly(), CheckpointManager(root / name / "one", deadline_seconds=60) as checkpoints:
            try:
                live = build(3)
                checkpoints.resume(live.state)
                saved = pickle.loads((root / f"{name}-{dist.get_rank()}").read_bytes())
                found[name] = "" if live.bits() == saved else "differs"
            except Exception:
                found[name] = traceback.format_exc()
    return found
