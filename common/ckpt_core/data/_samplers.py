"""The samplers of a DataLoader: what shuffles, deals to ranks, makes batches."""

from __future__ import annotations

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
    """Put back what `global_state` returned, or a part of it."""
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
    """Return the state of one generator, as a plain value."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return dict(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.getstate()


def load_generator_state(generator: Any, state: Any) -> None:
    """Put back what `generator_state` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


_LONGEST = 8
_KNOWN = {"builtins", "torch", "torchdata", "lightning", "lightning_fabric"}
_OF_ORDER = ("kind", "type", "length", "samples")
_TORCHDATA = "torchdata.stateful_dataloader.sampler"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Samplers:
    """The samplers of one loader, by the part they play.

    `batch` makes batches of samples, `shard` deals samples to ranks, `base` makes the order unless that does,
    and `inner` are those that `base` draws from.
    """

    batch: Any
    shard: Any
    base: Any
    inner: Sequence[Any]

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Samplers:
        """Return the samplers of a loader; wrappers of hosts are looked into."""
        chain = list(_chain(loader))
        shard = next((each for each in chain if _deals(each)), None)
        batch = chain.pop(0) if loader.batch_sampler is not None else None
        if chain and chain[0] is shard:
            chain.pop(0)
        return cls(batch=batch, shard=shard, base=chain[0] if chain else None, inner=chain[1:])

    @property
    def orderly(self) -> bool:
        """Whether what deals to ranks, if anything does, is known to deal as torch does."""
        if self.shard is None:
            return True
        stock = _is_stock(self.shard, DistributedSampler, "StatefulDistributedSampler")
        outermost = not any(each is self.shard for each in (self.batch, *self.inner))
        return outermost and (stock or _hidden(self.shard) is not None)

    @property
    def shards(self) -> tuple[int, int]:
        """The number of this shard and of all; 0 of 1 if every rank takes all samples."""
        return (0, 1) if self.shard is None else (int(self.shard.rank), int(self.shard.num_replicas))

    @property
    def batch_size(self) -> int | None:
        """Samples per batch; None if that is for a sampler of the user's to decide."""
        if self.batch is None:
            return 1
        return int(self.batch.batch_size) if _is_stock(self.batch, BatchSampler, "BatchSampler") else None

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


def _is_stock(sampler: Any, stock: type[Any], name: str) -> bool:
    kind = type(sampler)
    return kind is stock or (kind.__module__ == _TORCHDATA and kind.__name__ == name)


def samplers_state(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what decides the order of the next epoch, besides global generators.

    That is the generators of the loader and of its samplers, and their numbers that are called a seed or an
    epoch.
    """
    state = {part: _own_state(each) for part, each in _parts(loader)}
    return {part: each for part, each in state.items() if each}


def load_samplers_state(loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
    """Put back what `samplers_state` returned, as far as the loader has it."""
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
    return ((name, each) for name, each in parts if each is not None)


def _own_state(each: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in getattr(each, "__dict__", {}).items():
        if isinstance(value, GENERATORS):
            found[name] = generator_state(value)
        elif type(value) is int and ("epoch" in name or "seed" in name):
            found[name] = value
    return found


def starting_state(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return everything that decides the order of an epoch that begins now."""
    numbers = global_state()
    if not isinstance(loader.dataset, IterableDataset) and all(
        _draws_from_torch(e) for _, e in _parts(loader)
    ):
        numbers = {"torch": numbers["torch"]}
    return {"global": numbers, "samplers": samplers_state(loader)}


def _draws_from_torch(each: Any) -> bool:
    """Return whether it is of those that draw from no other global generator."""
    return isinstance(each, DataLoader) or type(each).__module__.partition(".")[0] in _KNOWN


def load_starting_state(loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
    """Put back what `starting_state` returned."""
    load_global_state(state["global"])
    load_samplers_state(loader, state["samplers"])


def recipe(loader: DataLoader[Any]) -> dict[str, Any] | None:
    """Describe how the order of an epoch is made, to make it again on other ranks.

    Returns None if the samples are not to be had by index.
    """
    samplers = Samplers.of(loader)
    base, shard = samplers.base, samplers.shard
    data: Any = loader.dataset
    if not hasattr(data, "__len__") or (base is None and shard is None) or not samplers.orderly:
        return None
    own = getattr(base, "generator", None)
    return {
        "kind": _kind(base),
        "type": type(base or shard).__qualname__,
        "length": len(data),
        "samples": len(base) if isinstance(base, Sized) else len(data),
        "shuffled": bool(getattr(shard, "shuffle", False)),
        "lazy": type(base).__module__ != _TORCHDATA,
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
    """Describe the order that a recipe makes."""
    if order["shuffled"] or order["kind"] == "random":
        return "shuffled"
    return "in the order of the data set" if order["kind"] == "sequential" else f"in that of {order['type']}"


def _kind(base: Any) -> str:
    if base is None or _is_stock(base, SequentialSampler, ""):
        return "sequential"
    if _is_stock(base, RandomSampler, "RandomSampler") and not base.replacement:
        return "random" if len(base) == len(base.data_source) else "other"
    return "other"


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
    sampler = _random(order, begin) if order["kind"] == "random" else Samplers.of(loader).base
    live = recipe(loader)
    if sampler is None or live is None:
        return None
    if order["kind"] == "other" and any(order.get(name, live[name]) != live[name] for name in _OF_ORDER):
        return None
    indices = iter(sampler)
    seeded = begin["created"] is None
    if seeded and order["shares"]:
        draw_seed(sampler.generator if order["owns"] else None)
    if seeded and order["workers"]:
        indices = iter(sampler)  # for the workers, which read ahead, another one is begun
    if begin["first"] is not None:
        load_starting_state(loader, begin["first"])
        if order["owns"] and order["kind"] == "random" and order["lazy"]:
            sampler.generator.set_state(begin["first"]["samplers"]["base"]["generator"])
    return list(indices)


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


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw what torch draws to seed the workers of an iterator, or a sampler."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def batches_of(samples: Sequence[Any], loader: DataLoader[Any]) -> list[Any]:
    """Return what the loader would make of these samples: batches, or themselves."""
    if loader.batch_sampler is None:
        return list(samples)
    batch: Any = loader.batch_sampler
    return list(BatchSampler(samples, batch.batch_size, batch.drop_last))


def skip(indices: Iterator[Any], count: int) -> None:
    """Advance by `count`, as far as there are."""
    next(islice(indices, count, count), None)
