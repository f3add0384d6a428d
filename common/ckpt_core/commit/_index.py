"""The commands' view of DCP's `.metadata`, without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

from ckpt_core.errors import CheckpointError, CorruptCheckpointError, FileFailure, UnsafeCheckpointError
from ckpt_core.formats.chunks import ChunkTable
from ckpt_core.formats.consistency import check_metadata
from ckpt_core.formats.dcp_metadata import Index, Tensor, item_bytes, read_index
from ckpt_core.names import METADATA, chunks_name, data_rank


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """A tensor in `.metadata`: DCP's flattened name, global shape, torch's dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int

    @property
    def num_elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def list_tensors(content: bytes, source: str) -> list[TensorEntry]:
    """List every tensor of a `.metadata`, in its order; errors as by `read_index`."""
    return [
        TensorEntry(
            name=name,
            shape=entry.size,
            dtype=entry.properties.dtype,
            size_bytes=math.prod(entry.size) * item_bytes(entry.properties.dtype),
        )
        for name, entry in read_index(content, source).state_dict_metadata.items()
        if isinstance(entry, Tensor)
    ]


def index_failures(path: str, sizes: Mapping[str, int], read: Callable[[str], bytes]) -> list[FileFailure]:
    """List why a load would refuse our `.metadata`, alone or beside the chunk tables.

    Args:
        path: of `.metadata`.
        sizes: path of every file of the checkpoint -> bytes.
        read: path -> content.
    """
    part = path.removesuffix(METADATA)

    def size(data: str) -> int:
        if part + data not in sizes:
            raise FileNotFoundError(part + data)
        return sizes[part + data]

    try:
        index = read_index(read(path), path)
        check_metadata(index, path, size)
    except CorruptCheckpointError as error:
        return list(error.failures)
    except UnsafeCheckpointError as error:
        return [FileFailure(path=path, problem=str(error))]
    return _table_failures(part, index, read)


_Rows: TypeAlias = Mapping[tuple[str, str, tuple[int, ...] | None], tuple[int, int]]


def _table_failures(part: str, index: Index, read: Callable[[str], bytes]) -> list[FileFailure]:
    """Find the first entry of `.metadata` that differs from the chunk tables."""
    tables: dict[str, _Rows] = {}
    for key, place in index.storage_data.items():
        path = part + place.relative_path
        rank = data_rank(path)
        if rank is None:
            return [
                FileFailure(
                    path=path, problem=f"holds {key.fqn!r:.200}, but no rank writes a file of that name"
                )
            ]
        name = chunks_name(rank)
        try:
            if name not in tables:
                tables[name] = _rows(ChunkTable.from_bytes(read(name), source=name))
        except CheckpointError as error:
            return [FileFailure(path=name, problem=str(error))]
        except FileNotFoundError:
            return [FileFailure(path=name, problem="missing")]
        if tables[name].get((path, key.fqn, key.offset)) != (place.offset, place.length):
            return [FileFailure(path=path, problem=f"{key.fqn!r:.200} is at another place than {name} says")]
    return []


def _rows(table: ChunkTable) -> _Rows:
    return {
        (path, key, None if offsets is None else tuple(offsets)): (offset, size)
        for path, chunks in table.files.items()
        for key, offsets, offset, size in zip(
            chunks.columns.key,
            chunks.columns.shard_offsets,
            chunks.columns.offset,
            chunks.columns.size_bytes,
            strict=True,
        )
    }
