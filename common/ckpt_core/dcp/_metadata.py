"""DCP's `.metadata`: a pickle, read through an allow-list so that no checkpoint can run code."""

from __future__ import annotations

import io
import pickle
from pathlib import PurePosixPath
from typing import Any, final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from typing_extensions import override

from ckpt_core.errors import CorruptCheckpointError, FileFailure, UnsafeCheckpointError
from ckpt_core.types import SavedEntries, SavedTensor

_METADATA_CLASSES = {
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
}  # fmt: skip
_ALLOWED = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES),
}
_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}


def _path_text(*parts: str) -> str:
    """Stands in for the path classes: a pickle can set attributes of any Python class that it reaches."""
    return "/".join(parts)


@final
class _MetadataUnpickler(pickle.Unpickler):  # noqa: S301 - the allow-list is what makes it safe
    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        if (module_name, global_name) in _ALLOWED:
            return super().find_class(module_name, global_name)
        if module_name == "pathlib" and global_name in _PATHS:
            return _path_text
        raise UnsafeCheckpointError(
            f".metadata refers to {module_name}.{global_name}, which no DCP metadata needs; "
            "it may be an attack and was not executed"
        )


def load_metadata(content: bytes, path: str) -> Metadata:
    """Read a `.metadata` file.

    Raises:
        UnsafeCheckpointError: it refers to anything but DCP's metadata classes.
        CorruptCheckpointError: it is not a pickle of `Metadata`, or points outside its directory.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(f"{path}: {error}") from error
    except Exception as error:  # a damaged pickle raises nearly anything; the caller is told what and where
        raise _corrupt(path, f"not readable ({type(error).__name__}: {error})") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise _corrupt(path, "not a DCP metadata object with storage data")
    for info in metadata.storage_data.values():
        _check_storage_info(info, path)
    return metadata


def _check_storage_info(info: object, path: str) -> None:
    if not isinstance(info, _StorageInfo):
        raise _corrupt(path, f"storage data of type {type(info).__name__} is not supported")
    place = tuple(getattr(info, name, None) for name in ("relative_path", "offset", "length"))
    if tuple(type(value) for value in place) != (str, int, int):
        raise _corrupt(path, f"storage data with {place!r} for path, offset and length")
    relative = PurePosixPath(info.relative_path)
    if relative.is_absolute() or ".." in relative.parts or "\\" in info.relative_path:
        raise _corrupt(path, f"points outside its directory: {info.relative_path!r}")
    if info.offset < 0 or info.length < 0:
        raise _corrupt(path, f"impossible offset or length in {info.relative_path!r}")


def _corrupt(path: str, problem: str) -> CorruptCheckpointError:
    failure = FileFailure(path=path, problem=problem)
    return CorruptCheckpointError(str(failure), failures=(failure,))


def entries(metadata: Metadata) -> SavedEntries:
    """The leaves of the nested state dict, by path. Keys without a recorded path stand for themselves."""
    paths: dict[str, tuple[str | int, ...]] = metadata.planner_data or {}
    return {
        tuple(paths.get(key, (key,))): _describe(value) for key, value in metadata.state_dict_metadata.items()
    }


def _describe(value: object) -> SavedTensor | None:
    if not isinstance(value, TensorStorageMetadata):
        return None
    return SavedTensor(shape=tuple(value.size), dtype=str(value.properties.dtype).removeprefix("torch."))
