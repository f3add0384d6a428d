"""A reader of DCP's `.metadata` without torch, safe for hostile files.

Every class in the pickle is replaced by an inert placeholder, so that no code of it can run. `index_failures`
tells whether a load would accept the result.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

from ckpt_core.errors import CheckpointError, CorruptCheckpointError, FileFailure
from ckpt_core.formats.chunks import ChunkTable
from ckpt_core.formats.codec import corrupt
from ckpt_core.formats.consistency import check_metadata
from ckpt_core.formats.pickles import Row, sanitize_pickle
from ckpt_core.names import METADATA, chunks_name, data_rank

BROKEN_PICKLE: Final = (
    pickle.UnpicklingError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    EOFError,
    RecursionError,
    OverflowError,
    MemoryError,
)

_NUMBER: Final = re.compile(r"(?:u?int|b?float|complex)(\d+)\w*")


class _Placeholder(dict[Any, Any]):
    """A stand-in for any object of a pickle: keeps fields, ignores all else."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __new__(cls, *_: Any, **__: Any) -> _Placeholder:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        elif isinstance(state, tuple):
            self.__dict__["fields"] = state  # of `TensorProperties`

    def append(self, _: Any) -> None:
        """Ignore an item, in place of a list."""

    def extend(self, _: Any) -> None:
        """Ignore items, in place of a list."""


