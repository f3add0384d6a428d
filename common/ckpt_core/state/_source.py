"""Where a training state comes from and goes back to: the seam between a training run and a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ckpt_core.types import CapturedState, SavedState


@runtime_checkable
class StateSource(Protocol):
    """A training state that can be saved and loaded.

    Call sequence, on every rank and on the thread that trains:

    1. save: `capture()`. Its tensors are live: they must be copied before the next optimizer step, and those
       that are not parameters or optimizer state before training goes on. Its `per_rank` and `shared` values
       are live too: they must be encoded before training goes on.
    2. load: `target(saved)` before anything large is read, then fill its tensors in place and replace each
       None by the value read, then `apply(loaded, saved)` with the same structure. Nothing but tensors is
       changed before `apply`; if `target` raises, nothing is.

    Methods may be collective over the ranks that hold the state. A source that can also `begin` (see
    `CarefulSource`) can be loaded so that a refusal leaves everything as it was.
    """

    def capture(self) -> CapturedState:
        """The state as it is now."""
        ...

    def target(self, saved: SavedState) -> Mapping[str, dict[str, Any]]:
        """Part directory -> nested dict with a tensor for every saved tensor and None for every plain value.

        What the checkpoint holds beyond the template is not wanted and need not be read.

        Raises:
            IncompatibleCheckpointError: the checkpoint is of another training state.
        """
        ...

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Sequence[str]:
        """Put everything back; returns what a person should know (what could not be restored).

        Raises:
            IncompatibleCheckpointError: a part of the state refuses what was loaded.
        """
        ...


@runtime_checkable
class CarefulSource(StateSource, Protocol):
    """A training state that puts back first what may refuse, and can take it back."""

    def begin(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Callable[[], None]:
        """Between `target` and `apply`: put back what is small and may refuse, before any tensor is read.

        In `loaded` plain values are there already, tensors are not.

        Returns:
            Takes it all back.

        Raises:
            IncompatibleCheckpointError: a part of the state refuses; everything is as it was before.
        """
        ...
