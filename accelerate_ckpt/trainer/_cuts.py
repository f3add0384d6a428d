"""The order of samples in one epoch, and how a loader takes its batches from it.

A position in an epoch is a number of samples of its order, by all ranks together: it means the same for any
number of ranks and any size of batches. A loader goes on from there with the samples trained on left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from accelerate import PartialState
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, IterableDatasetShard
from torch.utils.data import BatchSampler, IterableDataset, Sampler, get_worker_info

from accelerate_ckpt.data._layout import (
    dealt_out,
    described_order,
    makes_plain_batches,
    per_fetch_of_stream,
    ranks_of,
)

Cut = tuple[int, int]
"""Positions in an order, from the first that is left out to the first that is not."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Intake:
    """How a loader makes batches of samples.

    Attributes:
        batch: samples in a batch, of all ranks together.
        unit: samples in one fetch from the sampler, or from the stream of one worker.
        fetches: fetches in a batch; more than one if one rank fetches for all.
        streams: streams of samples that are fetched from in turn: one for each worker of an iterable dataset.
        iterable: whether samples come from an iterable dataset.
    """

    batch: int
    unit: int
    fetches: int = 1
    streams: int = 1
    iterable: bool = False

    @classmethod
    def of(cls, loader: Any) -> Self:
        """Return the intake of a loader, prepared by Accelerate or not."""
        dispatched = isinstance(loader, DataLoaderDispatcher)
        dispatching = ranks_of(loader) if dispatched and not loader.split_batches else 1
        dataset = loader.dataset
        if isinstance(dataset, IterableDataset):
            unit = per_fetch_of_stream(loader)
            return cls(
                batch=unit * dispatching,
                unit=unit,
                fetches=dispatching,
                streams=max(1, loader.num_workers),
                iterable=True,
            )
        outer, inner = _batch_samplers(loader)
        if hasattr(inner, "effective_batch_size"):  # it has cut its batches for the ranks by itself
            unit = inner.effective_batch_size // inner.grad_accum
        else:
            sharing = isinstance(outer, BatchSamplerShard) and not outer.split_batches
            unit = (getattr(inner, "batch_size", None) or 1) * (outer.num_processes if sharing else 1)
        return cls(batch=unit * dispatching, unit=unit, fetches=dispatching)

    def taken(self, batches: int) -> list[int]:
        """Return the samples taken from each stream for a number of batches."""
        return dealt_out(batches * self.fetches, self.unit, self.streams)

    def left_out(self, batches: int, done: Sequence[int]) -> list[Cut]:
        """Return what to leave out, if `batches` are skipped and `done` was trained on."""
        return list(zip(self.taken(batches), done, strict=True))


def sampler_of(loader: Any) -> Any:
    """Return the sampler that makes the order of a map-style dataset, or None."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    return getattr(_batch_samplers(loader)[1], "sampler", None)


def order_made_by(loader: Any) -> dict[str, Any]:
    """Describe what makes the order of whole epochs, and of how many samples."""
    data: Any = loader.dataset
    shard = isinstance(data, IterableDatasetShard)
    data, sampler = _whole(data.dataset if shard else data), _whole(sampler_of(loader))
    return described_order(data if sampler is None else sampler, data)


def _whole(part: Any) -> Any:
    return part.whole if isinstance(part, _WithCuts) else part


def generators_of(loader: Any) -> list[torch.Generator | None]:
    """Return the generators that an order may come from, besides the global ones."""
    owners = (sampler_of(loader), loader.dataset, getattr(loader.dataset, "dataset", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return [each if isinstance(each, torch.Generator) else None for each in found]


def can_leave_out(loader: Any) -> bool:
    """Return whether `leave_out` works: whether ranks share one order."""
    if isinstance(loader.dataset, IterableDataset):
        shared = isinstance(loader.dataset, IterableDatasetShard) or isinstance(loader, DataLoaderDispatcher)
        state: Any = PartialState()
        return shared or state.num_processes == 1
    return sampler_of(loader) is not None and makes_plain_batches(_batch_samplers(loader)[1])


def leave_out(loader: Any, cuts: Sequence[Cut]) -> Callable[[], None]:
    """Leave samples out of the order of a loader; return a function that undoes it.

    Args:
        loader: any that `can_leave_out`.
        cuts: what to leave out, of each stream.
    """
    if isinstance(loader.dataset, IterableDatasetShard):
        holder, name = vars(loader.dataset), "dataset"
    elif isinstance(loader.dataset, IterableDataset):
        # The loader lets nobody set its dataset once it is made.
        holder, name = vars(getattr(loader, "base_dataloader", loader)), "dataset"
    else:
        holder, name = vars(_batch_samplers(loader)[1]), "sampler"
    whole = holder[name]
    holder[name] = StreamWithCuts(whole, cuts) if name == "dataset" else OrderWithCut(whole, cuts[0])

    def undo() -> None:
        holder[name] = whole

    return undo


class _WithCuts:
    """The rest of what is iterated over; in all else as the whole."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __getattr__(self, name: str) -> Any:
        if name == "whole" or name.startswith("__"):  # while it is unpickled in a worker
            raise AttributeError(name)
        return getattr(self.whole, name)


@final
class OrderWithCut(_WithCuts, Sampler[Any]):
    """A sampler whose order has some positions left out."""

    def __init__(self, whole: Any, cut: Cut) -> None:
        super().__init__(whole)
        self._cut = cut
        self._order: list[Any] | None = None

    def fix(self) -> None:
        """Draw the order now, from the generators as they are."""
        self._order = list(_without(iter(self.whole), self._cut))

    def __iter__(self) -> Iterator[Any]:
        """Yield what is not left out."""
        return _without(iter(self.whole), self._cut) if self._order is None else iter(self._order)

    def __len__(self) -> int:
        """Return how many those are."""
        return len(self.whole) - _size(self._cut, len(self.whole))


@final
class StreamWithCuts(_WithCuts, IterableDataset[Any]):
    """A stream of which each worker leaves some samples out, in its first pass."""

    def __init__(self, whole: Any, cuts: Sequence[Cut]) -> None:
        super().__init__(whole)
        self._cuts = cuts
        self._passes = 0  # workers that persist keep their copy of this object

    def __iter__(self) -> Iterator[Any]:
        """Yield what is not left out, in this process."""
        worker = get_worker_info()
        cut = self._cuts[0 if worker is None else worker.id] if self._passes == 0 else (0, 0)
        self._passes += 1
        return _without(iter(self.whole), cut)

    def __len__(self) -> int:
        """Return how many those are, for all workers together."""
        whole = len(self.whole)
        return whole - min(whole, sum(tail - head for head, tail in self._cuts))


def _without(order: Iterator[Any], cut: Cut) -> Iterator[Any]:
    return (each for index, each in enumerate(order) if not cut[0] <= index < cut[1])


def _size(cut: Cut, whole: int) -> int:
    return min(cut[1], whole) - min(cut[0], whole)


def _batch_samplers(loader: Any) -> tuple[Any, Any]:
    """Return the outermost and the innermost batch sampler of a map-style loader."""
    outer: Any = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    inner: Any = outer
    while getattr(inner, "batch_sampler", None) is not None:
        inner = inner.batch_sampler
    return outer, inner
