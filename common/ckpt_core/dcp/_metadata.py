"""DCP's `.metadata`: made from plans, encoded, and read as DCP's own objects."""

from __future__ import annotations

import io
import os
import pickle
import stat
from collections.abc import Generator, ItemsView, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from typing_extensions import override

from ckpt_core._torch_internals import StorageInfo, layout_named, metadata_path, set_element
from ckpt_core.dcp._torch_zip import checked_zip
from ckpt_core.errors import ALLOW_PICKLE, UnsafeCheckpointError
from ckpt_core.formats.codec import corrupt, damage
from ckpt_core.formats.consistency import check_metadata
from ckpt_core.formats.dcp_metadata import reading
from ckpt_core.formats.index import Boxes, Index, Ints, Places, TensorIn, decode, encode, index_of
from ckpt_core.names import METADATA
from ckpt_core.storage import BIGGEST_SMALL_FILE
from ckpt_core.types import SavedEntries, SavedTensor

# By the value of torch's `_MEM_FORMAT_ENCODING`.
_MEMORY_FORMATS: Final = {0: torch.contiguous_format, 1: torch.channels_last, 2: torch.preserve_format}


def encode_metadata(metadata: Metadata, places: Mapping[MetadataIndex, StorageInfo]) -> bytes:
    return b"".join(encode(index_of(replace(metadata, storage_data=places))))


def load_metadata(content: bytes, path: str) -> Metadata:
    """Read a `.metadata` file.

    Nothing in it is executed, and its types are checked; `check_metadata` checks its values.
    """
    return metadata_of(decode(content, path), path)


def metadata_of(index: Index, path: str) -> Metadata:
    """Return an index as DCP's objects: equal entries as one, places when asked for.

    Raises:
        CorruptCheckpointError: torch has no such dtype or layout, or cannot hold a shape.
    """
    with reading(path):
        chunks = {id(each): _chunks(each) for each in index.boxes}
        entries = {id(None): BytesStorageMetadata()} | {
            id(each): TensorStorageMetadata(_properties(each), torch.Size(each.size), chunks[id(each.boxes)])
            for each in {id(each): each for each in index.entries}.values()
            if each is not None
        }
        found = Metadata(
            dict(zip(index.names, map(entries.__getitem__, map(id, index.entries)), strict=True)),
            {name: path for name, path in zip(index.names, index.paths, strict=True) if path is not None},
            StoredPlaces(index),
        )
        vars(found)["mcore_data"] = index.mcore_data  # where Megatron-Core itself puts it
        return found


def _chunks(boxes: Boxes) -> list[ChunkStorageMetadata]:
    sides = zip(boxes.starts.tolist(), boxes.sizes.tolist(), strict=True)
    return [ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in sides]


def _properties(tensor: TensorIn) -> TensorProperties:
    name, layout, requires_grad, memory_format, pin_memory = tensor.properties
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {name!r:.80}")
    return TensorProperties(
        dtype, layout_named(layout), requires_grad, _MEMORY_FORMATS[memory_format], pin_memory
    )


