"""The locations of a checkpoint's raw bytes, from our chunk tables or DCP's zips."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Final, TypeAlias, final

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ckpt_core._torch_internals import StorageInfo
from ckpt_core.dcp._torch_zip import legacy_payload, read_record, tensor_pickle
from ckpt_core.errors import CorruptCheckpointError, FileFailure, IncompatibleCheckpointError
from ckpt_core.formats.chunks import ChunkTable, FileChunks
from ckpt_core.formats.pickles import PickleError, survey
from ckpt_core.formats.zips import (
    HEAD_BYTES,
    TAIL_BYTES,
    ReadAt,
    ZipError,
    payload_offset,
    read_directory,
)
from ckpt_core.names import chunks_name, data_rank
from ckpt_core.reading import Payload

ReadFile: TypeAlias = Callable[[str, int, int], bytes]
"""(path, offset, size) -> the bytes; fewer only where the file ends."""

_MAX_GAP_BYTES: Final = 16 << 10
_MAX_SPAN_BYTES: Final = 4 << 20


def _ahead(path: str, read: ReadFile, windows: Iterable[tuple[int, int]]) -> ReadAt:
    """Return a function that reads neighbouring windows of a file at once.

    The last two requests are kept. What is in no window is read alone.
    """
    spans: list[tuple[int, int]] = []
    for start, end in windows:
        first, last = spans[-1] if spans else (start, -_MAX_GAP_BYTES - 1)
        if start - last <= _MAX_GAP_BYTES and max(end, last) - first <= _MAX_SPAN_BYTES:
            spans[-1] = first, max(end, last)
        else:
            spans.append((start, end))
    kept: deque[tuple[int, bytes]] = deque(maxlen=2)

    def read_at(offset: int, size: int) -> bytes:
        for start, content in kept:
            if start <= offset and offset + size <= start + len(content):
                return content[offset - start : offset - start + size]
        start, end = spans[bisect_right(spans, (offset, sys.maxsize)) - 1] if spans else (offset, offset)
        # If it was read already, it was cut off by the end of the file.
        if not start <= offset <= offset + size <= end or any(start == each for each, _ in kept):
            return read(path, offset, size)
        kept.appendleft((start, read(path, start, end - start)))
        return kept[0][1][offset - start : offset - start + size]

    return read_at


def _within(read_at: ReadAt, origin: int, size_bytes: int) -> ReadAt:
    """Return a function that reads only the part of that size at `origin`."""

    def read(offset: int, size: int) -> bytes:
        offset, end = max(0, offset), min(size_bytes, offset + size)
        return read_at(origin + offset, end - offset) if offset < end else b""

    return read


_OF_WRAPPED: Final = frozenset(
    {("torch._tensor", "_rebuild_from_type_v2"), ("torch._utils", "_rebuild_wrapper_subclass")}
)
_BYTE_ORDER: Final = sys.byteorder.encode()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkLocation:
    """One stored entry: a tensor chunk, or a byte entry.

    Attributes:
        path: of its file, POSIX-relative to the checkpoint directory.
        key: DCP's flattened name.
        offset: of the whole entry in the file.
        dtype: of the chunk; None for a byte entry, as is `shape`.
        payload: the chunk's raw bytes, of a byte entry all of it. None if the chunk's elements are not
            contiguous, or it is wrapped: then read the whole entry and pass it to `load_chunk`.
        reason: why there is no payload.
        wrapped: whether the chunk is a tensor made of others.
    """

    path: str
    key: str
    offset: int
    size_bytes: int
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    payload: Payload | None = None
    reason: str = ""
    wrapped: bool = False

    @property
    def form(self) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Dtype and shape of a chunk; None for a byte entry."""
        return None if self.dtype is None or self.shape is None else (self.dtype, self.shape)


_Entry: TypeAlias = tuple[MetadataIndex, StorageInfo]
_Rows: TypeAlias = Mapping[tuple[str, tuple[int, ...] | None], int]


