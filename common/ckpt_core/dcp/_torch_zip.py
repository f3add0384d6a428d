"""Entries in the layouts of `torch.save`: built ahead, read without trust.

Large ones as a zip; small ones in the layout that torch wrote before it, which has a quarter of the bytes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Final, final

import torch
from typing_extensions import override

from ckpt_core._torch_internals import (
    dtypes_by_storage_type,
    new_dtypes,
    rebuild_tensor,
    rebuild_tensor_of_new_dtype,
    storage_types_by_dtype,
)
from ckpt_core.formats import legacy
from ckpt_core.formats.codec import damage
from ckpt_core.formats.pickles import survey
from ckpt_core.formats.zips import Directory, ReadAt, ZipError, payload_offset, read_directory, verify_records
from ckpt_core.storage import ALIGNMENT

_ROOT = "archive"
ZIP32_LIMIT = 0xFFFFFFFF
_PADDING_FIELD = 0x4246  # "FB", the extra-field id torch itself pads with
_CRC_IN_LOCAL_HEADER = 14
_CRC_IN_CENTRAL_HEADER = 16
_CRC_IN_DESCRIPTOR = 4
_HAS_DESCRIPTOR = 8
_MOST_RECORDS = 0xFFFE
_NO_HOOKS: Final[OrderedDict[str, Any]] = OrderedDict()
"""As torch writes it into zips; None does as well."""
_WIDEST_ITEM: Final = 16
"""Bytes of a complex128: torch views memory as a dtype only at a multiple of its size."""
_DOS_EPOCH = (0, 0x21)  # 1980-01-01 00:00, so that equal content gives equal bytes


@dataclass(frozen=True, slots=True)
class _StorageRef:
    """Stand-in for a tensor's storage, pickled as torch's persistent id."""

    dtype: torch.dtype
    numel: int
    untyped: bool
    key: str


class TensorPickler(pickle.Pickler):
    """Pickler of contiguous CPU tensors as the calls that rebuild them, without bytes."""

    @override
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _StorageRef):
            return None
        if obj.untyped:
            return "storage", torch.storage.UntypedStorage, obj.key, "cpu", obj.numel * obj.dtype.itemsize
        return "storage", getattr(torch, storage_types_by_dtype()[obj.dtype]), obj.key, "cpu", obj.numel


def rebuilding(
    dtype: torch.dtype, shape: tuple[int, ...], key: str = "0", *, hooks: Any = _NO_HOOKS
) -> tuple[Any, ...]:
    """Return the call that rebuilds a contiguous tensor, for `TensorPickler`."""
    numel, stride = 1, []
    for length in reversed(shape):
        stride.append(numel)
        numel *= max(length, 1)
    untyped = dtype in new_dtypes()
    storage = _StorageRef(dtype, 0 if 0 in shape else numel, untyped, key)
    arguments: tuple[Any, ...] = (storage, 0, shape, tuple(reversed(stride)), False, hooks)
    if untyped:
        return rebuild_tensor_of_new_dtype, (*arguments, dtype)
    return rebuild_tensor, arguments


class TensorForm:
    """Stand-in for a contiguous tensor, pickled as the call that rebuilds it.

    It takes the arguments of `rebuilding`; tensors of one key are one storage.
    """

    def __init__(self, *form: Any, hooks: Any = _NO_HOOKS) -> None:
        self.form, self.hooks = form, hooks

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilding(*self.form, hooks=self.hooks)


def pickled_state(state: Any) -> bytes:
    """Return the `data.pkl` of nested plain values and `TensorForm`s."""
    buffer = io.BytesIO()
    TensorPickler(buffer, protocol=2).dump(state)
    return buffer.getvalue()


@lru_cache(maxsize=4096)
def tensor_pickle(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the `data.pkl` that `torch.save` writes for a contiguous CPU tensor."""
    # A `torch.Size` is the same cache key and pickles differently: the result must not depend on the caller.
    return pickled_state(TensorForm(dtype, tuple(shape)))


@final
class _LegacyPickler(TensorPickler):
    """Pickler for the layout before zips, whose storages have a type and may be views."""

    @override
    def persistent_id(self, obj: Any) -> Any:
        found = super().persistent_id(obj)
        if found is None:
            return None
        return (found[0], torch.ByteStorage if obj.untyped else found[1], *found[2:], None)


