"""DCP's `.metadata` as columns: no Python object per stored chunk.

Models repeat themselves: tensors of one shape and placement are cut into the same boxes. What is equal is one
object here, and one in the pickle. What remains of each chunk is where it lies: a record of constant length,
so that numpy writes and reads all of them at once.
"""

from __future__ import annotations

import pickle
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import accumulate, product, repeat
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ckpt_core.formats.codec import MAX_COUNT
from ckpt_core.formats.codec import relative_paths as check_paths
from ckpt_core.formats.dcp_metadata import ImpossibleError, check_extensions, read_stored, reading

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

    @property
    def dtype(self) -> str:
        """Torch's name of its dtype."""
        return self.properties[0]


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
        mcore_data: of Megatron-Core: what it tells of tensors that it stored in others, by name.
    """

    names: list[str]
    entries: Sequence[TensorIn | None]
    paths: Sequence[Path | None]
    places: Places | None = None
    mcore_data: Any = None

    def stored(self) -> Places:
        """Return the places; ValueError if it has none yet."""
        if self.places is None:
            raise ValueError("an index of a plan, without places")
        return self.places

    @property
    def boxes(self) -> list[Boxes]:
        """The distinct boxes of its tensors."""
        return list({id(each.boxes): each.boxes for each in self.entries if each is not None}.values())

    def tensors(self) -> Iterator[tuple[str, TensorIn]]:
        """Yield name and entry of each tensor."""
        return ((name, each) for name, each in zip(self.names, self.entries, strict=True) if each is not None)

    def firsts(self) -> Ints:
        """Return where the chunks of each entry begin; a byte entry is one chunk."""
        return np.cumsum([0, *(1 if each is None else len(each.boxes) for each in self.entries)])

    def rows(self) -> Iterator[tuple[str, tuple[int, ...] | None, str, int, int, Sequence[str] | None]]:
        """Yield name, start, file, offset, length and extensions of each stored chunk."""
        places = self.stored()
        starts = {id(each): list(map(tuple, each.starts.tolist())) for each in self.boxes}
        own = [None if each is None else starts[id(each.boxes)] for each in self.entries]
        columns = (places.name, places.box, places.file, places.offset, places.length)
        transforms = repeat(None) if places.transforms is None else places.transforms
        for name, box, file, offset, length, extensions in zip(
            *(each.tolist() for each in columns), transforms, strict=False
        ):
            start = own[name]
            yield self.names[name], start and start[box], places.files[int(file)], offset, length, extensions


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
_BEGIN: Final = b"\x80\4(" + b"".join(b"%b\x94" % each for each in _CONSTANTS.values())
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
_OPEN: Final = _text("storage_data") + b"}("
_END: Final = b"uub."
_MEMORY_FORMATS: Final = ["torch.contiguous_format", "torch.channels_last", "torch.preserve_format"]

_Field: TypeAlias = "bytes | tuple[str, npt.NDArray[Any]]"
_BLOCK: Final = 1 << 16


def _width(field: _Field) -> int:
    return len(field) if isinstance(field, bytes) else int(field[0][-1])


def _spans(fields: Sequence[_Field]) -> Iterator[tuple[int, _Field]]:
    return zip(accumulate(map(_width, fields), initial=0), fields, strict=False)


def _filled(fields: Sequence[_Field], rows: int) -> Iterator[memoryview]:
    """Yield records of constant bytes and columns: (numpy's name of a type, values)."""
    for first in range(0, rows, _BLOCK):
        last = min(rows, first + _BLOCK)
        records = np.empty((last - first, sum(map(_width, fields))), np.uint8)
        for at, each in _spans(fields):
            if isinstance(each, bytes):
                values = np.frombuffer(each, np.uint8)
            else:
                values = each[1][first:last].astype(each[0]).view(np.uint8).reshape(-1, _width(each))
            records[:, at : at + _width(each)] = values
        content: Any = records  # the types of numpy 1 do not declare it as a buffer
        yield memoryview(content).cast("B")


def _get(numbers: Ints) -> list[_Field]:
    """Return the fields of a reference to the memo."""
    return [b"j", ("<u4", numbers)]


def _int(values: Ints, *, wide: bool) -> list[_Field]:
    return [b"\x8a\x08", ("<i8", values)] if wide else [b"J", ("<i4", values)]


def _is_wide(values: Ints) -> bool:
    return bool(values.size) and int(values.max()) >= 1 << 31


def _object(kind: str, **attributes: list[_Field]) -> list[_Field]:
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
    yield from _Encoder(index, index.stored()).encode()


@final
class _Encoder:
    """Writer of one pickle: first what is referred to, then the records that do."""

    def __init__(self, index: Index, places: Places) -> None:
        self._index, self._places = index, places
        self._kept = len(_CONSTANTS)
        self._tensors = list({id(each): each for each in index.entries if each is not None}.values())
        self._boxes = index.boxes

    def _keep(self, count: int) -> Ints:
        self._kept += count
        return np.arange(self._kept - count, self._kept)

    def encode(self) -> Iterator[bytes | memoryview]:
        yield _BEGIN
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
        yield _OPEN
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
        known: dict[Any, Any] = {name: name for name in self._index.names}  # equal texts are written once
        once = known.setdefault
        pickler.dump({name: tuple(map(once, path, path)) for name, path in named if path is not None})
        numbers = self._keep(1 + len(self._index.names))[1:]
        self._kept, paths = len(pickler.memo.copy()), self._kept
        return buffer.getvalue()[:-1], numbers, paths

    def _sizes(self) -> Generator[bytes | memoryview, None, tuple[list[Ints], list[Ints], list[Ints]]]:
        """Yield every distinct `torch.Size`; return those of starts, sizes and shapes."""
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
            columns = [
                names[name],
                offsets[np.where(box < 0, -1, first[name] + box)],
                files[places.file[own]],
                places.offset[own],
                places.length[own],
                *([] if transforms is None else [transforms[own]]),
            ]
            yield from _filled(_record(columns, wide), len(name))


def _record(columns: Sequence[Ints], wide: Sequence[bool]) -> list[_Field]:
    name, start, file, offset, length, *more = columns
    extension = {"transform_descriptors": _get(more[0])} if more else {}
    offset_, length_ = _int(offset, wide=wide[0]), _int(length, wide=wide[1])
    place = _object("Place", relative_path=_get(file), offset=offset_, length=length_, **extension)
    return [*_object("Key", fqn=_get(name), offset=_get(start)), *place]


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


def _records_in(content: bytes) -> tuple[int, list[npt.NDArray[Any]]] | None:
    """Find the records that end a pickle of `encode`: their beginning and columns."""
    if not (content.startswith(_BEGIN) and content.endswith(_END)):
        return None
    nothing = np.empty(0, np.int64)
    for columns, *wide in product((5, 6), (False, True), (False, True)):
        fields = _record([nothing] * columns, wide)
        records = _matching(content, fields)
        begin = len(content) - len(_END) - records.size
        if len(records) and content.endswith(_OPEN, 0, begin):
            spans = [(at, each[0]) for at, each in _spans(fields) if not isinstance(each, bytes)]
            return begin, [
                np.ascontiguousarray(records[:, at : at + int(kind[-1])]).view(kind).reshape(-1)
                for at, kind in spans
            ]
    return None


def _matching(content: bytes, fields: Sequence[_Field]) -> npt.NDArray[np.uint8]:
    """Return the last bytes as records, as far back as their constant ones match."""
    width, most = sum(map(_width, fields)), len(content) - len(_END)
    rows = most // width
    records = np.frombuffer(content, np.uint8, rows * width, most - rows * width).reshape(rows, width)
    constants = {
        at + n: byte for at, each in _spans(fields) if isinstance(each, bytes) for n, byte in enumerate(each)
    }
    for last in range(rows, 0, -_BLOCK):
        block = records[max(0, last - _BLOCK) : last]
        right = np.ones(len(block), bool)
        for at, byte in constants.items():
            right &= block[:, at] == byte
        wrong = np.flatnonzero(~right)
        if len(wrong):
            return records[last - len(block) + wrong[-1] + 1 :]
    return records


def decode(content: bytes, path: str) -> Index:
    """Read a `.metadata`; of what `encode` wrote, the records by columns.

    Nothing is executed, and types are checked; `consistency.check` checks the values.

    Raises:
        CorruptCheckpointError: it is none, or a place is of nothing that it describes.
        UnsafeCheckpointError: it asks for what no metadata needs.
    """
    with reading(path):
        found = _records_in(content)
        if found is None:
            return index_of(read_stored(content))
        memo: dict[int, Any] = {}
        return _Columns(read_stored(content[: found[0]] + _END, memo)).with_records(found[1], memo)


def index_of(stored: Any) -> Index:
    """Return the columns of DCP's `Metadata`, or of what stands for it.

    Raises:
        ImpossibleError: a place is of nothing that is described, or a chunk has other dimensions.
    """
    return _Columns(stored).with_places(stored.storage_data or {})


def boxes_of(name: str, size: Sequence[int], chunks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Boxes:
    """Return starts and sizes of a tensor's chunks as columns.

    Raises:
        ImpossibleError: one has other dimensions than the tensor.
    """
    if any(not len(start) == len(sizes) == len(size) for start, sizes in chunks):
        raise ImpossibleError(f"a chunk of {name!r:.200} has other dimensions than its shape {tuple(size)}")
    sides = ([each[side] for each in chunks] for side in (0, 1))
    return Boxes(*(np.array(each, np.int64).reshape(len(chunks), len(size)) for each in sides))


@final
class _Columns:
    """Maker of an index from objects, of which equal ones become one."""

    def __init__(self, stored: Any) -> None:
        self._equal: dict[Any, Any] = {}
        self._starts: dict[tuple[int, ...] | None, int] = {None: 0}
        self._rows: dict[tuple[int, int], int] = {}
        described, paths = stored.state_dict_metadata, stored.planner_data or {}
        self._numbers = {name: number for number, name in enumerate(described)}
        known: dict[int, TensorIn | None] = {}
        for name, each in described.items():
            if id(each) not in known:
                known[id(each)] = self._tensor_in(name, each) if hasattr(each, "chunks") else None
        self._index = Index(
            list(described),
            [known[id(each)] for each in described.values()],
            list(map(paths.get, described)),
            mcore_data=vars(stored).get("mcore_data"),
        )
        boxes = {id(each): number for number, each in enumerate(self._index.boxes, 1)}
        self._boxes = [0 if each is None else boxes[id(each.boxes)] for each in self._index.entries]
        self._rows[0, 0] = -1  # of a byte entry
        for number, each in enumerate(self._index.boxes, 1):
            for row, start in enumerate(map(tuple, each.starts.tolist())):
                self._rows.setdefault((number, self._starts.setdefault(start, len(self._starts))), row)

    def _tensor_in(self, name: str, entry: Any) -> TensorIn:
        size, form = tuple(entry.size), entry.properties
        chunks = tuple((tuple(each.offsets), tuple(each.sizes)) for each in entry.chunks)
        boxes = self._equal.get((len(size), chunks))
        if boxes is None:
            boxes = self._equal[len(size), chunks] = boxes_of(name, size, chunks)
        memory = form.memory_format
        properties = (
            str(form.dtype).removeprefix("torch."),
            str(form.layout),
            bool(form.requires_grad),
            memory if memory in range(3) else _MEMORY_FORMATS.index(str(memory)),
            bool(form.pin_memory),
        )
        made: TensorIn = self._equal.setdefault(
            (properties, size, id(boxes)), TensorIn(properties, size, boxes)
        )
        return made

    def with_places(self, storage: Mapping[Any, Any]) -> Index:
        """Return the index with DCP's storage data."""
        rows: list[tuple[int, ...]] = []
        files: dict[str, int] = {}
        for key, place in storage.items():
            name = self._numbers.get(key.fqn, -1)
            start = self._starts.get(None if key.offset is None else tuple(key.offset), -1)
            box = self._rows.get((self._boxes[name], start)) if name >= 0 else None
            if box is None:
                raise _undescribed(key.fqn)
            file = files.setdefault(place.relative_path, len(files))
            rows.append((name, box, file, place.offset, place.length))
        columns = np.array(rows, np.int64).reshape(-1, 5).T
        transforms = [each.transform_descriptors for each in storage.values()]
        name, box, file = columns[:3].astype(np.int32)
        offset, length = columns[3:]
        known = transforms if any(transforms) else None
        places = Places(name, box, file, list(files), offset, length, known)
        return replace(self._index, places=places)

    def with_records(self, columns: Sequence[npt.NDArray[Any]], memo: Mapping[int, Any]) -> Index:
        """Return the index with the columns of records, which refer to the memo.

        Raises:
            ImpossibleError: a place is of nothing that is described.
            Exception: a reference is to nothing, or to what it cannot be.
        """
        most = max(memo)
        if any(int(each.max()) > most for each in (*columns[:3], *columns[5:])):
            raise ValueError("a record refers to nothing")
        numbers, starts = (np.full(most + 1, -1, np.int32) for _ in range(2))
        for number, value in memo.items():
            if type(value) is str:
                numbers[number] = self._numbers.get(value, -1)
            elif value is None or type(value) is tuple:
                starts[number] = self._starts.get(value, -1)
        name, start = numbers[columns[0]], starts[columns[1]]
        order = np.array(sorted((*key, row) for key, row in self._rows.items()), np.int64).T
        known = order[0] * len(self._starts) + order[1]
        own = np.array(self._boxes, np.int64)[name] * len(self._starts) + start
        at = np.minimum(np.searchsorted(known, own), len(known) - 1)
        wrong = np.flatnonzero((name < 0) | (start < 0) | (known[at] != own))
        if len(wrong):
            raise _undescribed(memo[int(columns[0][wrong[0]])])
        used = np.flatnonzero(np.bincount(columns[2]))
        files = [memo[number] for number in used.tolist()]
        of_file = np.zeros(len(numbers), np.int32)
        of_file[used] = np.arange(len(used))
        transforms = [memo[number] for number in columns[5].tolist()] if len(columns) > 5 else None
        offset, length = (each.astype(np.int64) for each in columns[3:5])
        box, file = order[2][at].astype(np.int32), of_file[columns[2]]
        places = Places(name, box, file, files, offset, length, transforms)
        _check_places(places, self._index)
        return replace(self._index, places=places)


def _check_places(places: Places, index: Index) -> None:
    """Check types and ranges, as of places that are objects."""
    check_paths(places.files)
    for column in (places.offset, places.length):
        wrong = np.flatnonzero((column < 0) | (column > MAX_COUNT))
        if len(wrong):
            path = places.files[int(places.file[wrong[0]])]
            raise ValueError(f"impossible offset or length in {path!r:.80}")
    for each in {id(each): each for each in places.transforms or ()}.values():
        check_extensions(each)
    rows = index.firsts()[places.name] + np.maximum(places.box, 0)
    if not np.diff(np.sort(rows)).all():
        raise ValueError("a chunk is in two places")


def _undescribed(name: object) -> ImpossibleError:
    return ImpossibleError(f"{name!r:.200} has a place but is not described")
