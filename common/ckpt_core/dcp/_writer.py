"""Shards to bytes: a DCP `StorageWriter` whose files stock `dcp.load` reads."""

from __future__ import annotations

import mmap
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from queue import SimpleQueue
from typing import Any, Protocol, Self, TypeAlias, cast, final

import numpy as np
import torch
from torch.distributed.checkpoint import SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from ckpt_core._torch_internals import StorageInfo
from ckpt_core.dcp._image import Image, ImageLayout, Spans, specs_of
from ckpt_core.dcp._torch_zip import pad_archive
from ckpt_core.formats.checksums import CRC32, Checksum, checksum, crc32
from ckpt_core.formats.chunks import ChunkColumns, ChunkTable, TableEntry
from ckpt_core.names import METADATA, data_name
from ckpt_core.storage import Storage
from ckpt_core.types import FileEntry

_Progress: TypeAlias = BaseException | int
"""The error of the hashing, 1 for each finished piece, or 0 at the end."""


class Twins(Protocol):
    """Writes a second file of the same bytes for every file that is shown to it."""

    def follow(self, path: str, pieces: Iterable[memoryview], /) -> Iterable[memoryview]:
        """Pass on the pieces of a file."""
        ...

    def add(self, path: str, content: bytes, /) -> None:
        """Take the content of a small file."""
        ...


@final
class Hashing:
    """The hashing of one rank's data files in one save.

    Concurrency: used by one thread. Pieces must not change until `checksums` has returned or the context has
    ended.

    Args:
        algorithm: of the checksums; for CRC-32, which the writer computes, nothing is hashed here.
        twins: is shown every file; None without twins.
    """

    def __init__(self, algorithm: str = CRC32, twins: Twins | None = None) -> None:
        self.algorithm = algorithm
        self._twins = twins
        self._files: dict[str, _File] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.stop()

    def follow(self, path: str, pieces: Iterable[memoryview]) -> Iterable[memoryview]:
        """Pass on the pieces of a file, and hash them on a thread meanwhile."""
        if self._twins is not None:
            pieces = self._twins.follow(path, pieces)
        if self.algorithm == CRC32:
            return pieces
        self._files[path] = file = _File(self.algorithm, path)
        return file.follow(pieces)

    def checksum_of(self, path: str, content: bytes) -> str:
        """Return the checksum of a small file."""
        if self._twins is not None:
            self._twins.add(path, content)
        return checksum(content, self.algorithm)

    def checksums(self, progress: Callable[[str], None]) -> dict[str, str]:
        """Wait for the checksum of every followed file, by path.

        Args:
            progress: called after every piece.
        """
        return {path: file.checksum(progress) for path, file in self._files.items()}


