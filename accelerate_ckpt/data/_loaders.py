"""Positions of the data loaders of one accelerator.

Stock Accelerate forgets the epoch a loader is in and what its shuffling started from; and a resumed loop
makes an iterator, which draws from the global generator after `load_state` has put it back. So that a resumed
run sees the same data and the same random numbers:

    at the start of every epoch     remember what the order is drawn from
    save                            epoch, that start, what was seen of the order, a stateful loader's state
    load                            epoch, stateful loader's own state
    the first epoch after a load    begins from the remembered start, and the generators are put back
                                    right before the first batch is handed out

On another number of ranks, or with another batch size, that first epoch is the rest of the order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, final
from weakref import WeakSet

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState

from accelerate_ckpt.data._saved import Reentry
from accelerate_ckpt.data._starts import Prepared
from accelerate_ckpt.data._tracked import TrackedLoader
from ckpt_core.state import load_rng_state

_states = cast("Any", GradientState)
_BEGIN, _END = _states._add_dataloader, _states._remove_dataloader

_followers: WeakSet[Loaders] = WeakSet()


@final
class Loaders:
    """The data loaders of one accelerator. Main thread only."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._tracked: dict[int, TrackedLoader] = {}
        for loader in accelerator._dataloaders:
            self.track(loader)

    def prepare(self, prepare: Callable[..., Any], data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Let the host prepare a loader, and track what it makes."""
        before = Prepared.before(data_loader)
        loader = prepare(data_loader, *args, **kwargs)
        if id(loader) not in self._tracked:
            self.track(loader)
            tracked = self._tracked.get(id(loader))
            if tracked is not None:
                tracked.made_after(before)
        return loader

    def track(self, loader: Any) -> None:
        """Track a prepared loader from now on; idempotent."""
        if isinstance(loader, DataLoaderStateMixin) and id(loader) not in self._tracked:
            self._tracked[id(loader)] = TrackedLoader(loader)
            _followers.add(self)
            _follow()

    def track_copy(self, original: Any, copy: Any) -> None:
        """Track a copy by `skip_first_batches`, which finishes the same epoch."""
        tracked = self._tracked.get(id(original)) or self._of_copy(original)
        if tracked is not None and isinstance(copy, DataLoaderStateMixin):
            tracked.adopt(copy)

    def note_step(self) -> None:
        """Note that the loaders that iterate had batches for an optimizer step."""
        for loader in self._accelerator.gradient_state.dataloader_references:
            tracked = None if loader is None else self._tracked.get(id(loader)) or self._of_copy(loader)
            if tracked is not None:
                tracked.trains = True

    def positions(self) -> list[dict[str, Any]]:
        """Return a plain value for every loader, in the order of their preparation."""
        return [
            {} if tracked is None else tracked.position()
            for tracked in (self._tracked.get(id(loader)) for loader in self._accelerator._dataloaders)
        ]

    def restore(
        self, positions: Sequence[Mapping[str, Any]], rng: Mapping[str, Any], *, same_ranks: bool
    ) -> list[str]:
        """Put every loader back to its saved position; return notes for the user.

        Args:
            positions: what `positions` gave.
            rng: states of the generators, to be put back right before the next batch.
            same_ranks: whether the positions are of this rank, among as many ranks as saved.
        """
        pairs = [
            (index, tracked, position)
            for index, (loader, position) in enumerate(
                zip(self._accelerator._dataloaders, positions, strict=False)
            )
            if (tracked := self._tracked.get(id(loader))) is not None and position
        ]
        training = [tracked for _, tracked, position in pairs if position.get("trains")]
        within = [tracked for _, tracked, position in pairs if position["within"]]
        # An evaluation that a save interrupts begins again; the training goes on.
        again = [tracked for tracked in within if tracked in training] or within[-1:]
        reentry = Reentry(rng=rng, at_edge=() if again else training or [each for _, each, _ in pairs])
        notes: list[str] = []
        for index, tracked, position in pairs:
            notes += tracked.restore(
                index, position, reentry, goes_on=tracked in again, same_ranks=same_ranks
            )
        load_rng_state(rng)  # of which the iterators that were made here have drawn
        return notes

    def begun(self, loader: Any) -> None:
        """Note that a loader, perhaps a copy or another's, begins an epoch."""
        tracked = self._tracked.get(id(loader)) or self._of_copy(loader)
        if tracked is None:
            tracked = next((each for each in self._tracked.values() if each.is_origin_of(loader)), None)
            if tracked is None:
                return
            tracked.adopt(loader)
        tracked.begun(loader)

    def ended(self, loader: Any) -> None:
        """Note that a loader has ended an epoch."""
        tracked = self._tracked.get(id(loader)) or self._of_copy(loader)
        if tracked is not None:
            tracked.ended(loader)

    def release(self) -> None:
        """Stop tracking every loader."""
        for tracked in self._tracked.values():
            tracked.release()
        self._tracked.clear()
        _followers.discard(self)
        if not _followers:
            _states._add_dataloader, _states._remove_dataloader = _BEGIN, _END

    def _of_copy(self, loader: Any) -> TrackedLoader | None:
        return next((each for each in self._tracked.values() if loader in each.copies), None)


def _follow() -> None:
    """Hear of every loader that begins or ends an epoch; idempotent.

    Every loader calls these methods, also a copy by the function `accelerate.skip_first_batches`, of which
    nothing else tells. On an instance they would be pickled with every loader.
    """
    _states._add_dataloader, _states._remove_dataloader = _begun, _ended


@functools.wraps(_BEGIN)
def _begun(state: Any, loader: Any) -> None:
    _BEGIN(state, loader)
    for each in tuple(_followers):
        each.begun(loader)


@functools.wraps(_END)
def _ended(state: Any, loader: Any) -> None:
    _END(state, loader)
    for each in tuple(_followers):
        each.ended(loader)
