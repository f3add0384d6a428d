"""The samplers of a DataLoader: what shuffles, deals to ranks, makes batches."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def global_state() -> dict[str, Any]:
    """Return the states of the global generators of samplers; draw nothing."""
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}


def load_global_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    if "python" in state:
        random.setstate(state["python"])


def same_values(one: Any, other: Any) -> bool:
    """Return whether two states of generators are the same."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_values(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple) and any(isinstance(each, np.ndarray) for each in one):
        return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def generator_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return dict(generator.bit_generator.state)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def load_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


_LONGEST = 8
_KNOWN = {"builtins", "torch", "torchdata", "lightning", "lightning_fabric", "accelerate"}
_OF_ORDER = ("kind", "type", "length", "samples")
_TORCHDATA = "torchdata.stateful_dataloader.sampler"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Samplers:
    """The samplers of one loader, by the part they play.

    `batch` makes batches of samples, `shard` deals samples or batches to ranks, `base` makes the order unless
    that does, and `inner` are those that `base` draws from. What deals batches or blocks of a stream is
    Accelerate's, known by its attributes.
    """

    batch: Any
    shard: Any
    base: Any
    inner: Sequence[Any]

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Samplers:
        """Return the samplers of a loader; wrappers of hosts are looked into."""
        chain = list(_chain(loader))
        shard = next((each for each in chain if _deals(each) or deals_batches(each)), None)
        chain = [each for each in chain if not deals_batches(each)]
        grouped = loader.batch_sampler is not None or (chain and isinstance(chain[0], BatchSampler))
        batch = chain.pop(0) if grouped else None
        if chain and chain[0] is shard:
            chain.pop(0)
        if deals_batches(loader.dataset):
            shard = loader.dataset
        return cls(batch=batch, shard=shard, base=chain[0] if chain else None, inner=chain[1:])

    @property
    def orderly(self) -> bool:
        """Whether what deals to ranks, if anything does, is known to deal as torch does."""
        if hasattr(self.batch, "effective_batch_size"):
            return False  # transformers' own, which has cut its batches for the ranks by itself
        if self.shard is None or deals_batches(self.shard):
            return True
        stock = _is_stock(self.shard, DistributedSampler, "StatefulDistributedSampler")
        outermost = not any(each is self.shard for each in (self.batch, *self.inner))
        return outermost and (stock or _hidden(self.shard) is not None)

    @property
    def shards(self) -> tuple[int, int]:
        """The number of this shard and of all; 0 of 1 if every rank takes all samples."""
        shard: Any = self.shard
        if shard is None:
            return 0, 1
        if not deals_batches(shard):
            return int(shard.rank), int(shard.num_replicas)
        of_stream = issubclass(type(shard), IterableDataset)
        split = shard.split_batches and not of_stream
        return (0, 1) if split else (int(shard.process_index), int(shard.num_processes))

    @property
    def batch_size(self) -> int | None:
        """Samples per batch; None if that is for a sampler of the user's to decide."""
        if self.batch is None:
            return 1
        return int(self.batch.batch_size) if _is_stock(self.batch, BatchSampler, "BatchSampler") else None

    @property
    def makes_batches(self) -> bool:
        return self.batch is not None and self.batch_size is None and self.base is None

    @property
    def named_size(self) -> int | None:
        """What a sampler that makes batches itself calls its `batch_size`, if anything."""
        size = getattr(self.base if self.batch is None else self.batch, "batch_size", None)
        return size if isinstance(size, int) else None


def _chain(loader: DataLoader[Any]) -> Iterator[Any]:
    each: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    for _ in range(_LONGEST):
        if each is None:
            return
        yield each
        inner = (getattr(each, "batch_sampler", None), getattr(each, "sampler", None), _hidden(each))
        each = next((one for one in inner if one is not None), None)


def _hidden(sampler: Any) -> Any:
    """Return the sampler that Lightning wraps into a data set of indices."""
    return getattr(getattr(sampler, "dataset", None), "_sampler", None)


def _deals(sampler: Any) -> bool:
    return isinstance(getattr(sampler, "num_replicas", None), int) and isinstance(
        getattr(sampler, "rank", None), int
    )


def deals_batches(part: Any) -> bool:
    """Return whether Accelerate deals batches, or blocks of a stream, with it."""
    return hasattr(part, "process_index") and hasattr(part, "split_batches")


def _is_stock(sampler: Any, stock: type[Any], name: str) -> bool:
    kind = type(sampler)
    return kind is stock or (kind.__module__ == _TORCHDATA and kind.__name__ == name)


