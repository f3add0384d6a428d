"""The start of an epoch: what its order is drawn from, and the way back there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, final

import torch
from accelerate import data_loader
from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from accelerate_ckpt.data._layout import sampler_of
from ckpt_core.data import draw_seed
from ckpt_core.state import load_rng_state, rng_state

_GENERATORS = ("python", "numpy", "torch")
_MOST_DRAWS = 8


def start_here(loader: Any, *, made: bool) -> dict[str, Any]:
    """Return what the next order of a loader is drawn from, as plain values.

    Args:
        loader: a prepared loader.
        made: whether its iterator is made already, and draws no base seed any more.
    """
    state = rng_state()
    return {
        **{name: state[name] for name in _GENERATORS},
        "generator": _order_state(loader),
        "anew": made,
        "seed": getattr(sampler_of(loader), "initial_seed", None),
    }


def rewind(loader: Any, start: Mapping[str, Any]) -> dict[str, Any]:
    """Go back to a start; return it as the present number of ranks has it."""
    if "python" in start:
        load_rng_state({name: start[name] for name in _GENERATORS})
    elif start.get("torch") is not None:
        torch.set_rng_state(start["torch"])
    return set_generator(loader, start)


def set_generator(loader: Any, start: Mapping[str, Any]) -> dict[str, Any]:
    """Put only the loader's own generator back to a start; return that start."""
    generator, state = _generator(loader), start.get("generator")
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

    Args:
        loader: a prepared loader, with its own sampler.
        start: of the epoch, as `rewind` has returned it.
        position: as it was saved.
    """
    if not _draws_early(loader):
        return partial(rewind, loader, start) if start.get("anew") else lambda: None
    found, samples = position.get("generator"), position.get("order", {}).get("samples")
    state = start.get("generator")
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
    """The state from which `prepare` draws the order of a stateful loader.

    Attributes:
        sampler: the one that the order is drawn from.
        rng: states of the global generators.
        generator: state of the sampler's own generator, if it has one.
    """

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
            "seed": getattr(sampler_of(loader), "initial_seed", None),
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
