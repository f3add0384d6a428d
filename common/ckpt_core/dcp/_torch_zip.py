"""One entry of a data file as `torch.save` wrote it: which tensor it is, and a way in if it is not plain."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, final

import torch
from torch.storage import _new_dtypes, _storage_type_to_dtype_map
from typing_extensions import override

from ckpt_core.dcp._rehearsal import rehearse
from ckpt_core.errors import CorruptCheckpointError, FileFailure, UnsafeCheckpointError
from ckpt_core.pickles import Ordered, Row, Sealed, guarded
from ckpt_core.zips import Directory, ReadAt, ZipError, payload_offset, read_directory, verify_records

_SMALL_RECORDS: Final = frozenset(
    {"data.pkl", ".format_version", ".storage_alignment", "byteorder", "version", ".data/serialization_id"}
)
_MAX_PICKLE_BYTES: Final = 1 << 16


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TensorForm:
    """A plain tensor as its pickle describes it; offset and strides in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    storage_bytes: int

    @property
    def is_raw(self) -> bool:
        """Whether its storage is exactly the tensor, element after element."""
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != expected and 0 not in self.shape:
                return False
            expected *= length
        return self.storage_offset == 0 and self.storage_bytes == expected * self.dtype.itemsize


class NotPlainError(ValueError):
    """It is not one plain tensor, or not in a way that can be told without torch."""


@lru_cache(maxsize=1024)
def read_form(data_pickle: bytes) -> TensorForm:
    """Read the `data.pkl` that `torch.save` writes for one plain tensor, executing nothing.

    Raises:
        NotPlainError: it is for something else.
    """
    if len(data_pickle) > _MAX_PICKLE_BYTES:
        raise NotPlainError("its pickle is too long for one tensor")
    try:
        form = _FormUnpickler(io.BytesIO(guarded(data_pickle, persistent_ids=True))).load()
    except NotPlainError:
        raise
    except Exception as error:  # a foreign pickle raises nearly anything; the caller asks torch
        raise NotPlainError(f"its pickle is not that of a plain tensor ({type(error).__name__})") from error
    if type(form) is not TensorForm:
        raise NotPlainError("it holds something other than one tensor")
    return form


@dataclass(frozen=True, slots=True)
class _StorageKind:
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: torch.dtype | None
    numel: int


class _Plain(metaclass=Sealed):
    """`torch._utils._rebuild_tensor_v2`."""

    def __new__(cls, storage: Any, *args: Any) -> Any:
        return _form(storage, storage.dtype, args[:5], args[5:])


class _PlainOfNewDtype(metaclass=Sealed):
    """`torch._utils._rebuild_tensor_v3`."""

    def __new__(cls, storage: Any, *args: Any) -> Any:
        return _form(storage, args[5], args[:5], args[6:])


class _Parameter(metaclass=Sealed):
    """`torch._utils._rebuild_parameter`."""

    def __new__(cls, data: Any, *_: Any) -> Any:
        return data


