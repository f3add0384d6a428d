"""What failed loads have left in the live state."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias, final

import torch

from ckpt_core.errors import OverwrittenError
from ckpt_core.loading._targets import PartLoad
from ckpt_core.state import POSITIONS, leaves
from ckpt_core.types import SavedState

Path: TypeAlias = tuple[str | int, ...]
Entry: TypeAlias = tuple[str | None, Path]
"""Part of a checkpoint, and path of a tensor in its live state; of a small value, None and its path."""

_SHOWN: Final = 5


@final
class Overwritten:
    """What failed loads have written to, and no load has replaced.

    One for each manager, and on each rank its own.

    Attributes:
        error: the failure of the last load that left something; None if the live state is no mixture.
    """

    def __init__(self) -> None:
        self._left: dict[Entry, None] = {}
        self.error: OverwrittenError | None = None

    def add(self, parts: Mapping[str, PartLoad], error: OverwrittenError, values: Iterable[Path]) -> None:
        """Record a failed load, with the small values that were put back and not undone."""
        self._left |= _tensors(parts) | {(None, path): None for path in values}
        self.error = error.retold(str(error))  # without frames, which keep what was loaded

    def lacking(self, parts: Mapping[str, PartLoad], saved: SavedState) -> list[str]:
        """Return the names of what a load would leave as a failed one has left it."""
        if self.error is None:
            return []
        replaced = _tensors(parts) | _values(saved)
        return _dotted(entry for entry in self._left if entry not in replaced)

    def replaced(self, parts: Mapping[str, PartLoad], saved: SavedState) -> None:
        """Record that a load has succeeded."""
        if self.error is not None:
            replaced = _tensors(parts) | _values(saved)
            self._left = {entry: None for entry in self._left if entry not in replaced}
            if not self._left:
                self.error = None

    def clear(self) -> None:
        """Forget everything: the live state is known to be whole."""
        self._left, self.error = {}, None

    def require_none(self) -> None:
        """Refuse to save a mixture of checkpoints."""
        if self.error is None:
            return
        left = shown(_dotted(self._left)) or "some values"
        raise self.error.retold(
            f"the state is not saved, because it would be a mixture: {self.error.name} was loaded in part, "
            f"and nothing has replaced {left} since. Resume, or load a "
            "whole checkpoint; if you have built a new training state, make a new CheckpointManager for it"
        )


def shown(names: list[str]) -> str:
    """Return the first few names."""
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def release(error: BaseException | None) -> None:
    """Free the memory that an exception, and those before it, keep in their frames."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _tensors(parts: Mapping[str, PartLoad]) -> dict[Entry, None]:
    """Return the tensors that a load fills."""
    return {
        (part, tuple(load.paths[key])): None
        for part, load in parts.items()
        for key, value in load.entries.items()
        if isinstance(value, torch.Tensor)
    }


def _values(saved: SavedState) -> dict[Entry, None]:
    """Return the small values of a checkpoint, and what holds them."""
    groups = (saved.per_rank, saved.shared, saved.shared.get(POSITIONS, {}))
    paths = (path for group in groups for path, _ in leaves(group))
    return {(None, path[:end]): None for path in paths for end in range(1, len(path) + 1)}


def _dotted(entries: Iterable[Entry]) -> list[str]:
    return [".".join(map(str, path)) for _, path in entries]
