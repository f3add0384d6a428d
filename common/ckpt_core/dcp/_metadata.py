"""DCP's `.metadata`, a pickle, read without running code or exhausting memory."""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Generator
from contextlib import contextmanager
from types import NoneType
from typing import Any, Final, final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from typing_extensions import override

from ckpt_core._torch_internals import StorageInfo, layout_named
from ckpt_core.errors import CorruptCheckpointError, FileFailure, UnsafeCheckpointError
from ckpt_core.formats.codec import MAX_COUNT, relative_paths
from ckpt_core.formats.consistency import MAX_DIMS
from ckpt_core.formats.pickles import Ordered, Row, Sealed, sanitize_pickle
from ckpt_core.types import SavedEntries, SavedTensor

_MAX_PATH_CHARS: Final = 4096
_PATHS: Final = {"Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
# By the value of torch's `_MEM_FORMAT_ENCODING`; its members are shared, and a pickle could alter them.
_MEMORY_FORMATS: Final = {0: torch.contiguous_format, 1: torch.channels_last, 2: torch.preserve_format}
_ENCODINGS: Final = {"TORCH_CONTIGUOUS_FORMAT": 0, "TORCH_CHANNELS_LAST": 1, "TORCH_PRESERVE_FORMAT": 2}
_STEPS: Final = frozenset({str, int, float, bool, NoneType})


def _stand_in(real: type) -> type:
    """Make a class by which a pickle can only make empty objects of the class `real`."""

    def make(_: type) -> Any:
        return object.__new__(real)

    return Sealed(real.__name__, (), {"__new__": make})


class _Index(metaclass=Sealed):
    """An unchecked `MetadataIndex`, without a hash of its untrusted fields."""


class _Properties(metaclass=Sealed):
    """The state of a `TensorProperties`."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _Size(metaclass=Sealed):
    def __new__(cls, lengths: Row) -> Any:
        if len(lengths) > MAX_DIMS:
            raise ValueError(f"a shape of {len(lengths)} dimensions")
        return torch.Size(lengths)


class _Layout(metaclass=Sealed):
    def __new__(cls, name: str) -> Any:
        return layout_named(name)


class _Encoding(metaclass=Sealed):
    def __new__(cls, value: int) -> Any:
        return value


class _EncodingByName(metaclass=Sealed):
    """Stand-in for `getattr`, by which early releases of Python 3.11 pickle enums."""

    def __new__(cls, *asked: object) -> Any:
        match asked:
            case (owner, str(name)) if owner is _Encoding and type(name) is str and name in _ENCODINGS:
                return _ENCODINGS[name]
            case _:
                raise UnsafeCheckpointError(
                    ".metadata asks for an attribute that no DCP metadata needs; "
                    "it may be an attack and was not executed"
                )


class _PathText(metaclass=Sealed):
    def __new__(cls, *parts: str) -> Any:
        if sum(map(len, parts)) > _MAX_PATH_CHARS:
            raise ValueError("an absurdly long path")
        return "/".join(parts)


_DCP: Final = "torch.distributed.checkpoint.metadata"
_STAND_INS: Final[dict[tuple[str, str], Any]] = {
    **{
        (_DCP, real.__name__): _stand_in(real)
        for real in (
            Metadata,
            TensorStorageMetadata,
            BytesStorageMetadata,
            ChunkStorageMetadata,
            StorageMeta,
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _stand_in(StorageInfo),
    (_DCP, "MetadataIndex"): _Index,
    (_DCP, "TensorProperties"): _Properties,
    (_DCP, "_MEM_FORMAT_ENCODING"): _Encoding,
    ("torch.serialization", "_get_layout"): _Layout,
    ("torch", "Size"): _Size,
    **{(module, "getattr"): _EncodingByName for module in ("builtins", "__builtin__")},
    ("collections", "OrderedDict"): Ordered,
    **{("pathlib", name): _PathText for name in _PATHS},
}


@final
class _MetadataUnpickler(pickle.Unpickler):  # noqa: S301 - the allow-list is what makes it safe
    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = _STAND_INS.get((module_name, global_name))
        if found is not None:
            return found
        if module_name == "torch" and isinstance(vars(torch).get(global_name), torch.dtype):
            return vars(torch)[global_name]
        raise UnsafeCheckpointError(
            f".metadata refers to {module_name:.200}.{global_name:.200}, which no DCP metadata needs; "
            "it may be an attack and was not executed"
        )

    @override
    def persistent_load(self, pid: Any, /) -> Row:
        return Row(pid)


def load_metadata(content: bytes, path: str) -> Metadata:
    """Read a `.metadata` file.

    Nothing in it is executed, and its types are checked; `check_metadata` checks its values.

    Raises:
        UnsafeCheckpointError: it refers to anything but DCP's metadata classes.
        CorruptCheckpointError: it is not a pickle of `Metadata`, or refers to a path outside its directory.
    """
    try:
        with _collector_paused():
            return _settle(_MetadataUnpickler(io.BytesIO(sanitize_pickle(content))).load())
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(f"{path}: {error}") from error
    except Exception as error:  # a damaged pickle raises nearly anything; the error names file and cause
        failure = FileFailure(path=path, problem=f"not readable ({type(error).__name__}: {error!s:.500})")
        raise CorruptCheckpointError(str(failure), failures=(failure,)) from error


@contextmanager
def _collector_paused() -> Generator[None]:
    """Pause the garbage collector, which would traverse the metadata repeatedly."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


def _settle(metadata: Any) -> Metadata:
    """Check the types of all values, and replace the stand-ins by real objects."""
    if type(metadata) is not Metadata or type(metadata.storage_data) is not dict:
        raise TypeError("not a DCP metadata object with storage data")
    _expect(metadata.state_dict_metadata, dict, "the state dict's metadata")
    for key, entry in metadata.state_dict_metadata.items():
        _expect(key, str, "a name")
        if type(entry) is TensorStorageMetadata:
            _settle_tensor(entry)
        else:
            _expect(entry, BytesStorageMetadata, "an entry")
    metadata.planner_data = _paths(metadata.planner_data)
    places = {_index(index): _place(info) for index, info in metadata.storage_data.items()}
    if len(places) != len(metadata.storage_data):
        raise ValueError("a chunk is in two places")
    relative_paths(list({info.relative_path for info in places.values()}))
    metadata.storage_data = places
    settled: Metadata = metadata
    return settled


def _settle_tensor(entry: Any) -> None:
    _expect(entry.properties, _Properties, "the properties of a tensor")
    dtype, layout, requires_grad, encoding, pin_memory = entry.properties.state
    _expect(dtype, torch.dtype, "a dtype")
    _expect(layout, torch.layout, "a layout")
    entry.properties = TensorProperties(
        dtype, layout, bool(requires_grad), _MEMORY_FORMATS[encoding], bool(pin_memory)
    )
    _expect(entry.size, torch.Size, "a shape")
    _expect(entry.chunks, list, "the chunks of a tensor")
    for chunk in entry.chunks:
        if not (
            type(chunk) is ChunkStorageMetadata and type(chunk.offsets) is type(chunk.sizes) is torch.Size
        ):
            raise TypeError("a chunk without a place and a shape")


def _index(index: Any) -> MetadataIndex:
    _expect(index, _Index, "a key of the storage data")
    fields = vars(index)
    key, offset, hint = fields.get("fqn"), fields.get("offset"), fields.get("index")
    _expect(key, str, "the name of a chunk")
    if type(offset) not in (torch.Size, NoneType) or type(hint) not in (int, NoneType):
        raise TypeError(f"the place of a chunk of {key!r:.80} is not a shape")
    return MetadataIndex(key, offset, hint)


def _place(info: Any) -> StorageInfo:
    if type(info) is not StorageInfo:
        raise TypeError(f"storage data of type {type(info).__name__} is not supported")
    fields: dict[str, Any] = vars(info)
    path, offset, length = (fields.get(name, "") for name in ("relative_path", "offset", "length"))
    if not (type(path) is str and type(offset) is type(length) is int):
        kinds = ", ".join(type(value).__name__ for value in (path, offset, length))
        raise TypeError(f"storage data with {kinds} for path, offset and length")
    if not (0 <= offset <= MAX_COUNT and 0 <= length <= MAX_COUNT):
        raise ValueError(f"impossible offset or length in {path!r:.80}")
    extensions = fields.get("transform_descriptors")
    if extensions is not None and not (type(extensions) is list and {str}.issuperset(map(type, extensions))):
        raise TypeError(f"stream extensions in {path!r:.80} that are not names")
    return info


def _paths(planned: Any) -> dict[str, tuple[Any, ...]] | None:
    """Check the planner's data: flattened name -> path in the nested state dict."""
    if planned is None:
        return None
    if not isinstance(planned, dict):
        raise TypeError("planner data that is not a mapping")
    paths: dict[str, tuple[Any, ...]] = {}
    for key, path in planned.items():
        _expect(key, str, "a name in the planner data")
        if not (isinstance(path, tuple) and _STEPS.issuperset(map(type, path))):
            raise TypeError(f"the path of {key!r:.80} is not one")
        paths[key] = tuple(path)
    return paths


def _expect(value: object, kind: type, what: str) -> None:
    if type(value) is not kind:
        raise TypeError(f"{what} is of type {type(value).__name__}, not {kind.__name__}")


def entries(metadata: Metadata) -> SavedEntries:
    """Return the leaves of the nested state dict, by path, or else by key."""
    paths: dict[str, tuple[str | int, ...]] = metadata.planner_data or {}
    return {
        tuple(paths.get(key, (key,))): _describe(value) for key, value in metadata.state_dict_metadata.items()
    }


def _describe(value: object) -> SavedTensor | None:
    if not isinstance(value, TensorStorageMetadata):
        return None
    return SavedTensor(shape=tuple(value.size), dtype=str(value.properties.dtype).removeprefix("torch."))
