"""A small training run in one process, and ways to look at it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_core import TrainState
from ckpt_core.errors import FileFailure
from ckpt_core.names import OWN
from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.testing import Fault, FaultyStorage

LONG = 60.0


class Net(nn.Module):
    """Dropout, batch-norm statistics, a tied parameter and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.dropout = nn.Dropout(0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.dropout(self.norm(self.embed(tokens).mean(1)))))


@dataclass
class Run:
    """A training run: everything that a checkpoint has to bring back."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler

    @classmethod
    def make(cls, seed: int = 0) -> Run:
        torch.manual_seed(seed)
        model = Net()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        return cls(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5))

    @property
    def state(self) -> TrainState:
        return TrainState(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def step(self) -> str:
        """One optimizer step; the loss, exactly."""
        loss = self.model(torch.randint(0, 11, (6, 4))).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.item().hex()

    def steps(self, count: int) -> list[str]:
        return [self.step() for _ in range(count)]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of every tensor of model and optimizer."""
        found = {f"model.{name}": value.clone() for name, value in self.model.state_dict().items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{index}.{key}": torch.as_tensor(v).clone() for key, v in values.items()}
        return found


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


class Gate:
    """Holds writes of data files back until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def __call__(self, operation: object) -> None:
        self.reached.set()
        assert self._open.wait(LONG), "nobody opened the gate"

    def before(self, inner: Storage) -> FaultyStorage:
        return FaultyStorage(inner, [Fault(method="create", key="*.distcp", before=self)])


def failing(root: Path, error: BaseException, *, key: str = "*.distcp", nth: int | None = 0) -> FaultyStorage:
    """A directory in which the nth write of such a file fails."""
    return FaultyStorage(LocalStorage(root), [Fault(method="write", key=key, error=error, nth=nth)])


def damage(root: Path, name: str, file: str = "__0_0.distcp", place: int = 4096) -> None:
    """Flip one bit of a committed file."""
    path = root / name / file
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


def children(root: Path) -> list[str]:
    """Directories of checkpoints, torn ones and all."""
    return sorted(path.name for path in root.iterdir() if path.is_dir() and path.name != OWN)


def paths(failures: list[FileFailure]) -> list[str]:
    return [failure.path for failure in failures]


def values_of(state: Any) -> dict[str, Any]:
    """A nested mapping of tensors as lists, to compare."""
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
