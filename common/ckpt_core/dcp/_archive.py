"""One chunk's bytes: a torch zip around a raw payload, laid out before the payload is known.

A `.distcp` file is a concatenation of ordinary torch zip archives, one per chunk; stock `dcp.load` hands
each to `torch.load`. We lay them out ourselves, so that payloads start on 4 KiB boundaries (direct I/O) and
every offset is known before a byte is written. Only the CRC-32 fields need the payload.

Source of the structures: PKWARE APPNOTE 6.3.x, sections 4.3.7 (local header), 4.3.12 (central directory),
4.3.14 to 4.3.16 (end records, zip64), 4.5.3 (zip64 extra field).
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from ckpt_core.storage import ALIGNMENT

_ROOT = "archive"
_PAYLOAD = f"{_ROOT}/data/0"
ZIP32_LIMIT = 0xFFFFFFFF
_PADDING_FIELD = 0x4246  # "FB", the extra-field id torch itself pads with
_CRC_IN_LOCAL_HEADER = 14
_CRC_IN_CENTRAL_HEADER = 16
_END_BYTES = 22  # of the end record of a zip without a comment
# Zip allows 64 KiB, but torch looks for the end record reliably only in the last 4 KiB.
_MAX_PADDING_BYTES = 2048
_DOS_EPOCH = (0, 0x21)  # 1980-01-01 00:00, so that equal content gives equal bytes


@dataclass(frozen=True, slots=True)
class _StorageRef:
    """Stands for the tensor's storage in the pickle, as torch's persistent id does."""

    dtype: torch.dtype
    numel: int
    untyped: bool


class _TensorPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _StorageRef):
            return None
        if obj.untyped:
            return "storage", torch.storage.UntypedStorage, "0", "cpu", obj.numel * obj.dtype.itemsize
        name = torch.storage._dtype_to_storage_type_map()[obj.dtype]
        return "storage", getattr(torch, name), "0", "cpu", obj.numel


class _Rebuild:
    """Pickles as the call by which torch rebuilds a contiguous tensor of this dtype and shape."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        numel, stride = 1, []
        for length in reversed(self.shape):
            stride.append(numel)
            numel *= max(length, 1)
        untyped = self.dtype in torch.storage._new_dtypes()
        storage = _StorageRef(self.dtype, 0 if 0 in self.shape else numel, untyped)
        arguments: tuple[Any, ...] = (storage, 0, self.shape, tuple(reversed(stride)), False, OrderedDict())
        if untyped:
            return _rebuild_tensor_v3, (*arguments, self.dtype)
        return _rebuild_tensor_v2, arguments


