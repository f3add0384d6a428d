"""Loads of wrapped tensors, which are made of others, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, final

import torch
from torch.distributed.checkpoint.planner import ReadItem

from ckpt_core.dcp import StoredPiece, WrapMismatchError, fillings
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.types import SavedEntries, SavedState

Unlike: TypeAlias = Mapping[tuple[str | int, ...], bool]
"""Path of an entry -> whether it is wrapped in the checkpoint, where the live one is not alike."""

_SHOWN = 5


@final
@dataclass(slots=True)
class WrappedLoad:
    """The load of one rank's part of a wrapped tensor.

    Attributes:
        name: of the tensor, for errors.
        live: this rank's part of it.
    """

    name: str
    live: torch.Tensor
    _chunks: list[tuple[Callable[[], torch.Tensor], ReadItem]] = field(
        default_factory=list[tuple[Callable[[], torch.Tensor], ReadItem]]
    )

    def add(self, read: Callable[[], torch.Tensor], item: ReadItem) -> None:
        """Add a chunk that holds a part of it."""
        self._chunks.append((read, item))

    def check(self) -> None:
        """Read, verify and compare, without changing anything.

        Raises:
            IncompatibleCheckpointError: what is stored does not fit the live tensor.
        """
        with torch.no_grad():
            self._fillings()

    def fill(self) -> None:
        """Read what is stored into the live tensor."""
        with torch.no_grad():
            for target, source in self._fillings():
                target.copy_(source)

    def _fillings(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pieces = [
            StoredPiece(
                stored=read(),
                offsets=tuple(item.storage_offsets),
                into=tuple(item.dest_offsets),
                lengths=tuple(item.lengths),
            )
            for read, item in self._chunks
        ]
        try:
            return fillings(self.live, pieces)
        except WrapMismatchError as error:
            raise IncompatibleCheckpointError(
                f"{self.name}: {error}. Nothing was loaded", mismatched=[self.name]
            ) from error


def with_kinds(saved: SavedState, unlike: Mapping[str, Unlike]) -> SavedState:
    """Note in the entries of a checkpoint, by part, which are wrapped."""

    def noted(entries: SavedEntries, known: Unlike) -> SavedEntries:
        return {
            path: replace(entry, wrapped=known[path]) if entry is not None and path in known else entry
            for path, entry in entries.items()
        }

    parts = {part: noted(entries, unlike.get(part, {})) for part, entries in saved.sharded.items()}
    return replace(saved, sharded=parts)


def refuse_unlike(unlike: Mapping[str, Unlike], place: str) -> None:
    """Refuse entries that are wrapped in the checkpoint or here, but not in both.

    Raises:
        IncompatibleCheckpointError: there is one.
    """
    found = {".".join(map(str, path)): kind for of_part in unlike.values() for path, kind in of_part.items()}
    if not found:
        return
    saved = [name for name, wrapped in found.items() if wrapped]
    live = [name for name, wrapped in found.items() if not wrapped]
    listed = [*_listed(saved, "in the checkpoint", "here"), *_listed(live, "here", "in the checkpoint")]
    raise IncompatibleCheckpointError(
        f"{place} does not fit the training state, and nothing was loaded: {'; '.join(listed)}. Quantise the "
        "model before the load as it was when it was saved. What an optimizer keeps quantised depends on the "
        "size of each rank's shard: load on as many ranks as saved",
        mismatched=sorted(found),
    )


def _listed(names: Sequence[str], place: str, other: str) -> Iterator[str]:
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield (
            f"{', '.join(names[:_SHOWN])}{more}: made of other tensors (quantised, for example) {place}, and "
            f"at least in part plain {other}"
        )