@final
class ChunkLocator:
    """Locator of the entries of one part of a checkpoint; reads nothing before `find`.

    Args:
        metadata: of the part, from `load_metadata`.
        part: its sub-directory, "" for the checkpoint directory itself.
        directory: of the checkpoint, for errors.
        read_table: returns the chunk table of a rank, which the caller has verified and keeps.
        read_at: reads a data file, by its path in the checkpoint directory: instead of `read_table`, for
            checkpoints of stock DCP, which have no tables.
    """

    def __init__(
        self,
        metadata: Metadata,
        *,
        part: str = "",
        directory: str = "",
        read_table: Callable[[int], ChunkTable] | None = None,
        read_at: ReadFile | None = None,
    ) -> None:
        if (read_table is None) == (read_at is None):
            raise ValueError("exactly one of read_table and read_at must be given")
        self._metadata = metadata
        self._infos: Mapping[MetadataIndex, StorageInfo] = metadata.storage_data
        self._part = part
        self._directory = directory
        self._read_table = read_table
        self._read_at = read_at
        self._shapes: dict[str, dict[torch.Size, torch.Size]] = {}
        self._rows: dict[str, _Rows] = {}

    def find(self, indices: Iterable[MetadataIndex]) -> dict[MetadataIndex, ChunkLocation]:
        """Locate these entries.

        Raises:
            KeyError: the part has no such entry.
            CorruptCheckpointError: the files contradict each other, or a zip is damaged.
            IncompatibleCheckpointError: an entry was written through a stream extension of DCP.
        """
        by_file: defaultdict[str, list[_Entry]] = defaultdict(list)
        for index in indices:
            info = self._infos[index]
            if info.transform_descriptors:
                raise IncompatibleCheckpointError(
                    f"{self._name(self._path(info), index.fqn)} uses the DCP stream extensions "
                    f"{list(info.transform_descriptors)}, which this version does not read; "
                    "load it with stock dcp.load"
                )
            by_file[self._path(info)].append((index, info))
        found: dict[MetadataIndex, ChunkLocation] = {}
        for path, entries in by_file.items():
            if self._read_at is None:
                self._find_by_table(path, entries, found)
            else:
                self._find_by_zip(path, entries, found, self._read_at)
        return found

    def _path(self, info: StorageInfo) -> str:
        return f"{self._part}/{info.relative_path}" if self._part else info.relative_path

    def _name(self, path: str, key: str) -> str:
        place = f"{self._directory}/{path}" if self._directory else path
        return f"{place}: {key!r:.200}"

    def _shape(self, index: MetadataIndex) -> tuple[torch.dtype, torch.Size] | None:
        """Return dtype and shape of a chunk; None for a byte entry."""
        entry = self._metadata.state_dict_metadata[index.fqn]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        shapes = self._shapes.get(index.fqn)
        if shapes is None:
            shapes = self._shapes[index.fqn] = {chunk.offsets: chunk.sizes for chunk in entry.chunks}
        if index.offset is None:
            raise KeyError(index)
        return entry.properties.dtype, shapes[index.offset]

    def _corrupt(self, path: str, key: str, problem: str) -> CorruptCheckpointError:
        failure = FileFailure(path=path, problem=f"{key!r:.200}: {problem}")
        return CorruptCheckpointError(f"{self._name(path, key)}: {problem}", failures=(failure,))

    # -- ours

    def _find_by_table(
        self, path: str, entries: Sequence[_Entry], found: dict[MetadataIndex, ChunkLocation]
    ) -> None:
        chunks, rows, table_name = self._table(path, entries[0][0].fqn)
        for index, info in entries:
            row = rows.get((index.fqn, index.offset))
            if row is None:
                raise self._corrupt(path, index.fqn, f"is in .metadata but not in {table_name}")
            form = self._shape(index)
            problem = _contradiction(chunks, row, info, form)
            if problem:
                raise self._corrupt(path, index.fqn, f"{problem} (as {table_name} has it)")
            columns = chunks.columns
            if form is not None and columns.dtype[row] is None:
                found[index] = replace(_location(path, index.fqn, info, form), wrapped=True)
                continue
            payload_at, payload_bytes = columns.payload_offset[row], columns.payload_bytes[row]
            found[index] = replace(
                _location(path, index.fqn, info, form),
                payload=Payload(
                    path=path,
                    key=index.fqn,
                    offset=info.offset if payload_at is None else payload_at,
                    size_bytes=info.length if payload_bytes is None else payload_bytes,
                    crc32=chunks.crcs[row],
                    block_bytes=chunks.block_bytes,
                    block_crcs=chunks.block_crcs[chunks.first_blocks[row] : chunks.first_blocks[row + 1]],
                ),
            )

    def _table(self, path: str, key: str) -> tuple[FileChunks, _Rows, str]:
        rank = data_rank(path)
        if rank is None or self._read_table is None:
            raise self._corrupt(path, key, "is in a file that no rank has written")
        name = chunks_name(rank)
        table = self._read_table(rank)
        if path not in table.files:
            raise self._corrupt(path, key, f"is in a file that {name} does not list")
        chunks = table.files[path]
        rows = self._rows.get(path)
        if rows is None:
            columns = zip(chunks.columns.key, chunks.columns.shard_offsets, strict=True)
            rows = self._rows[path] = {
                (key, None if offsets is None else tuple(offsets)): row
                for row, (key, offsets) in enumerate(columns)
            }
        return chunks, rows, name

    # -- stock DCP's

    def _find_by_zip(
        self, path: str, entries: list[_Entry], found: dict[MetadataIndex, ChunkLocation], read: ReadFile
    ) -> None:
        entries.sort(key=lambda entry: entry[1].offset)
        ends = [(info.offset, info.offset + info.length) for _, info in entries]
        # What is read of a zip that is as torch usually writes it.
        windows = [((a, min(b, a + HEAD_BYTES)), (max(a, b - TAIL_BYTES), b)) for a, b in ends]
        read_at = _ahead(path, read, chain.from_iterable(windows))
        for index, info in entries:
            form = self._shape(index)
            place = _location(path, index.fqn, info, form)
            offset, size, crc = 0, info.length, None
            try:
                if form is not None:
                    offset, size, crc = _raw(*form, _within(read_at, info.offset, info.length), info.length)
            except _NotRawError as error:
                found[index] = replace(place, reason=str(error), wrapped=error.wrapped)
                continue
            except _ContradictionError as error:
                raise self._corrupt(path, index.fqn, str(error)) from error
            except ZipError as error:
                raise self._corrupt(path, index.fqn, f"not a whole torch zip: {error}") from error
            payload = Payload(
                path=path, key=index.fqn, offset=info.offset + offset, size_bytes=size, crc32=crc
            )
            found[index] = replace(place, payload=payload)


