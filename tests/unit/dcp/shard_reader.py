"""A DCP `StorageReader` over our storage, by which tests read back what writers wrote."""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import IO, Any, final

import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, StorageReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.futures import Future
from typing_extensions import override

from ckpt_core.dcp import checked_zip, load_chunk, load_metadata
from ckpt_core.errors import CorruptCheckpointError, FileFailure, IncompatibleCheckpointError
from ckpt_core.names import METADATA
from ckpt_core.storage import Storage, read_small
from tests.unit.dcp.saved_entries import LEGACY_START, load_entry


@final
class ShardReader(StorageReader):
    """Reader of one part of a checkpoint directory. Not collective.

    Also usable with stock `dcp.load(..., storage_reader=ShardReader(storage, "some/directory"))`.
    """

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage = storage
        self._directory = directory
        self._infos: Mapping[MetadataIndex, _StorageInfo] = {}

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
                # The planner decides whether its pickle may run.
                checked_zip(content, name, trusted=True)
                planner.load_bytes(item, io.BytesIO(content))
                continue
            if chunk_of != item.storage_index:  # several ranges of one chunk follow each other
                content = self._read_chunk(stream, path, info)
                is_legacy = content[2:14] == LEGACY_START
                chunk = load_entry(content) if is_legacy else load_chunk(content, name)
                chunk_of = item.storage_index
            _copy_range(chunk, item, planner)

    def _read_chunk(self, stream: IO[bytes], path: str, info: _StorageInfo) -> bytes:
        if info.transform_descriptors:
            raise IncompatibleCheckpointError(
                f"{self._key(path)} uses the DCP stream extensions {list(info.transform_descriptors)}, which "
                "this version does not read; load it with stock dcp.load"
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
