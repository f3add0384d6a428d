"""What takes part in a measurement, and what a contender is that saves the state that all others save."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch.optim import Optimizer

Tensors = Mapping[str, torch.Tensor]
Kind = Literal["ours", "stock", "other", "limit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What every contender is given.

    Attributes:
        tensors: name -> live tensor.
        root: an existing directory on the disk to measure.
        device: where the tensors are.
        optimizers: their steps are the only thing that changes the tensors.
        shared: what contenders share, made by the first that needs it.
    """

    tensors: Tensors
    root: Path
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    optimizers: Sequence[Optimizer] = ()
    shared: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors together, on this rank's view of them (global for DTensors)."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """A save after the call has returned; `staged` is None if it was staged by then."""

    durable: Future[Any]
    staged: Future[Any] | None = None


class Entrant(ABC):
    """Whoever takes turns with others at the same task. Constructing one must be cheap.

    Attributes:
        key: its name on the command line and in JSON.
        name: its name in tables and pictures.
        kind: whose it is.
        copies: copies of the state it keeps in host memory between its turns.
        passing_copies: copies that it allocates in every turn, and frees.
    """

    key: ClassVar[str]
    name: ClassVar[str]
    kind: ClassVar[Kind]
    copies: ClassVar[int] = 0
    passing_copies: ClassVar[int] = 0

    def __init__(self, task: Any) -> None:
        self.task = task

    def turn(self) -> AbstractContextManager[None]:
        """Around each of its turns, outside the timing."""
        return nullcontext()

    def close(self) -> None:
        """Release what was kept between turns."""
        return


class Contender(Entrant):
    """Saves one state over and over, each time to a fresh place; `fsync` is part of every durable time.

    What it keeps between saves is made in its first save, or by `prewarm`.

    Attributes:
        fsync: who makes its files durable.
    """

    task: Task
    fsync: ClassVar[str] = "its own"
    has_stall: ClassVar[bool] = True
    has_durable: ClassVar[bool] = True

    @abstractmethod
    def start(self, number: int) -> InFlight:
        """Begin save `number`; returns when the training may go on."""

    def directory(self, number: int) -> Path:
        """Where save `number` goes; it does not exist before."""
        return self.task.root / f"{self.key}-{number}"

    def clean(self, number: int) -> None:
        """Delete save `number`; nothing of it is in flight any more."""
        shutil.rmtree(self.directory(number), ignore_errors=True)

    def step_guard(self) -> AbstractContextManager[Any]:
        """Around each optimizer step, where its documentation asks for one."""
        return nullcontext()

    def prewarm(self) -> None:
        """Do ahead of the first save what can be done."""
        raise NotRunError(f"{self.name} has nothing to prewarm")


class NotRunError(Exception):
    """A contender cannot run here; the text says why and ends up in the table."""


def ended() -> Future[None]:
    """A future for what is done already."""
    future: Future[None] = Future()
    future.set_result(None)
    return future
