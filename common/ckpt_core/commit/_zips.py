"""Whether a torch zip is whole: every CRC32 inside it, and every field that torch's own reader believes.

Python's `zipfile` checks the CRC32s but forgives much in the directory that miniz, inside torch, does not:
one flipped bit there makes a chunk unreadable, or (the attribute "directory") makes it load as garbage.
"""

from __future__ import annotations

import io
import lzma
import struct
import zipfile
import zlib
from typing import IO, Final, final

_BLOCK_BYTES: Final = 8 << 20
_BROKEN: Final = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    ValueError,
    LookupError,
    EOFError,
    OverflowError,
    RuntimeError,
)
_END: Final = struct.Struct("<4s4H2LH")
_LOCATOR: Final = struct.Struct("<4sLQL")
_END64: Final = struct.Struct("<4sQ2H2L4Q")
_RECORD_SIZE: Final = 46
_RECORD_LENGTHS: Final = struct.Struct("<3H")
_RECORD_LENGTHS_AT: Final = 28
_DATA_DESCRIPTOR_AND_UTF8: Final = 0x0808
_DIRECTORY_ATTRIBUTE: Final = 0x10


def zip_problem(stream: IO[bytes], offset: int, size: int) -> str | None:
    """Read the zip at `offset` through and say what is wrong with it, or None."""
    window = _Window(stream, offset, size)
    try:
        with zipfile.ZipFile(window) as archive:
            records = archive.infolist()
            if not any(record.CRC for record in records):
                return "written with torch's CRC32 switched off, so that nothing can be verified"
            if not all(map(_is_plain, records)) or not _ends_well(window, archive):
                return "not a whole torch zip: its directory is damaged"
            for record in records:
                with archive.open(record) as content:
                    while content.read(_BLOCK_BYTES):
                        pass
    except _BROKEN as error:
        return f"not a whole torch zip: {error}"
    return None


def _is_plain(record: zipfile.ZipInfo) -> bool:
    """Whether a record of the directory says what torch says of all its records."""
    return (
        record.flag_bits | _DATA_DESCRIPTOR_AND_UTF8 == _DATA_DESCRIPTOR_AND_UTF8
        and record.compress_type == zipfile.ZIP_STORED
        and record.compress_size == record.file_size
        and record.volume == 0
        and not record.comment
        and not record.external_attr & _DIRECTORY_ATTRIBUTE
    )


def _ends_well(window: _Window, archive: zipfile.ZipFile) -> bool:
    """Whether the records that close a zip, all of which miniz believes, describe its directory."""
    end_at = window.size - _END.size - len(archive.comment)
    _, *disks, on_disk, total, size, start, _ = _END.unpack(window.read_at(end_at, _END.size))
    # A field of all ones means: see the 64-bit record.
    counts, places = {on_disk, total} - {0xFFFF}, {(size, start)} - {(0xFFFFFFFF, 0xFFFFFFFF)}
    locator_at, directory_end = end_at - _LOCATOR.size, end_at
    signature, disk, end64_at, num_disks = _LOCATOR.unpack(window.read_at(locator_at, _LOCATOR.size))
    if signature == b"PK\6\7":
        directory_end = locator_at - _END64.size
        end64 = _END64.unpack(window.read_at(directory_end, _END64.size))
        if (end64_at, *end64[:2], disk, num_disks) != (directory_end, b"PK\6\6", _END64.size - 12, 0, 1):
            return False
        disks += end64[4:6]
        counts |= set(end64[6:8])
        places |= {end64[8:10]}
    length = directory_end - archive.start_dir
    directory = window.read_at(archive.start_dir, length)
    return (
        not any(disks)
        and counts == {len(archive.infolist())}
        and places == {(length, archive.start_dir)}
        and _lengths_add_up(directory)
    )


def _lengths_add_up(directory: bytes) -> bool:
    """Whether the records of a directory, one after another, end where the directory ends."""
    position = 0
    while position < len(directory):
        position += _RECORD_SIZE + sum(_RECORD_LENGTHS.unpack_from(directory, position + _RECORD_LENGTHS_AT))
    return position == len(directory)


@final
class _Window(io.RawIOBase):
    """A part of a seekable stream, as a read-only stream of its own."""

    def __init__(self, stream: IO[bytes], start: int, size: int) -> None:
        self.size = size
        self._stream = stream
        self._start = start
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError("it points before its own start")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        left = max(0, self.size - self._position)
        self._stream.seek(self._start + self._position)
        content = self._stream.read(left if size < 0 else min(size, left))
        self._position += len(content)
        return content

    def read_at(self, position: int, size: int) -> bytes:
        self.seek(position)
        return self.read(size)
