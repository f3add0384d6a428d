"""DCP's `.metadata`, a pickle, read without torch and without running code.

`read_stored` checks the types of all values, `consistency.check` the values.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import NoneType
from typing import Any, Final

from ckpt_core.errors import UnsafeCheckpointError
from ckpt_core.formats.codec import MAX_COUNT, damage, relative_paths
from ckpt_core.formats.pickles import Sealed, read_pickle

_DTYPE: Final = re.compile(r"(?:q?u?int|b?float|b?complex|bits)(\d+)\w*|bool")
_ENCODINGS: Final = {"TORCH_CONTIGUOUS_FORMAT": 0, "TORCH_CHANNELS_LAST": 1, "TORCH_PRESERVE_FORMAT": 2}
_STEPS: Final = frozenset({str, int, float, bool, NoneType})


class Chunk(metaclass=Sealed):
    """Stand-in for `ChunkStorageMetadata`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Properties(metaclass=Sealed):
    """Stand-in for `TensorProperties`, with names of dtype and layout."""

    dtype: str
    layout: str
    requires_grad: bool
    memory_format: int
    pin_memory: bool

    def __setstate__(self, state: Any) -> None:
        # From 2.15 on torch notes strides, too, which nothing reads.
        self.dtype, self.layout, self.requires_grad, self.memory_format, self.pin_memory, *_ = state


class Tensor(metaclass=Sealed):
    """Stand-in for `TensorStorageMetadata`."""

    properties: Properties
    size: tuple[int, ...]
    chunks: list[Chunk]


class Value(metaclass=Sealed):
    """Stand-in for `BytesStorageMetadata`."""


class Key(metaclass=Sealed):
    """Stand-in for `MetadataIndex`, hashed by identity."""

    fqn: str
    offset: tuple[int, ...] | None = None
    index: int | None = None


class Place(metaclass=Sealed):
    """Stand-in for `_StorageInfo`."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: list[str] | None = None


class StoredMetadata(metaclass=Sealed):
    """Stand-in for `Metadata`."""

    state_dict_metadata: dict[str, Tensor | Value]
    storage_data: dict[Key, Place]
    planner_data: Mapping[str, tuple[Any, ...]] | None = None
    mcore_data: Mapping[str, Mapping[str, Any]] | None = None
    """Of Megatron-Core: the shapes of tensors that it stored in others."""


class _Ignored(metaclass=Sealed):
    def __new__(cls, *_: Any) -> Any:
        return object.__new__(cls)


class _IgnoredKind(_Ignored):
    """An enum of the planner's; early releases of Python 3.11 pickle it by name."""


class _EncodingByName(metaclass=Sealed):
    """Stand-in for `getattr`, by which early releases of Python 3.11 pickle enums."""

    def __new__(cls, *asked: object) -> Any:
        match asked:
            case (owner, str(name)) if owner is int and name in _ENCODINGS:
                return _ENCODINGS[name]
            case (owner, str(name)) if owner is _IgnoredKind and name in _KINDS_OF_ITEMS:
                return None
            case _:
                raise UnsafeCheckpointError(
                    ".metadata asks for an attribute that no DCP metadata needs; "
                    "it may be an attack and was not executed"
                )


