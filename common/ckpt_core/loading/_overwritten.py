"""What failed loads have left in the live state."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import torch

from ckpt_core._torch_internals import ShardedTensor, inner_tensors, memory_in_use, own_part
from ckpt_core.errors import OverwrittenError
from ckpt_core.loading._targets import PartLoad
from ckpt_core.state import POSITIONS, leaves
from ckpt_core.types import SavedState

Path: TypeAlias = tuple[str | int, ...]
Entry: TypeAlias = tuple[str, Path]
"""Part of a checkpoint, and path of a tensor in its live state."""

_SHOWN: Final = 5


@final
class Overwritten:
    """What failed loads have written to, and no load has replaced.

    Memory that is free again counts no more: that of optimizer state that a load had made, and dropped when
    it failed, or that of a training state that is gone. One for each manager, and on each rank its own.
    """

    def __init__(self) -> None:
        self._left: dict[Entry, Sequence[Callable[[], bool]]] = {}
        self._values: set[Path] = set()
        self._applied = False
        self._error: OverwrittenError | None = None

    @property
    def error(self) -> OverwrittenError | None:
        """The failure of the last load that left something; None if nothing is left."""
        return self._error

    def add(
        self,
        parts: Mapping[str, PartLoad],
        error: OverwrittenError,
        *,
        values: Iterable[Path],
        applied: bool,
    ) -> None:
        """Record a failed load.

        Args:
            parts: what it loads.
            error: how it failed.
            values: paths of small values that were put back, and could not be undone.
            applied: whether other values than tensors may have changed.
        """
        self._left |= {entry: [memory_in_use(each) for each in memory] for entry, memory in _tensors(parts)}
        self._values.update(values)
        self._applied |= applied
        self._error = error.retold(str(error))  # without frames, which keep what was loaded

    def lacking(self, parts: Mapping[str, PartLoad], saved: SavedState) -> list[str]:
        """Return the names of what a load would leave as a failed one has left it."""
        if self._error is None:
            return []
        replaced = {entry for entry, _ in _tensors(parts)}
        tensors = self._names(entry for entry in self._left if entry not in replaced)
        return [*tensors, *_dotted(self._values - _values(saved))]

    def replaced(self, parts: Mapping[str, PartLoad], saved: SavedState) -> None:
        """Record that a load has succeeded."""
        if self._error is None:
            return
        for entry, _ in _tensors(parts):
            self._left.pop(entry, None)
        self._values -= _values(saved)
        if not self._values and not self._names(self._left):
            self.clear()

    def clear(self) -> None:
        """Forget everything: the live state is known to be whole."""
        self._left, self._values, self._applied, self._error = {}, set(), False, None

    def require_none(self) -> None:
        """Refuse to save a mixture of checkpoints.

        Raises:
            OverwrittenError: something is left.
        """
        if self._error is None:
            return
        names = [*self._names(self._left), *_dotted(self._values)]
        if not names and not self._applied:
            self.clear()
            return
        what = (
            f"{', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}" if names else "some values"
        )
        raise self._error.retold(
            f"the state is not saved, because it would be a mixture: {self._error.name} was loaded in part, "
            f"and nothing has replaced {what} since. Resume, or load a whole checkpoint; if you have "
            "built a new training state, make a new CheckpointManager for it"
        )

    def _names(self, entries: Iterable[Entry]) -> list[str]:
        """Return the names of the entries whose memory is in use."""
        found = [entry for entry in entries if self._in_use(entry)]
        if found:
            gc.collect()
        return _dotted(path for part, path in found if self._in_use((part, path)))

    def _in_use(self, entry: Entry) -> bool:
        return any(in_use() for in_use in self._left[entry])


def release(error: BaseException | None) -> None:
    """Free the memory that an exception, and those before it, keep in their frames."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _tensors(parts: Mapping[str, PartLoad]) -> Iterator[tuple[Entry, list[torch.Tensor]]]:
    """Yield the tensors that a load fills, and this rank's memory of each."""
    for part, load in parts.items():
        for key, value in load.entries.items():
            if memory := list(_memory(value)):
                yield (part, tuple(load.paths[key])), memory


def _values(saved: SavedState) -> set[Path]:
    """Return the paths of the small values of a checkpoint, and of what holds them."""
    groups = (saved.per_rank, saved.shared, saved.shared.get(POSITIONS, {}))
    paths = (path for group in groups for path, _ in leaves(group))
    return {path[:end] for path in paths for end in range(1, len(path) + 1)}


def _dotted(paths: Iterable[Path]) -> list[str]:
    return [".".join(map(str, path)) for path in paths]


def _memory(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, ShardedTensor):
        yield from (shard.tensor for shard in value.local_shards())
    elif isinstance(value, torch.Tensor):
        yield from (tensor for _, tensor in inner_tensors(own_part(value)))