@lru_cache(maxsize=4096)
def tensor_pickle(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """The `data.pkl` record that `torch.save` writes for a contiguous CPU tensor."""
    buffer = io.BytesIO()
    # A `torch.Size` is the same key and pickles differently: the record must not depend on who asked first.
    _TensorPickler(buffer, protocol=2).dump(_Rebuild(dtype, tuple(shape)))
    return buffer.getvalue()


@dataclass(frozen=True, kw_only=True, slots=True)
class Archive:
    """Everything of one torch zip but its payload: write `prefix`, the payload, then `suffix`.

    `crc_in_prefix` and `crc_in_suffix` are where the payload's CRC-32 stands, as little-endian 32 bits.
    """

    prefix: bytes
    suffix: bytes
    crc_in_prefix: int
    crc_in_suffix: int


def build_archive(
    data_pickle: bytes,
    payload_bytes: int,
    payload_crc: int,
    *,
    offset: int,
    zip64_from: int = ZIP32_LIMIT,
) -> Archive:
    """Lay out the archive that starts at `offset` of its file.

    Args:
        data_pickle: result of `tensor_pickle`.
        payload_bytes: size of the raw tensor bytes.
        payload_crc: CRC-32 of the raw tensor bytes.
        offset: where in the file the archive starts; decides the padding before the payload.
        zip64_from: sizes and offsets from here on use 64-bit fields.
    """
    records = [
        (f"{_ROOT}/data.pkl", data_pickle),
        (f"{_ROOT}/.format_version", b"1"),
        (f"{_ROOT}/byteorder", sys.byteorder.encode()),
        (f"{_ROOT}/version", b"3\n"),
    ]
    body = bytearray()
    directory = bytearray()
    for name, content in records:
        record = _Record(name, len(content), zlib.crc32(content), len(body), zip64_from)
        body += record.local_header() + content
        directory += record.central_header()
    payload = _Record(_PAYLOAD, payload_bytes, payload_crc, len(body), zip64_from)
    unpadded = offset + len(body) + len(payload.local_header()) + 4
    body += payload.local_header(padding=-unpadded % ALIGNMENT)
    crc_in_suffix = len(directory) + _CRC_IN_CENTRAL_HEADER
    directory += payload.central_header()
    end = _end_records(len(records) + 1, len(directory), len(body) + payload_bytes, zip64_from)
    return Archive(
        prefix=bytes(body),
        suffix=bytes(directory) + end,
        crc_in_prefix=payload.offset + _CRC_IN_LOCAL_HEADER,
        crc_in_suffix=crc_in_suffix,
    )


@dataclass(frozen=True, slots=True)
class _Record:
    name: str
    size: int
    crc: int
    offset: int
    zip64_from: int

    def local_header(self, *, padding: int | None = None) -> bytes:
        large = self.size >= self.zip64_from
        size = ZIP32_LIMIT if large else self.size
        extra = struct.pack("<HHQQ", 1, 16, self.size, self.size) if large else b""
        if padding is not None:
            extra += struct.pack("<HH", _PADDING_FIELD, padding) + b"\0" * padding
        name = self.name.encode()
        fixed = struct.pack(
            "<IHHHHHIIIHH", 0x04034B50, 45 if large else 20, 0, 0, *_DOS_EPOCH, self.crc, size, size,
            len(name), len(extra),
        )  # fmt: skip
        return fixed + name + extra

    def central_header(self) -> bytes:
        large = self.size >= self.zip64_from
        size = ZIP32_LIMIT if large else self.size
        extra = struct.pack("<HHQQ", 1, 16, self.size, self.size) if large else b""
        name, version = self.name.encode(), 45 if large else 20
        fixed = struct.pack(
            "<IHHHHHHIIIHHHHHII", 0x02014B50, version, version, 0, 0, *_DOS_EPOCH, self.crc, size, size,
            len(name), len(extra), 0, 0, 0, 0, self.offset,
        )  # fmt: skip
        return fixed + name + extra


def _end_records(num_records: int, directory_bytes: int, directory_offset: int, zip64_from: int) -> bytes:
    large = directory_offset >= zip64_from
    shown_offset = ZIP32_LIMIT if large else directory_offset
    end = struct.pack(
        "<IHHHHIIH", 0x06054B50, 0, 0, num_records, num_records, directory_bytes, shown_offset, 0
    )
    if not large:
        return end
    end64 = struct.pack(
        "<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, num_records, num_records,
        directory_bytes, directory_offset,
    )  # fmt: skip
    locator = struct.pack("<IIQI", 0x07064B50, 0, directory_offset + directory_bytes, 1)
    return end64 + locator + end


def pad_archive(content: bytes, capacity: int) -> bytes:
    """A zip made `capacity` bytes long by a comment at its end, which every reader of zips passes over.

    What is no zip with an empty comment, or cannot be padded to exactly `capacity`, is returned as it is.
    """
    padding = capacity - len(content)
    end = content[-_END_BYTES:]
    is_plain = len(end) == _END_BYTES and end.startswith(b"PK\5\6") and end.endswith(b"\0\0")
    if not is_plain or not 0 < padding <= _MAX_PADDING_BYTES:
        return content
    return b"".join((content[:-2], struct.pack("<H", padding), bytes(padding)))
