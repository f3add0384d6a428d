"""Shards to bytes: a DCP `StorageWriter` whose files stock `dcp.load` reads."""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO, Any, final

import torch
from torch.distributed.checkpoint import SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from ckpt_core.checksums import Checksum, checksum, crc32_text
from ckpt_core.dcp._archive import build_archive, tensor_pickle
from ckpt_core.names import METADATA, data_name
from ckpt_core.storage import Storage
from ckpt_core.types import ChunkEntry, FileEntry

_PIECE_BYTES = 16 << 20


@final
class ShardWriter(StorageWriter):
    """Writes one part of one rank: a single `__{rank}_0.distcp`, then, on the coordinator, `.metadata`.

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
        results: list[WriteResult] = []
        if plan.items:
            path = self._path(data_name(self._rank, 0))
            with self._create(path) as stream:
                results = [self._write_item(stream, path, item, planner) for item in plan.items]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {r.index: r.storage_data for of_rank in results for r in of_rank}
        metadata.storage_meta = StorageMeta()
        metadata.version = CURRENT_DCP_VERSION
        with self._create(self._path(METADATA)) as stream:
            stream.write(pickle.dumps(metadata))

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _path(self, name: str) -> str:
        return f"{self._part}/{name}" if self._part else name

    @contextmanager
    def _create(self, path: str) -> Generator[_CountingStream]:
        with self._storage.create(f"{self._directory}/{path}" if self._directory else path) as raw:
            stream = _CountingStream(raw)
            yield stream
        self.files.append(FileEntry(path=path, size_bytes=stream.offset, checksum=str(stream.checksum)))

    def _write_item(
        self, stream: _CountingStream, path: str, item: WriteItem, planner: SavePlanner
    ) -> WriteResult:
        data = planner.resolve_data(item)
        start = stream.offset
        if item.type == WriteItemType.BYTE_IO:
            content = data.getvalue()  # type: ignore[union-attr]  # BYTE_IO items resolve to BytesIO
            stream.write(content)
            self._note(path, item.index, start=start, end=stream.offset, digest=checksum(content))
        else:
            self._write_tensor(stream, path, item.index, _as_tensor(data))
        length = stream.offset - start
        return WriteResult(
            index=item.index,
            size_in_bytes=length,
            storage_data=_StorageInfo(relative_path=data_name(self._rank, 0), offset=start, length=length),
        )

    def _write_tensor(
        self, stream: _CountingStream, path: str, index: MetadataIndex, tensor: torch.Tensor
    ) -> None:
        payload = raw_bytes(tensor)
        start, crc = stream.offset, zlib.crc32(payload)
        archive = build_archive(
            tensor_pickle(tensor.dtype, tuple(tensor.shape)), len(payload), crc, offset=start
        )
        stream.write(archive.prefix)
        stream.write(payload)
        stream.write(archive.suffix)
        self._note(
            path,
            index,
            start=start,
            end=stream.offset,
            digest=crc32_text(crc),
            payload=(len(archive.prefix), tensor),
        )

    def _note(
        self,
        path: str,
        index: MetadataIndex,
        *,
        start: int,
        end: int,
        digest: str,
        payload: tuple[int, torch.Tensor] | None = None,
    ) -> None:
        entry = ChunkEntry(
            path=path,
            key=index.fqn,
            shard_offsets=None if index.offset is None else tuple(index.offset),
            offset=start,
            size_bytes=end - start,
            checksum=digest,
            payload_offset=None if payload is None else start + payload[0],
            payload_bytes=None if payload is None else payload[1].nbytes,
            dtype=None if payload is None else str(payload[1].dtype).removeprefix("torch."),
        )
        self.chunks.append(entry)


class _CountingStream:
    """Passes bytes on, knowing how many they were and what they sum to."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.offset = 0
        self.checksum = Checksum()

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self.checksum.update(piece)
            _write_all(self._raw, piece)
        self.offset += len(view)


def _write_all(raw: IO[bytes], piece: memoryview) -> None:
    while len(piece):
        written = raw.write(piece)
        if written == len(piece):
            return
        piece = piece[written:]


def _as_tensor(data: object) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"the planner gave {type(data).__name__} for a tensor")
    tensor = data.detach().resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    return tensor.contiguous()


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    if tensor.numel() == 0:
        return memoryview(b"")
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