class _Dtype(NamedTuple):
    """A stand-in for a dtype of torch."""

    name: str
    itemsize: int

    @classmethod
    def named(cls, name: str) -> _Dtype | None:
        found = _NUMBER.fullmatch(name)
        if found is None:
            return cls(name, 1) if name == "bool" else None
        return cls(name, max(1, int(found[1]) // 8))


def _size(lengths: Row) -> tuple[int, ...]:
    """Build a shape, in place of `torch.Size`."""
    if not {int}.issuperset(map(type, lengths)):
        raise TypeError("a shape that is not of integers")
    return tuple(lengths)


@final
class _Inert(pickle.Unpickler):  # noqa: S301 - no name in it is ever looked up
    """An unpickler that reads the structure only: it imports and calls nothing."""

    def find_class(self, module: str, name: str, /) -> Any:
        if module == "torch":
            return _size if name == "Size" else _Dtype.named(name) or _Placeholder
        return _Placeholder

    def persistent_load(self, pid: Any, /) -> Row:
        return Row(pid)


def read_index(content: bytes) -> Any:
    """Read a `.metadata`, with placeholders for DCP's objects.

    Raises one of `BROKEN_PICKLE`.
    """
    return _Inert(io.BytesIO(sanitize_pickle(content))).load()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """A tensor in `.metadata`: DCP's flattened name, global shape, torch's dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int

    @property
    def num_elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def list_tensors(content: bytes, source: str) -> list[TensorEntry]:
    """List every tensor of a `.metadata`, in its order.

    Raises:
        CorruptCheckpointError: DCP does not write such a file.
    """
    try:
        found = {
            _typed(key, str): _tensor(entry) for key, entry in read_index(content).state_dict_metadata.items()
        }
    except BROKEN_PICKLE as error:
        raise corrupt(source, f"cannot be read: {type(error).__name__}: {error!s:.500}") from error
    return [
        TensorEntry(
            name=name,
            shape=tensor.size,
            dtype=tensor.properties.dtype.name,
            size_bytes=math.prod(tensor.size) * tensor.properties.dtype.itemsize,
        )
        for name, tensor in found.items()
        if tensor is not None
    ]


def index_failures(path: str, sizes: Mapping[str, int], read: Callable[[str], bytes]) -> list[FileFailure]:
    """List why a load would refuse our `.metadata`, alone or beside the chunk tables.

    Args:
        path: of `.metadata`.
        sizes: path of every file of the checkpoint -> bytes.
        read: path -> content.
    """
    part = path.removesuffix(METADATA)

    def size(data: str) -> int:
        if part + data not in sizes:
            raise FileNotFoundError(part + data)
        return sizes[part + data]

    try:
        index = _Index.of(read_index(read(path)))
        check_metadata(index, path, size)
    except CorruptCheckpointError as error:
        return list(error.failures)
    except BROKEN_PICKLE as error:
        return [FileFailure(path=path, problem=f"cannot be read: {type(error).__name__}: {error!s:.500}")]
    return _table_failures(part, index, read)


@final
@dataclass(frozen=True, slots=True)
class _Chunk:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class _Properties:
    dtype: _Dtype


@final
@dataclass(frozen=True, slots=True)
class _Tensor:
    size: tuple[int, ...]
    properties: _Properties
    chunks: list[_Chunk]


@final
@dataclass(frozen=True, slots=True)
class _Place:
    relative_path: str
    offset: int
    length: int
    transform_descriptors: Any


@final
@dataclass(frozen=True, slots=True)
class _Key:
    fqn: str
    offset: tuple[int, ...] | None


@final
@dataclass(frozen=True, slots=True)
class _Index:
    """The part of `Metadata` that the checks need, with verified types."""

    state_dict_metadata: Mapping[str, _Tensor | None]
    storage_data: Mapping[_Key, _Place]

    @classmethod
    def of(cls, found: Any) -> _Index:
        """Convert the result of `read_index`; raises one of `BROKEN_PICKLE` for bad types."""
        return cls(
            state_dict_metadata={
                _typed(key, str): _tensor(entry) for key, entry in found.state_dict_metadata.items()
            },
            storage_data={_key(key): _place(place) for key, place in found.storage_data.items()},
        )


def _tensor(entry: Any) -> _Tensor | None:
    if "chunks" not in vars(entry):
        return None
    chunks = [_Chunk(_typed(c.offsets, tuple), _typed(c.sizes, tuple)) for c in _typed(entry.chunks, list)]
    dtype = _typed(entry.properties.fields[0], _Dtype)
    return _Tensor(_typed(entry.size, tuple), _Properties(dtype), chunks)


def _key(key: Any) -> _Key:
    offset = vars(key).get("offset")  # a default is not pickled
    return _Key(_typed(key.fqn, str), None if offset is None else _typed(offset, tuple))


def _place(place: Any) -> _Place:
    return _Place(
        relative_path=_typed(place.relative_path, str),
        offset=_typed(place.offset, int),
        length=_typed(place.length, int),
        transform_descriptors=vars(place).get("transform_descriptors"),
    )


def _typed(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} where DCP has {kind.__name__}")
    return value


_Rows = Mapping[tuple[str, str, tuple[int, ...] | None], tuple[int, int]]


def _table_failures(part: str, index: _Index, read: Callable[[str], bytes]) -> list[FileFailure]:
    """Find the first entry of `.metadata` that differs from the chunk tables."""
    tables: dict[str, _Rows] = {}
    for key, place in index.storage_data.items():
        path = part + place.relative_path
        rank = data_rank(path)
        if rank is None:
            return [
                FileFailure(
                    path=path, problem=f"holds {key.fqn!r:.200}, but no rank writes a file of that name"
                )
            ]
        name = chunks_name(rank)
        try:
            if name not in tables:
                tables[name] = _rows(ChunkTable.from_bytes(read(name), source=name))
        except CheckpointError as error:
            return [FileFailure(path=name, problem=str(error))]
        except FileNotFoundError:
            return [FileFailure(path=name, problem="missing")]
        if tables[name].get((path, key.fqn, key.offset)) != (place.offset, place.length):
            return [FileFailure(path=path, problem=f"{key.fqn!r:.200} is at another place than {name} says")]
    return []


def _rows(table: ChunkTable) -> _Rows:
    return {
        (path, key, None if offsets is None else tuple(offsets)): (offset, size)
        for path, chunks in table.files.items()
        for key, offsets, offset, size in zip(
            chunks.columns.key,
            chunks.columns.shard_offsets,
            chunks.columns.offset,
            chunks.columns.size_bytes,
            strict=True,
        )
    }
