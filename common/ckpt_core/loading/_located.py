"""The tensors of an open checkpoint, each with the places of its bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, TypeAlias, final

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ckpt_core.dcp import ChunkLocation
from ckpt_core.formats.checksums import crc32
from ckpt_core.formats.zips import payload_offset, read_directory
from ckpt_core.loading._checkpoint import CheckpointPart
from ckpt_core.types import SavedTensor

_OF_THE_WRITER: Final = frozenset({".format_version", ".storage_alignment", ".data/serialization_id"})
"""Records of a torch zip that say how it was written."""
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk."""


@final
@dataclass(frozen=True, kw_only=True)
class LocatedTensor:
    """A tensor in a checkpoint.

    Attributes:
        name: DCP's, with the sub-directory of its part in front, if that has one.
        path: in the nested state: item first; what metadata of stock DCP lacks is the name.
        chunks: the index of each chunk in its part, and its box.
    """

    name: str
    part: CheckpointPart
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Mapping[MetadataIndex, Box] = field(default_factory=dict[MetadataIndex, Box])
    path: tuple[str | int, ...] = ()

    @property
    def form(self) -> SavedTensor:
        """Shape and dtype, for people."""
        return SavedTensor(shape=self.shape, dtype=str(self.dtype).removeprefix("torch."))

    @cached_property
    def boxes(self) -> dict[Box, ChunkLocation]:
        """Where the bytes of each chunk are."""
        return {self.chunks[index]: place for index, place in self.part.find(self.chunks).items()}

    @property
    def checksums(self) -> dict[Box, tuple[int, int]] | None:
        """Checksum and size of each chunk's bytes; None if one has no checksum."""
        found: dict[Box, tuple[int, int]] = {}
        for box, place in self.boxes.items():
            if math.prod(box[1]):
                if place.wrapped or place.payload is None or place.payload.crc32 is None:
                    return None
                found[box] = place.payload.crc32, place.payload.size_bytes
        return found

    @property
    def is_wrapped(self) -> bool:
        """Whether it is made of others."""
        return any(place.wrapped for place in self.boxes.values())

    @property
    def size_bytes(self) -> int:
        """What reading it takes."""
        return sum(map(_size_of, self.boxes.values()))

    def read(self, seen: Callable[[int], None]) -> torch.Tensor:
        """Read it, flat, and compare every chunk with its checksum.

        Raises:
            CorruptCheckpointError: one differs, or a file ends before.
        """
        found = torch.empty(self.shape, dtype=self.dtype)
        for (offsets, sizes), place in self.boxes.items():
            if math.prod(sizes):
                box = tuple(slice(start, start + n) for start, n in zip(offsets, sizes, strict=True))
                found[box] = self.part.read_tensor(place, self.dtype).view(sizes)
            seen(_size_of(place))
        return found.reshape(-1)

    def records(self, box: Box, seen: Callable[[int], None]) -> dict[str, tuple[int, int]]:
        """Return size and checksum of each record of a zip, whose padding may differ."""
        content = self.part.read_entry(self.boxes[box])
        seen(len(content))
        view = memoryview(content)

        def read_at(offset: int, size: int) -> bytes:
            return bytes(view[offset : offset + size])

        directory = read_directory(read_at, len(content))
        found: dict[str, tuple[int, int]] = {}
        for record in directory.records.values():
            if (name := directory.inner_name(record)) not in _OF_THE_WRITER:
                start = payload_offset(read_at, directory, record)
                # Not the checksum in the directory: torch can be configured to write none.
                found[name] = record.size_bytes, crc32(view[start : start + record.size_bytes])
        return found


def _size_of(place: ChunkLocation) -> int:
    return place.size_bytes if place.wrapped or place.payload is None else place.payload.size_bytes


def located(parts: Mapping[str, CheckpointPart]) -> dict[str, LocatedTensor]:
    """Locate the tensors of a checkpoint's parts, by name; reads nothing."""
    found: dict[str, LocatedTensor] = {}
    for directory, part in parts.items():
        for key, path in part.paths.items():
            entry = part.metadata.state_dict_metadata[key]
            if isinstance(entry, TensorStorageMetadata):
                name = f"{directory}: {key}" if directory else key
                found[name] = LocatedTensor(
                    name=name,
                    part=part,
                    dtype=entry.properties.dtype,
                    shape=tuple(entry.size),
                    chunks={
                        MetadataIndex(key, each.offsets): (tuple(each.offsets), tuple(each.sizes))
                        for each in entry.chunks
                    },
                    path=path,
                )
    return found
