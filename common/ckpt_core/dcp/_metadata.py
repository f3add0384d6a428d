"""DCP's `.metadata`: made from plans, encoded, and read as DCP's own objects."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType

from ckpt_core._torch_internals import StorageInfo, layout_named
from ckpt_core.formats.chunks import ChunkTable
from ckpt_core.formats.consistency import ImpossibleError, check_chunks
from ckpt_core.formats.dcp_metadata import Tensor, Value, read_index, reading
from ckpt_core.types import SavedEntries, SavedTensor

_MOST_LISTED: Final = 5
# By the value of torch's `_MEM_FORMAT_ENCODING`.
_MEMORY_FORMATS: Final = {0: torch.contiguous_format, 1: torch.channels_last, 2: torch.preserve_format}


def describe(plans: Sequence[SavePlan]) -> Metadata:
    """Build the metadata of plans in which every chunk is written once.

    The result equals that of DCP's own planner, which takes a hundred microseconds per shard: at thousands of
    ranks, most of an hour.

    Raises:
        ValueError: shards of a tensor overlap, leave holes, exceed its bounds, or differ in dtype or shape.
    """
    entries: dict[str, Any] = {}
    problems = [problem for plan in plans if (problem := _add(plan, entries)) is not None]
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            try:
                check_chunks(name, entry.size, entry.chunks)
            except ImpossibleError as error:
                problems.append(str(error))
    if problems:
        more = f", and {len(problems) - _MOST_LISTED} more" if len(problems) > _MOST_LISTED else ""
        raise ValueError(f"the shards do not make up the state: {'; '.join(problems[:_MOST_LISTED])}{more}")
    paths: dict[str, Any] = {}
    for plan in reversed(plans):
        paths |= plan.planner_data or {}
    return Metadata(state_dict_metadata=entries, planner_data=paths)


def _add(plan: SavePlan, entries: dict[str, Any]) -> str | None:
    """Add the items of a plan; describe the first that contradicts an entry, if any."""
    byte_io = WriteItemType.BYTE_IO
    for item in plan.items:
        name, data = item.index.fqn, item.tensor_data
        if item.type == byte_io or data is None:
            if isinstance(entries.setdefault(name, BytesStorageMetadata()), TensorStorageMetadata):
                return f"{name} is a plain value on one rank and a tensor on another"
            continue
        entry = entries.get(name)
        if entry is None:
            properties, size = data.properties, data.size
            entry = entries[name] = TensorStorageMetadata(properties=properties, size=size, chunks=[])
        elif not (
            isinstance(entry, TensorStorageMetadata)
            and entry.size == data.size
            and entry.properties.dtype == data.properties.dtype
        ):
            tensor = isinstance(entry, TensorStorageMetadata)
            other = f"{entry.properties.dtype} {tuple(entry.size)}" if tensor else "a plain value"
            own = f"{data.properties.dtype} {tuple(data.size)}"
            return f"{name} is {own} on one rank and {other} on another"
        entry.chunks.append(data.chunk)
    return None


def encode_metadata(metadata: Metadata, places: Mapping[MetadataIndex, StorageInfo]) -> bytes:
    """Encode `.metadata`, with `places` as DCP's storage data."""
    same: dict[Any, Any] = {}  # of equal values one object: a pickle refers to it where it comes again

    def one(value: Any) -> Any:
        return same.setdefault(value, value)

    def entry_of(entry: Any) -> Any:
        if not isinstance(entry, TensorStorageMetadata):
            return entry
        state: Any = cast("Any", entry.properties).__getstate__()
        properties = same.setdefault(state, entry.properties)
        chunks = [ChunkStorageMetadata(one(chunk.offsets), one(chunk.sizes)) for chunk in entry.chunks]
        return TensorStorageMetadata(properties, one(entry.size), chunks)

    def index_of(index: MetadataIndex) -> MetadataIndex:
        found = MetadataIndex(one(index.fqn))
        if index.offset is not None:
            object.__setattr__(found, "offset", one(index.offset))  # its constructor would make another
        return found

    return pickle.dumps(
        replace(
            metadata,
            state_dict_metadata={one(key): entry_of(e) for key, e in metadata.state_dict_metadata.items()},
            storage_data={index_of(index): place for index, place in places.items()},
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
    )


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
    index = read_index(content, path)
    with reading(path):
        found = Metadata(
            {name: _entry(entry) for name, entry in index.state_dict_metadata.items()},
            index.planner_data,
            {
                MetadataIndex(
                    key.fqn, None if key.offset is None else torch.Size(key.offset), key.index
                ): StorageInfo(place.relative_path, place.offset, place.length, place.transform_descriptors)
                for key, place in index.storage_data.items()
            },
        )
        vars(found)["mcore_data"] = index.mcore_data  # where Megatron-Core itself puts it
        return found


def _entry(entry: Tensor | Value) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(entry, Value):
        return BytesStorageMetadata()
    found = entry.properties
    dtype = getattr(torch, found.dtype)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {found.dtype!r:.80}")
    properties = TensorProperties(
        dtype,
        layout_named(found.layout),
        bool(found.requires_grad),
        _MEMORY_FORMATS[found.memory_format],
        bool(found.pin_memory),
    )
    chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
    return TensorStorageMetadata(properties, torch.Size(entry.size), chunks)


def entries(metadata: Metadata) -> SavedEntries:
    """Return the leaves of the nested state dict, by path, or else by key."""
    paths: dict[str, tuple[str | int, ...]] = metadata.planner_data or {}
    return {
        tuple(paths.get(key, (key,))): SavedTensor(
            shape=tuple(value.size), dtype=str(value.properties.dtype).removeprefix("torch.")
        )
        if isinstance(value, TensorStorageMetadata)
        else None
        for key, value in metadata.state_dict_metadata.items()
    }
