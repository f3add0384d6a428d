"""The order of an epoch's samples: what draws it, and its rest for any ranks.

Accelerate gives the ranks batches of one batch sampler in turn, or blocks of one stream. What all ranks have
seen together is therefore always a beginning of one order: a number of samples, which has the same meaning
on another number of ranks, and with another batch size.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, final

import torch
from accelerate import PartialState, data_loader
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    IterableDatasetShard,
    SkipBatchSampler,
)
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, get_worker_info

from ckpt_core.data import draw_seed
from ckpt_core.state import load_rng_state, rng_state

SAMPLES = "samples"
BATCHES = "batches"

Cut = tuple[int, int]
"""Places in an order, from the first that is left out to the first that is not."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderLayout:
    """How a loader, prepared or not, deals out the order of an epoch.

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
        """Return the layout of a loader."""
        fetches = 1
        if isinstance(loader, DataLoaderDispatcher) and not loader.split_batches:
            fetches = _ranks_of(loader)
        state: Any = PartialState()
        # Of a loader that is not prepared, each rank has an order of its own.
        known = base_of(loader) is not loader or state.num_processes == 1
        if isinstance(loader.dataset, IterableDataset):
            return cls(
                unit=SAMPLES if known and not _is_split_by_files(loader) else "",
                fetches=fetches,
                per_fetch=_per_fetch_of_stream(loader),
                batch_size=loader.batch_size or 1,
                streams=max(1, loader.num_workers),
            )
        chain = _batch_samplers(loader)
        shard = _shard_in(chain)
        ranks = 1 if shard is None or shard.split_batches else shard.num_processes
        size = getattr(chain[-1], "batch_size", None)
        size = size if isinstance(size, int) else 0
        if makes_plain_batches(chain[-1]):
            unit = SAMPLES if known else ""
            return cls(unit=unit, fetches=fetches, per_fetch=size * ranks, batch_size=size)
        # That of transformers has cut its batches for the ranks by itself.
        known &= chain[-1] is not None and not hasattr(chain[-1], "effective_batch_size")
        return cls(unit=BATCHES if known else "", fetches=fetches, per_fetch=ranks, batch_size=size)

    @property
    def per_step(self) -> int:
        """Units of the order in one step of all ranks."""
        return self.fetches * self.per_fetch

    def taken(self, fetched: int) -> list[int]:
        """Return how much of each order was dealt out with that many fetches."""
        turns = (max(0, fetched - stream) for stream in range(self.streams))
        return [-(-each // self.streams) * self.per_fetch for each in turns]

    def samples(self, taken: Sequence[int]) -> int:
        """Return how many samples so much of each order is."""
        return sum(taken) * (self.batch_size if self.unit == BATCHES else 1)

    def goes_on_from(self, before: LoaderLayout, streams: int) -> bool:
        """Return whether what `before` dealt out is a beginning of the order now."""
        if before.unit == BATCHES and before.batch_size != self.batch_size:
            return False  # they are other batches
        return bool(self.unit) and before.unit == self.unit and streams == self.streams


def base_of(loader: Any) -> Any:
    """Return torch's own loader in a prepared one, or the loader itself."""
    return getattr(loader, "base_dataloader", loader)


def _ranks_of(dispatcher: Any) -> int:
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


def _per_fetch_of_stream(loader: Any) -> int:
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
    chain = [vars(base_of(loader))[_place(loader)]]
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
    return _whole(getattr(_batch_samplers(loader)[-1], "sampler", None))


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
    data = loader.dataset
    if isinstance(data, IterableDataset):
        maker = data = _whole(_stream_of(loader))
    else:
        sampler = sampler_of(loader)
        maker = _whole(_batch_samplers(loader)[-1]) if sampler is None else sampler
    try:
        samples = len(data)
    except TypeError:
        samples = None
    return {"type": type(maker).__qualname__, "samples": samples}


def _whole(part: Any) -> Any:
    while isinstance(part, (Rest, RestOfStream)):
        part = part.whole
    return part


def drops_last(loader: Any) -> bool:
    """Return whether a last batch that is not full is left out."""
    return bool(getattr(loader, "_drop_last", loader.drop_last))


def padding(loader: Any, remaining: int) -> int:
    """Return how many samples are added to fill the last step of an epoch."""
    if drops_last(loader):
        return 0
    if isinstance(loader, DataLoaderDispatcher):
        return -remaining % _ranks_of(loader)
    if isinstance(loader.dataset, IterableDataset):
        return (
            -remaining % _per_fetch_of_stream(loader)
            if isinstance(loader.dataset, IterableDatasetShard)
            else 0
        )
    shard, layout = _shard_in(_batch_samplers(loader)), LoaderLayout.of(loader)
    even = shard is not None and shard.even_batches
    return -remaining % layout.per_fetch if even and layout.unit == SAMPLES else 0


