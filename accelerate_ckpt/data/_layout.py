"""The order of an epoch's samples, and the rest of it for any number of ranks.

Accelerate gives the ranks batches of one batch sampler in turn, or blocks of one stream. What all ranks have
seen together is therefore always a beginning of one order: a number of samples, which has the same meaning
on another number of ranks, and with another batch size.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self, final

from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    IterableDatasetShard,
    SkipBatchSampler,
)
from torch.utils.data import BatchSampler, IterableDataset, get_worker_info

SAMPLES = "samples"
BATCHES = "batches"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderLayout:
    """How a prepared loader deals out the order of an epoch.

    Attributes:
        unit: what the order is made of: samples, batches of a batch sampler of the user's own kind, or
            nothing that can be counted (empty).
        fetches: batches that this process fetches for one of the user's.
        per_fetch: units of the order that go, over all ranks, with one fetch.
        batch_size: samples of a batch, if the batch sampler or the stream is of torch's kind.
        streams: number of orders that are read in turn: one per worker for a stream.
    """

    unit: str
    fetches: int
    per_fetch: int
    batch_size: int
    streams: int = 1

    @classmethod
    def of(cls, loader: Any) -> Self:
        """Return the layout of a prepared loader."""
        fetches = 1
        if isinstance(loader, DataLoaderDispatcher) and not loader.split_batches:
            fetches = ranks_of(loader)
        if isinstance(loader.dataset, IterableDataset):
            return cls(
                unit="" if _is_split_by_files(loader) else SAMPLES,
                fetches=fetches,
                per_fetch=per_fetch_of_stream(loader),
                batch_size=loader.batch_size or 1,
                streams=max(1, loader.num_workers),
            )
        chain = _batch_samplers(loader)
        shard = _shard_in(chain)
        ranks = 1 if shard is None or shard.split_batches else shard.num_processes
        if makes_plain_batches(chain[-1]):
            size = chain[-1].batch_size
            return cls(unit=SAMPLES, fetches=fetches, per_fetch=size * ranks, batch_size=size)
        size = getattr(chain[-1], "batch_size", None)
        size = size if isinstance(size, int) else 0
        return cls(unit=BATCHES, fetches=fetches, per_fetch=ranks, batch_size=size)

    @property
    def per_step(self) -> int:
        """Units of the order in one step of all ranks."""
        return self.fetches * self.per_fetch

    def taken(self, fetched: int) -> list[int]:
        """Return how much of each order was dealt out with that many fetches."""
        return dealt_out(fetched, self.per_fetch, self.streams)


def dealt_out(fetched: int, per_fetch: int, streams: int) -> list[int]:
    """Return how much of each of several orders, read in turn, was dealt out."""
    return [-(-max(0, fetched - stream) // streams) * per_fetch for stream in range(streams)]


def ranks_of(dispatcher: Any) -> int:
    """Return for how many ranks a dispatcher fetches; tensor parallel ones share."""
    return 1 if dispatcher.submesh_tp is not None else int(dispatcher.state.num_processes)


def _is_split_by_files(loader: Any) -> bool:
    """Return whether every rank reads files of its own, as with `datasets`."""
    datasets = sys.modules.get("datasets")
    return (
        datasets is not None
        and isinstance(loader.dataset, datasets.IterableDataset)
        and not isinstance(loader, DataLoaderDispatcher)
    )


def _stream_of(loader: Any) -> Any:
    """Return the data set of the user's."""
    return loader.dataset.dataset if isinstance(loader.dataset, IterableDatasetShard) else loader.dataset


def per_fetch_of_stream(loader: Any) -> int:
    """Return the samples of a stream that go, over all ranks, with one fetch."""
    shard: Any = loader.dataset
    if not isinstance(loader.dataset, IterableDatasetShard):
        return loader.batch_size or 1
    return int(shard.batch_size * (1 if shard.split_batches else shard.num_processes))


def makes_plain_batches(batch_sampler: Any) -> bool:
    """Return whether a batch sampler groups samples as torch's does."""
    return (
        isinstance(batch_sampler, BatchSampler)
        and type(batch_sampler).__iter__ is BatchSampler.__iter__
        and isinstance(getattr(batch_sampler, "batch_size", None), int)
    )