@final
class _File:
    """A file and the thread that hashes it."""

    def __init__(self, algorithm: str, path: str) -> None:
        self._path = path
        self._running = Checksum(algorithm)
        self._pieces: SimpleQueue[memoryview | None] = SimpleQueue()
        self._progress: SimpleQueue[_Progress] = SimpleQueue()
        self._stopped = False
        # A daemon: a process that ends has no use for its result.
        self._thread = threading.Thread(target=self._run, name="ckpt-hash", daemon=True)

    def follow(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is ending: hash on the writing thread
            for piece in pieces:
                self._running.update(piece)
                yield piece
            self._progress.put(0)
            return
        for piece in pieces:
            self._pieces.put(piece)
            yield piece
        self._pieces.put(None)

    def checksum(self, progress: Callable[[str], None]) -> str:
        while more := self._progress.get():
            if isinstance(more, BaseException):
                raise more
            progress(f"hashing {self._path}")
        return str(self._running)

    def stop(self) -> None:
        self._stopped = True
        self._pieces.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while (piece := self._pieces.get()) is not None and not self._stopped:
                self._running.update(piece)
                self._progress.put(1)
        except BaseException as error:  # noqa: BLE001 - raised on the thread that waits for the checksum
            self._progress.put(error)
        else:
            self._progress.put(0)


# The data files of a rank: tensors in one, byte entries, whose sizes vary, in another.
_SHARDS, _VALUES = 0, 1
_GRAIN_BYTES = 512

Pace: TypeAlias = Callable[[Iterable[memoryview]], Iterable[memoryview]]
"""Passes pieces on, no faster than they should be written."""


@final
class ShardWriter(StorageWriter):
    """Writer of one rank's part: tensors, byte entries, on rank 0 also `.metadata`.

    Also usable with stock `dcp.save(..., storage_writer=ShardWriter(storage, "some/directory"))`; the written
    files are then in `files` and `tables`.

    Args:
        storage: the root.
        directory: key of the checkpoint directory.
        part: sub-directory of this part, "" for the checkpoint directory itself.
        rank: set by DCP when DCP calls, by us otherwise.
        pace: limits the rate of tensor writes; None for full speed.
        hashing: hashes the file of tensors while it is written, and has the algorithm for byte entries; None
            for CRC-32.

    Attributes:
        files: every file written, for the manifest; that of tensors with its CRC-32.
        tables: every data file written, for the rank's chunk table.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        *,
        part: str = "",
        rank: int = 0,
        pace: Pace | None = None,
        hashing: Hashing | None = None,
    ) -> None:
        self._storage = storage
        self._directory = directory
        self._part = part
        self._rank = rank
        self._pace = pace
        self._hashing = hashing or Hashing()
        self.files: list[FileEntry] = []
        self.tables: list[TableEntry] = []

    def write_image(self, image: Image, wait_for: Callable[[int], None] | None = None) -> Spans:
        """Write the image of this rank's tensors.

        Args:
            image: the content of the file.
            wait_for: see `Image.pieces`.

        Returns:
            Start and end of every entry in the file, int64 [entries, 2]; it belongs to the layout.
        """
        if image.layout.slots:
            path = self._path(data_name(self._rank, _SHARDS))
            pieces: Iterable[memoryview] = self._hashing.follow(path, image.pieces(wait_for))
            self._storage.write_pieces(self._key(path), pieces if self._pace is None else self._pace(pieces))
            self.files.append(image.file_entry(path))
            self.tables.append(image.table_entry(path))
        return image.layout.spans

    def write_values(self, values: Mapping[MetadataIndex, bytes]) -> Spans:
        """Write this rank's byte entries, which are serialised already.

        Their sizes vary a little from save to save, so they are padded: mostly their offsets stay the same.

        Returns:
            Start and end of every entry in the file, int64 [entries, 2].
        """
        entries = [pad_archive(content, _capacity(len(content))) for content in values.values()]
        sizes = tuple(map(len, entries))
        if entries:
            path = self._path(data_name(self._rank, _VALUES))
            self._write_file(path, b"".join(entries))
            self.tables.append(
                TableEntry(
                    path=path,
                    size_bytes=sum(sizes),
                    num_chunks=len(entries),
                    columns=_value_columns(tuple(index.fqn for index in values), sizes),
                    crcs=np.array([crc32(entry) for entry in entries], dtype="<u4").tobytes(),
                )
            )
        ends = np.cumsum(sizes, dtype=np.int64)
        return np.stack([ends - sizes, ends], axis=1)

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.files, self.tables = [], []

    # DCP passes the rank only to a parameter that is literally named `kwargs`.
    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.reset()  # DCP itself calls `reset` only when it is given a checkpoint_id
        self._rank = int(kwargs.get("rank", self._rank) or 0)

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        shards: dict[MetadataIndex, torch.Tensor] = {}
        values: dict[MetadataIndex, bytes] = {}
        for item in plan.items:
            _sort(item, planner.resolve_data(item), shards, values)
        laid_out = {index: specs_of(index, shard) for index, shard in shards.items()}
        layout = ImageLayout(
            [spec for specs, _ in laid_out.values() for spec in specs],
            {index: record for index, (_, record) in laid_out.items() if record is not None},
        )
        image = Image(layout, torch.frombuffer(mmap.mmap(-1, layout.size_bytes or 1), dtype=torch.uint8))
        image.copy(shards)
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            _results(shards, data_name(self._rank, _SHARDS), self.write_image(image))
            + _results(values, data_name(self._rank, _VALUES), self.write_values(values))
        )
        return future

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {r.index: r.storage_data for of_rank in results for r in of_rank}
        self._write_file(self._path(METADATA), encode_metadata(metadata, metadata.storage_data))

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _path(self, name: str) -> str:
        return f"{self._part}/{name}" if self._part else name

    def _key(self, path: str) -> str:
        return f"{self._directory}/{path}" if self._directory else path

    def _write_file(self, path: str, content: bytes) -> None:
        self._storage.write_bytes(self._key(path), content)
        text = self._hashing.checksum_of(path, content)
        self.files.append(FileEntry(path=path, size_bytes=len(content), checksum=text))


def _sort(
    item: WriteItem,
    data: object,
    shards: dict[MetadataIndex, torch.Tensor],
    values: dict[MetadataIndex, bytes],
) -> None:
    if item.type == WriteItemType.BYTE_IO:
        values[item.index] = data.getvalue()  # type: ignore[attr-defined]  # BYTE_IO resolves to BytesIO
    elif isinstance(data, torch.Tensor):
        shards[item.index] = data.detach().cpu()
    else:
        raise TypeError(f"the planner gave {type(data).__name__} for the tensor {item.index.fqn}")


def _results(indices: Iterable[MetadataIndex], name: str, spans: Spans) -> list[WriteResult]:
    return [
        WriteResult(
            index=index,
            size_in_bytes=end - start,
            storage_data=StorageInfo(relative_path=name, offset=start, length=end - start),
        )
        for index, (start, end) in zip(indices, spans.tolist(), strict=True)
    ]


def encode_metadata(metadata: Metadata, places: Mapping[MetadataIndex, StorageInfo]) -> bytes:
    """Encode `.metadata`, with `places` as DCP's storage data."""
    same: dict[Any, Any] = {}  # of equal values one object: a pickle refers to it where it comes again

    def one(value: Any) -> Any:
        return same.setdefault(value, value)

    def entry_of(entry: Any) -> Any:
        if not isinstance(entry, TensorStorageMetadata):
            return entry
        state: Any = cast("Any", entry.properties).__getstate__()
        properties = same.setdefault(state, entry.properties)
        chunks = [ChunkStorageMetadata(one(chunk.offsets), one(chunk.sizes)) for chunk in entry.chunks]
        return TensorStorageMetadata(properties, one(entry.size), chunks)

    def index_of(index: MetadataIndex) -> MetadataIndex:
        found = MetadataIndex(one(index.fqn))
        if index.offset is not None:
            object.__setattr__(found, "offset", one(index.offset))  # its constructor would make another
        return found

    return pickle.dumps(
        replace(
            metadata,
            state_dict_metadata={one(key): entry_of(e) for key, e in metadata.state_dict_metadata.items()},
            storage_data={index_of(index): place for index, place in places.items()},
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
    )


def places_in(table: ChunkTable, part: str) -> Iterator[tuple[MetadataIndex, StorageInfo]]:
    """Yield DCP's storage data of one part, from a rank's chunk table."""
    for path, chunks in table.files.items():
        directory, _, name = path.rpartition("/")
        if directory != part:
            continue
        columns = chunks.columns
        rows = zip(columns.key, columns.shard_offsets, columns.offset, columns.size_bytes, strict=True)
        for key, shard_offsets, offset, size in rows:
            index = MetadataIndex(key) if shard_offsets is None else MetadataIndex(key, shard_offsets)
            yield index, StorageInfo(relative_path=name, offset=offset, length=size)


def _capacity(size_bytes: int) -> int:
    return -(-size_bytes // _GRAIN_BYTES) * _GRAIN_BYTES


@lru_cache(maxsize=8)
def _value_columns(keys: tuple[str, ...], sizes: tuple[int, ...]) -> bytes:
    """Encode byte entries as columns of a chunk table, cached between saves."""
    nothing = [None] * len(keys)
    return ChunkColumns(
        key=keys,
        shard_offsets=nothing,
        offset=[0, *accumulate(sizes[:-1])],
        size_bytes=sizes,
        payload_offset=nothing,
        payload_bytes=nothing,
        dtype=nothing,
    ).encode()