def place_rest(
    loader: Any,
    cuts: Sequence[Cut],
    *,
    sampler: Any = None,
    rewinds: Sequence[Callable[[], object]] = (),
) -> Callable[[], None]:
    """Make a loader leave out a part of each order; return what undoes it.

    The next iterator sees it. It skips nothing else, even if it is a copy by `skip_first_batches`.

    Args:
        loader: any, or a copy of one.
        cuts: what to leave out of each order.
        sampler: the sampler to order the samples, if not the loader's own.
        rewinds: called before each time that the order is drawn, until it is undone: an iterator with workers
            has it drawn twice when it is made.
    """
    # The loader lets nobody set its dataset once it is made.
    base, place = vars(base_of(loader)), _place(loader)
    before = base[place]
    until_undone = list(rewinds)
    if place == "dataset":
        base[place] = _rest_of_stream(before, cuts)
        loader.skip_batches = 0
    else:
        base[place] = _rest_of_batches(_batch_samplers(loader), cuts[0], sampler, until_undone)

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


def _rest_of_stream(dataset: Any, cuts: Sequence[Cut]) -> Any:
    if not isinstance(dataset, IterableDatasetShard):
        return RestOfStream(dataset, cuts)
    shard = copy.copy(dataset)
    shard.dataset = RestOfStream(dataset.dataset, cuts)
    return shard


def _rest_of_batches(
    chain: Sequence[Any], cut: Cut, sampler: Any, rewinds: Sequence[Callable[[], object]]
) -> Any:
    own = chain[-1]
    rest: Any
    if makes_plain_batches(own):
        rest = copy.copy(own)
        rest.sampler = Rest(sampler or own.sampler, cut, rewinds)
    else:
        rest = Rest(own, cut, rewinds)
    for outer in reversed(chain[:-1]):
        if isinstance(outer, BatchSamplerShard):
            inner, rest = rest, copy.copy(outer)
            rest.batch_sampler = inner
    return rest


def _without(order: Iterator[Any], cut: Cut) -> Iterator[Any]:
    return (each for index, each in enumerate(order) if not cut[0] <= index < cut[1])


@final
class Rest(BatchSampler):
    """A sampler, or batch sampler, but for some of its elements."""

    def __init__(self, whole: Any, cut: Cut, rewinds: Sequence[Callable[[], object]] = ()) -> None:
        self.whole = whole
        self._cut = cut
        self._rewinds = rewinds

    def __iter__(self) -> Iterator[Any]:
        for rewind in self._rewinds:
            rewind()
        return _without(iter(self.whole), self._cut)

    def __len__(self) -> int:
        whole, (head, tail) = len(self.whole), self._cut
        return whole - min(tail, whole) + min(head, whole)

    def __getattr__(self, name: str) -> Any:
        if name == "whole":
            raise AttributeError(name)
        return getattr(self.whole, name)


@final
class RestOfStream(IterableDataset[Any]):
    """A stream of which every worker leaves some elements out, in its first pass."""

    def __init__(self, whole: Any, cuts: Sequence[Cut]) -> None:
        self.whole = whole
        self._cuts = cuts
        self._passes = 0  # workers that persist keep their copy of this object

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        cut = self._cuts[0 if worker is None else worker.id] if self._passes == 0 else (0, 0)
        self._passes += 1
        return _without(iter(self.whole), cut)

    def __len__(self) -> int:
        whole = len(self.whole)
        return whole - min(whole, sum(tail - head for head, tail in self._cuts))

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


_GENERATORS = ("python", "numpy", "torch")
_SEEDS = ("initial_seed", "batch_size")
"""Numbers of samplers that their orders follow from."""
_MOST_DRAWS = 8


def start_here(loader: Any, *, made: bool) -> dict[str, Any]:
    """Return what the next order of a loader is drawn from, as plain values."""
    state = rng_state()
    return {
        **{name: state[name] for name in _GENERATORS},
        "generator": _order_state(loader),
        "anew": made,
        "seeds": _seeds(loader),
        "prepared": False,
    }


def _seeds(loader: Any) -> dict[str, int]:
    found = {name: getattr(sampler_of(loader), name, None) for name in _SEEDS}
    return {name: value for name, value in found.items() if type(value) is int}


def put_seeds_back(loader: Any, start: Mapping[str, Any]) -> Callable[[], None]:
    """Put back numbers of a sampler; return what undoes all but a seed."""
    sampler, now = sampler_of(loader), _seeds(loader)
    for name in now.keys() & start["seeds"].keys():
        setattr(sampler, name, start["seeds"][name])

    def undo() -> None:
        for name in now.keys() - {"initial_seed"}:
            setattr(sampler, name, now[name])

    return undo


def is_persistent(loader: Any) -> bool:
    """Return whether a loader makes one iterator for all epochs."""
    return bool(loader.persistent_workers and loader.num_workers)


def rewind(loader: Any, start: Mapping[str, Any]) -> dict[str, Any]:
    """Go back to a start; return it as the present number of ranks has it."""
    load_rng_state({name: start[name] for name in _GENERATORS})
    return set_generator(loader, start)