def _batch_samplers(loader: Any) -> list[Any]:
    """Return a loader's batch sampler and those within it; the last is the user's."""
    chain = [vars(loader.base_dataloader)[_place(loader)]]
    while isinstance(chain[-1], (SkipBatchSampler, BatchSamplerShard)):
        chain.append(chain[-1].batch_sampler)
    return chain


def _shard_in(chain: Sequence[Any]) -> Any:
    """Return what deals batches out to the ranks, if there is such a part."""
    return next((each for each in chain if isinstance(each, BatchSamplerShard)), None)


def _place(loader: Any) -> str:
    if isinstance(loader.dataset, IterableDataset):
        return "dataset"
    return "sampler" if isinstance(loader.sampler, BatchSampler) else "batch_sampler"


def sampler_of(loader: Any) -> Any:
    """Return the sampler of the user's that orders the samples; None for a stream."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    return getattr(_batch_samplers(loader)[-1], "sampler", None)


def skip_samplers(loader: Any) -> list[SkipBatchSampler]:
    """Return what makes a loader skip batches; empty unless it is such a copy."""
    if isinstance(loader.dataset, IterableDataset):
        return []
    return [each for each in _batch_samplers(loader) if isinstance(each, SkipBatchSampler)]


def is_copy(loader: Any, original: Any) -> bool:
    """Return whether `skip_first_batches` has made a loader from another."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        return dataset is original.dataset and loader.skip_batches > 0
    if isinstance(original.dataset, IterableDataset):
        return False
    chain = _batch_samplers(loader)
    return any(each is _batch_samplers(original)[0] for each in chain[1:])


def length(loader: Any) -> int | None:
    """Return the length of the whole order, in its unit; None if unknown."""
    try:
        if isinstance(loader.dataset, IterableDataset):
            return len(_stream_of(loader))
        last = _batch_samplers(loader)[-1]
        return len(last.sampler) if makes_plain_batches(last) else len(last)
    except TypeError:
        return None


def order_of(loader: Any) -> dict[str, Any]:
    """Describe what makes the order of an epoch, and of how many samples, if known."""
    if isinstance(loader.dataset, IterableDataset):
        stream = _whole(_stream_of(loader))
        return described_order(stream, stream)
    sampler = sampler_of(loader)
    return described_order(
        _whole(_batch_samplers(loader)[-1] if sampler is None else sampler), loader.dataset
    )


def described_order(maker: Any, data: Any) -> dict[str, Any]:
    """Describe an order by what makes it, and the number of samples, if known."""
    try:
        samples = len(data)
    except TypeError:
        samples = None
    return {"type": type(maker).__qualname__, "samples": samples}


def _whole(part: Any) -> Any:
    return part.whole if isinstance(part, (Rest, RestOfStream)) else part


def padding(loader: Any, remaining: int) -> int:
    """Return how many samples are added to fill the last step of an epoch."""
    if loader._drop_last:
        return 0
    if isinstance(loader, DataLoaderDispatcher):
        return -remaining % ranks_of(loader)
    if isinstance(loader.dataset, IterableDataset):
        return (
            -remaining % per_fetch_of_stream(loader)
            if isinstance(loader.dataset, IterableDatasetShard)
            else 0
        )
    shard, layout = _shard_in(_batch_samplers(loader)), LoaderLayout.of(loader)
    even = shard is not None and shard.even_batches
    return -remaining % layout.per_fetch if even and layout.unit == SAMPLES else 0