def samplers_state(loader: DataLoader[Any], *, of_next: bool = False) -> dict[str, Any]:
    """Return what decides the order of the next epoch, besides global generators.

    That is the generators of the loader and of its samplers, and their numbers that are called a seed or an
    epoch. With `of_next` the epoch is the one after that which Accelerate has told a stream's shard.
    """
    state = {part: _own_state(each) for part, each in _parts(loader)}
    data: Any = loader.dataset
    if deals_batches(data) and state.get("stream") and not hasattr(data.dataset, "set_epoch"):
        number = getattr(data, "epoch", -of_next) + of_next  # from which the shard seeds it
        state["stream"] = {"generator": torch.Generator().manual_seed(number).get_state()}
    return {part: each for part, each in state.items() if each}


def load_samplers_state(loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
    for part, each in _parts(loader):
        saved = state.get(part, {})
        present = _own_state(each)
        for name, value in saved.items():
            if name not in present:
                continue
            attribute = getattr(each, name)
            if isinstance(attribute, GENERATORS):
                load_generator_state(attribute, value)
            elif name == "epoch" and callable(getattr(each, "set_epoch", None)):
                each.set_epoch(value)
            elif attribute != value:
                setattr(each, name, value)


def other_seeds(loader: DataLoader[Any], state: Mapping[str, Any]) -> list[str]:
    """Describe seeds that were changed since the save; the saved ones count."""
    notes: list[str] = []
    for part, each in _parts(loader):
        present, saved = _seeds(each, _own_state(each)), _seeds(each, state.get(part, {}))
        notes += [
            f"the {name} of its {type(each).__name__} stays {saved[name]}, as it was saved, and is not "
            f"{present[name]}, for the order to stay the same"
            for name in sorted(present.keys() & saved.keys())
            if present[name] != saved[name]
        ]
    return notes


def _seeds(each: Any, state: Mapping[str, Any]) -> dict[str, int]:
    """Return the seeds in an `_own_state`; none of torchdata's, which are random."""
    if type(each).__module__ == _TORCHDATA:
        return {}
    found = {name: value for name, value in state.items() if type(value) is int and "seed" in name}
    for name, value in state.items():
        if isinstance(live := getattr(each, name, None), torch.Generator):
            generator = torch.Generator(live.device)
            generator.set_state(value)
            found[f"seed of the {name}"] = generator.initial_seed()
    return found


def _parts(loader: DataLoader[Any]) -> Iterator[tuple[str, Any]]:
    samplers = Samplers.of(loader)
    parts = [
        ("loader", loader),
        ("batch", samplers.batch),
        ("shard", samplers.shard),
        ("base", samplers.base),
    ]
    parts += [(f"inner{number}", each) for number, each in enumerate(samplers.inner)]
    if isinstance(loader.dataset, IterableDataset):
        parts.append(("stream", stream_of(loader)))
    return ((name, each) for name, each in parts if each is not None)


def stream_of(loader: DataLoader[Any]) -> Any:
    data: Any = loader.dataset
    return data.dataset if deals_batches(data) else data


def length_of(loader: DataLoader[Any]) -> int | None:
    try:
        return len(stream_of(loader))
    except (TypeError, NotImplementedError):
        return None


def _own_state(each: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in getattr(each, "__dict__", {}).items():
        if isinstance(value, GENERATORS):
            found[name] = generator_state(value)
        elif (
            type(value) is int
            and ("epoch" in name or "seed" in name)
            and not isinstance(each, IterableDataset)
        ):
            found[name] = value
    return found


def starting_state(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return everything that decides the order of an epoch that begins now."""
    numbers = global_state()
    # Those known draw from no other global generator.
    if not isinstance(loader.dataset, IterableDataset) and all(
        isinstance(each, DataLoader) or type(each).__module__.partition(".")[0] in _KNOWN
        for _, each in _parts(loader)
    ):
        numbers = {"torch": numbers["torch"]}
    return {"global": numbers, "samplers": samplers_state(loader)}


def load_starting_state(loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
    load_global_state(state["global"])
    load_samplers_state(loader, state["samplers"])


def recipe(loader: DataLoader[Any]) -> dict[str, Any] | None:
    """Describe how the order of an epoch is made, to make it again on other ranks.

    Returns None if the samples are not to be had by index.
    """
    samplers = Samplers.of(loader)
    base, shard, length = samplers.base, samplers.shard, length_of(loader)
    if samplers.makes_batches:
        base = samplers.batch
    if length is None or (base is None and shard is None) or not samplers.orderly:
        return None
    own = getattr(base, "generator", None)
    late = samplers.batch is not None and type(samplers.batch).__module__ != _TORCHDATA
    late = late or deals_batches(shard)
    kind = "other"
    if base is None or _is_stock(base, SequentialSampler, ""):
        kind = "sequential"
    elif _is_stock(base, RandomSampler, "RandomSampler") and not base.replacement:
        kind = "random" if len(base) == len(base.data_source) else "other"
    return {
        "kind": kind,
        "type": type(base or shard).__qualname__,
        "length": length,
        "samples": len(base) if isinstance(base, Sized) else length,
        "shuffled": bool(getattr(shard, "shuffle", False)),
        # Torchdata's draw when an iterator is made; others, or within another, with their first index.
        "lazy": late or type(base).__module__ != _TORCHDATA,
        "late": late,
        # Lengths may be grouped by it.
        "size": getattr(base, "batch_size", None),
        # Whether the seed of the workers is drawn from the generator that makes the order, too.
        "shares": own is loader.generator,
        "owns": own is not None,
        "workers": loader.num_workers > 0,
    }


def same_recipe(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None, *, same_ranks: bool) -> bool:
    """Return whether a loader makes the order of an epoch as at the save."""
    if saved is None or now is None:
        return saved is now
    names = {*_OF_ORDER, "shuffled", "lazy"}
    if saved["kind"] == "other":
        names.add("workers")  # which have a sampler begin twice
    if not same_ranks:
        names.remove("samples")  # of a sampler that deals to ranks by itself
    return all(saved.get(name, now[name]) == now[name] for name in names)


def style_of(order: Mapping[str, Any]) -> str:
    if order["shuffled"] or order["kind"] == "random":
        return "shuffled"
    return "in the order of the data set" if order["kind"] == "sequential" else f"in that of {order['type']}"


def samples_of(loader: DataLoader[Any], begin: Mapping[str, Any]) -> Sequence[Any] | None:
    """Make the order of an epoch again; None if that is not possible.

    The generators of the loader are used: put them back afterwards.
    """
    order = begin["order"]
    samples = _of_base(loader, order, begin)
    if samples is None or not order["shuffled"]:
        return samples
    values = begin["start"]["samplers"]["shard"]
    generator = torch.Generator().manual_seed(values["seed"] + values["epoch"])
    return [samples[number] for number in torch.randperm(len(samples), generator=generator).tolist()]


def _of_base(
    loader: DataLoader[Any], order: Mapping[str, Any], begin: Mapping[str, Any]
) -> Sequence[Any] | None:
    if order["kind"] == "sequential":
        return range(order["length"])
    load_starting_state(loader, begin["start"])
    live, samplers = recipe(loader), Samplers.of(loader)
    sampler = samplers.batch if samplers.makes_batches else samplers.base
    if order["kind"] == "random":
        sampler = _random(order, begin)
    if sampler is None or live is None:
        return None
    if order["kind"] == "other" and any(order.get(name, live[name]) != live[name] for name in _OF_ORDER):
        return None
    own = getattr(sampler, "batch_size", None)
    if isinstance(order["size"], int) and isinstance(own, int):
        sampler.batch_size = order["size"]
    made = _drawn_by(sampler, loader, begin)
    if own is not None:
        sampler.batch_size = own
    return made


def _drawn_by(sampler: Any, loader: DataLoader[Any], begin: Mapping[str, Any]) -> list[Any]:
    """Draw from a sampler as an iterator of the loader has."""
    order, seeded = begin["order"], begin["created"] is None
    indices = [] if order["late"] else iter(sampler)
    if seeded and order["shares"]:
        # As torch draws to seed the workers of an iterator, or a sampler.
        torch.empty((), dtype=torch.int64).random_(generator=sampler.generator if order["owns"] else None)
    if seeded and order["workers"] and not order["late"]:
        indices = iter(sampler)  # for the workers, which read ahead, another one is begun
    if begin["first"] is not None:
        load_starting_state(loader, begin["first"])
        if order["owns"] and order["kind"] == "random" and order["lazy"]:
            sampler.generator.set_state(begin["first"]["samplers"]["base"]["generator"])
    return list(iter(sampler) if order["late"] else indices)


def _random(order: Mapping[str, Any], begin: Mapping[str, Any]) -> Any:
    """Make a sampler like the saved one, with its generator as it was."""
    samples = range(order["length"])
    generator = None
    if order["owns"]:
        generator = torch.Generator()
        generator.set_state(begin["start"]["samplers"]["base"]["generator"])
    if order["lazy"]:
        return RandomSampler(samples, generator=generator)
    from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler

    return StatefulRandomSampler(samples, generator=generator)


def batches_of(units: Sequence[Any], loader: DataLoader[Any]) -> list[Any]:
    """Return what the loader would make of samples, or of batches of the user's.

    These are batches, or themselves; of all units, if batches are dealt to ranks, the part of this one.
    """
    samplers = Samplers.of(loader)
    if samplers.batch is None:
        return list(units)
    batches: Any = list(units)
    if samplers.batch_size is not None:
        batches = BatchSampler(units, samplers.batch.batch_size, samplers.batch.drop_last)
    if deals_batches(samplers.shard):
        inner, batches = batches, copy.copy(samplers.shard)
        batches.batch_sampler = inner
    return list(batches)


def skip(indices: Iterator[Any], count: int) -> None:
    next(islice(indices, count, count), None)