def set_generator(loader: Any, start: Mapping[str, Any]) -> dict[str, Any]:
    """Put only the loader's own generator back to a start; return that start."""
    generator, state = _generator(loader), start["generator"]
    if generator is not None and state is None:
        state = _state_for_generator(loader, start)
    if state is None:
        return dict(start)
    if generator is None:
        # Saved on several ranks, for which Accelerate gives the sampler a generator.
        generator = torch.Generator()
        sampler = sampler_of(loader)
        if hasattr(sampler, "generator"):
            sampler.generator = generator
    generator.set_state(state)
    return {**start, "generator": state}


def rewinding(loader: Any, start: Mapping[str, Any], position: Mapping[str, Any]) -> Callable[[], object]:
    """Return what to call wherever the order of a saved epoch is drawn again.

    A sampler that draws whenever an iterator is made, as torchdata's does, may have drawn several orders for
    the epoch: in `prepare`, and twice with workers. The last one left its generator as the save found it.
    """
    if not _draws_early(loader):
        return partial(rewind, loader, start) if start["anew"] else lambda: None
    found, samples, state = position["generator"], position["order"]["samples"], start["generator"]
    if found is not None and state is not None and samples is not None:
        state = _last_drawn_from(state, found, samples)
    return partial(set_generator, loader, {**start, "generator": state})


def _draws_early(loader: Any) -> bool:
    if not getattr(loader, "use_stateful_dataloader", False):
        return False
    from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler

    sampler = sampler_of(loader)
    return isinstance(sampler, StatefulRandomSampler) and not sampler.replacement


def _last_drawn_from(state: torch.Tensor, found: torch.Tensor, samples: int) -> torch.Tensor:
    """Return the state before the draw that left a generator as found."""
    generator, first = torch.Generator(), state
    generator.set_state(state)
    for _ in range(_MOST_DRAWS):
        state = generator.get_state()
        torch.randperm(samples, generator=generator)
        if torch.equal(generator.get_state(), found):
            return state
    return first


def generator_state(loader: Any) -> torch.Tensor | None:
    """Return the state of the generator that a loader shuffles with, if it has one."""
    generator = _generator(loader)
    return None if generator is None else generator.get_state()


def lend_generator(base: Any) -> Callable[[], None]:
    """Lend a generator to draw the base seed from; return what takes it back."""
    own = base.generator
    base.generator = torch.Generator()
    base.generator.set_state(torch.get_rng_state())

    def give_back() -> None:
        base.generator = own

    return give_back


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The state from which `prepare` draws the order of a stateful loader."""

    sampler: Any
    rng: Mapping[str, Any]
    generator: torch.Tensor | None

    @classmethod
    def before(cls, loader: Any) -> Self | None:
        """Note the state before a loader is prepared."""
        if not isinstance(loader, DataLoader):
            return None
        sampler = _sampler_of_unprepared(loader)
        generator = getattr(sampler, "generator", None)
        state = generator.get_state() if isinstance(generator, torch.Generator) else None
        return cls(sampler=sampler, rng=rng_state(), generator=state)

    def has_drawn(self, loader: Any) -> bool:
        """Return whether the sampler's own generator has moved since."""
        now = generator_state(loader)
        return self.generator is not None and now is not None and not torch.equal(self.generator, now)

    def with_new_generator(self) -> Self:
        """Follow `prepare`, which has seeded a generator for the sampler."""
        source, made = torch.Generator(), torch.Generator()
        source.set_state(self.rng["torch"])
        made.manual_seed(draw_seed(source))
        rng = {**self.rng, "torch": source.get_state()}
        return replace(self, rng=rng, generator=made.get_state())

    def start(self, loader: Any) -> dict[str, Any]:
        """Return the start of the first epoch."""
        return {
            **{name: self.rng[name] for name in _GENERATORS},
            "generator": self.generator,
            "anew": False,
            "seeds": _seeds(loader),
            "prepared": True,
        }


def _generator(loader: Any) -> torch.Generator | None:
    """Return the generator that a loader shuffles with, if it has one of its own."""
    found = getattr(loader, "synchronized_generator", None) or getattr(sampler_of(loader), "generator", None)
    if found is None and isinstance(loader.dataset, IterableDataset):
        found = getattr(loader.dataset, "generator", None)
    return found if isinstance(found, torch.Generator) else None


def _order_state(loader: Any) -> torch.Tensor | None:
    shard = loader.dataset
    if isinstance(shard, IterableDatasetShard) and not hasattr(shard.dataset, "set_epoch"):
        generator = getattr(shard.dataset, "generator", None)
        if isinstance(generator, torch.Generator):
            # The shard seeds it at every beginning.
            return torch.Generator().manual_seed(loader.iteration).get_state()
    return generator_state(loader)


def _state_for_generator(loader: Any, start: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the state from which one rank, without a generator, would draw."""
    if start.get("torch") is None:
        return None
    source = torch.Generator()
    source.set_state(start["torch"])
    if not start.get("anew"):
        draw_seed(source)
    if isinstance(sampler_of(loader), RandomSampler):
        source.manual_seed(draw_seed(source))
    return source.get_state()


_sampler_of_unprepared: Callable[[Any], Any] = data_loader.get_sampler
