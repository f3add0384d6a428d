"""How much a save will write, told before it writes: from the plan, and from the save before.

What DCP's metadata says of tensors is exact but for the pages that a file's headers fill; everything else is
small, and bounded by what the rank with most of it has. After a commit the size of that checkpoint is known,
and a save of the same plan is taken to be as large, plus what the small things have grown by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, final

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ckpt_core.options import Headroom
from ckpt_core.state import PICKLED
from ckpt_core.storage import Storage

_PAGE: Final = 4096
_FRAME_BYTES: Final = 1536
"""More than the zip around a tensor takes, without what pads it to a page."""
_TABLE_BYTES: Final = 512
"""More than a chunk takes in its rank's table and in `.metadata`, without its name."""
_ENTRY_BYTES: Final = 3072
"""More than a plain value takes in its file and in the tables."""
_BLOCK_CRC: Final = 8 / (1 << 20)
"""Bytes of a chunk table per byte of a tensor."""
_LISTED_BYTES: Final = 512
"""More than a file takes in the manifest."""
_FIXED_BYTES: Final = 16 * 1024
"""Marker, and the rest of the manifest."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """What ranks write beside what the plan tells the size of.

    Attributes:
        generation: of the plan.
        ranks: how many there are.
        rank_bytes: of small files, plain values, pickles and buffers that one rank may write, at most.
        rank_files: files of one rank, at most.
    """

    generation: int = 0
    ranks: int = 1
    rank_bytes: int = 0
    rank_files: int = 0

    def with_values(self, staged: Iterable[Mapping[MetadataIndex, bytes]]) -> Overhead:
        """With plain values, whose size a rank knows when they are staged: others' are taken to be alike."""
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
        return self.ranks * self.rank_bytes

    @property
    def files(self) -> int:
        """Of all ranks."""
        return self.ranks * self.rank_files


NO_OVERHEAD: Final = Overhead()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SpaceNeeded:
    """What a save takes of a filesystem, at most."""

    size_bytes: int
    files: int

    def times(self, count: int) -> SpaceNeeded:
        """What so many of them take."""
        return SpaceNeeded(size_bytes=count * self.size_bytes, files=count * self.files)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SpaceFree:
    """What is free of a filesystem; None where nobody can tell, which is room for everything."""

    size_bytes: int | None
    files: int | None
    headroom_bytes: int = 0

    @classmethod
    def of(cls, storage: Storage, headroom: Headroom) -> SpaceFree:
        """As the filesystem tells it just now."""
        return cls(
            size_bytes=storage.free_bytes(),
            files=storage.free_files(),
            headroom_bytes=headroom.of(storage.total_bytes()),
        )

    def fits(self, need: SpaceNeeded) -> bool:
        """Whether there is room for it, headroom left aside."""
        return (
            self.size_bytes is None or need.size_bytes <= max(0, self.size_bytes - self.headroom_bytes)
        ) and (self.files is None or need.files <= self.files)

    def plus(self, need: SpaceNeeded, sign: int = 1) -> SpaceFree:
        """What is free once as much as `need` has been given back, or with -1, taken."""
        return replace(
            self,
            size_bytes=None if self.size_bytes is None else self.size_bytes + sign * need.size_bytes,
            files=None if self.files is None else self.files + sign * need.files,
        )


@final
class SizeEstimator:
    """Predicts saves; coordinator only, one save at a time."""

    def __init__(self) -> None:
        self._planned: tuple[int, int] | None = None
        self._known: tuple[Overhead, int] | None = None

    def need(self, metadata: Mapping[str, Metadata], extras: Overhead) -> SpaceNeeded:
        """What a save with that plan and these extras will take."""
        files = extras.files + 2 * len(metadata) + 3
        rest = files * (_PAGE + _LISTED_BYTES) + _FIXED_BYTES
        if self._known is not None and self._known[0].generation == extras.generation:
            before, size_bytes = self._known
            growth = max(0, extras.size_bytes - before.size_bytes)
            return SpaceNeeded(size_bytes=size_bytes + growth + rest, files=files)
        planned = self._planned_bytes(metadata, extras.generation)
        return SpaceNeeded(size_bytes=planned + extras.size_bytes + rest, files=files)

    def learn(self, extras: Overhead, size_bytes: int) -> None:
        """A save with these extras was committed and is so large."""
        self._known = extras, size_bytes

    def _planned_bytes(self, metadata: Mapping[str, Metadata], generation: int) -> int:
        if self._planned is None or self._planned[0] != generation:
            self._planned = generation, sum(map(_part_bytes, metadata.values()))
        return self._planned[1]


def _part_bytes(metadata: Metadata) -> int:
    total = 0
    for key, entry in metadata.state_dict_metadata.items():
        name_bytes = 4 * len(key)
        if not isinstance(entry, TensorStorageMetadata):
            total += _ENTRY_BYTES + name_bytes
            continue
        item = entry.properties.dtype.itemsize
        for chunk in entry.chunks:
            payload = chunk.sizes.numel() * item
            pages = -(-(payload + _FRAME_BYTES) // _PAGE)
            total += pages * _PAGE + _TABLE_BYTES + name_bytes + int(payload * _BLOCK_CRC)
    return total