class _ContradictionError(ValueError):
    pass


class _NotRawError(ValueError):
    """The tensor is not the bytes of one record; `wrapped` if it is made of others."""

    def __init__(self, reason: str, *, wrapped: bool = False) -> None:
        super().__init__(reason)
        self.wrapped = wrapped


def _contradiction(
    chunks: FileChunks, row: int, info: StorageInfo, form: tuple[torch.dtype, torch.Size] | None
) -> str:
    """Describe how `.metadata` and the chunk table differ; "" if they do not."""
    columns = chunks.columns
    if (columns.offset[row], columns.size_bytes[row]) != (info.offset, info.length):
        return (
            f".metadata says {info.length} bytes at {info.offset}, the table "
            f"{columns.size_bytes[row]} at {columns.offset[row]}"
        )
    said = columns.dtype[row], columns.payload_bytes[row]
    if form is None or said == (None, None):
        expected: tuple[str | None, int | None] = None, None
    else:
        expected = str(form[0])[len("torch.") :], prod(form[1]) * form[0].itemsize
    if said != expected:
        return f".metadata says {expected[1]} bytes of {expected[0]}, the table {said[1]} of {said[0]!s:.40}"
    return ""


def _location(
    path: str, key: str, info: StorageInfo, form: tuple[torch.dtype, torch.Size] | None
) -> ChunkLocation:
    dtype, shape = form or (None, None)
    return ChunkLocation(
        path=path, key=key, offset=info.offset, size_bytes=info.length, dtype=dtype, shape=shape
    )


def _raw(
    dtype: torch.dtype, shape: torch.Size, read_at: ReadAt, size_bytes: int
) -> tuple[int, int, int | None]:
    """Return offset, size and CRC-32 of the raw bytes of a tensor in its entry.

    Raises:
        _NotRawError: they are not one after another.
        ZipError: the entry is damaged.
        _ContradictionError: it is not the tensor that `.metadata` describes.
    """
    expected = prod(shape) * dtype.itemsize
    small = legacy_payload(read_at, size_bytes, dtype, shape)
    if small is not None:
        return small[0], expected, small[1]
    directory = read_directory(read_at, size_bytes)
    order = read_record(read_at, directory, "byteorder")
    data_pickle = read_record(read_at, directory, "data.pkl")
    record = directory.find("data/0")
    if data_pickle is None or record is None:
        raise ZipError("it has no 'data.pkl' or no 'data/0'")
    # Without elements there is nothing to lie otherwise, and torch gives such tensors any strides.
    if (expected or record.size_bytes) and not _is_usual(data_pickle, dtype, shape):
        try:
            wrapped = not _OF_WRAPPED.isdisjoint(survey(data_pickle)[0])
        except PickleError as error:
            raise _NotRawError(f"its pickle is not that of a tensor: {error}") from error
        raise _NotRawError(
            "its elements are not contiguous, or it has more to it than these", wrapped=wrapped
        )
    if record.size_bytes != expected:
        raise _ContradictionError(f"has {record.size_bytes} bytes, its shape and dtype need {expected}")
    if (order or b"little") != _BYTE_ORDER:
        raise _NotRawError("it was written on a machine with another byte order")
    crc = record.crc32 if directory.has_checksums else None
    return payload_offset(read_at, directory, record), expected, crc


def _is_usual(data_pickle: bytes, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Return whether a pickle is the usual one; comparing is faster than reading."""
    try:
        return data_pickle == tensor_pickle(dtype, shape)
    except KeyError:  # a dtype that torch.save does not write
        return False
