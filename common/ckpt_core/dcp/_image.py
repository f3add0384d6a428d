"""The image of a data file, laid out before any shard is copied.

The layout is a pure function of the shards' keys, dtypes and shapes; it is computed once and used by every
save until one of those changes. A save then copies each shard into its slot, fills in the CRC-32 fields, and
passes the image to storage in large aligned pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt_core._torch_internals import inner_tensors, is_wrapped
from ckpt_core.dcp._torch_zip import ZIP32_LIMIT, build_archive, build_legacy, tensor_pickle
from ckpt_core.dcp._wrapped_tensors import wrapped_pickle
from ckpt_core.formats.checksums import combine_crc32, crc32, crc32_text
from ckpt_core.formats.chunks import BLOCK_BYTES, ChunkColumns, TableEntry
from ckpt_core.storage import ALIGNMENT
from ckpt_core.types import FileEntry

PIECE_BYTES = 16 << 20
_SMALL_BYTES: Final = BLOCK_BYTES
"""Payloads from this size on are worth a zip, and padding to a page."""
_ALIGNMENT_OF_SMALL: Final = 64
"""Of the payloads of small wrapped shards; that of torch's own zips."""

ShardSpec = tuple[MetadataIndex, torch.dtype, tuple[int, ...]]
"""Index, dtype and shape of a shard, or of one of the tensors that a wrapped shard is made of."""

Spans: TypeAlias = npt.NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True)
class Slot:
    """The offsets of one payload in the file: with its frames, and CRC-32 fields."""

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
    """The slots of all shards of one data file, and the bytes around them.

    Args:
        records: `wrapped_pickle` of the shards that are wrapped; their payloads follow one another.
        zip64_from: the smallest payload size that uses the 64-bit fields of zip.
    """

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        records: Mapping[MetadataIndex, bytes] = MappingProxyType({}),
        *,
        zip64_from: int = ZIP32_LIMIT,
    ) -> None:
        self._zip64_from = zip64_from
        self._frames: list[tuple[int, bytes]] = []
        slots: list[Slot] = []
        self.firsts: list[int] = []
        self.size_bytes = place = 0
        while place < len(specs):
            index = specs[place][0]
            record = records.get(index)
            end = place + 1
            while record is not None and end < len(specs) and specs[end][0] == index:
                end += 1
            self.firsts.append(place)
            slots += self._place(specs[place:end], record)
            place = end
        self.slots = tuple(slots)
        self._wrapped = frozenset(records)

    def _place(self, specs: Sequence[ShardSpec], record: bytes | None) -> Iterator[Slot]:
        """Append the entry of one shard; yield the slots of its payloads."""
        start = self.size_bytes
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in specs]
        _, dtype, shape = specs[0]
        if record is None and sizes[0] < _SMALL_BYTES:
            archive = build_legacy(dtype, shape, offset=start)
        else:
            archive = build_archive(
                record or tensor_pickle(dtype, shape),
                [(size, 0) for size in sizes],
                offset=start,
                zip64_from=self._zip64_from,
                alignment=_ALIGNMENT_OF_SMALL if max(sizes) < _SMALL_BYTES else ALIGNMENT,
            )
        self.size_bytes = start + archive.size_bytes
        at = start
        for place, ((index, dtype, shape), size) in enumerate(zip(specs, sizes, strict=True)):
            frame = archive.frames[place]
            self._frames.append((at, frame))
            payload = at + len(frame)
            last = place + 1 == len(specs)
            yield Slot(
                index=index,
                dtype=dtype,
                shape=shape,
                start=at,
                payload=payload,
                payload_bytes=size,
                end=self.size_bytes if last else payload + size,
                crc_fields=(start + archive.crc_fields[place][0], start + archive.crc_fields[place][1]),
            )
            at = payload + size
        self._frames.append((at, archive.frames[-1]))

    def frame(self, memory: memoryview) -> None:
        """Write the bytes around the payloads into `memory`, without the CRC-32 fields."""
        for offset, content in self._frames:
            memory[offset : offset + len(content)] = content

    @cached_property
    def spans(self) -> Spans:
        """Start and end in the file of every shard's archive, int64 [shards, 2]."""
        starts = np.array([self.slots[first].start for first in self.firsts], dtype=np.int64)
        return np.stack([starts, np.append(starts, self.size_bytes)[1:]], axis=1)

    @cached_property
    def crc_places(self) -> Spans:
        """Offsets of the bytes of every slot's two CRC-32 fields, int64 [slots, 2, 4]."""
        fields = np.array([slot.crc_fields for slot in self.slots], dtype=np.int64).reshape(-1, 2, 1)
        return fields + np.arange(4)

    @cached_property
    def payloads(self) -> list[tuple[int, int]]:
        """Start and end in the file of every slot's payload."""
        return [(slot.payload, slot.payload + slot.payload_bytes) for slot in self.slots]

    @cached_property
    def large(self) -> list[int]:
        """The slots whose payload has a checksum for every block, in order."""
        return [
            place
            for place, slot in enumerate(self.slots)
            if slot.payload_bytes > BLOCK_BYTES and slot.index not in self._wrapped
        ]

    @cached_property
    def batches(self) -> list[tuple[int, int, int]]:
        """For every piece of the file: its end, and its first and last (exclusive) slot."""
        starts = [slot.start for slot in self.slots]
        ends = [*range(PIECE_BYTES, self.size_bytes, PIECE_BYTES), self.size_bytes] if starts else []
        cuts = [0, *(bisect_left(starts, end) for end in ends)]
        return list(zip(ends, cuts[:-1], cuts[1:], strict=True))

    @cached_property
    def columns(self) -> bytes:
        """The shards as columns of a chunk table; a wrapped one has several payloads."""
        slots = [self.slots[first] for first in self.firsts]
        plain = [slot.index not in self._wrapped for slot in slots]
        pairs = list(zip(slots, plain, strict=True))
        offsets = [slot.index.offset for slot in slots]
        return ChunkColumns(
            key=[slot.index.fqn for slot in slots],
            shard_offsets=[None if offset is None else list(offset) for offset in offsets],
            offset=[start for start, _ in self.spans.tolist()],
            size_bytes=[end - start for start, end in self.spans.tolist()],
            payload_offset=[slot.payload if one else None for slot, one in pairs],
            payload_bytes=[slot.payload_bytes if one else None for slot, one in pairs],
            dtype=[str(slot.dtype).removeprefix("torch.") if one else None for slot, one in pairs],
        ).encode()

    @cached_property
    def wrapped(self) -> list[int]:
        """The positions of the wrapped shards among all shards."""
        return [place for place, first in enumerate(self.firsts) if self.slots[first].index in self._wrapped]


