"""Trainings that note every sample they see, for the tests of Lightning's data position."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_core import EverySteps
from lightning_ckpt import ShardedCheckpoint
from tests.adapters.lightning_jobs import rank_and_world
from tests.unit.data.test_hidden import KeepsIterator, ReadsAhead

BATCH = 4


class Numbers(Dataset[float]):
    def __init__(self, samples: int = 24) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> float:
        return float(index)


class Stream(IterableDataset[float]):
    def __init__(self, samples: int = 24) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[float]:
        return iter(map(float, range(self.samples)))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.samples


class Restartable(Stream):
    """With a position of its own."""

    done = 0

    def __iter__(self) -> Iterator[float]:
        while self.done < self.samples:
            self.done += 1
            yield float(self.done - 1)
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class SizedRestartable(Restartable):
    def __len__(self) -> int:
        return self.samples


class Batches:
    """No DataLoader, as DALI's and WebDataset's iterators."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(24.0).split(BATCH))


class Seen(pl.LightningModule):
    """Notes samples and random numbers of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
        self.steps: list[Any] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        leaves = [each.flatten().float() for each in tree_leaves(batch) if each is not None]
        self.steps.append(([each.tolist() for each in leaves], torch.rand(()).item(), random.random()))
        return self.layer(leaves[0].reshape(-1, 1)).pow(2).mean() / 1000

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(kind: str) -> Any:
    """Give the loader, or loaders, of that name."""
    generator = torch.Generator().manual_seed(3)
    plain: dict[str, Any] = {"batch_size": BATCH, "shuffle": True}

    def pair(mode: str) -> CombinedLoader:
        short = StatefulDataLoader(Numbers(9), **plain)
        return CombinedLoader({"long": DataLoader(Numbers(), **plain), "short": short}, mode)

    def streams(mode: str) -> CombinedLoader:
        both = {"long": DataLoader(Stream(), BATCH), "short": DataLoader(Stream(9), BATCH)}
        return CombinedLoader(both, mode)

    def own(mode: str) -> CombinedLoader:
        short = StatefulDataLoader(Stream(9), BATCH)
        return CombinedLoader({"long": DataLoader(Stream(), BATCH), "short": short}, mode)

    return {
        "plain": lambda: DataLoader(Numbers(), **plain),
        "large": lambda: DataLoader(Numbers(90), **plain),
        "own generator": lambda: DataLoader(Numbers(), generator=generator, **plain),
        "stateful": lambda: StatefulDataLoader(Numbers(), **plain),
        "persistent": lambda: DataLoader(Numbers(), num_workers=1, persistent_workers=True, **plain),
        "custom sampler": lambda: DataLoader(Numbers(90), BATCH, sampler=Backwards(range(90))),
        "stream": lambda: DataLoader(Stream(), BATCH),
        "sized stream": lambda: DataLoader(SizedStream(), BATCH),
        "sized stream, other batches": lambda: DataLoader(SizedStream(), 6),
        "restartable": lambda: DataLoader(Restartable(), BATCH),
        "stateful, restartable": lambda: StatefulDataLoader(Restartable(90), BATCH),
        "stateful, sized restartable": lambda: StatefulDataLoader(SizedRestartable(40), BATCH),
        "stateful, shorter than the limit": lambda: StatefulDataLoader(Restartable(11), BATCH),
        "stateful, workers": lambda: StatefulDataLoader(Restartable(90), BATCH, num_workers=1),
        "stateful, persistent": lambda: StatefulDataLoader(
            Restartable(90), BATCH, num_workers=1, persistent_workers=True
        ),
        "batches": Batches,
        "keeps its iterator": lambda: KeepsIterator(Numbers(), **plain),
        "reads ahead": lambda: ReadsAhead(Numbers(), **plain),
        "min_size": lambda: pair("min_size"),
        "max_size": lambda: pair("max_size"),
        "max_size_cycle": lambda: pair("max_size_cycle"),
        "streams, max_size": lambda: streams("max_size"),
        "streams with states, max_size": lambda: own("max_size"),
        "streams, max_size_cycle": lambda: streams("max_size_cycle"),
    }[kind]()


class Backwards(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return reversed(range(len(self)))


@dataclass(frozen=True, kw_only=True)
class DataJob:
    """One fit; picklable, so that it can be sent to ranks."""

    root: str
    loader: str
    seed: int = 1
    max_steps: int = -1
    max_epochs: int = 3
    ckpt_path: str | None = None
    saves: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a rank saw."""

    steps: list[Any]
    logged: list[str]

    @property
    def samples(self) -> list[int]:
        """The samples of all steps, of the first loader."""
        return [int(each) for step in self.steps for each in step[0][0]]


def train(*jobs: DataJob) -> list[Trained]:
    """Run fits on this rank, one after another."""
    return [train_one(job) for job in jobs]


def train_one(job: DataJob) -> Trained:
    rank, world = rank_and_world()
    logged: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_ckpt").addHandler(listener)
    pl.seed_everything(job.seed, verbose=False)
    module = Seen()
    torch.manual_seed(job.seed + 100 * rank)
    random.seed(job.seed + 100 * rank)
    save = EverySteps(1) if job.saves else None
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_epochs=job.max_epochs,
        max_steps=job.max_steps,
        callbacks=[ShardedCheckpoint(job.root, save=save, save_last=False)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **job.trainer,
    )
    trainer.fit(module, loader(job.loader), ckpt_path=job.ckpt_path)
    logging.getLogger("lightning_ckpt").removeHandler(listener)
    return Trained(steps=module.steps, logged=logged)
