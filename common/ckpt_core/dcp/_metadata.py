"""DCP's `.metadata`: made from plans, encoded, and read as DCP's own objects."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import repeat
from typing import Final, final

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from typing_extensions import override

from ckpt_core._torch_internals import StorageInfo, layout_named
from ckpt_core.formats.chunks import ChunkTable
from ckpt_core.formats.dcp_metadata import reading
from ckpt_core.formats.index import Boxes, Index, Ints, Places, TensorIn, decode, encode, index_of
from ckpt_core.types import SavedEntries, SavedTensor

# By the value of torch's `_MEM_FORMAT_ENCODING`.
_MEMORY_FORMATS: Final = {0: torch.contiguous_format, 1: torch.channels_last, 2: torch.preserve_format}


def encode_metadata(metadata: Metadata, places: Mapping[MetadataIndex, StorageInfo]) -> bytes:
    """Encode `.metadata`, with `places` as DCP's storage data."""
    return b"".join(encode(index_of(replace(metadata, storage_data=places))))


def places_in(table: ChunkTable, part: str) -> Iterator[tuple[MetadataIndex, StorageInfo]]:
    """Yield DCP's storage data of one part, from a rank's chunk table."""
    for path, chunks in table.files.items():
        directory, _, name = path.rpartition("/")
        if directory != part:
            continue
        columns = chunks.columns
        rows = zip(columns.key, columns.shard_offsets, columns.offset, columns.size_bytes, strict=True)
        for key, shard_offsets, offset, size in rows:
            index = MetadataIndex(key) if shard_offsets is None else MetadataIndex(key, shard_offsets)
            yield index, StorageInfo(relative_path=name, offset=offset, length=size)


def load_metadata(content: bytes, path: str) -> Metadata:
    """Read a `.metadata` file.

    Nothing in it is executed, and its types are checked; `check_metadata` checks its values.
    """
    return metadata_of(decode(content, path), path)


def metadata_of(index: Index, path: str) -> Metadata:
    """Return an index as DCP's objects: equal entries as one, places when asked for.

    Raises:
        CorruptCheckpointError: torch has no such dtype or layout, or cannot hold a shape.
    """
    with reading(path):
        chunks = {id(each): _chunks(each) for each in index.boxes}
        entries = {id(None): BytesStorageMetadata()} | {
            id(each): TensorStorageMetadata(_properties(each), torch.Size(each.size), chunks[id(each.boxes)])
            for each in {id(each): each for each in index.entries}.values()
            if each is not None
        }
        named = zip(index.names, index.paths, strict=True)
        found = Metadata(
            dict(zip(index.names, map(entries.__getitem__, map(id, index.entries)), strict=True)),
            {name: path for name, path in named if path is not None},
            StoredPlaces(index),
        )
        vars(found)["mcore_data"] = index.mcore_data  # where Megatron-Core itself puts it
        return found


def _chunks(boxes: Boxes) -> list[ChunkStorageMetadata]:
    sides = zip(boxes.starts.tolist(), boxes.sizes.tolist(), strict=True)
    return [ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in sides]


def _properties(tensor: TensorIn) -> TensorProperties:
    name, layout, requires_grad, memory_format, pin_memory = tensor.properties
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {name!r:.80}")
    return TensorProperties(
        dtype, layout_named(layout), requires_grad, _MEMORY_FORMATS[memory_format], pin_memory
    )


@final
class StoredPlaces(Mapping[MetadataIndex, StorageInfo]):
    """DCP's storage data as columns; an object is made when it is asked for."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._boxes: dict[int, dict[tuple[int, ...], int]] = {}

    @cached_property
    def _places(self) -> Places:
        return self._index.stored()

    @cached_property
    def _firsts(self) -> list[int]:
        return [int(each) for each in self._index.firsts()]

    @cached_property
    def _names(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._index.names)}

    @cached_property
    def _sorted(self) -> tuple[Ints, Ints]:
        """Numbers of the stored chunks over all entries, in order, and their rows."""
        numbers = self._index.firsts()[self._places.name] + np.maximum(self._places.box, 0)
        order = np.argsort(numbers, kind="stable")
        return numbers[order], order

    def __len__(self) -> int:
        return len(self._places.name)

    def __iter__(self) -> Iterator[MetadataIndex]:
        return (MetadataIndex(name, start) for name, start, *_ in self._index.rows())

    def __getitem__(self, key: MetadataIndex) -> StorageInfo:
        return self.take([key])[0]

    @override
    def items(self) -> ItemsView[MetadataIndex, StorageInfo]:
        """Return all, found together."""
        keys = list(self)
        return dict(zip(keys, self.take(keys), strict=True)).items()

    def take(self, keys: Sequence[MetadataIndex]) -> list[StorageInfo]:
        """Return where these are; KeyError if one is nowhere."""
        if not keys:
            return []
        places, firsts = self._places, self._firsts
        wanted = np.array([firsts[self._names[key.fqn]] + self._box(key) for key in keys], np.int64)
        numbers, order = self._sorted
        at = np.searchsorted(numbers, wanted)
        if not len(self) or not np.array_equal(numbers[np.minimum(at, len(numbers) - 1)], wanted):
            raise KeyError("no place of one of these chunks")
        rows = order[at]
        columns = [each[rows].tolist() for each in (places.file, places.offset, places.length)]
        transforms = places.transforms
        of_rows = repeat(None) if transforms is None else [transforms[row] for row in rows.tolist()]
        return [
            StorageInfo(places.files[int(file)], offset, length, each)
            for file, offset, length, each in zip(*columns, of_rows, strict=False)
        ]

    def _box(self, key: MetadataIndex) -> int:
        entry = self._index.entries[self._names[key.fqn]]
        if entry is None or key.offset is None:
            if (entry is None) != (key.offset is None):
                raise KeyError(key)
            return 0
        boxes = entry.boxes
        if id(boxes) not in self._boxes:
            rows = list(enumerate(map(tuple, boxes.starts.tolist())))
            self._boxes[id(boxes)] = {start: row for row, start in reversed(rows)}
        return self._boxes[id(boxes)][tuple(key.offset)]


def entries(metadata: Metadata) -> SavedEntries:
    """Return the leaves of the nested state dict, by path, or else by key."""
    paths: dict[str, tuple[str | int, ...]] = metadata.planner_data or {}
    known: dict[int, SavedTensor | None] = {}
    for value in metadata.state_dict_metadata.values():
        if id(value) not in known:
            known[id(value)] = (
                SavedTensor(shape=tuple(value.size), dtype=str(value.properties.dtype).removeprefix("torch."))
                if isinstance(value, TensorStorageMetadata)
                else None
            )
    return {
        tuple(paths.get(key, (key,))): known[id(value)] for key, value in metadata.state_dict_metadata.items()
    }
