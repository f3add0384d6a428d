"""The zip archives of `torch.save`: locations and checksums of their records.

Only torch's form is accepted: stored records without comments, a directory right before the end. Every field
that torch's own reader (miniz) trusts is checked, so that both see the same archive: one flipped bit there
makes a chunk unreadable, or (the attribute "directory") makes it load as garbage.

Source of the structures: PKWARE APPNOTE 6.3.x, sections 4.3.7 (local header), 4.3.12 (central directory),
4.3.14 to 4.3.16 (end records, zip64), 4.5.3 (zip64 extra field).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Final, TypeAlias, final

from ckpt_core.formats.checksums import crc32

ReadAt: TypeAlias = Callable[[int, int], bytes]
"""(offset from the start of the zip, size) -> the bytes; fewer only where the zip ends."""

TAIL_BYTES: Final = 1024
"""The most bytes that torch writes after the payload of a zip of one tensor."""
HEAD_BYTES: Final = 1024
"""The most bytes before the payload."""

_BLOCK_BYTES: Final = 8 << 20
_LONGEST_COMMENT: Final = 0xFFFF
_END: Final = Struct("<4s4H2LH")
_LOCATOR: Final = Struct("<4sLQL")
_END64: Final = Struct("<4sQ2H2L4Q")
_CENTRAL: Final = Struct("<4s6H3L5H2L")
_LOCAL: Final = Struct("<4s5H3L2H")
_EXTRA: Final = Struct("<2H")
_ONES16: Final = 0xFFFF
_ONES32: Final = 0xFFFFFFFF
_ZIP64_EXTRA: Final = 1
_DATA_DESCRIPTOR_AND_UTF8: Final = 0x0808
_DIRECTORY_ATTRIBUTE: Final = 0x10


class ZipError(ValueError):
    """The bytes are not a complete zip as torch writes it."""


@final
@dataclass(frozen=True, slots=True)
class Record:
    """A record of the directory; offsets count from the start of the zip."""

    name: str
    size_bytes: int
    crc32: int
    header: int


@final
@dataclass(frozen=True, slots=True)
class Directory:
    """The records of a zip, by name, in the order of its directory.

    Attributes:
        root: the common prefix of all names, before a slash.
        start: the start of the directory, which is the end of the records.
    """

    root: str
    records: Mapping[str, Record]
    start: int

    @property
    def has_checksums(self) -> bool:
        """False if torch wrote the zip with CRC32 disabled."""
        return any(record.crc32 for record in self.records.values())

    def find(self, name: str) -> Record | None:
        """Return the record of that name below the root."""
        return self.records.get(f"{self.root}/{name}")

    def inner_name(self, record: Record) -> str:
        """Return the name of a record below the root."""
        return record.name.removeprefix(f"{self.root}/")

    def is_intact(self, record: Record, content: bytes) -> bool:
        """Return whether `content` is that of the record, as far as checksums tell."""
        same_size = len(content) == record.size_bytes
        return same_size and (crc32(content) == record.crc32 or not self.has_checksums)


def read_directory(read_at: ReadAt, size_bytes: int) -> Directory:
    """Read the directory at the end of a zip of that size."""
    try:
        return _read_directory(read_at, size_bytes)
    except (struct.error, UnicodeDecodeError) as error:
        raise _damaged() from error


def payload_offset(read_at: ReadAt, directory: Directory, record: Record) -> int:
    """Return the offset of a record's bytes, from its local header."""
    name = record.name.encode()
    header = read_at(record.header, _LOCAL.size + len(name))
    if len(header) != _LOCAL.size + len(name):
        raise _damaged()
    signature, _, flags, method, *_, name_bytes, extra_bytes = _LOCAL.unpack_from(header)
    start: int = record.header + len(header) + extra_bytes
    plain = signature == b"PK\3\4" and not flags & ~_DATA_DESCRIPTOR_AND_UTF8 and method == 0
    if not plain or name_bytes != len(name) or header[_LOCAL.size :] != name:
        raise ZipError(f"the header of {record.name!r:.80} is damaged")
    if start + record.size_bytes > directory.start:
        raise ZipError(f"{record.name!r:.80} is not inside it")
    return start


def _read_directory(read_at: ReadAt, size_bytes: int) -> Directory:
    tail = read_at(max(0, size_bytes - TAIL_BYTES), min(size_bytes, TAIL_BYTES))
    place = _find_end(tail)
    if place < 0 and len(tail) < size_bytes:
        longest = min(size_bytes, _END.size + _LONGEST_COMMENT)
        tail = read_at(size_bytes - longest, longest)
        place = _find_end(tail)
    if place < 0:
        raise ZipError("it has no end record")
    origin = size_bytes - len(tail)

    def read(offset: int, size: int) -> bytes:
        """Read, from the tail where possible."""
        if offset >= origin:
            return tail[offset - origin : offset - origin + size]
        return read_at(offset, size)

    num_records, start, size = _end_records(read, origin + place, size_bytes)
    content = read(start, size)
    if len(content) != size:
        raise _damaged()
    records = _records(content, num_records, start)
    if not records:
        raise _damaged()
    return Directory(next(iter(records)).partition("/")[0], records, start)