_CALLS: Final[dict[tuple[str, str], Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _Plain,
    ("torch._utils", "_rebuild_tensor_v3"): _PlainOfNewDtype,
    ("torch._utils", "_rebuild_parameter"): _Parameter,
    ("collections", "OrderedDict"): Ordered,
}


def _form(storage: Any, dtype: Any, args: tuple[Any, ...], extra: tuple[Any, ...]) -> TensorForm:
    offset, shape, strides, _, hooks = args
    if type(storage) is not _Storage or type(dtype) is not torch.dtype or hooks or any(extra):
        raise NotPlainError("a tensor with more to it than its values, such as a conjugate view or hooks")
    if not {int}.issuperset(map(type, (offset, storage.numel, *shape, *strides))):
        raise NotPlainError("a shape that is not of integers")
    if min((offset, storage.numel, *shape, *strides)) < 0 or len(shape) != len(strides):
        raise NotPlainError("an impossible shape")
    return TensorForm(
        dtype=dtype,
        shape=tuple(shape),
        strides=tuple(strides),
        storage_offset=offset,
        storage_bytes=storage.numel * (1 if storage.dtype is None else storage.dtype.itemsize),
    )


@final
class _FormUnpickler(pickle.Unpickler):  # noqa: S301 - the allow-list is what makes it safe
    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in _CALLS:
            return _CALLS[module_name, global_name]
        if module_name == "torch":
            dtype = vars(torch).get(global_name)
            if isinstance(dtype, torch.dtype) and dtype in _new_dtypes():
                return dtype
            if global_name in _storage_type_to_dtype_map():
                return _StorageKind(_storage_type_to_dtype_map()[global_name])
        if (module_name, global_name) == ("torch.storage", "UntypedStorage"):
            return _StorageKind(None)
        raise NotPlainError(f"its pickle refers to {module_name:.80}.{global_name:.80}")

    @override
    def persistent_load(self, pid: Any, /) -> Any:
        if type(pid) is tuple:
            return Row(pid)
        kind, storage, key, _, numel = pid
        if kind != "storage" or type(storage) is not _StorageKind or key != "0":
            raise NotPlainError("it refers to something other than its own storage")
        return _Storage(storage.dtype, numel)


def read_record(read_at: ReadAt, directory: Directory, name: str) -> bytes | None:
    """Content of a small record, compared with its checksum; None if there is none of that name.

    Raises:
        ZipError: it is damaged.
    """
    record = directory.find(name)
    if record is None:
        return None
    if record.size_bytes > _MAX_PICKLE_BYTES:
        raise ZipError(f"{record.name!r:.80} has {record.size_bytes} bytes, which is absurd")
    content = read_at(payload_offset(read_at, directory, record), record.size_bytes)
    if not directory.is_intact(record, content):
        raise ZipError(f"Bad CRC-32 for {record.name!r:.80}")
    return content


def checked_zip(content: bytes, name: str, *, trusted: bool = False) -> bool:
    """Check an entry's bytes before torch sees them.

    It is a zip as torch writes it: all records stored, none over another, so that together they are no
    larger than the zip, and each has the checksum that the directory names. Its pickle needs no more time
    and memory than its size explains, and its storages are those of the records.

    Args:
        content: the whole zip.
        name: which entry of which file it is, for errors.
        trusted: leave its pickle alone, as it may execute anything anyhow.

    Returns:
        Whether there were checksums to compare; torch can be told to write none.

    Raises:
        CorruptCheckpointError: it is not.
    """

    def read_at(offset: int, size: int) -> bytes:
        return content[offset : offset + size]

    try:
        directory = read_directory(read_at, len(content))
        verify_records(read_at, directory)
        storages = _storages(directory)
        record = directory.find("data.pkl")
        if record is None:
            raise ZipError("it has no 'data.pkl'")
        if not trusted:
            start = payload_offset(read_at, directory, record)
            rehearse(content[start : start + record.size_bytes], storages, len(content))
    except Exception as error:  # a foreign pickle raises nearly anything; the caller is told what and where
        raise _corrupt(name, f"not a whole torch zip: {error!s:.500}") from error
    return directory.has_checksums


def _storages(directory: Directory) -> dict[str, int]:
    """Key of a storage -> its size in bytes; every record must be one that torch.save writes."""
    storages: dict[str, int] = {}
    for record in directory.records.values():
        name = directory.inner_name(record)
        if name.startswith("data/"):
            storages[name.removeprefix("data/")] = record.size_bytes
        elif name not in _SMALL_RECORDS:
            raise ZipError(f"it has a record {record.name!r:.80}, which torch.save does not write")
    return storages


def load_chunk(content: bytes, name: str) -> torch.Tensor:
    """Load a tensor chunk that is not plain raw bytes, such as a transposed one; it is verified first.

    Args:
        content: the whole zip.
        name: which entry of which file it is, for errors.

    Raises:
        CorruptCheckpointError: it is damaged, or holds no tensor.
        UnsafeCheckpointError: it is not a tensor that can be rebuilt without executing foreign code.
    """
    checked_zip(content, name)
    try:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise UnsafeCheckpointError(
            f"{name} is not a plain tensor, and nothing of it was executed: {reason}"
        ) from error
    except Exception as error:  # a damaged archive raises nearly anything; the caller is told
        raise _corrupt(name, f"{type(error).__name__}: {error!s:.500}") from error
    if not isinstance(tensor, torch.Tensor):
        raise _corrupt(name, f"holds a {type(tensor).__name__}, not a tensor")
    return tensor


def _corrupt(name: str, problem: str) -> CorruptCheckpointError:
    failure = FileFailure(path=name, problem=problem)
    return CorruptCheckpointError(str(failure), failures=(failure,))
