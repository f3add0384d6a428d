"""The locations of a checkpoint's raw bytes, from our chunk tables or DCP's zips."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Final, TypeAlias, final

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ckpt_core.dcp._metadata import StoredPlaces
from ckpt_core.dcp._torch_zip import legacy_payload, read_record, tensor_pickle
from ckpt_core.errors import CorruptCheckpointError, FileFailure
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
@dataclass(kw_only=True, slots=True)
class ChunkLocation:
    """One stored entry: a tensor chunk, or a byte entry.

    Attributes:
        payload: the chunk's raw bytes, of a byte entry all of it. None if the chunk's elements are not
            contiguous, or it is wrapped or transformed: then read the whole entry for `load_chunk`.
        reason: why there is no payload.
        wrapped: whether the chunk is a tensor made of others.
        strides: of a chunk that is raw bytes and not contiguous, in elements.
        transforms: stream extensions of DCP through which the entry was written; see `plain_entry`.
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
    strides: tuple[int, ...] | None = None
    transforms: tuple[str, ...] = ()

    @property
    def form(self) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Dtype and shape of a chunk; None for a byte entry."""
        return None if self.dtype is None or self.shape is None else (self.dtype, self.shape)


_Rows: TypeAlias = Mapping[tuple[str, tuple[int, ...] | None], int]


@final
class ChunkLocator:
    """Locator of the entries of one part of a checkpoint; reads nothing before `find`.

    Args:
        part: its sub-directory, "" for the checkpoint directory itself.
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
        self._metadata = metadata
        self._part = part
        self._directory = directory
        self._read_table = read_table
        self._read_at = read_at
        self._shapes: dict[int, dict[torch.Size, torch.Size]] = {}
        self._rows: dict[str, _Rows] = {}

    def find(self, indices: Iterable[MetadataIndex]) -> dict[MetadataIndex, ChunkLocation]:
        """Locate these entries.

        Raises:
            CorruptCheckpointError: the files contradict each other, or a zip is damaged.
        """
        by_file: defaultdict[str, list[tuple[MetadataIndex, ChunkLocation]]] = defaultdict(list)
        found: dict[MetadataIndex, ChunkLocation] = {}
        wanted, storage = list(indices), self._metadata.storage_data
        infos = (
            storage.take(wanted) if isinstance(storage, StoredPlaces) else map(storage.__getitem__, wanted)
        )
        for index, info in zip(wanted, infos, strict=True):
            path = f"{self._part}/{info.relative_path}" if self._part else info.relative_path
            dtype, shape = self._form(index)
            found[index] = place = ChunkLocation(
                path=path,
                key=index.fqn,
                offset=info.offset,
                size_bytes=info.length,
                dtype=dtype,
                shape=shape,
            )
            if info.transform_descriptors:
                place.transforms = tuple(info.transform_descriptors)
                place.reason = f"it was written through {', '.join(place.transforms)}"
            else:
                by_file[path].append((index, place))
        for path, entries in by_file.items():
            if self._read_at is None:
                chunks, rows, table = self._table(path, entries[0][0].fqn)
                for index, place in entries:
                    self._take(place, chunks, rows.get((index.fqn, index.offset)), table)
                continue
            entries.sort(key=lambda entry: entry[1].offset)
            ends = [(place.offset, place.offset + place.size_bytes) for _, place in entries]
            # What is read of a zip that is as torch usually writes it.
            windows = [((a, min(b, a + HEAD_BYTES)), (max(a, b - TAIL_BYTES), b)) for a, b in ends]
            read_at = _ahead(path, self._read_at, chain.from_iterable(windows))
            for index, place in entries:
                found[index] = self._by_zip(place, read_at)
        return found

    def _form(self, index: MetadataIndex) -> tuple[torch.dtype, torch.Size] | tuple[None, None]:
        """Return dtype and shape of a chunk; nothing of a byte entry."""
        entry = self._metadata.state_dict_metadata[index.fqn]
        if not isinstance(entry, TensorStorageMetadata):
            return None, None
        shapes = self._shapes.get(id(entry.chunks))  # tensors that are cut alike share them
        if shapes is None:
            shapes = self._shapes[id(entry.chunks)] = {each.offsets: each.sizes for each in entry.chunks}
        if index.offset is None:
            raise KeyError(index)
        return entry.properties.dtype, shapes[index.offset]

    def _corrupt(self, path: str, key: str, problem: str) -> CorruptCheckpointError:
        place, what = f"{self._directory}/{path}" if self._directory else path, f"{key!r:.200}: {problem}"
        return CorruptCheckpointError(f"{place}: {what}", failures=(FileFailure(path=path, problem=what),))

    def _table(self, path: str, key: str) -> tuple[FileChunks, _Rows, str]:
        """Return the chunks of a file, their rows, and the name of the table."""
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

    def _take(self, place: ChunkLocation, chunks: FileChunks, row: int | None, table: str) -> None:
        """Add to a location what the chunk table says."""
        if row is None:
            raise self._corrupt(place.path, place.key, f"is in .metadata but not in {table}")
        columns, form = chunks.columns, place.form
        said = columns.dtype[row], columns.payload_bytes[row]
        expected: tuple[str | None, int | None] = None, None
        if form is not None and said != (None, None):
            dtype, shape = form
            expected = str(dtype)[len("torch.") :], prod(shape) * dtype.itemsize
        problem = ""
        if (columns.offset[row], columns.size_bytes[row]) != (place.offset, place.size_bytes):
            problem = (
                f".metadata says {place.size_bytes} bytes at {place.offset}, the table "
                f"{columns.size_bytes[row]} at {columns.offset[row]}"
            )
        elif said != expected:
            problem = (
                f".metadata says {expected[1]} bytes of {expected[0]}, the table {said[1]} of {said[0]!s:.40}"
            )
        if problem:
            raise self._corrupt(place.path, place.key, f"{problem} (as {table} has it)")
        if form is not None and said[0] is None:
            place.wrapped = True
            return
        payload_at, payload_bytes = columns.payload_offset[row], columns.payload_bytes[row]
        place.payload = Payload(
            path=place.path,
            key=place.key,
            offset=place.offset if payload_at is None else payload_at,
            size_bytes=place.size_bytes if payload_bytes is None else payload_bytes,
            crc32=chunks.crcs[row],
            block_bytes=chunks.block_bytes,
            block_crcs=chunks.block_crcs[chunks.first_blocks[row] : chunks.first_blocks[row + 1]],
        )

    def _by_zip(self, place: ChunkLocation, read_at: ReadAt) -> ChunkLocation:
        if place.form is None:
            return _with_payload(place, 0, place.size_bytes, None)
        try:
            return _raw(place, *place.form, _within(read_at, place.offset, place.size_bytes))
        except ZipError as error:
            raise self._corrupt(place.path, place.key, f"not a whole torch zip: {error}") from error