@final
class StoredPlaces(Mapping[MetadataIndex, StorageInfo]):
    """DCP's storage data as columns; an object is made when it is asked for."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._boxes: dict[int, dict[tuple[int, ...], int]] = {}

    @cached_property
    def _places(self) -> Places:
        return self._index.stored()

    @cached_property
    def _firsts(self) -> list[int]:
        return [int(each) for each in self._index.firsts()]

    @cached_property
    def _names(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._index.names)}

    @cached_property
    def _sorted(self) -> tuple[Ints, Ints]:
        """Numbers of the stored chunks over all entries, in order, and their rows."""
        numbers = self._index.firsts()[self._places.name] + np.maximum(self._places.box, 0)
        order = np.argsort(numbers, kind="stable")
        return numbers[order], order

    def __len__(self) -> int:
        return len(self._places.name)

    def __iter__(self) -> Iterator[MetadataIndex]:
        return (MetadataIndex(name, start) for name, start, *_ in self._index.rows())

    def __getitem__(self, key: MetadataIndex) -> StorageInfo:
        return self.take([key])[0]

    @override
    def items(self) -> ItemsView[MetadataIndex, StorageInfo]:
        """Return all, found together."""
        keys = list(self)
        return dict(zip(keys, self.take(keys), strict=True)).items()

    def take(self, keys: Sequence[MetadataIndex]) -> list[StorageInfo]:
        """Return where these are; KeyError if one is nowhere."""
        if not keys:
            return []
        places, firsts = self._places, self._firsts
        wanted = np.array([firsts[self._names[key.fqn]] + self._box(key) for key in keys], np.int64)
        numbers, order = self._sorted
        at = np.searchsorted(numbers, wanted)
        if not len(self) or not np.array_equal(numbers[np.minimum(at, len(numbers) - 1)], wanted):
            raise KeyError("no place of one of these chunks")
        rows = order[at]
        columns = [each[rows].tolist() for each in (places.file, places.offset, places.length)]
        transforms = places.transforms
        of_rows = repeat(None) if transforms is None else [transforms[row] for row in rows.tolist()]
        return [
            StorageInfo(places.files[int(file)], offset, length, each)
            for file, offset, length, each in zip(*columns, of_rows, strict=False)
        ]

    def _box(self, key: MetadataIndex) -> int:
        entry = self._index.entries[self._names[key.fqn]]
        if entry is None or key.offset is None:
            if (entry is None) != (key.offset is None):
                raise KeyError(key)
            return 0
        boxes = entry.boxes
        if id(boxes) not in self._boxes:
            rows = list(enumerate(map(tuple, boxes.starts.tolist())))
            self._boxes[id(boxes)] = {start: row for row, start in reversed(rows)}
        return self._boxes[id(boxes)][tuple(key.offset)]


def entries(metadata: Metadata) -> SavedEntries:
    """Return the leaves of the nested state dict, by path, or else by key."""
    paths: dict[str, tuple[str | int, ...]] = metadata.planner_data or {}
    known: dict[int, SavedTensor | None] = {}
    for value in metadata.state_dict_metadata.values():
        if id(value) not in known:
            known[id(value)] = (
                SavedTensor(shape=tuple(value.size), dtype=str(value.properties.dtype).removeprefix("torch."))
                if isinstance(value, TensorStorageMetadata)
                else None
            )
    return {
        tuple(paths.get(key, (key,))): known[id(value)] for key, value in metadata.state_dict_metadata.items()
    }


def load_plain(content: bytes, name: str) -> Any:
    checked_zip(content, name)
    return load_value(content, name, allow_pickle=False)


def load_value(content: bytes, name: str, *, allow_pickle: bool) -> Any:
    """Deserialise the output of `torch.save`; run no code unless pickle is allowed.

    Raises:
        CorruptCheckpointError: `torch.save` did not write it like that.
        UnsafeCheckpointError: it holds objects that only pickle can rebuild.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if allow_pickle:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
        raise UnsafeCheckpointError(
            f"{name} holds Python objects that only pickle can rebuild. If you trust who wrote this "
            f"checkpoint, give {ALLOW_PICKLE}"
        ) from error
    except Exception as error:  # a forged archive raises nearly anything; the error names entry and cause
        raise damage(name, f"{type(error).__name__}: {error!s:.500}") from error


