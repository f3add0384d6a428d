"""Loaders that hide their position: they keep iterators, or read ahead."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self, final

from torch.utils.data import DataLoader

from ckpt_core._torch_internals import LoaderIterator, batches_given, index_sampler_of, kept_iterator
from ckpt_core.disclosure import logger_of

_log = logger_of(__name__)
EPOCH = "_ckpt_epoch"
"""Attribute of a tracked iterator: its epoch."""


@final
@dataclass(slots=True)
class Outer:
    """The last pass over a loader with an `__iter__` of its own, as the loop sees it."""

    batches: int = 0
    ended: bool = False


@final
class CountedBatches:
    """Counts the batches that a loader's own `__iter__` gives the loop."""

    def __init__(self, batches: Iterator[Any], outer: Outer) -> None:
        self._batches = batches
        self._outer = outer

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._outer.ended = True
            raise
        self._outer.batches += 1
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def keeps_iterator(loader: DataLoader[Any]) -> bool:
    """Return whether a loader keeps an iterator besides the one that torch keeps."""
    kept = [each for each in vars(loader).values() if isinstance(each, LoaderIterator)]
    return any(each is not kept_iterator(loader) for each in kept)


def begun_untracked(loader: DataLoader[Any]) -> bool:
    """Return whether an iterator of this loader is in use, of which nothing is known."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    iterators = [each for each in gc.get_referrers(sampler) if isinstance(each, LoaderIterator)]
    iterators = [each for each in iterators if index_sampler_of(each) is sampler]
    if (kept := kept_iterator(loader)) is not None:
        iterators.append(kept)
    return any(not hasattr(each, EPOCH) and _unfinished(loader, each) for each in iterators)


def _unfinished(loader: Any, iterator: Any) -> bool:
    try:
        return batches_given(iterator) < len(loader)
    except (TypeError, NotImplementedError):
        return True


def tell_of_missing(how: str) -> bool:
    """Warn of a loop within an epoch of a loader; return whether to ask again.

    For a state without loaders. Looks at every object of the process, which takes a tenth of a second: for
    the first save only, and for the second if so far one batch was drawn, which may be a look at it.
    """
    looked = False
    for each in gc.get_objects():
        if (
            not issubclass(type(each), LoaderIterator)
            or not batches_given(each)
            or not _unfinished(each, each)
        ):
            continue
        if not getattr(getattr(each, EPOCH, None), "trains", True):
            continue
        if batches_given(each) == 1:
            looked = True
        else:
            _log.warning(
                "a DataLoader is within an epoch, and no loader is in the state that is saved: a resume "
                "begins its data again. If it trains, give %s; else nothing is to be done",
                how,
            )
            return False
    return looked


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def batches_in(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
