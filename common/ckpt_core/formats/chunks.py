"""The chunk table of a rank: location and checksums of the chunks it wrote.

Each rank writes its own, as a file like any other, so that nothing per tensor travels to the coordinator. All
columns but the checksums stay the same from save to save; they are encoded once per layout and kept as bytes.
The checksums follow as hex digits of little-endian 32-bit numbers, so that a save makes no object per chunk.
The table is compressed, to a tenth, and read as hostile input: it is checked before use.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate, chain
from struct import iter_unpack
from typing import Any, Final, final

from ckpt_core.formats.codec import Fields, corrupt, count, file_paths
from ckpt_core.names import FORMAT_VERSION
from ckpt_core.types import ChunkEntry

BLOCK_BYTES: Final = 1 << 20
"""Payloads larger than this have a checksum per block of this size, so that a part can be verified."""

_MAX_TABLE_BYTES: Final = 1 << 30
_INT: Final = frozenset({int})
_TEXT: Final = frozenset({str})
_NONE: Final = frozenset({type(None)})
_COLUMNS: Final = {
    "key": _TEXT,
    "shard_offsets": frozenset({list}) | _NONE,
    "offset": _INT,
    "size_bytes": _INT,
    "payload_offset": _INT | _NONE,
    "payload_bytes": _INT | _NONE,
    "dtype": _TEXT | _NONE,
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkColumns:
    """Columns of the chunks of one data file, in file order; see `ChunkEntry`."""

    key: Sequence[str]
    shard_offsets: Sequence[Sequence[int] | None]
    offset: Sequence[int]
    size_bytes: Sequence[int]
    payload_offset: Sequence[int | None]
    payload_bytes: Sequence[int | None]
    dtype: Sequence[str | None]

    def encode(self) -> bytes:
        """Encode the columns for the table; reusable while the layout is unchanged."""
        return _encode({name: getattr(self, name) for name in _COLUMNS})


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TableEntry:
    """The entry of one data file in the table.

    Attributes:
        columns: the result of `ChunkColumns.encode`.
        lengths: of the chunks, which follow one another in the file, int64.
        crcs: one CRC-32 per chunk, little-endian uint32.
        block_crcs: CRC-32s of the blocks of payloads larger than `BLOCK_BYTES`, chunk after chunk, likewise.
    """

    path: str
    size_bytes: int
    num_chunks: int
    columns: bytes
    crcs: bytes
    block_crcs: bytes = b""
    lengths: bytes = b""

    def encode(self) -> bytes:
        """Encode this entry for the table."""
        return b'{"path":%b,"size_bytes":%d,"chunks":%b,"crc32":"%b","block_crc32":"%b"}' % (
            _encode(self.path),
            self.size_bytes,
            self.columns,
            self.crcs.hex().encode(),
            self.block_crcs.hex().encode(),
        )


def encode_table(entries: Iterable[TableEntry], *, beside: Collection[str] = ()) -> bytes:
    """Encode a chunk table.

    `beside` are the rank's other files whose names are not recognisable as ours. The table is written before
    them, so that it identifies them if the save does not finish.
    """
    files = b",".join(entry.encode() for entry in entries)
    others = b',"beside":%b' % _encode(sorted(beside)) if beside else b""
    table = b'{"format_version":%d,"block_bytes":%d%b,"files":[%b]}' % (
        FORMAT_VERSION,
        BLOCK_BYTES,
        others,
        files,
    )
    return zlib.compress(table, level=1)


def decode_table(content: bytes) -> bytes:
    """Return the JSON text of a chunk table."""
    decompressor = zlib.decompressobj()
    try:
        text = decompressor.decompress(content, _MAX_TABLE_BYTES)
    except zlib.error as error:
        raise ValueError(f"not compressed by zlib ({error})") from error
    if not decompressor.eof or decompressor.unused_data:
        raise ValueError("cut off, larger than any table, or with more behind it")
    return text


def table_fields(content: bytes, *, source: str) -> AbstractContextManager[Fields]:
    """Read a compressed table as hostile input; `source` names it in errors.

    Raises:
        IncompatibleCheckpointError: it was written by a newer version.
        CorruptCheckpointError: it is malformed; the context makes one of any ValueError in it.
    """
    try:
        text = decode_table(content)
    except ValueError as error:
        raise corrupt(source, f"is malformed: {error}") from error
    return Fields.parse(text, source=source)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class FileChunks:
    """The chunks of one data file, in file order; each is built on access."""

    path: str
    size_bytes: int
    columns: ChunkColumns
    crcs: Sequence[int]
    block_bytes: int
    block_crcs: Sequence[int]
    first_blocks: Sequence[int]

    def __len__(self) -> int:
        return len(self.crcs)

    def __getitem__(self, place: int) -> ChunkEntry:
        columns, shard_offsets = self.columns, self.columns.shard_offsets[place]
        return ChunkEntry(
            path=self.path,
            key=columns.key[place],
            shard_offsets=None if shard_offsets is None else tuple(shard_offsets),
            offset=columns.offset[place],
            size_bytes=columns.size_bytes[place],
            crc32=self.crcs[place],
            payload_offset=columns.payload_offset[place],
            payload_bytes=columns.payload_bytes[place],
            dtype=columns.dtype[place],
            block_bytes=self.block_bytes,
            block_crcs=self.block_crcs[self.first_blocks[place] : self.first_blocks[place + 1]],
        )

    def __iter__(self) -> Iterator[ChunkEntry]:
        return map(self.__getitem__, range(len(self)))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkTable:
    """A decoded chunk table: path of a data file -> its chunks."""

    files: Mapping[str, FileChunks]

    @classmethod
    def from_bytes(cls, content: bytes, *, source: str) -> ChunkTable:
        """Read a table; `source` names it in errors.

        Raises:
            IncompatibleCheckpointError: it was written by a newer version.
            CorruptCheckpointError: it is malformed, or holds impossible values.
        """
        with table_fields(content, source=source) as fields:
            block_bytes = fields.count("block_bytes", least=1)
            files = [_file(each, block_bytes) for each in fields.objects("files")]
            file_paths([file.path for file in files])
            return cls(files={file.path: file for file in files})

    def __iter__(self) -> Iterator[ChunkEntry]:
        return chain.from_iterable(self.files.values())


def _file(fields: Fields, block_bytes: int) -> FileChunks:
    size = fields.count("size_bytes")
    columns = _columns(fields.get("chunks", dict))
    _check_ranges(columns, size)
    sizes = (payload or 0 for payload in columns.payload_bytes)
    num_blocks = [-(-each // block_bytes) if each > block_bytes else 0 for each in sizes]
    return FileChunks(
        path=fields.get("path", str),
        size_bytes=size,
        columns=columns,
        crcs=_crcs(fields.get("crc32", str), len(num_blocks)),
        block_bytes=block_bytes,
        block_crcs=_crcs(fields.get("block_crc32", str), sum(num_blocks)),
        first_blocks=tuple(accumulate(num_blocks, initial=0)),
    )


def _columns(columns: dict[str, Any]) -> ChunkColumns:
    """Check types by column, which costs a tenth of a check by row."""
    lengths = {len(columns[name]) if type(columns.get(name)) is list else -1 for name in _COLUMNS}
    if len(lengths) != 1 or -1 in lengths:
        raise ValueError("'chunks' should hold columns of equal length")
    for name, kinds in _COLUMNS.items():
        if not kinds.issuperset(map(type, columns[name])):
            raise ValueError(f"'chunks.{name}' holds values of the wrong type")
    if not _INT.issuperset(map(type, chain.from_iterable(filter(None, columns["shard_offsets"])))):
        raise ValueError("'chunks.shard_offsets' should hold lists of integers")
    return ChunkColumns(**{name: columns[name] for name in _COLUMNS})


def _check_ranges(columns: ChunkColumns, file_bytes: int) -> None:
    """Check that chunks are inside their file, and payloads inside their chunks."""
    ranges = zip(
        columns.offset, columns.size_bytes, columns.payload_offset, columns.payload_bytes, strict=True
    )
    for index, (offset, size, payload_offset, payload_bytes) in enumerate(ranges):
        end = offset + size
        if not 0 <= offset <= end <= file_bytes:
            raise ValueError(f"the chunk of {columns.key[index]!r:.80} is not inside its file")
        if payload_offset is None and payload_bytes is None:
            continue
        if payload_offset is None or payload_bytes is None:
            raise ValueError(f"the payload of {columns.key[index]!r:.80} has only one of offset and size")
        if not offset <= payload_offset <= payload_offset + payload_bytes <= end:
            raise ValueError(f"the payload of {columns.key[index]!r:.80} is not inside its chunk")
    for shard_offsets in filter(None, columns.shard_offsets):
        count(min(shard_offsets), "shard_offsets")
        count(max(shard_offsets), "shard_offsets")


def _crcs(text: str, expected: int) -> tuple[int, ...]:
    content = bytes.fromhex(text)
    if len(content) != 4 * expected:
        raise ValueError(f"there should be {expected} checksums of 8 hex digits each")
    return tuple(value for (value,) in iter_unpack("<I", content))


def _encode(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
