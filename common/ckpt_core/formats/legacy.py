"""Small tensors and plain values in the layout that torch had before zips.

Stock `torch.load`, and so DCP, reads it: a magic number, a version, a value that readers ignore, the pickle
of the tensor, the keys of its storages, the number of elements, and the payload. The ignored value is an
integer of ours: CRC-32 and size of the payload, and as many zeros as align it. Of a plain value, the payload
is the pickle itself, and an empty list of keys.
"""

from __future__ import annotations

import struct
from typing import Final

from ckpt_core.formats.checksums import crc32
from ckpt_core.formats.zips import ReadAt, ZipError

_START: Final = b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\2M\xe9\3.\x80\2\x8a"
"""The pickles of torch's magic number and version, and the beginning of one of an integer."""
CRC_FIELD: Final = len(_START) + 1
"""Offset of the CRC-32."""
_INFO: Final = struct.Struct("<II")
_HEAD_BYTES: Final = CRC_FIELD + _INFO.size
_NO_KEYS: Final = b"\x80\2]."
_GRAIN_BYTES: Final = 64


def head(rest: bytes, size_bytes: int, *, offset: int, alignment: int) -> bytes:
    """Return the bytes before the payload of a tensor, without its CRC-32.

    `rest` goes from the pickle of the tensor to the number of elements. The payload begins at a multiple of
    `alignment`, 128 at most, if the entry begins at `offset` of the file; it has less than 4 GiB.
    """
    zeros = 1 + -(offset + _HEAD_BYTES + 2 + len(rest)) % alignment  # one at least: the number is positive
    number = _INFO.pack(0, size_bytes) + bytes(zeros)
    return b"%b%c%b.%b" % (_START, len(number), number, rest)


def plain_value(pickled: bytes) -> bytes:
    """Return the entry of a plain value, by its pickle of protocol 2.

    It has a multiple of 64 bytes, so that values that vary a little lie where they lay in the save before.
    """
    payload = pickled + _NO_KEYS
    zeros = 1 + -(_HEAD_BYTES + 2 + len(payload)) % _GRAIN_BYTES
    number = _INFO.pack(crc32(payload), len(payload)) + bytes(zeros)
    return b"%b%c%b.%b" % (_START, len(number), number, payload)


def pickle_of_value(content: bytes, payload_bytes: int) -> bytes:
    """Return the pickle in an entry of `plain_value`."""
    pickled = content[len(content) - payload_bytes : -len(_NO_KEYS)]
    if content != plain_value(pickled):
        raise ZipError("it is damaged, or no plain value")
    return pickled


def small_payload(read_at: ReadAt, size_bytes: int) -> tuple[int, int] | None:
    """Return CRC-32 and size of the payload at the end of an entry; None of another."""
    found = read_at(0, _HEAD_BYTES)
    if len(found) < _HEAD_BYTES or not found.startswith(_START):
        return None
    crc, payload_bytes = _INFO.unpack(found[CRC_FIELD:])
    if found[CRC_FIELD - 1] <= _INFO.size or _HEAD_BYTES + payload_bytes > size_bytes:
        raise ZipError("the head of a small entry is damaged")
    return crc, payload_bytes


def verify_small(read_at: ReadAt, size_bytes: int) -> bool:
    """Compare the checksum of an entry's payload; False if it is laid out otherwise."""
    found = small_payload(read_at, size_bytes)
    if found is None:
        return False
    crc, payload_bytes = found
    if crc32(read_at(size_bytes - payload_bytes, payload_bytes)) != crc:
        raise ZipError("Bad CRC-32 of a small entry")
    return True
