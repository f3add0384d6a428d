"""Loads by stock DCP, which unpickles what it finds: what they read is checked before, and while they run."""

from __future__ import annotations

import io
import os
import pickle
import stat
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, final

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    LoadPlan,
    LoadPlanner,
    StorageReader,
)
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.futures import Future
from typing_extensions import override

from ckpt_core._torch_internals import StorageInfo, metadata_path, set_element
from ckpt_core.dcp._metadata import load_metadata
from ckpt_core.dcp._torch_zip import checked_zip, load_chunk
from ckpt_core.errors import (
    CorruptCheckpointError,
    FileFailure,
    IncompatibleCheckpointError,
    UnsafeCheckpointError,
)
from ckpt_core.formats.codec import corrupt
from ckpt_core.formats.consistency import check_metadata
from ckpt_core.names import METADATA
from ckpt_core.storage import BIGGEST_SMALL_FILE, Storage, read_small


@final
class ShardReader(StorageReader):
    """Reads one part of a checkpoint directory; needs no collective.

    Also usable with stock `dcp.load(..., storage_reader=ShardReader(storage, "some/directory"))`.
    """

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage = storage
        self._directory = directory
        self._infos: Mapping[MetadataIndex, StorageInfo] = {}

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._infos = {}

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        key = self._key(METADATA)
        return load_metadata(read_small(self._storage, key), f"{self._storage.url}/{key}")

    @override
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._infos = metadata.storage_data

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: defaultdict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._infos[item.storage_index].relative_path].append(item)
        for path, items in by_file.items():
            items.sort(key=lambda item: self._infos[item.storage_index].offset)
            with self._storage.open(self._key(path)) as stream:
                self._read_file(stream, path, items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _key(self, path: str) -> str:
        return f"{self._directory}/{path}" if self._directory else path

    def _read_file(self, stream: IO[bytes], path: str, items: list[ReadItem], planner: LoadPlanner) -> None:
        chunk_of, chunk = None, torch.empty(0)
        for item in items:
            info = self._infos[item.storage_index]
            name = f"{self._storage.url}/{self._key(path)}: {item.storage_index.fqn!r:.200}"
            if item.type == LoadItemType.BYTE_IO:
                content = self._read_chunk(stream, path, info)
                # Whether its pickle may run is for the planner to say.
                checked_zip(content, name, trusted=True)
                planner.load_bytes(item, io.BytesIO(content))
                continue
            if chunk_of != item.storage_index:  # several ranges of one chunk follow each other
                chunk = load_chunk(self._read_chunk(stream, path, info), name)
                chunk_of = item.storage_index
            _copy_range(chunk, item, planner)

    def _read_chunk(self, stream: IO[bytes], path: str, info: StorageInfo) -> bytes:
        if info.transform_descriptors:
            raise IncompatibleCheckpointError(
                f"{self._key(path)} uses the DCP stream extensions {list(info.transform_descriptors)}, which "
                " this version does not read; load it with stock dcp.load"
            )
        stream.seek(info.offset)
        content = stream.read(info.length)
        if len(content) != info.length:
            raise self._corrupt(path, f"ends {info.length - len(content)} bytes too early")
        return content

    def _corrupt(self, path: str, problem: str) -> CorruptCheckpointError:
        failure = FileFailure(path=self._key(path), problem=problem)
        return CorruptCheckpointError(f"{self._storage.url}/{failure}", failures=(failure,))


def _copy_range(chunk: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    source = chunk
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        source = source.narrow(dim, offset, length)
    target = planner.resolve_tensor(item).detach()
    if target.shape != source.shape:
        raise IncompatibleCheckpointError(
            f"{item.dest_index.fqn}: stored range {tuple(source.shape)}, target {tuple(target.shape)}"
        )
    target.copy_(source)
    planner.commit_tensor(item, target)


@final
class SafeLoadPlanner(DefaultLoadPlanner):
    """DCP's load planner, except that byte entries cannot run code unless pickle is allowed."""

    def __init__(self, *, allow_pickle: bool = False) -> None:
        # Flattening drops ShardedTensors without a local shard; DCP then takes the checkpoint for an old one.
        super().__init__(flatten_sharded_tensors=False)
        self._allow_pickle = allow_pickle

    @override
    def create_local_plan(self) -> LoadPlan:
        # The parent re-flattens as torch 2.3 did whenever a load is partial; nothing here needs that.
        if self.metadata is None:
            raise ValueError("set_up_planner must be given the checkpoint's metadata")
        return create_default_local_load_plan(self.state_dict, self.metadata, strict=True)

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.put_value(read_item.dest_index.fqn, value.getvalue(), lambda _path, loaded: loaded)

    def put_value(
        self, fqn: str, content: bytes, convert: Callable[[tuple[str | int, ...], Any], Any]
    ) -> None:
        """Put what `content` holds where the target has `fqn`, after `convert(path, value)`.

        Raises:
            UnsafeCheckpointError: it holds objects that only pickle can rebuild, and that is not allowed.
        """
        path = self.mappings[fqn]
        container: Any = self.original_state_dict
        for step in path[:-1]:
            container = container[step]
        container[path[-1]] = convert(path, load_value(content, fqn, allow_pickle=self._allow_pickle))


def load_plain(content: bytes, name: str) -> Any:
    """Deserialise the whole of a small file that `torch.save` wrote for somebody else, as plain values only.

    Args:
        content: of the file; it is checked before torch sees it.
        name: which file it is, for errors.

    Raises:
        CorruptCheckpointError: it is not what `torch.save` writes.
        UnsafeCheckpointError: it holds objects that only pickle can rebuild.
    """
    checked_zip(content, name)
    return load_value(content, name, allow_pickle=False)


def load_value(content: bytes, name: str, *, allow_pickle: bool) -> Any:
    """Deserialise what `torch.save` wrote, without executing anything unless allowed.

    Raises:
        CorruptCheckpointError: it is not what `torch.save` writes.
        UnsafeCheckpointError: it holds objects that only pickle can rebuild.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if allow_pickle:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
        raise UnsafeCheckpointError(
            f"{name} holds Python objects that only pickle can rebuild. If you trust who wrote this "
            "checkpoint, load it with allow_pickle=True"
        ) from error
    except Exception as error:  # a forged archive raises nearly anything; the caller is told
        failure = FileFailure(path=name, problem=f"{type(error).__name__}: {error!s:.500}")
        raise CorruptCheckpointError(str(failure), failures=(failure,)) from error


def check_stock(directory: str | os.PathLike[str]) -> None:
    """Check that a DCP directory can be loaded without running code that it holds.

    Its `.metadata` has to pass the allow-list, which also tells what may be read, and what it calls a value
    that is not a tensor has to be one that torch loads with `weights_only=True`. Not collective; ask on one
    rank. Links are followed, as stock DCP follows them: the directory is one that a person has named.

    Raises:
        UnsafeCheckpointError: stock DCP could run what is in it; `allow_pickle=True` is the way out.
        CorruptCheckpointError: a file is missing, or what `.metadata` says is impossible.
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
    """Read a small file of a host's, links followed, once it is known to be a file and its size to be sane.

    Raises:
        FileNotFoundError: there is none.
        CorruptCheckpointError: it is something else, which could be waited for in vain, or is too large.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise corrupt(str(path), "is a directory, pipe or device, where a file should be")
    if found.st_size > BIGGEST_SMALL_FILE:
        raise corrupt(str(path), f"has {found.st_size} bytes, and may have {BIGGEST_SMALL_FILE} at most")
    return path.read_bytes()


@contextmanager
def without_pickle() -> Generator[None]:
    """Have stock DCP read `.metadata` through the allow-list and values with `weights_only=True`.

    `check_stock` refuses with better words, before anything live has changed; this holds for the bytes that
    are used. It changes DCP's own classes for as long as it lasts: for one thread at a time.
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
            f"{error}. If you trust who wrote this checkpoint, load it with allow_pickle=True"
        ) from error


def _stock_metadata(self: Any, *_: Any, **asked: Any) -> Metadata:
    """Stands for `FileSystemReader.read_metadata`."""
    path = metadata_path(self, asked.get("rank"))
    with self.fs.create_stream(path, "rb") as stream:
        metadata = _metadata(stream.read(), str(path))
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = self.load_id
    return metadata


def _stock_value(self: Any, read_item: ReadItem, value: io.BytesIO) -> None:
    """Stands for `DefaultLoadPlanner.load_bytes`."""
    key = read_item.dest_index.fqn
    loaded = load_plain(value.getvalue(), repr(key))
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[key], loaded)
    else:
        self.state_dict[key] = loaded