@final
class Image:
    """A data file in memory.

    That is uint8, contiguous, on the host, on a page boundary, and large enough.

    Concurrency: `pieces` on one thread, which may wait for slots of `targets` that others fill.
    """

    def __init__(self, layout: ImageLayout, memory: torch.Tensor) -> None:
        self.layout = layout
        array: Any = memory[: layout.size_bytes].numpy()
        self._array: npt.NDArray[np.uint8] = array
        self._bytes = memoryview(array)
        layout.frame(self._bytes)
        self.targets = tuple(
            memory[slot.payload : slot.payload + slot.payload_bytes].view(slot.dtype).view(slot.shape)
            for slot in layout.slots
        )
        """The slots as tensors of their dtype and shape, in the order of the layout."""
        self.chunk_crcs: list[int] = []
        """CRC-32 of every slot's payload; valid after `pieces` has ended."""
        self._block_crcs: list[int] = []
        self._file_crc = 0

    def pieces(self, wait_for: Callable[[int], None] | None = None) -> Generator[memoryview]:
        """Fill in the checksums and yield the file in pieces; a yielded piece is final.

        `wait_for` blocks until slots 0 to n are filled; it is None if all are.
        """
        self.chunk_crcs, self._block_crcs, self._file_crc = [], [], 0
        start = 0
        for end, first, last in self.layout.batches:
            # A header may be in this piece and the end of its payload in a later one.
            if first < last:
                if wait_for is not None:
                    wait_for(last - 1)
                self._fill_in(first, last)
            yield self._bytes[start:end]
            start = end

    def _fill_in(self, first: int, last: int) -> None:
        """Fill in the checksums of slots `first` to `last` (exclusive); update the file's."""
        layout, content, sums = self.layout, self._bytes, self.chunk_crcs
        large = layout.large[bisect_left(layout.large, first) : bisect_left(layout.large, last)]
        done = first
        for place in large:
            sums += [crc32(content[start:end]) for start, end in layout.payloads[done:place]]
            sums.append(self._add_blocks(content[slice(*layout.payloads[place])]))
            done = place + 1
        sums += [crc32(content[start:end]) for start, end in layout.payloads[done:last]]
        crcs = np.array(sums[first:last], dtype="<u4").view(np.uint8).reshape(-1, 1, 4)
        self._array[layout.crc_places[first:last]] = crcs
        position = layout.slots[first].start
        for place in large:
            start, end = layout.payloads[place]
            running = crc32(content[position:start], self._file_crc)
            self._file_crc = combine_crc32(running, sums[place], end - start)
            position = end
        self._file_crc = crc32(content[position : layout.slots[last - 1].end], self._file_crc)

    def _add_blocks(self, payload: memoryview) -> int:
        """Add the checksums of a payload's blocks; return that of the payload."""
        crc = 0
        for start in range(0, len(payload), BLOCK_BYTES):
            block = payload[start : start + BLOCK_BYTES]
            self._block_crcs.append(crc32(block))
            crc = combine_crc32(crc, self._block_crcs[-1], len(block))
        return crc

    def file_entry(self, path: str) -> FileEntry:
        """Return the file's entry in the manifest; valid after `pieces` has ended."""
        return FileEntry(path=path, size_bytes=self.layout.size_bytes, checksum=crc32_text(self._file_crc))

    def table_entry(self, path: str) -> TableEntry:
        """Return the file's entry in the chunk table; valid after `pieces` has ended."""
        layout, crcs = self.layout, np.array(self.chunk_crcs, dtype="<u4")
        if layout.wrapped:
            crcs = crcs[layout.firsts]
            for place in layout.wrapped:  # of the whole archive
                start, end = layout.spans[place].tolist()
                crcs[place] = crc32(self._bytes[start:end])
        return TableEntry(
            path=path,
            size_bytes=layout.size_bytes,
            num_chunks=len(layout.firsts),
            columns=layout.columns,
            crcs=crcs.tobytes(),
            block_crcs=np.array(self._block_crcs, dtype="<u4").tobytes(),
            lengths=np.diff(layout.spans).tobytes(),
        )


def spec_of(index: MetadataIndex, shard: torch.Tensor) -> ShardSpec:
    """Return index, dtype and shape of a shard."""
    return index, shard.dtype, tuple(shard.shape)


def specs_of(index: MetadataIndex, shard: torch.Tensor) -> tuple[list[ShardSpec], bytes | None]:
    """Return the payloads of a shard, and the record of it if it is wrapped."""
    if not is_wrapped(shard):
        return [spec_of(index, shard)], None
    return [spec_of(index, inner) for _, inner in inner_tensors(shard)], wrapped_pickle(shard)
