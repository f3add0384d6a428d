"""DCP's `.metadata` as DCP's own objects."""

from __future__ import annotations

from typing import Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_core._torch_internals import StorageInfo, layout_named
from ckpt_core.formats.dcp_metadata import Tensor, Value, read_index, reading
from ckpt_core.types import SavedEntries, SavedTensor

# By the value of torch's `_MEM_FORMAT_ENCODING`.
_MEMORY_FORMATS: Final = {0: torch.contiguous_format, 1: torch.channels_last, 2: torch.preserve_format}


def load_metadata(content: bytes, path: str) -> Metadata:
    """Read a `.metadata` file.

    Nothing in it is executed, and its types are checked; `check_metadata` checks its values.

    Raises:
        UnsafeCheckpointError: it refers to anything but DCP's metadata classes.
        CorruptCheckpointError: it is not a pickle of `Metadata`, or refers to a path outside its directory.
    """
    index = read_index(content, path)
    with reading(path):
        return Metadata(
            {name: _entry(entry) for name, entry in index.state_dict_metadata.items()},
            index.planner_data,
            {
                MetadataIndex(
                    key.fqn, None if key.offset is None else torch.Size(key.offset), key.index
                ): StorageInfo(place.relative_path, place.offset, place.length, place.transform_descriptors)
                for key, place in index.storage_data.items()
            },
        )


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
        tuple(paths.get(key, (key,))): _describe(value) for key, value in metadata.state_dict_metadata.items()
    }


def _describe(value: object) -> SavedTensor | None:
    if not isinstance(value, TensorStorageMetadata):
        return None
    return SavedTensor(shape=tuple(value.size), dtype=str(value.properties.dtype).removeprefix("torch."))
