"""DCP's `.metadata` as columns: no Python object per stored chunk.

Models repeat themselves: tensors of one shape and placement are cut into the same boxes. What is equal is one
object here, and one in the pickle. What remains of each chunk is where it lies: a record of constant length,
so that numpy writes and reads all of them at once.
"""

from __future__ import annotations

import pickle
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Numbers: TypeAlias = npt.NDArray[np.int32]
Properties: TypeAlias = tuple[str, str, bool, int, bool]
"""Names of dtype and layout, `requires_grad`, number of the memory format, `pin_memory`."""

Path: TypeAlias = tuple[str | int, ...]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """The chunks of a tensor, in DCP's order: int64 arrays, chunks x dimensions.

    Equal ones are one object.
    """

    starts: Ints
    sizes: Ints

    def __len__(self) -> int:
        return len(self.starts)


@final
@dataclass(frozen=True, slots=True, eq=False)
class TensorIn:
    """A tensor as `.metadata` describes it; equal ones are one object."""

    properties: Properties
    size: tuple[int, ...]
    boxes: Boxes


@final
@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Columns of equal length: where each stored chunk lies.

    Attributes:
        name: int32, into the names of the `Index`.
        box: int32, row in the boxes of the tensor; -1 for a byte entry.
        file: int32, into `files`.
        files: paths of data files.
        offset: int64, bytes.
        length: int64, bytes.
        transforms: DCP's stream extensions of each chunk; None if no chunk has any.
    """

    name: Numbers
    box: Numbers
    file: Numbers
    files: Sequence[str]
    offset: Ints
    length: Ints
    transforms: Sequence[Sequence[str] | None] | None = None


@final
@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """What `.metadata` says: lists of equal length, one row for each entry.

    Attributes:
        names: DCP's, each once.
        entries: of tensors; None for a byte entry. Equal ones are one object.
        paths: in the nested state dict; None where DCP's `planner_data` has none.
    """

    names: list[str]
    entries: Sequence[TensorIn | None]
    paths: Sequence[Path | None]
    places: Places | None = None


def _text(value: str) -> bytes:
    content = value.encode("utf-8", "surrogatepass")
    return b"X%b%b" % (len(content).to_bytes(4, "little"), content)


def _class(name: str, module: str = "metadata") -> bytes:
    return f"ctorch.distributed.checkpoint.{module}\n{name}\n".encode()


_CONSTANTS: Final = {
    "Metadata": _class("Metadata"),
    "Tensor": _class("TensorStorageMetadata"),
    "Value": _class("BytesStorageMetadata") + b")\x81",
    "Chunk": _class("ChunkStorageMetadata"),
    "Properties": _class("TensorProperties"),
    "MemoryFormat": _class("_MEM_FORMAT_ENCODING"),
    "Key": _class("MetadataIndex"),
    "Place": _class("_StorageInfo", "filesystem"),
    "Size": b"ctorch\nSize\n",
    "layout": b"ctorch.serialization\n_get_layout\n",
    "none": b"N",
    **{
        name: _text(name)
        for name in (
            *("properties", "size", "chunks", "offsets", "sizes"),
            *("fqn", "offset", "relative_path", "length", "transform_descriptors"),
        )
    },
}
"""What a pickle begins with, by number in its memo."""
_MEMO: Final = {name: number for number, name in enumerate(_CONSTANTS)}
_GET: Final = {name: b"h%c" % number for name, number in _MEMO.items()}
_BOOL: Final = {False: b"\x89", True: b"\x88"}
_STORAGE_META: Final = b"".join(
    (
        _text("storage_meta"),
        _class("StorageMeta") + b")\x81}(",
        *(_text(name) + b"N" for name in ("checkpoint_id", "save_id", "load_id")),
        _text("modules") + b"]ub",
        _text("version") + _text("1.0.0"),  # DCP's `CURRENT_DCP_VERSION`
    )
)
_END: Final = b"uub."

_Field: TypeAlias = "bytes | tuple[int, npt.NDArray[Any]]"
_BLOCK: Final = 1 << 16


def _filled(fields: Sequence[_Field], rows: int) -> Iterator[memoryview]:
    """Yield records of constant bytes and of columns: (bytes of a value, values)."""
    width = sum(len(each) if isinstance(each, bytes) else each[0] for each in fields)
    for first in range(0, rows, _BLOCK):
        last = min(rows, first + _BLOCK)
        records, at = np.empty((last - first, width), np.uint8), 0
        for each in fields:
            if isinstance(each, bytes):
                size, values = len(each), np.frombuffer(each, np.uint8)
            else:
                size = each[0]
                values = (
                    np.ascontiguousarray(each[1][first:last], "<i8").view(np.uint8).reshape(-1, 8)[:, :size]
                )
            records[:, at : at + size] = values
            at += size
        content: Any = records  # the types of numpy 1 do not declare it as a buffer
        yield memoryview(content).cast("B")


def _get(numbers: Ints) -> list[_Field]:
    """Return the fields of a reference to the memo."""
    return [b"j", (4, numbers)]


def _int(values: Ints, *, wide: bool) -> list[_Field]:
    return [b"\x8a\x08", (8, values)] if wide else [b"J", (4, values)]


def _is_wide(values: Ints) -> bool:
    return bool(values.size) and int(values.max()) >= 1 << 31


def _object(kind: str, **attributes: list[_Field]) -> list[_Field]:
    """Return the fields of an object with these attributes."""
    fields: list[_Field] = [_GET[kind], b")\x81}("]
    for name, value in attributes.items():
        fields += [_GET[name], *value]
    return [*fields, b"ub"]


def encode(index: Index) -> Iterator[bytes | memoryview]:
    """Yield the bytes of `.metadata`; every stored chunk is a record.

    Needs memory for the names and for the distinct boxes, not for the places.

    Raises:
        ValueError: the index has no places.
    """
    if index.places is None:
        raise ValueError("an index without places")
    yield from _Encoder(index, index.places).encode()


@final
class _Encoder:
    """Writer of one pickle: first what is referred to, then the records that do."""

    def __init__(self, index: Index, places: Places) -> None:
        self._index, self._places = index, places
        self._kept = len(_CONSTANTS)
        tensors = {id(each): each for each in index.entries if each is not None}
        self._tensors = list(tensors.values())
        self._boxes = list({id(each.boxes): each.boxes for each in self._tensors}.values())

    def _keep(self, count: int) -> Ints:
        """Return the numbers in the memo of the next values."""
        self._kept += count
        return np.arange(self._kept - count, self._kept)

    def encode(self) -> Iterator[bytes | memoryview]:
        yield b"\x80\4(" + b"".join(b"%b\x94" % each for each in _CONSTANTS.values())
        content, names, paths = self._names()
        yield content
        starts, sizes, shapes = yield from self._sizes()
        entries = yield from self._entries(starts, sizes, shapes)
        files = self._keep(len(self._places.files))
        yield b"".join(b"%b\x94" % _text(each) for each in self._places.files)
        transforms = yield from self._transforms()
        yield b"1" + _GET["Metadata"] + b")\x81}(" + _text("state_dict_metadata") + b"}("
        yield from _filled([*_get(names), *_get(entries)], len(names))
        yield b"u" + _text("planner_data") + b"j" + paths.to_bytes(4, "little") + _STORAGE_META
        yield _text("storage_data") + b"}("
        yield from self._records(names, starts, files, transforms)
        yield _END

    def _names(self) -> tuple[bytes, Ints, int]:
        """Return the pickled names and paths, and their numbers in the memo."""
        buffer = BytesIO()
        pickler: Any = pickle.Pickler(buffer, 3)  # of later protocols frames could not be joined
        pickler.memo = {number: (number, object()) for number in range(self._kept)}
        pickler.dump(self._index.names)
        buffer.seek(-1, 1)  # over the end
        named = zip(self._index.names, self._index.paths, strict=True)
        pickler.dump({name: path for name, path in named if path is not None})
        numbers = self._keep(1 + len(self._index.names))[1:]
        self._kept, paths = len(pickler.memo.copy()), self._kept
        return buffer.getvalue()[:-1], numbers, paths

    def _sizes(self) -> Generator[bytes | memoryview, None, tuple[list[Ints], list[Ints], list[Ints]]]:
        """Yield every distinct `torch.Size`; return the numbers of those of starts, sizes, shapes."""
        shapes = [np.array([each.size], np.int64).reshape(1, -1) for each in self._tensors]
        arrays = [*(each.starts for each in self._boxes), *(each.sizes for each in self._boxes), *shapes]
        found = [np.empty(0, np.int64)] * len(arrays)
        for dims in sorted({each.shape[1] for each in arrays}):
            own = [number for number, each in enumerate(arrays) if each.shape[1] == dims]
            rows = np.concatenate([arrays[number] for number in own])
            if dims:
                rows, inverse = np.unique(rows, axis=0, return_inverse=True)
            else:
                rows, inverse = rows[:1], np.zeros(len(rows), np.int64)
            wide = _is_wide(rows)
            fields = [field for values in rows.T for field in _int(values, wide=wide)]
            yield from _filled([_GET["Size"], b"(", *fields, b"t\x85R\x94"], len(rows))
            ends = np.cumsum([len(arrays[number]) for number in own])[:-1]
            for number, part in zip(
                own, np.split(self._keep(len(rows))[inverse.reshape(-1)], ends), strict=True
            ):
                found[number] = part
        boxes = len(self._boxes)
        return found[:boxes], found[boxes : 2 * boxes], found[2 * boxes :]

    def _entries(
        self, starts: list[Ints], sizes: list[Ints], shapes: list[Ints]
    ) -> Generator[bytes | memoryview, None, Ints]:
        """Yield lists of chunks and tensors; return the number of each entry."""
        for start, size in zip(starts, sizes, strict=True):
            yield b"]("
            yield from _filled(_object("Chunk", offsets=_get(start), sizes=_get(size)), len(start))
            yield b"e\x94"
        chunks = dict(zip(map(id, self._boxes), self._keep(len(self._boxes)), strict=True))
        kinds = list({each.properties: None for each in self._tensors})
        yield b"".join(map(_properties, kinds))
        properties = dict(zip(kinds, self._keep(len(kinds)), strict=True))
        record = _object(
            "Tensor",
            properties=_get(_ints(properties[each.properties] for each in self._tensors)),
            size=_get(_joined(shapes)),
            chunks=_get(_ints(chunks[id(each.boxes)] for each in self._tensors)),
        )
        yield from _filled([*record, b"\x94"], len(self._tensors))
        numbers = dict(zip(map(id, self._tensors), self._keep(len(self._tensors)), strict=True))
        numbers[id(None)] = np.int64(_MEMO["Value"])
        return _ints(map(numbers.__getitem__, map(id, self._index.entries)))

    def _transforms(self) -> Generator[bytes, None, Ints | None]:
        """Yield the distinct stream extensions; return the number of those of each place."""
        of_places = self._places.transforms
        if of_places is None:
            return None
        lists = list({tuple(each): None for each in of_places if each is not None})
        yield b"".join(b"](%be\x94" % b"".join(map(_text, each)) for each in lists)
        numbers = dict(zip(lists, self._keep(len(lists)), strict=True))
        return _ints(_MEMO["none"] if each is None else numbers[tuple(each)] for each in of_places)

    def _records(
        self, names: Ints, starts: list[Ints], files: Ints, transforms: Ints | None
    ) -> Iterator[memoryview]:
        """Yield the storage data: a key and a place of each chunk."""
        places = self._places
        firsts = dict(zip(map(id, self._boxes), np.cumsum([0, *map(len, self._boxes)]), strict=False))
        first = _ints(0 if each is None else firsts[id(each.boxes)] for each in self._index.entries)
        offsets = np.append(_joined(starts), _MEMO["none"])
        wide = _is_wide(places.offset), _is_wide(places.length)
        for begin in range(0, len(places.name), _BLOCK):
            own = slice(begin, begin + _BLOCK)
            name, box = places.name[own], places.box[own]
            key = _object(
                "Key", fqn=_get(names[name]), offset=_get(offsets[np.where(box < 0, -1, first[name] + box)])
            )
            attributes = {
                "relative_path": _get(files[places.file[own]]),
                "offset": _int(places.offset[own], wide=wide[0]),
                "length": _int(places.length[own], wide=wide[1]),
            }
            if transforms is not None:
                attributes["transform_descriptors"] = _get(transforms[own])
            record = [*key, *_object("Place", **attributes)]
            yield from _filled(record, len(name))


def _properties(properties: Properties) -> bytes:
    dtype, layout, requires_grad, memory_format, pin_memory = properties
    state = b"(ctorch\n%b\n%b%b\x85R%b%bK%c\x85R%bt" % (
        dtype.encode(),
        _GET["layout"],
        _text(layout),
        _BOOL[requires_grad],
        _GET["MemoryFormat"],
        memory_format,
        _BOOL[pin_memory],
    )
    return b"%b)\x81%bb\x94" % (_GET["Properties"], state)


def _ints(values: Iterable[Any]) -> Ints:
    return np.fromiter(values, np.int64)


def _joined(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *arrays])
