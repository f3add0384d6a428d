"""A training that an exception ends, at a place of its own in a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_core import CheckpointManager, EverySteps, TrainState

STEPS, FAILING = 10, 7
WIDTH = 6


class TroubleError(RuntimeError):
    """What ends a training here."""


class Places:
    """Raises at one place of one step, on some ranks."""

    def __init__(
        self, place: str, error: type[BaseException] = TroubleError, ranks: tuple[int, ...] = (0, 1)
    ) -> None:
        self.place, self.error, self.ranks = place, error, ranks
        self.step = 0

    def reach(self, place: str) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        if place == self.place and self.step == FAILING - 1 and rank in self.ranks:
            raise self.error(f"in {place} of step {FAILING}")


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, places: Places) -> None:
        self._places = places

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        self._places.reach("loader")
        return torch.sin(torch.arange(WIDTH) * (index + 1.0))


class Forward(nn.Module):
    """Dropout draws before the place where the forward fails."""

    def __init__(self, places: Places, *, norm: bool = False) -> None:
        super().__init__()
        self._places = places
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.drop(self.first(batch)))
        self._places.reach("forward")
        return self.second(hidden)


class FailingAdam(torch.optim.AdamW):
    """Fails when half of its parameters were changed."""

    places: Places

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(0.0)
        self.places.reach("optimizer")
        return super().step(closure)


def train(
    root: Path, places: Places, *, window: int = 1, norm: bool = False, report: dict[str, Any] | None = None
) -> list[torch.Tensor]:
    """Train to the last step, from wherever the root is; weights at the end."""
    torch.manual_seed(5)
    model: Any = Forward(places, norm=norm)
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = FailingAdam(model.parameters(), lr=0.05)
    optimizer.places = places
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    loader = StatefulDataLoader(Samples(places), batch_size=4, shuffle=True)
    state = TrainState(model=model, optimizer=optimizer, scheduler=schedule, dataloader=loader)
    with CheckpointManager(root, save=EverySteps(4), on_exception="save", deadline_seconds=30) as checkpoints:
        places.step = began = checkpoints.resume(state) or 0
        if report is not None:
            report["began"] = began
        batches = _forever(loader)
        while places.step < STEPS:
            for part in range(window):
                loss = (model(batch := next(batches)) - batch).square().mean()
                if part == window - 1:
                    places.reach("window")
                loss.register_hook(lambda _: places.reach("hook"))
                loss.backward()
            optimizer.step()
            places.reach("after the optimizer")
            optimizer.zero_grad()
            schedule.step()
            places.step += 1
            checkpoints.maybe_save(places.step, state)
    return [each.detach().clone() for each in model.parameters()]


def _forever(loader: Any) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


def fail_and_resume(folder: str, place: str, ranks: tuple[int, ...]) -> tuple[str, int, list[str], bool]:
    """End a training of several ranks by an exception, go on with fresh objects; what each rank saw."""
    rank, root = dist.get_rank(), Path(folder) / "run"
    whole = train(Path(folder) / "whole", Places("nowhere"))
    seen: BaseException | None = None
    try:
        train(root, Places(place, ranks=ranks))
    except BaseException as error:
        seen = error
    report: dict[str, Any] = {}
    resumed = train(root, Places("nowhere"), report=report)
    same = all(torch.equal(*pair) for pair in zip(whole, resumed, strict=True))
    return type(seen).__name__, report["began"], list(getattr(seen, "__notes__", [])), same and rank >= 0


def fail_one(folder: str) -> tuple[str, bool]:
    """End a training by an exception of rank 1 alone; the error of each rank, and whether it has a note."""
    try:
        train(Path(folder) / "run", Places("forward", ranks=(1,)))
    except BaseException as error:
        if dist.get_rank() == 1:
            dist.destroy_process_group()  # as at the end of its process: rank 0 hears of it
        notes = getattr(error, "__notes__", [])
        return type(error).__name__, any("the last whole step was not saved" in note for note in notes)
    return "", False