def place_rest(
    loader: Any,
    taken: Sequence[int],
    *,
    sampler: Any = None,
    rewinds: Sequence[Callable[[], object]] = (),
) -> Callable[[], None]:
    """Make a loader begin behind what was taken; return the function that undoes it.

    The next iterator sees it. It skips nothing else, even if it is a copy by `skip_first_batches`.

    Args:
        loader: a prepared loader, or a copy of one.
        taken: of `LoaderLayout.taken`.
        sampler: the sampler to order the samples, if not the loader's own.
        rewinds: called before each time that the order is drawn, until it is undone: an iterator with workers
            has it drawn twice when it is made.
    """
    base, place = vars(loader.base_dataloader), _place(loader)
    before = base[place]
    until_undone = list(rewinds)
    if place == "dataset":
        base[place] = _rest_of_stream(before, taken)
        loader.skip_batches = 0
    else:
        base[place] = _rest_of_batches(_batch_samplers(loader), taken[0], sampler, until_undone)

    def undo() -> None:
        base[place] = before
        until_undone.clear()

    return undo


def swap_sampler(loader: Any, sampler: Any) -> Callable[[], None]:
    """Let another sampler order the samples; return the function that undoes it."""
    last = _batch_samplers(loader)[-1]
    own, last.sampler = last.sampler, sampler

    def undo() -> None:
        last.sampler = own

    return undo


def _rest_of_stream(dataset: Any, taken: Sequence[int]) -> Any:
    if not isinstance(dataset, IterableDatasetShard):
        return RestOfStream(dataset, taken)
    shard = copy.copy(dataset)
    shard.dataset = RestOfStream(dataset.dataset, taken)
    return shard


def _rest_of_batches(
    chain: Sequence[Any], taken: int, sampler: Any, rewinds: Sequence[Callable[[], object]]
) -> Any:
    own = chain[-1]
    rest: Any
    if makes_plain_batches(own):
        rest = copy.copy(own)
        rest.sampler = Rest(sampler or own.sampler, taken, rewinds)
    else:
        rest = Rest(own, taken, rewinds)
    for outer in reversed(chain[:-1]):
        if isinstance(outer, BatchSamplerShard):
            inner, rest = rest, copy.copy(outer)
            rest.batch_sampler = inner
    return rest


@final
class Rest(BatchSampler):
    """A sampler, or batch sampler, behind its first elements."""

    def __init__(self, whole: Any, taken: int, rewinds: Sequence[Callable[[], object]]) -> None:
        self.whole = whole
        self._taken = taken
        self._rewinds = rewinds

    def __iter__(self) -> Iterator[Any]:
        for rewind in self._rewinds:
            rewind()
        return islice(iter(self.whole), self._taken, None)

    def __len__(self) -> int:
        return max(0, len(self.whole) - self._taken)

    def __getattr__(self, name: str) -> Any:
        if name == "whole":
            raise AttributeError(name)
        return getattr(self.whole, name)


@final
class RestOfStream(IterableDataset[Any]):
    """A stream behind its first elements, in every worker."""

    def __init__(self, whole: Any, taken: Sequence[int]) -> None:
        self.whole = whole
        self._taken = taken

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first = self._taken[0 if worker is None else worker.id]
        return islice(iter(self.whole), first, None)

    def __len__(self) -> int:
        return max(0, len(self.whole) - sum(self._taken))

    def __getattr__(self, name: str) -> Any:
        # A shard would seed the stream's generator by the epoch; a position of its own would be another one.
        if name in {"whole", "generator", "state_dict", "load_state_dict"}:
            raise AttributeError(name)
        return getattr(self.whole, name)


def skip_batches_of_the_users(copy: Any, original: Any, *, fetched: int | None) -> None:
    """Make a dispatcher's copy skip batches as the user counts them.

    Stock counts those that the main process fetches, which are several for each of the user's.

    Args:
        copy: by `skip_first_batches`.
        original: what it is a copy of.
        fetched: what was fetched at the save, if within an epoch. A script that counts as stock does skips as
            many, and is right.
    """
    skips, fetches = skip_samplers(copy), LoaderLayout.of(original).fetches
    if not skips or not isinstance(copy, DataLoaderDispatcher) or skips[0].skip_batches == fetched:
        return
    if skips[0].skip_batches < len(original):
        skips[0].skip_batches *= fetches
        return
    # A dispatcher without any batch raises: it fetches its last ones, and hands out none.
    skips[0].skip_batches = (len(original) - 1) * fetches
    copy.skip_batches = 1
