"""Plain training loops over one loader, for the tests of its position."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_core.data import LoaderPosition
from ckpt_core.state import decode, encode

SAMPLES, BATCH = 23, 4
Loader = Callable[[], DataLoader[Any]]


class Numbers(Dataset[int]):
    """Counts the samples that were fetched in this process."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples
        self.fetched = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        self.fetched += 1
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        yield from range(SAMPLES) if worker is None else range(worker.id, SAMPLES, worker.num_workers)


class StatefulStream(IterableDataset[int]):
    def __init__(self) -> None:
        self.done = 0

    def __iter__(self) -> Iterator[int]:
        while self.done < SAMPLES:
            self.done += 1
            yield self.done - 1
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class CountsEpochs(Sampler[int]):
    """Another order in each epoch, which it counts itself."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples
        self.epoch = 0

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        order = list(range(self.samples))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


class Numpys(Sampler[int]):
    """An order from the global generator of NumPy."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(SAMPLES).tolist())


class DrawsAsItGoes(Sampler[int]):
    """Every index from the global generator, when it is asked for."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield random.randrange(SAMPLES)


def loader(
    kind: str, *, stateful: bool = False, workers: int = 0, persistent: bool = False
) -> DataLoader[Any]:
    data, generator = Numbers(), torch.Generator().manual_seed(5)
    special: dict[str, dict[str, Any]] = {
        "sequential": {},
        "shuffled": {"shuffle": True, "drop_last": True},
        "own generator": {"shuffle": True, "generator": generator},
        "sampler's generator": {"sampler": RandomSampler(data, generator=generator)},
        "replacement": {
            "sampler": RandomSampler(data, replacement=True, num_samples=40, generator=generator)
        },
        "weighted": {"sampler": WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)},
        "distributed": {"sampler": DistributedSampler(data, 2, 1, seed=3)},
        "counts epochs": {"sampler": CountsEpochs()},
        "numpy": {"sampler": Numpys()},
        "batches": {"batch_sampler": BatchSampler(Numpys(), BATCH, drop_last=True)},
        "single": {"shuffle": True, "batch_size": None},
    }
    batched = {} if kind in {"batches", "single"} else {"batch_size": BATCH}
    made_by = StatefulDataLoader if stateful else DataLoader
    return made_by(data, num_workers=workers, persistent_workers=persistent, **batched, **special[kind])


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def rng() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def train(loader: DataLoader[Any], saves: Callable[[int, int, bool], None], first: int = 0) -> list[Any]:
    """Three epochs; every batch with random numbers drawn in its step."""
    steps: list[Any] = []
    for epoch in range(first, 3):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            drawn = (torch.rand(()).item(), random.random(), np.random.rand())
            steps.append((batch.tolist() if isinstance(batch, torch.Tensor) else batch, *drawn))
            saves(epoch, len(steps), False)
        saves(epoch + 1, len(steps), True)
    return steps


def positions_of(make: Loader) -> tuple[list[Any], dict[tuple[int, bool], Any]]:
    """Train with a save after every batch and every epoch; the steps, and what was saved."""
    seed(1)
    live = make()
    position, saved = LoaderPosition(live), {}

    def save(epoch: int, step: int, after_epoch: bool) -> None:
        state = json.dumps(encode(position.state()))
        saved[step, after_epoch] = (epoch, state, rng())

    return train(live, save), saved


def resumed(make: Loader, saved: tuple[int, str, Any]) -> tuple[list[Any], list[str]]:
    """Resume in a new loader, as if in another process."""
    epoch, state, (in_torch, in_python, in_numpy) = saved
    seed(99)
    live = make()
    notes = LoaderPosition(live).restore(decode(json.loads(state)))
    torch.set_rng_state(in_torch)
    random.setstate(in_python)
    np.random.set_state(in_numpy)
    return train(live, lambda *_: None, epoch), notes


def untracked(make: Loader) -> list[Any]:
    seed(1)
    return train(make(), lambda *_: None)
