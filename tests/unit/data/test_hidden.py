"""A loader that hides its position is refused, at the latest by the first save."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ckpt_core import ConfigError, TrainState
from ckpt_core.data import LoaderPosition, track
from tests.unit.data.loops import BATCH, SAMPLES, Numbers, positions_of, resumed, seed, train


class KeepsIterator(DataLoader[Any]):
    """As timm's MultiEpochsDataLoader, and the InfiniteDataLoader of others."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.__dict__["batch_sampler"] = Repeats(self.batch_sampler)
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)


class Repeats:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class ReadsAhead(DataLoader[Any]):
    """As NVIDIA's data prefetchers."""

    def __iter__(self) -> Iterator[Any]:
        ahead = super().__iter__()
        batch = next(ahead)
        for following in ahead:
            yield batch
            batch = following
        yield batch


def in_background(batches: Any) -> Iterator[Any]:
    """As BackgroundGenerator."""
    ready: queue.Queue[Any] = queue.Queue(2)

    def read() -> None:
        for batch in batches:
            ready.put(batch)
        ready.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (batch := ready.get()) is not None:
        yield batch


class ReadsInBackground(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        return in_background(super().__iter__())


class Filters(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (batch for number, batch in enumerate(super().__iter__()) if number % 2)


class EndsEarly(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _ in zip(super().__iter__(), range(3), strict=False))


class Moves(DataLoader[Any]):
    """Harmless: each batch is handed out as it is drawn."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch + 0


def made(kind: type[DataLoader[Any]]) -> DataLoader[Any]:
    return kind(Numbers(), batch_size=BATCH, shuffle=True)


def after(loader: DataLoader[Any], batches: int) -> None:
    """Draw some batches; 0 for a whole epoch."""
    begun = iter(loader)
    drawn = [next(begun) for _ in range(batches)] if batches else list(begun)
    # The loop still holds the iterator.
    loader.__dict__["loop"] = [begun, drawn]


@pytest.mark.parametrize("tracked", [False, True])
def test_a_loader_that_keeps_its_iterator_is_refused_at_the_start(tracked):
    loader = made(KeepsIterator)
    if tracked:
        track(loader)
    with pytest.raises(ConfigError, match=r"a KeepsIterator cannot tell its position.*keeps an iterator"):
        TrainState(model=torch.nn.Linear(1, 1), dataloader=loader)


@pytest.mark.parametrize(
    ("kind", "batches", "told"),
    [
        (ReadsAhead, 2, "drawn 3 batches of this epoch for 2"),
        (ReadsAhead, 5, "drawn 6 batches of this epoch for 5"),
        (ReadsInBackground, 1, "another thread"),
        (Filters, 1, "drawn 2 batches of this epoch for 1"),
        (EndsEarly, 0, "for 3 that it has handed out"),
    ],
)
def test_a_loader_that_hands_out_other_batches_than_it_draws_is_refused_by_the_first_save(
    kind, batches, told
):
    loader = made(kind)
    state = TrainState(model=torch.nn.Linear(1, 1), dataloader=loader)
    after(loader, batches)
    with pytest.raises(ConfigError, match=told):
        state.capture()


def test_what_reads_ahead_in_another_thread_from_outside_is_refused_by_the_first_save():
    loader = made(DataLoader)
    position = LoaderPosition(loader)
    assert len(next(in_background(loader))) == BATCH
    with pytest.raises(ConfigError, match="another thread"):
        position.state()


def test_what_is_iterated_before_it_is_tracked_is_refused_by_the_first_save():
    loader = made(DataLoader)
    begun = iter(loader)
    next(begun)
    track(loader)
    position = LoaderPosition(loader)
    with pytest.raises(ConfigError, match="iterated already"):
        position.state()
    assert position.state(ended=True)["ended"], "it is not in use: a host says that no epoch goes on"
    own = iter(loader)
    next(own)
    assert not position.state()["ended"], "the loop has begun an epoch of its own"


@pytest.mark.parametrize("kind", [ReadsAhead, Filters])
def test_between_epochs_nothing_is_hidden(kind):
    loader = made(kind)
    position = LoaderPosition(loader)
    list(loader)
    assert position.state()["ended"]


def test_a_loader_that_only_changes_its_batches_resumes_exactly():
    def make() -> DataLoader[Any]:
        return made(Moves)

    full, saved = positions_of(make)
    seed(1)
    assert train(make(), lambda *_: None) == full
    for place in ((2, False), (SAMPLES // BATCH + 1, False), (SAMPLES // BATCH + 1, True), (8, False)):
        assert resumed(make, saved[place])[0] == full[place[0] :]