@lru_cache(maxsize=4096)
def _legacy_rest(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Return what stands between the checksum of a small tensor and its payload."""
    buffer = io.BytesIO()
    _LegacyPickler(buffer, protocol=2).dump(TensorForm(dtype, tuple(shape), hooks=None))
    stored = prod(shape) * (dtype.itemsize if dtype in new_dtypes() else 1)
    keys = pickle.dumps(["0"], protocol=2)
    return pickletools.optimize(buffer.getvalue()) + keys + struct.pack("<q", stored)


def build_legacy(dtype: torch.dtype, shape: tuple[int, ...], *, offset: int) -> Archive:
    """Lay out a small tensor at `offset` of its file as torch did before zips."""
    size_bytes = prod(shape) * dtype.itemsize
    head = legacy.head(_legacy_rest(dtype, tuple(shape)), size_bytes, offset=offset, alignment=_WIDEST_ITEM)
    crc = legacy.CRC_FIELD
    return Archive(frames=(head, b""), crc_fields=((crc, crc),), size_bytes=len(head) + size_bytes)


def legacy_payload(
    read_at: ReadAt, size_bytes: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[int, int] | None:
    """Return offset and CRC-32 of a payload of `build_legacy`; None of another."""
    found = legacy.small_payload(read_at, size_bytes)
    if found is None:
        return None
    crc, payload_bytes = found
    start, rest = size_bytes - payload_bytes, _legacy_rest(dtype, tuple(shape))
    if payload_bytes != prod(shape) * dtype.itemsize or read_at(start - len(rest), len(rest)) != rest:
        raise ZipError("it is not the tensor that .metadata describes")
    return start, crc


@dataclass(frozen=True, kw_only=True, slots=True)
class Archive:
    """The bytes of one entry of a data file around its payloads.

    Attributes:
        frames: the bytes before each payload, and after the last.
        crc_fields: of each payload, the two offsets of its CRC-32, as little-endian 32 bits.
    """

    frames: Sequence[bytes]
    crc_fields: Sequence[tuple[int, int]]
    size_bytes: int


def build_archive(
    data_pickle: bytes,
    payloads: Sequence[tuple[int, int]],
    *,
    offset: int,
    zip64_from: int = ZIP32_LIMIT,
    alignment: int = ALIGNMENT,
    streamed: bool = False,
) -> Archive:
    """Lay out the archive that starts at `offset` of its file.

    `payloads` are size and CRC-32 of the raw bytes of each of its tensors, `zip64_from` is the smallest size
    or offset that uses 64-bit fields. If it is `streamed`, the CRC-32 of a payload is behind it.
    """
    records = [
        (f"{_ROOT}/data.pkl", data_pickle),
        (f"{_ROOT}/.format_version", b"1"),
        (f"{_ROOT}/byteorder", sys.byteorder.encode()),
        (f"{_ROOT}/version", b"3\n"),
    ]
    body, directory, end = bytearray(), bytearray(), 0
    for name, content in records:
        record = _ZipRecord(name, len(content), zlib.crc32(content), len(body), zip64_from)
        body += record.local_header() + content
        directory += record.central_header()
    frames: list[bytes] = []
    fields: list[tuple[int, int]] = []
    for key, (size_bytes, crc) in enumerate(payloads):
        payload = _ZipRecord(f"{_ROOT}/data/{key}", size_bytes, crc, end + len(body), zip64_from, streamed)
        unpadded = offset + end + len(body) + len(payload.local_header()) + 4
        body += payload.local_header(padding=-unpadded % alignment)
        end += len(body) + size_bytes
        crc_at = end + _CRC_IN_DESCRIPTOR if streamed else payload.offset + _CRC_IN_LOCAL_HEADER
        fields.append((crc_at, len(directory) + _CRC_IN_CENTRAL_HEADER))
        directory += payload.central_header()
        frames.append(bytes(body))
        body = bytearray(payload.descriptor())
    start = end + len(body)
    frames.append(
        bytes(body + directory)
        + _end_records(len(records) + len(payloads), len(directory), start, zip64_from)
    )
    return Archive(
        frames=frames,
        crc_fields=[(local, start + central) for local, central in fields],
        size_bytes=end + len(frames[-1]),
    )


@dataclass(frozen=True, slots=True)
class _ZipRecord:
    name: str
    size: int
    crc: int
    offset: int
    zip64_from: int
    streamed: bool = False

    @property
    def _flags(self) -> int:
        return _HAS_DESCRIPTOR if self.streamed else 0

    def descriptor(self) -> bytes:
        """Return what follows the content of a streamed record."""
        if not self.streamed:
            return b""
        sizes = "QQ" if self.size >= self.zip64_from else "II"
        return struct.pack(f"<II{sizes}", 0x08074B50, self.crc, self.size, self.size)

    def local_header(self, *, padding: int | None = None) -> bytes:
        large = self.size >= self.zip64_from
        size = ZIP32_LIMIT if large else self.size
        extra = struct.pack("<HHQQ", 1, 16, self.size, self.size) if large else b""
        if padding is not None:
            extra += struct.pack("<HH", _PADDING_FIELD, padding) + b"\0" * padding
        name = self.name.encode()
        fixed = struct.pack(
            "<IHHHHHIIIHH", 0x04034B50, 45 if large else 20, self._flags, 0, *_DOS_EPOCH,
            0 if self.streamed else self.crc, size, size, len(name), len(extra),
        )  # fmt: skip
        return fixed + name + extra

    def central_header(self) -> bytes:
        large, far = self.size >= self.zip64_from, self.offset >= self.zip64_from
        size, offset = ZIP32_LIMIT if large else self.size, ZIP32_LIMIT if far else self.offset
        fields = [self.size, self.size] * large + [self.offset] * far
        extra = struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""
        name, version = self.name.encode(), 45 if fields else 20
        fixed = struct.pack(
            "<IHHHHHHIIIHHHHHII", 0x02014B50, version, version, self._flags, 0, *_DOS_EPOCH, self.crc,
            size, size, len(name), len(extra), 0, 0, 0, 0, offset,
        )  # fmt: skip
        return fixed + name + extra


def _end_records(num_records: int, directory_bytes: int, directory_offset: int, zip64_from: int) -> bytes:
    large = directory_offset >= zip64_from or num_records > _MOST_RECORDS
    shown_offset = ZIP32_LIMIT if large else directory_offset
    shown_records = min(num_records, 0xFFFF)
    end = struct.pack(
        "<IHHHHIIH", 0x06054B50, 0, 0, shown_records, shown_records, directory_bytes, shown_offset, 0
    )
    if not large:
        return end
    end64 = struct.pack(
        "<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, num_records, num_records,
        directory_bytes, directory_offset,
    )  # fmt: skip
    locator = struct.pack("<IIQI", 0x07064B50, 0, directory_offset + directory_bytes, 1)
    return end64 + locator + end


_PLAIN: Final = frozenset({bool, int, float, str, type(None), bytes, torch.Size, torch.dtype})
_MOST_PLAIN: Final = 100_000
_LARGE_BYTES: Final = 1 << 20


def is_plain(value: Any) -> bool:
    if type(value) in _PLAIN:
        return True
    if type(value) not in {list, tuple} or len(value) > _MOST_PLAIN:
        return False
    return _PLAIN.issuperset(map(type, value)) or all(map(is_plain, value))


def value_entry(value: Any) -> bytes:
    """Serialise a value that is no tensor, for `torch.load`."""
    if is_plain(value) and len(pickled := pickle.dumps(value, protocol=2)) < _LARGE_BYTES:
        return legacy.plain_value(pickled)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


_SMALL_RECORDS: Final = frozenset(
    {"data.pkl", ".format_version", ".storage_alignment", "byteorder", "version", ".data/serialization_id"}
)
_MAX_PICKLE_BYTES: Final = 1 << 16


def read_record(
    read_at: ReadAt, directory: Directory, name: str, *, most_bytes: int = _MAX_PICKLE_BYTES
) -> bytes | None:
    """Read a small record and compare its checksum; None if it does not exist."""
    record = directory.find(name)
    if record is None:
        return None
    if record.size_bytes > most_bytes:
        raise ZipError(f"{record.name!r:.80} has {record.size_bytes} bytes, which is absurd")
    content = read_at(payload_offset(read_at, directory, record), record.size_bytes)
    if not directory.is_intact(record, content):
        raise ZipError(f"Bad CRC-32 for {record.name!r:.80}")
    return content


def checked_zip(content: bytes, name: str, *, trusted: bool = False) -> None:
    """Check an entry's bytes before torch reads them.

    It must be what `value_entry` makes of a plain value, or a zip as torch writes it: all records
    uncompressed and without overlap, so that together they are no larger than the zip, and each with the
    checksum of the directory. The storages that its pickle names must be those of the records: torch would
    read memory beyond a shorter one. The pickle of a `trusted` one may execute anything.
    """

    def read_at(offset: int, size: int) -> bytes:
        return content[offset : offset + size]

    try:
        storages: Mapping[str, int] = {}
        small = legacy.small_payload(read_at, len(content))
        if small is not None:
            pickled = legacy.pickle_of_value(content, small[1])
        else:
            directory = read_directory(read_at, len(content))
            verify_records(read_at, directory)
            storages = _storages(directory)
            record = directory.find("data.pkl")
            if record is None:
                raise ZipError("it has no 'data.pkl'")
            start = payload_offset(read_at, directory, record)
            pickled = content[start : start + record.size_bytes]
        for pid in () if trusted else survey(pickled)[1]:
            _check_storage(pid, storages)
    except Exception as error:  # a foreign pickle raises nearly anything; the error names entry and cause
        raise damage(name, f"not a whole torch zip: {error!s:.500}") from error


def _storages(directory: Directory) -> dict[str, int]:
    """Map storages to sizes in bytes; refuse records that torch.save does not write."""
    storages: dict[str, int] = {}
    for record in directory.records.values():
        name = directory.inner_name(record)
        if name.startswith("data/"):
            storages[name.removeprefix("data/")] = record.size_bytes
        elif name not in _SMALL_RECORDS:
            raise ZipError(f"it has a record {record.name!r:.80}, which torch.save does not write")
    return storages


def _check_storage(pid: Any, storages: Mapping[str, int]) -> None:
    kind, storage, key, _, count = pid
    name = storage.__name__
    itemsize = 1 if name == "UntypedStorage" else dtypes_by_storage_type()[name].itemsize
    if kind != "storage" or type(key) is not str or type(count) is not int:
        raise ZipError("its pickle refers to something that is no storage")
    if storages.get(key) != count * itemsize:
        raise ZipError(
            f"storage {key!r:.20} should have {count * itemsize} bytes and has {storages.get(key)}"
        )
