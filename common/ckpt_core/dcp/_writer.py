"""Shards to bytes: a DCP `StorageWriter` whose files stock `dcp.load` reads."""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Mapping
from typing import Any, final

import torch
from torch.distributed.checkpoint import SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from ckpt_core.checksums import checksum
from ckpt_core.dcp._image import Image, ImageLayout, spec_of
from ckpt_core.names import METADATA, data_name
from ckpt_core.storage import Storage
from ckpt_core.types import ChunkEntry, FileEntry

_SHARDS, _VALUES = (
    0,
    1,
)  # the data files of a rank: tensors in one, byte entries, whose sizes vary, in another


@final
class ShardWriter(StorageWriter):
    """Writes one part of one rank: its tensors, its byte entries, and on the coordinator `.metadata`.

    Also usable with stock `dcp.save(..., storage_writer=ShardWriter(storage, "some/directory"))`; what it
    wrote is then in `files` and `chunks`.

    Args:
        storage: where to write.
        directory: key of the checkpoint directory.
        part: sub-directory of this part, "" for the checkpoint directory itself.
        rank: set by DCP when DCP drives, by us otherwise.
    """

    def __init__(self, storage: Storage, directory: str, *, part: str = "", rank: int = 0) -> None:
        self._storage = storage
        self._directory = directory
        self._part = part
        self._rank = rank
        self.files: list[FileEntry] = []
        self.chunks: list[ChunkEntry] = []

    def write_image(self, image: Image) -> list[WriteResult]:
        """Write a finished image of this rank's tensors."""
        if not image.layout.slots:
            return []
        name = data_name(self._rank, _SHARDS)
        path = self._path(name)
        self._storage.write_pieces(self._key(path), image.pieces())
        self.files.append(image.file_entry(path))
        self.chunks += image.chunk_entries(path)
        return [_result(slot.index, name, slot.start, slot.end) for slot in image.layout.slots]

    def write_values(self, values: Mapping[MetadataIndex, bytes]) -> list[WriteResult]:
        """Write this rank's byte entries, which are serialised already."""
        if not values:
            return []
        name = data_name(self._rank, _VALUES)
        path = self._path(name)
        results: list[WriteResult] = []
        offset = 0
        for index, content in values.items():
            end = offset + len(content)
            results.append(_result(index, name, offset, end))
            self.chunks.append(_byte_entry(path, index, offset, content))
            offset = end
        self._write_file(path, b"".join(values.values()))
        return results

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.files, self.chunks = [], []

    # DCP hands the rank over only to a parameter that is literally named `kwargs`.
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
        layout = ImageLayout([spec_of(index, shard) for index, shard in shards.items()])
        image = Image(layout, torch.frombuffer(mmap.mmap(-1, layout.size_bytes or 1), dtype=torch.uint8))
        image.copy(shards)
        future: Future[list[WriteResult]] = Future()
        future.set_result(self.write_image(image) + self.write_values(values))
        return future

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {r.index: r.storage_data for of_rank in results for r in of_rank}
        metadata.storage_meta = StorageMeta()
        metadata.version = CURRENT_DCP_VERSION
        self._write_file(self._path(METADATA), pickle.dumps(metadata))

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
        self.files.append(FileEntry(path=path, size_bytes=len(content), checksum=checksum(content)))


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


def _result(index: MetadataIndex, name: str, start: int, end: int) -> WriteResult:
    return WriteResult(
        index=index,
        size_in_bytes=end - start,
        storage_data=_StorageInfo(relative_path=name, offset=start, length=end - start),
    )


def _byte_entry(path: str, index: MetadataIndex, offset: int, content: bytes) -> ChunkEntry:
    return ChunkEntry(
        path=path,
        key=index.fqn,
        shard_offsets=None,
        offset=offset,
        size_bytes=len(content),
        checksum=checksum(content),
    )