def _find_end(tail: bytes) -> int:
    return tail.rfind(b"PK\5\6", 0, max(0, len(tail) - _END.size + 4))


def _end_records(read: ReadAt, end_at: int, size_bytes: int) -> tuple[int, int, int]:
    """Return number of records, start and size of the directory.

    All end records must agree.
    """
    _, *disks, on_disk, total, size, start, comment = _END.unpack(read(end_at, _END.size))
    directory_end = end_at
    wide_at = end_at - _LOCATOR.size - _END64.size
    if wide_at >= 0 and read(wide_at + _END64.size, 4) == b"PK\6\7":
        directory_end = wide_at
        count, wide_size, wide_start = _wide_end(read, wide_at)
        # A field of all ones means: see the 64-bit record.
        for narrow, wide, ones in (
            (on_disk, count, _ONES16),
            (total, count, _ONES16),
            (size, wide_size, _ONES32),
            (start, wide_start, _ONES32),
        ):
            if narrow not in (wide, ones):
                raise _damaged()
        on_disk, total, size, start = count, count, wide_size, wide_start
    ends_well = end_at + _END.size + comment == size_bytes and start + size == directory_end
    if any(disks) or on_disk != total or not ends_well:
        raise _damaged()
    return total, start, size


def _wide_end(read: ReadAt, wide_at: int) -> tuple[int, int, int]:
    """Return number of records, size and start, from the 64-bit end record."""
    locator = _LOCATOR.unpack(read(wide_at + _END64.size, _LOCATOR.size))
    signature, length, _, _, *disks, on_disk, total, size, start = _END64.unpack(read(wide_at, _END64.size))
    ours = (signature, length, *disks) == (b"PK\6\6", _END64.size - 12, 0, 0) and on_disk == total
    if not ours or locator[1:] != (0, wide_at, 1):
        raise _damaged()
    return total, size, start


def _records(content: bytes, expected: int, directory_start: int) -> dict[str, Record]:
    records: dict[str, Record] = {}
    position, seen = 0, set[str]()
    while position < len(content):
        record, position = _record(content, position)
        if record.header + _LOCAL.size + record.size_bytes > directory_start:
            raise ZipError(f"{record.name!r:.80} is not inside it")
        records[record.name] = record
        seen.add(record.name.lower())  # torch looks names up without regard to case
    if position != len(content) or not len(seen) == len(records) == expected:
        raise _damaged()
    return records


def _record(content: bytes, position: int) -> tuple[Record, int]:
    """Return the record of the directory at `position`, and the position of the next."""
    (signature, _, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes, comment_bytes, disk,
     _, attributes, header) = _CENTRAL.unpack_from(content, position)  # fmt: skip
    name_at = position + _CENTRAL.size
    extra_at = name_at + name_bytes
    end = extra_at + extra_bytes
    if signature != b"PK\1\2" or comment_bytes or disk or end > len(content):
        raise _damaged()
    if flags & ~_DATA_DESCRIPTOR_AND_UTF8 or attributes & _DIRECTORY_ATTRIBUTE:
        raise _damaged()
    if _ONES32 in (size, packed, header):
        size, packed, header = _wide(content[extra_at:end], (size, packed, header))
    name = content[name_at:extra_at].decode()
    if method != 0 or packed != size:
        raise ZipError(f"{name!r:.80} is compressed, which torch never does: it may be an attack")
    return Record(name, size, crc, header), end


def _wide(extra: bytes, narrow: tuple[int, int, int]) -> tuple[int, int, int]:
    """Fill in the fields of a record that are in its zip64 field."""
    position = length = 0
    while position < len(extra):
        kind, length = _EXTRA.unpack_from(extra, position)
        position += _EXTRA.size
        if kind == _ZIP64_EXTRA:
            break
        position += length
    else:
        raise _damaged()
    content = extra[position : position + length]
    wide = iter([value for (value,) in struct.iter_unpack("<Q", content[: len(content) // 8 * 8])])
    size, packed, header = (value if value != _ONES32 else next(wide, -1) for value in narrow)
    if -1 in {size, packed, header}:
        raise _damaged()
    return size, packed, header


def _damaged() -> ZipError:
    return ZipError("its directory is damaged")


def verify_records(read_at: ReadAt, directory: Directory) -> None:
    """Read every record and compare it with its checksum, in bounded memory."""
    end = 0
    for record in sorted(directory.records.values(), key=lambda record: record.header):
        if record.header < end:
            raise ZipError(f"{record.name!r:.80} overlaps another record")
        start = payload_offset(read_at, directory, record)
        end = start + record.size_bytes
        crc = 0
        for offset in range(start, end, _BLOCK_BYTES):
            crc = crc32(read_at(offset, min(_BLOCK_BYTES, end - offset)), crc)
        if crc != record.crc32 and directory.has_checksums:
            raise ZipError(f"Bad CRC-32 for {record.name!r:.80}")