_DCP: Final = "torch.distributed.checkpoint.metadata"
_PLANNER: Final = "torch.distributed.checkpoint.planner"
_MEGATRON: Final = "megatron.core.dist_checkpointing.strategies.torch"
_KINDS_OF_ITEMS: Final = frozenset({"TENSOR", "SHARD", "BYTE_IO"})
_ALLOWED: Final[dict[tuple[str, str], Any]] = {
    (_DCP, "Metadata"): StoredMetadata,
    (_DCP, "TensorStorageMetadata"): Tensor,
    (_DCP, "BytesStorageMetadata"): Value,
    (_DCP, "ChunkStorageMetadata"): Chunk,
    (_DCP, "TensorProperties"): Properties,
    (_DCP, "MetadataIndex"): Key,
    (_DCP, "StorageMeta"): _Ignored,
    (_DCP, "_MEM_FORMAT_ENCODING"): int,
    # Megatron-Core keeps the ranks' plans, too.
    **{(_PLANNER, name): _Ignored for name in ("SavePlan", "WriteItem", "TensorWriteData")},
    (_PLANNER, "WriteItemType"): _IgnoredKind,
    (_MEGATRON, "MCoreSavePlan"): _Ignored,
    (_MEGATRON, "MCoreMetadata"): StoredMetadata,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Place,
    ("torch.serialization", "_get_layout"): str,
    ("torch", "Size"): tuple,
    ("builtins", "getattr"): _EncodingByName,
    ("__builtin__", "getattr"): _EncodingByName,
    ("collections", "OrderedDict"): dict,
    **{
        (module, name): _Ignored
        for module in ("pathlib", "pathlib._local")  # the latter by Python 3.13 alone
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


def _find(module: str, name: str) -> Any:
    if (module, name) in _ALLOWED:
        return _ALLOWED[module, name]
    if module == "torch" and _DTYPE.fullmatch(name):
        return name
    raise UnsafeCheckpointError(
        f".metadata refers to {module:.200}.{name:.200}, which no DCP metadata needs; "
        "it may be an attack and was not executed"
    )


def item_bytes(dtype: str) -> int:
    """Return the bytes of an element, by torch's name of the dtype."""
    found = _DTYPE.fullmatch(dtype)
    return max(1, int(found[1]) // 8) if found and found[1] else 1


class ImpossibleError(ValueError):
    """What `.metadata` says of a tensor or file cannot be."""


def read_stored(content: bytes, memo: dict[int, Any] | None = None) -> StoredMetadata:
    """Read a `.metadata` file, in `reading`, and check the types of all values.

    `memo` receives what the pickle has kept, by number.
    """
    return _checked(read_pickle(content, _find, memo=memo))


@contextmanager
def collector_paused() -> Generator[None]:
    """Pause the garbage collector, which would traverse what is made here repeatedly."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


@contextmanager
def reading(path: str) -> Generator[None]:
    """Name the file in errors; the garbage collector is paused."""
    try:
        with collector_paused():
            yield
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(f"{path}: {error}") from error
    except ImpossibleError as error:
        raise damage(path, f"says what cannot be: {error}") from error
    except Exception as error:  # unchecked values raise nearly anything; the error names file and cause
        raise damage(path, f"cannot be read: {type(error).__name__}: {error!s:.500}") from error


def _checked(index: Any) -> StoredMetadata:
    if type(index) is not StoredMetadata or type(index.storage_data) is not dict:
        raise TypeError("not a DCP metadata object with storage data")
    _expect(index.state_dict_metadata, dict, "the state dict's metadata")
    for name in index.state_dict_metadata:
        _expect(name, str, "a name")
    for entry in {id(entry): entry for entry in index.state_dict_metadata.values()}.values():
        if type(entry) is Tensor:
            _check_tensor(entry)
        else:
            _expect(entry, Value, "an entry")
    for key, place in index.storage_data.items():
        _check_place(key, place)
    if len({(key.fqn, key.offset) for key in index.storage_data}) != len(index.storage_data):
        raise ValueError("a chunk is in two places")
    relative_paths(list({place.relative_path for place in index.storage_data.values()}))
    _check_paths(index.planner_data)
    _check_original(index.mcore_data)
    return index


def _check_original(original: Any) -> None:
    """Check Megatron-Core's data: name -> what it tells of the tensor."""
    if original is None:
        return
    _expect(original, dict, "the data of Megatron-Core")
    for told in original.values():
        _expect(told, dict, "the data of a tensor")
        if (shape := told.get("nd_reformulated_orig_global_shape")) is not None:
            _check_lengths(shape)


def _check_paths(planned: Any) -> None:
    """Check the planner's data: flattened name -> path in the nested state dict."""
    if planned is None:
        return
    _expect(planned, dict, "the planner data")
    for name, steps in planned.items():
        _expect(name, str, "a name in the planner data")
        _expect(steps, tuple, "a path in the planner data")
        if not _STEPS.issuperset(map(type, steps)):
            raise TypeError(f"the path of {name!r:.80} is not one")


def _check_tensor(tensor: Tensor) -> None:
    _expect(tensor.properties, Properties, "the properties of a tensor")
    if not _DTYPE.fullmatch(tensor.properties.dtype):
        raise ValueError(f"{tensor.properties.dtype!r:.80} is no dtype")
    _check_lengths(tensor.size)
    _expect(tensor.chunks, list, "the chunks of a tensor")
    for chunk in tensor.chunks:
        _expect(chunk, Chunk, "a chunk")
        _check_lengths(chunk.offsets)
        _check_lengths(chunk.sizes)


def _check_place(key: Any, place: Any) -> None:
    _expect(key, Key, "a key of the storage data")
    _expect(key.fqn, str, "the name of a chunk")
    if key.offset is not None:
        _check_lengths(key.offset)
    if type(key.index) not in (int, NoneType):
        raise TypeError(f"the place of a chunk of {key.fqn!r:.80} is not a number")
    if type(place) is not Place:
        raise TypeError(f"storage data of type {type(place).__name__} is not supported")
    _expect(place.relative_path, str, "the path of a chunk")
    for number in (place.offset, place.length):
        _expect(number, int, "the place of a chunk")
        if not 0 <= number <= MAX_COUNT:
            raise ValueError(f"impossible offset or length in {place.relative_path!r:.80}")
    check_extensions(place.transform_descriptors)


def check_extensions(transforms: Any) -> None:
    """Raise TypeError unless these are stream extensions of DCP, or None."""
    if transforms is not None:
        _expect(transforms, list, "stream extensions")
        if not {str}.issuperset(map(type, transforms)):
            raise TypeError("stream extensions that are not names")


def _check_lengths(lengths: Any) -> None:
    if type(lengths) is not tuple or not {int}.issuperset(map(type, lengths)):
        raise TypeError("a shape that is not of integers")


def _expect(value: object, kind: type, what: str) -> None:
    if type(value) is not kind:
        raise TypeError(f"{what} is of type {type(value).__name__}, not {kind.__name__}")