def _with_payload(place: ChunkLocation, offset: int, size_bytes: int, crc32: int | None) -> ChunkLocation:
    at = place.offset + offset
    payload = Payload(path=place.path, key=place.key, offset=at, size_bytes=size_bytes, crc32=crc32)
    return replace(place, payload=payload)


def _raw(place: ChunkLocation, dtype: torch.dtype, shape: tuple[int, ...], read_at: ReadAt) -> ChunkLocation:
    """Locate the raw bytes of a tensor in its entry, if they are one after another.

    Raises:
        ZipError: the entry is damaged, or not the tensor that `.metadata` describes.
    """
    expected = prod(shape) * dtype.itemsize
    small = legacy_payload(read_at, place.size_bytes, dtype, shape)
    if small is not None:
        return _with_payload(place, small[0], expected, small[1])
    directory = read_directory(read_at, place.size_bytes)
    order = read_record(read_at, directory, "byteorder")
    data_pickle = read_record(read_at, directory, "data.pkl")
    record = directory.find("data/0")
    if data_pickle is None or record is None:
        raise ZipError("it has no 'data.pkl' or no 'data/0'")
    try:  # comparing is faster than reading
        is_usual = data_pickle == tensor_pickle(dtype, shape)
    except KeyError:  # a dtype that torch.save does not write
        is_usual = False
    # Without elements there is nothing to lie otherwise, and torch gives such tensors any strides.
    if (expected or record.size_bytes) and not is_usual:
        try:
            wrapped = not _OF_WRAPPED.isdisjoint(survey(data_pickle)[0])
        except PickleError as error:
            return replace(place, reason=f"its pickle is not that of a tensor: {error}")
        reason = "its elements are not contiguous, or it has more to it than these"
        return replace(place, reason=reason, wrapped=wrapped)
    if record.size_bytes != expected:
        raise ZipError(f"it has {record.size_bytes} bytes, its shape and dtype need {expected}")
    if (order or b"little") != _BYTE_ORDER:
        return replace(place, reason="it was written on a machine with another byte order")
    crc = record.crc32 if directory.has_checksums else None
    return _with_payload(place, payload_offset(read_at, directory, record), expected, crc)
