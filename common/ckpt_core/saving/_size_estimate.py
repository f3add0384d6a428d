"""The predicted size of a save, from its plan and from the save before.

The sizes of tensors in DCP's metadata are exact but for the pages of a file's headers; everything else is
small, and bounded by the rank with most of it. After a commit the size of that checkpoint is known, and a
save of the same plan is predicted to be as large, plus the growth of the overhead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, final

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ckpt_core.formats.chunks import BLOCK_BYTES
from ckpt_core.options import Headroom
from ckpt_core.state import PICKLED
from ckpt_core.storage import Storage

_PAGE: Final = 4096
_FRAME_BYTES: Final = 832
"""Upper bound of the zip around a tensor, without padding to a page."""
_SMALL_FRAME_BYTES: Final = 208
"""Of a small tensor, which is no zip."""
_TABLE_BYTES: Final = 160
"""Upper bound of a chunk's entries in its rank's table and in `.metadata`, without its name."""
_ENTRY_BYTES: Final = 3072
"""Upper bound of a plain value in its file and in the tables."""
_BLOCK_CRC: Final = 8 / (1 << 20)
"""Bytes of a chunk table per byte of a tensor."""
_LISTED_BYTES: Final = 512
"""Upper bound of a file's entry in the manifest."""
_FIXED_BYTES: Final = 16 * 1024
"""Upper bound of the marker and the rest of the manifest."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """Upper bounds of the ranks' writes beside the planned tensors.

    Attributes:
        generation: of the plan.
        ranks: the number of ranks.
        rank_bytes: of one rank's small files, plain values, pickles and buffers.
        rank_files: of one rank.
        replicas: the number of files that hold the same bytes.
    """

    generation: int = 0
    ranks: int = 1
    rank_bytes: int = 0
    rank_files: int = 0
    replicas: int = 1

    def with_values(self, staged: Iterable[Mapping[MetadataIndex, bytes]]) -> Overhead:
        """Add the staged plain values; those of other ranks are assumed to be alike."""
        values = sum(
            len(content)
            for part in staged
            for index, content in part.items()
            if not index.fqn.startswith(f"{PICKLED}.")  # counted already
        )
        return replace(self, rank_bytes=self.rank_bytes + values)

    @property
    def size_bytes(self) -> int:
        """Of all ranks."""
        return self.replicas * self.ranks * self.rank_bytes

    @property
    def files(self) -> int:
        """Of all ranks."""
        return self.replicas * self.ranks * self.rank_files


NO_OVERHEAD: Final = Overhead()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SpaceNeeded:
    """Upper bounds of the space of a save."""

    size_bytes: int
    files: int

    def times(self, count: int) -> SpaceNeeded:
        """Return the space of `count` saves."""
        return SpaceNeeded(size_bytes=count * self.size_bytes, files=count * self.files)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SpaceFree:
    """Free bytes and files; None means unknown and is treated as unlimited."""

    size_bytes: int | None
    files: int | None
    headroom_bytes: int = 0

    @classmethod
    def of(cls, storage: Storage, headroom: Headroom) -> SpaceFree:
        """Ask the filesystem."""
        free_bytes, total_bytes, free_files = storage.space()
        return cls(size_bytes=free_bytes, files=free_files, headroom_bytes=headroom.of(total_bytes))

    def fits(self, needed: SpaceNeeded) -> bool:
        """Return whether there is room for it without using the headroom."""
        return (
            self.size_bytes is None or needed.size_bytes <= max(0, self.size_bytes - self.headroom_bytes)
        ) and (self.files is None or needed.files <= self.files)

    def plus(self, space: SpaceNeeded, sign: int = 1) -> SpaceFree:
        """Return the free space after `space` was freed, or with -1, used."""
        return replace(
            self,
            size_bytes=None if self.size_bytes is None else self.size_bytes + sign * space.size_bytes,
            files=None if self.files is None else self.files + sign * space.files,
        )


@final
class SizeEstimator:
    """Predictions of the sizes of saves. Coordinator only, one save at a time."""

    def __init__(self) -> None:
        self._planned: tuple[int, int] | None = None
        self._known: tuple[Overhead, int] | None = None

    def predict(self, metadata: Mapping[str, Metadata], overhead: Overhead) -> SpaceNeeded:
        """Predict the space of a save with that plan and overhead."""
        files = overhead.files + overhead.replicas * 2 * len(metadata) + 3
        rest = files * (_PAGE + _LISTED_BYTES) + _FIXED_BYTES
        if self._known is not None and self._known[0].generation == overhead.generation:
            before, size_bytes = self._known
            growth = max(0, overhead.size_bytes - before.size_bytes)
            return SpaceNeeded(size_bytes=size_bytes + growth + rest, files=files)
        planned = overhead.replicas * self._planned_bytes(metadata, overhead.generation)
        return SpaceNeeded(size_bytes=planned + overhead.size_bytes + rest, files=files)

    def record(self, overhead: Overhead, size_bytes: int) -> None:
        """Record the size of a committed save with that overhead."""
        self._known = overhead, size_bytes

    def _planned_bytes(self, metadata: Mapping[str, Metadata], generation: int) -> int:
        if self._planned is None or self._planned[0] != generation:
            self._planned = generation, sum(map(_part_bytes, metadata.values()))
        return self._planned[1]


def _part_bytes(metadata: Metadata) -> int:
    total = 0
    for key, entry in metadata.state_dict_metadata.items():
        name_bytes = 2 * len(key)
        if not isinstance(entry, TensorStorageMetadata):
            total += _ENTRY_BYTES + name_bytes
            continue
        item = entry.properties.dtype.itemsize
        for chunk in entry.chunks:
            payload = chunk.sizes.numel() * item
            frame = _SMALL_FRAME_BYTES if payload < BLOCK_BYTES else _FRAME_BYTES + _PAGE
            total += payload + frame + _TABLE_BYTES + name_bytes + int(payload * _BLOCK_CRC)
    return total
