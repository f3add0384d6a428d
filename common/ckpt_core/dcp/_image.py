"""The image of a data file: every shard's place in it is known before a byte of any shard is.

The layout is a pure function of the shards' keys, dtypes and shapes; it is computed once and serves every
save until one of those changes. A save then copies each shard into its slot, fills in the CRC-32 fields, and
hands the image to storage in large aligned pieces.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt_core.checksums import combine_crc32, crc32, crc32_text
from ckpt_core.dcp._archive import build_archive, tensor_pickle
from ckpt_core.types import ChunkEntry, FileEntry

PIECE_BYTES = 16 << 20
_COMBINE_FROM = 1 << 20  # above this, combining checksums is cheaper than another pass over the bytes

ShardSpec = tuple[MetadataIndex, torch.dtype, tuple[int, ...]]


@final
@dataclass(frozen=True, slots=True)
class Slot:
    """Where one shard lies in the file: its archive, the payload in it, and the two CRC-32 fields."""

    index: MetadataIndex
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    payload: int
    payload_bytes: int
    end: int
    crc_fields: tuple[int, int]


@final
class ImageLayout:
    """The places of all shards, and the bytes around them, of one data file."""

    def __init__(self, specs: Sequence[ShardSpec]) -> None:
        self._frames: list[tuple[int, bytes]] = []
        slots: list[Slot] = []
        offset = 0
        for index, dtype, shape in specs:
            slot = self._place(index, dtype, shape, offset)
            slots.append(slot)
            offset = slot.end
        self.slots = tuple(slots)
        self.size_bytes = offset

    def _place(self, index: MetadataIndex, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Slot:
        payload_bytes = torch.Size(shape).numel() * dtype.itemsize
        archive = build_archive(tensor_pickle(dtype, shape), payload_bytes, 0, offset=offset)
        payload = offset + len(archive.prefix)
        self._frames += [(offset, archive.prefix), (payload + payload_bytes, archive.suffix)]
        return Slot(
            index=index,
            dtype=dtype,
            shape=shape,
            start=offset,
            payload=payload,
            payload_bytes=payload_bytes,
            end=payload + payload_bytes + len(archive.suffix),
            crc_fields=(offset + archive.crc_in_prefix, payload + payload_bytes + archive.crc_in_suffix),
        )

    def frame(self, memory: memoryview) -> None:
        """Write everything but the payloads into `memory`; the CRC-32 fields are filled in later."""
        for offset, content in self._frames:
            memory[offset : offset + len(content)] = content


@final
class Image:
    """A layout with memory behind it.

    Concurrency: `copy` on one thread, then `pieces` on one thread; never both at once.

    Args:
        layout: where everything goes.
        memory: uint8, contiguous, on the host, at least `layout.size_bytes` long, on a page boundary.
    """

    def __init__(self, layout: ImageLayout, memory: torch.Tensor) -> None:
        self.layout = layout
        self._bytes = _view(memory[: layout.size_bytes])
        layout.frame(self._bytes)
        self.targets = [
            memory[slot.payload : slot.payload + slot.payload_bytes].view(slot.dtype).view(slot.shape)
            for slot in layout.slots
        ]
        self._crcs: list[int] = []
        self.file_crc = 0

    def copy(
        self, shards: Mapping[MetadataIndex, torch.Tensor], *, later: Collection[int] | None = None
    ) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Copy shards into their slots; for CUDA shards the copies are only enqueued on their stream.

        Args:
            shards: all of them.
            later: addresses of storages whose shards are left out. If not None, other CUDA shards are cloned
                on their device, and the clones left out, so that the host need not wait for the device.

        Returns:
            Name, source and slot of those left out.
        """
        left: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        now: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for slot, target in zip(self.layout.slots, self.targets, strict=True):
            source = shards[slot.index].detach()
            if later is not None and source.untyped_storage().data_ptr() in later:
                left.append((slot.index.fqn, source, target))
            elif later is not None and source.is_cuda:
                left.append((slot.index.fqn, source.clone(), target))
            else:
                now[0].append(target)
                now[1].append(source)
        if now[0]:
            torch._foreach_copy_(*now, non_blocking=True)
        return left

    def pieces(self) -> Generator[memoryview]:
        """Fill in the checksums and give the file, piece by piece."""
        self._crcs, self.file_crc = [], 0
        slots = iter(self.layout.slots)
        following = next(slots, None)
        for start in range(0, self.layout.size_bytes, PIECE_BYTES):
            end = min(start + PIECE_BYTES, self.layout.size_bytes)
            # A header may lie in this piece and its payload end in a later one.
            while following is not None and following.start < end:
                self._fill_in(following)
                following = next(slots, None)
            yield self._bytes[start:end]

    def _fill_in(self, slot: Slot) -> None:
        payload = self._bytes[slot.payload : slot.payload + slot.payload_bytes]
        crc = crc32(payload)
        for field in slot.crc_fields:
            struct.pack_into("<I", self._bytes, field, crc)
        self._crcs.append(crc)
        running = crc32(self._bytes[slot.start : slot.payload], self.file_crc)
        if slot.payload_bytes >= _COMBINE_FROM:
            running = combine_crc32(running, crc, slot.payload_bytes)
        else:
            running = crc32(payload, running)
        self.file_crc = crc32(self._bytes[slot.payload + slot.payload_bytes : slot.end], running)

    def file_entry(self, path: str) -> FileEntry:
        """What the manifest promises of the file; valid after `pieces` has ended."""
        return FileEntry(path=path, size_bytes=self.layout.size_bytes, checksum=crc32_text(self.file_crc))

    def chunk_entries(self, path: str) -> list[ChunkEntry]:
        """What the manifest promises of every shard; valid after `pieces` has ended."""
        return [
            ChunkEntry(
                path=path,
                key=slot.index.fqn,
                shard_offsets=None if slot.index.offset is None else tuple(slot.index.offset),
                offset=slot.start,
                size_bytes=slot.end - slot.start,
                checksum=crc32_text(crc),
                payload_offset=slot.payload,
                payload_bytes=slot.payload_bytes,
                dtype=str(slot.dtype).removeprefix("torch."),
            )
            for slot, crc in zip(self.layout.slots, self._crcs, strict=True)
        ]


def spec_of(index: MetadataIndex, shard: torch.Tensor) -> ShardSpec:
    """What a layout needs to know of a shard."""
    return index, shard.dtype, tuple(shard.shape)


def _view(memory: torch.Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)