def load_chunk(
    content: bytes, name: str, form: tuple[torch.dtype, tuple[int, ...]] | None = None
) -> torch.Tensor:
    """Verify and load a tensor chunk that is not raw bytes, such as a transposed one.

    `form` is the dtype and shape that `.metadata` says, None if it is not known.

    Raises:
        CorruptCheckpointError: it is damaged, or holds no tensor, or one of another form.
        UnsafeCheckpointError: the tensor cannot be rebuilt without executing foreign code.
    """
    checked_zip(content, name)
    try:
        tensor = load_value(content, name, allow_pickle=False)
    except UnsafeCheckpointError as error:
        reason = str(error.__cause__).strip().splitlines()[0]
        raise UnsafeCheckpointError(
            f"{name} is not a plain tensor, and none of its code was executed: {reason}"
        ) from error.__cause__
    if not isinstance(tensor, torch.Tensor):
        raise damage(name, f"holds a {type(tensor).__name__}, not a tensor")
    own = tensor.dtype, tuple(tensor.shape)
    if form not in {None, own}:
        raise damage(name, f".metadata says {form}, its own pickle {own!s:.200}")
    return tensor


def check_stock(directory: str | os.PathLike[str]) -> None:
    """Check that a DCP directory can be loaded without running code that it holds.

    Its `.metadata` must pass the allow-list, and torch must be able to load its byte entries with
    `weights_only=True`. Not collective; call it on one rank. Links are followed, as stock DCP follows them:
    the user has named the directory.

    Raises:
        UnsafeCheckpointError: stock DCP could run code in it; `allow_pickle=True` permits that.
        CorruptCheckpointError: a file is missing, or `.metadata` is impossible.
    """
    place = Path(directory)
    source = str(place / METADATA)
    try:
        content = read_linked(place / METADATA)
    except FileNotFoundError as error:
        raise corrupt(source, "missing: the save did not end, DCP cannot load this") from error
    metadata = _metadata(content, source)
    check_metadata(metadata, source, lambda path: (place / path).stat().st_size)
    for index, info in metadata.storage_data.items():
        if type(metadata.state_dict_metadata[index.fqn]) is BytesStorageMetadata:
            with (place / info.relative_path).open("rb") as stream:
                stream.seek(info.offset)
                load_plain(stream.read(info.length), f"{place / info.relative_path}: {index.fqn!r:.200}")


def read_linked(path: Path) -> bytes:
    """Read a host's small file, links followed, after a check of its type and size.

    Raises:
        CorruptCheckpointError: it is too large, or no regular file: a read of a pipe could block forever.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise corrupt(str(path), "is a directory, pipe or device, where a file should be")
    if found.st_size > BIGGEST_SMALL_FILE:
        raise corrupt(str(path), f"has {found.st_size} bytes, and may have {BIGGEST_SMALL_FILE} at most")
    return path.read_bytes()


@contextmanager
def without_pickle() -> Generator[None]:
    """Restrict stock DCP to the allow-list for `.metadata`, and to plain values.

    `check_stock` refuses with better messages, before anything live has changed; this covers the bytes that
    are actually read. It patches DCP's own classes meanwhile: for one thread at a time.
    """
    reader: Any = FileSystemReader
    planner: Any = DefaultLoadPlanner
    stock = reader.read_metadata, planner.load_bytes
    reader.read_metadata, planner.load_bytes = _stock_metadata, _stock_value
    try:
        yield
    finally:
        reader.read_metadata, planner.load_bytes = stock


def _metadata(content: bytes, source: str) -> Metadata:
    try:
        return load_metadata(content, source)
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(
            f"{error}. If you trust who wrote this checkpoint, give {ALLOW_PICKLE}"
        ) from error


def _stock_metadata(self: Any, *_: Any, **asked: Any) -> Metadata:
    path = metadata_path(self, asked.get("rank"))
    with self.fs.create_stream(path, "rb") as stream:
        metadata = _metadata(stream.read(), str(path))
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = self.load_id
    return metadata


def _stock_value(self: Any, read_item: ReadItem, value: io.BytesIO) -> None:
    key = read_item.dest_index.fqn
    loaded = load_plain(value.getvalue(), repr(key))
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[key], loaded)
    else:
        self.state_dict[key] = loaded
